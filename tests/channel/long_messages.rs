//! Messages that are longer than the port can send, which this device (like mlx5 and mlx4) does not say when they are posted.

use std::ptr;
use std::slice;

use ibverbs::channel::AnyBuffer;
use ibverbs::memory::BorrowedMemoryRegion;
use ibverbs::{AccessFlags, BufferPool, ChannelId, Loop, SendWorkRequest, WriteWorkRequest};
use ibverbs_function_device::FunctionDevice;

use crate::pair::{ModelPair, connect, domain};

/// The port's limit, a message that is longer, and one whose length C cannot describe.
const MOST: usize = 512;
const LONG: usize = 513;
const HUGE: usize = (5 << 30) + 7;

fn device() -> FunctionDevice {
    let device = FunctionDevice::model();
    device.change_port(1, |port| port.max_msg_sz = MOST as u32);
    device
}

fn limit(length: usize) -> String {
    format!(
        "by the port's max_msg_sz, the length of the message is {length}, and must be within 0..=512"
    )
}

#[track_caller]
fn refused<T: std::fmt::Debug, E: std::fmt::Debug + std::fmt::Display>(
    result: Result<T, E>,
    length: usize,
) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(&limit(length)), "{error}");
}

#[test]
fn every_operation_of_a_channel_refuses_them_with_the_ports_limit() {
    let mut pair = ModelPair::with(device(), |builder| builder);
    let (region, target, mut local) =
        (pair.region(1024, 1), pair.shared(128), pair.region(1024, 1));
    let pool = BufferPool::new(&pair.domain, LONG, 8, AccessFlags::empty()).unwrap();
    let buffer = || pool.take_from(&[1; LONG]).unwrap().unwrap();
    assert_eq!(buffer().len(), LONG);
    let remote = target.remote();
    let posted = pair.device.calls("post_send");
    let one = &mut pair.one;
    let slice = || region.slice(..LONG).unwrap();
    let halves = || [region.slice(..500).unwrap(), region.slice(..13).unwrap()];
    refused(one.send(slice()), LONG);
    refused(one.send(halves()), LONG);
    refused(one.write(slice(), remote), LONG);
    refused(one.read(&mut local.slice_mut(..LONG).unwrap(), remote), LONG);
    // SAFETY: nothing is posted.
    refused(unsafe { one.post_unpolled(SendWorkRequest::new(slice())) }, LONG);
    one.scope(|scope| {
        refused(scope.post_send(slice()), LONG);
        refused(scope.post(WriteWorkRequest::new(halves(), remote)), LONG);
        Ok::<_, ibverbs::TransportError>(())
    })
    .unwrap();
    assert_eq!(pair.device.calls("post_send"), posted);
    assert_eq!(pool.available(), 8, "no buffer is kept");
    // A message of the greatest length goes.
    one.write(region.slice(..MOST).unwrap(), remote).unwrap();
    pair.exchange();
    drop((region, target, local, pool));
    pair.finish();
}

#[test]
fn a_loop_refuses_them_too() {
    let device = device();
    let domain = domain(&device);
    let pool = BufferPool::new(&domain, LONG, 8, AccessFlags::empty()).unwrap();
    let buffer = || pool.take_from(&[1; LONG]).unwrap().unwrap();
    let mut owner = Loop::<AnyBuffer>::new(domain.context_parent(), 64).unwrap();
    let prepare = |owner: &Loop<'static, AnyBuffer>| owner.create_channel(&domain);
    let (one, two) = connect(prepare(&owner), prepare(&owner));
    let channel: ChannelId = owner.add(one).unwrap();
    refused(owner.post(channel, SendWorkRequest::new(buffer()), 1), LONG);
    drop((owner, two));
    assert_eq!(pool.available(), 8);
    drop((pool, domain));
    device.assert_clean();
}

/// Above 4 GiB, the port's limit counts too, not that of C's structure.
#[test]
fn a_piece_that_c_cannot_describe_is_named_with_the_ports_limit() {
    let mut pair = ModelPair::with(device(), |builder| builder);
    // SAFETY: new memory, which nothing touches.
    let memory = unsafe {
        libc::mmap(
            ptr::null_mut(),
            HUGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    assert_ne!(memory, libc::MAP_FAILED);
    {
        // SAFETY: it is mapped, and zero.
        let bytes = unsafe { slice::from_raw_parts_mut(memory.cast::<u8>(), HUGE) };
        let region = BorrowedMemoryRegion::new(&pair.domain, bytes).unwrap();
        let whole = || region.slice(..).unwrap();
        refused(pair.one.send(whole()), HUGE);
        // SAFETY: nothing is posted.
        refused(unsafe { pair.one.post_unpolled(SendWorkRequest::new(whole())) }, HUGE);
        pair.one
            .scope(|scope| {
                refused(scope.post_send(whole()), HUGE);
                Ok::<_, ibverbs::TransportError>(())
            })
            .unwrap();
    }
    // SAFETY: nothing refers to it any more.
    assert_eq!(unsafe { libc::munmap(memory, HUGE) }, 0);
    pair.exchange();
    pair.finish();
}
