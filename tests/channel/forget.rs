//! Forgotten objects (`mem::forget`) leak, and are never used after they were freed. `script/test memcheck`
//! runs these tests under valgrind, which checks every access of the device.

use std::mem::forget;

use ibverbs::{
    Channel, Inline, MemoryRegion, ReceiveWorkRequest, SharedMemoryRegion, TransportError,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ALL, ModelPair as Pair, builder, connect, domain};

/// A device that writes where requests told it to, whether or not the region still exists.
fn relentless() -> FunctionDevice {
    let device = FunctionDevice::model();
    device.stale_translation(true);
    device
}

/// The objects that the test may forget, one bit each.
const HANDLES: u32 = 1;
const CHANNEL: u32 = 2;
const REGION: u32 = 4;
const PEER: u32 = 8;
const DOMAIN: u32 = 16;

fn forget_if<T>(forgotten: bool, value: T) {
    if forgotten { forget(value) } else { drop(value) }
}

#[test]
fn anything_may_be_forgotten_in_any_order() {
    for what in 0..32_u32 {
        for order in 0..4 {
            let device = relentless();
            let pair = Pair::with(device.clone(), |builder| builder);
            let (source, sink) = (pair.region(64, 9), pair.region(64, 0));
            let target = SharedMemoryRegion::<u64>::new(&pair.domain, 8, ALL).unwrap();
            let remote = target.remote();
            let Pair { mut one, mut two, domain, .. } = pair;
            let mut sink = sink;
            let part = sink.slice_mut(..).unwrap();
            let outcome = two.scope(|s| {
                let mut parts = part.chunks(16)?;
                let receives = [(); 3].map(|()| s.post_receive(parts.next().unwrap()));
                let sent = one.scope(|s| {
                    let send = s.post_send(source.slice(..16)?)?;
                    let write = s.post_write(source.slice(..)?, remote)?;
                    forget_if(what & HANDLES != 0, (send, write));
                    Ok::<_, TransportError>(())
                });
                sent.unwrap();
                // One message has arrived; two receives are in flight.
                forget_if(what & HANDLES != 0, receives);
                Err::<(), _>(TransportError::TimedOut)
            });
            outcome.unwrap_err();
            // The scope has ended: all slices can be used again.
            let mut ends: Vec<Box<dyn FnOnce()>> = vec![
                Box::new(move || forget_if(what & CHANNEL != 0, two)),
                Box::new(move || forget_if(what & REGION != 0, (sink, target))),
                Box::new(move || forget_if(what & PEER != 0, one)),
                Box::new(move || forget_if(what & DOMAIN != 0, domain)),
                Box::new(move || drop(source)),
            ];
            ends.rotate_left(order);
            if order % 2 == 1 {
                ends.reverse();
            }
            for end in ends {
                end();
                // Execute what is still posted.
                device.run();
            }
            assert_eq!(device.violations().0, 0, "{what} {order}: {}", device.violations().1);
            if what == 0 {
                device.assert_clean();
            }
        }
    }
}

#[test]
fn prepared_and_reset_channels_may_be_forgotten() {
    let device = relentless();
    let domain = domain(&device);
    forget(builder(&domain));
    forget(builder(&domain).build().unwrap());
    let (mut one, two) = connect(builder(&domain), builder(&domain));
    let mut region = MemoryRegion::<u8>::new(&domain, 64).unwrap();
    for part in region.slice_mut(..).unwrap().chunks(16).unwrap() {
        let mut part = part;
        // SAFETY: the channel is reset before the region goes.
        let _ = unsafe { one.post_unpolled(ReceiveWorkRequest::new(&mut part)) }.unwrap();
    }
    forget(one.reset().unwrap());
    drop(region);
    drop(two);
    device.run();
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// Late writes by the function device would be seen: the region is freed while the device still uses it,
/// which only `unsafe` can do.
#[test]
fn the_device_would_tell() {
    let device = relentless();
    device.stale_translation(false);
    let (domain, other) = (domain(&device), FunctionDevice::model());
    drop(other);
    let (mut one, mut two): (Channel<'_>, _) = connect(builder(&domain), builder(&domain));
    let mut region = MemoryRegion::<u8>::new(&domain, 64).unwrap();
    device.progress(Progress::Manual);
    // SAFETY: broken on purpose; the model knows that the region is gone, and does not write.
    let work = unsafe { one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap())) }
        .unwrap();
    drop(region);
    assert_eq!(device.violations().0, 1);
    device.progress(Progress::OnPoll);
    let _ = two.until(crate::pair::soon()).send(Inline(b"late"));
    let _ = work.wait_until(&mut one, crate::pair::soon());
}
