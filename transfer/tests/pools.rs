//! Pools of several sizes, on a device of software.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
use ibverbs_software::Device;
use ibverbs_transfer::BufferPools;

#[test]
fn a_message_gets_the_shortest_chunk_that_is_free() {
    let device = Device::builder().name("pools0").build().unwrap();
    device.register();
    let domain = Arc::new(ProtectionDomain::new(ibverbs::open("pools0").unwrap()).unwrap());
    let pool = |len, chunks| BufferPool::new(&domain, len, chunks, AccessFlags::empty()).unwrap();
    let pools = BufferPools::new([pool(1000, 1), pool(10, 2), pool(100, 1)]);
    let capacity = |len| pools.take(len).map(|buffer| buffer.capacity());
    assert_eq!([0, 10, 11, 100, 1000].map(capacity), [10, 10, 100, 100, 1000].map(Some));
    assert_eq!(capacity(1001), None);
    let held: Vec<_> = (0..4).map(|_| pools.take(5).unwrap()).collect();
    assert_eq!(held.iter().map(|b| b.capacity()).collect::<Vec<_>>(), [10, 10, 100, 1000]);
    assert!(pools.take(0).is_none());

    // A task waits for the shortest that fits, not for a shorter one.
    let mut cx = Context::from_waker(Waker::noop());
    let mut wait = pin!(pools.wait(50));
    assert!(wait.as_mut().poll(&mut cx).is_pending());
    let mut held = held.into_iter();
    drop((held.next(), held.next()));
    assert!(wait.as_mut().poll(&mut cx).is_pending());
    drop(held.next());
    let Poll::Ready(Some(buffer)) = wait.as_mut().poll(&mut cx) else { panic!("it is free") };
    assert_eq!(buffer.capacity(), 100);
    assert!(matches!(pin!(pools.wait(1001)).poll(&mut cx), Poll::Ready(None)));
    assert_eq!(pools.pools().iter().map(|p| p.chunk_len()).collect::<Vec<_>>(), [10, 100, 1000]);
}
