//! A channel that ends while it is out of its loop, and another one in its place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread;

use ibverbs::future::Locked;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, PooledBuffer, ProtectionDomain, Reactor, ffi,
};
use ibverbs_function_device::FunctionDevice;

use crate::rig::{ALL, LEN, filled, poll_with};

/// The objects that a channel is made of.
struct World {
    reactor: Reactor<Locked<PooledBuffer>>,
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
    next: Mutex<Option<AsyncChannel>>,
    device: FunctionDevice,
}

impl World {
    fn is_of(&self, kind: ffi::ibv_transport_type) {
        // SAFETY: the device is live, and whoever else looks at this meanwhile reads either.
        unsafe { (*(*self.domain.context_parent().as_raw()).device).transport_type = kind };
    }

    /// A channel that is connected to itself, and has one receive.
    fn channel(&self, buffer: PooledBuffer, kind: ffi::ibv_transport_type) -> AsyncChannel {
        let builder = Channel::builder(&self.domain).max_send_wr(1).max_recv_wr(1).access(ALL);
        let mut prepared = self.reactor.prepare(builder).unwrap();
        self.is_of(ffi::ibv_transport_type::IBV_TRANSPORT_IB);
        prepared.post_receive(buffer).unwrap();
        let endpoint = prepared.endpoint();
        // The device is an InfiniBand one until the handshake has begun: on iWARP, only the
        // connection manager would connect the channel.
        self.device.hold_verb("modify_qp", true);
        thread::scope(|threads| {
            let connecting = threads.spawn(move || prepared.handshake(endpoint).unwrap());
            while !self.device.holds_verb("modify_qp") {
                assert!(!connecting.is_finished());
                thread::yield_now();
            }
            self.is_of(kind);
            self.device.hold_verb("modify_qp", false);
            connecting.join().unwrap()
        })
    }
}

/// Makes the next channel when a buffer is free.
struct Maker(Arc<World>, Mutex<Option<PooledBuffer>>);

impl Wake for Maker {
    fn wake(self: Arc<Self>) {
        if let Some(buffer) = self.1.lock().unwrap().take() {
            let next = self.0.channel(buffer, ffi::ibv_transport_type::IBV_TRANSPORT_IB);
            *self.0.next.lock().unwrap() = Some(next);
        }
    }
}

/// iWARP tells by no completion that a connection has ended: the reactor asks. The program drops the channel meanwhile, and
/// another one has its place when the answer comes.
#[test]
fn a_channel_is_not_stopped_for_one_that_was_in_its_place() {
    let device = FunctionDevice::model();
    device.progress(ibverbs_function_device::Progress::Manual);
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let pool = BufferPool::new(&domain, LEN, 2, AccessFlags::empty()).unwrap();
    let reactor = Reactor::with_share(&context, 64).unwrap();
    let world =
        Arc::new(World { reactor, domain, pool, next: Mutex::new(None), device: device.clone() });
    let (first, second) = (filled(&world.pool, 1), filled(&world.pool, 2));
    let channel = world.channel(first, ffi::ibv_transport_type::IBV_TRANSPORT_IWARP);
    let mut waiting = Box::pin(world.pool.wait());
    let maker = Waker::from(Arc::new(Maker(world.clone(), Mutex::new(Some(second)))));
    assert!(poll_with(&mut waiting, &maker).is_none());
    let queue = device.last_call("create_qp").unwrap().qp_init_attr.send_cq;
    device.hold_completions(queue, channel.number(), true);
    device.break_qp(channel.number());
    let is_over = AtomicBool::new(false);
    thread::scope(|threads| {
        let turns = threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = world.reactor.turn();
            }
        });
        // The first answer may be too early, the second counts.
        while device.calls("query_qp") == 0 {
            thread::yield_now();
        }
        device.hold_verb("query_qp", true);
        while !device.holds_verb("query_qp") {
            assert!(!turns.is_finished());
            thread::yield_now();
        }
        drop(channel);
        device.hold_verb("query_qp", false);
        while world.next.lock().unwrap().is_none() {
            assert!(!turns.is_finished());
            thread::yield_now();
        }
        // The reactor goes on with what it does about the first one.
        let queries = world.reactor.turn();
        is_over.store(true, Ordering::Relaxed);
        turns.join().unwrap();
        queries.unwrap();
    });
    let next = world.next.lock().unwrap().take().unwrap();
    assert_eq!(next.in_flight(), 1, "its receive is still there");
    drop(waiting);
    let buffer = filled(&world.pool, 3);
    drop(next.submit(ibverbs::SendWorkRequest::new(buffer)).expect("it was not stopped"));
    drop(next);
    drop(maker);
}
