//! Messages that are longer than the port can send, which this device (like mlx5 and mlx4) does not say when they are posted.

use super::*;
use ibverbs::operation::PreparedRequest;
use ibverbs::operation::SendList;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::SendOperations;
use ibverbs::{ReadWorkRequest, SendWorkRequest, WriteWorkRequest, operation::DatagramPeer};

/// The port's limit, and a message that is longer.
const MOST: u32 = 512;
const LONG: usize = 513;

const LIMIT: &str =
    "by the port's max_msg_sz, the length of the message is 513, and must be within 0..=512";

fn device() -> FunctionDevice {
    let device = FunctionDevice::model();
    device.change_port(1, |port| port.max_msg_sz = MOST);
    device
}

#[track_caller]
fn refused<E: std::fmt::Debug + std::fmt::Display>(result: std::result::Result<(), E>) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(LIMIT), "{error}");
}

#[test]
fn every_way_to_post_refuses_them_with_the_ports_limit() {
    let device = device();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(1024).unwrap();
    let shared = domain.allocate_shared::<u64>(1024, AccessFlags::REMOTE_WRITE).unwrap();
    let there = remote(&shared);
    for extended in [None, Some(SendOperations::SEND | SendOperations::WRITE)] {
        let builder = builder(&domain, &queue, Rc);
        let mut queue_pair = to_itself(match extended {
            Some(operations) => builder.extended(operations),
            None => builder,
        });
        let posted = device.calls("post_send");
        // SAFETY: nothing is posted.
        unsafe {
            refused(queue_pair.post_send(&region, ..LONG, 1));
            refused(queue_pair.post_write(&region, ..LONG, there, 1));
            refused(queue_pair.post_read(&mut region, ..LONG, there, 1));
            let read = region.scatter_element(..LONG).unwrap();
            refused(queue_pair.post(ReadWorkRequest::new(read, there), 1));
            let one = region.gather_element(..LONG).unwrap();
            let parts =
                [region.gather_element(..500).unwrap(), region.gather_element(..13).unwrap()];
            refused(queue_pair.split().0.post(SendWorkRequest::new(one).immediate(1), 1));
            refused(queue_pair.post(WriteWorkRequest::new(&parts, there), 1));
            refused(queue_pair.batch(|batch| batch.add(SendWorkRequest::new(one), 1)));
            refused(queue_pair.batch(|batch| batch.add(SendWorkRequest::new(&parts), 1)));
            let mut long = PreparedRequest::new(SendWorkRequest::new(&parts), 0).unwrap();
            refused(queue_pair.post_prepared(&mut long, 1));
            refused(queue_pair.split().0.post_prepared(&mut long, 1));
            let fits = region.gather_element(..MOST as usize).unwrap();
            let fits = PreparedRequest::new(SendWorkRequest::new(&fits).unsignaled(), 0).unwrap();
            let mut entries = [fits, long];
            let mut list = SendList::new(&mut entries).unwrap();
            refused(queue_pair.post_list(&mut list));
            assert_eq!(device.calls("post_send"), posted);
            // A request that is not posted does not count, and one that fits goes.
            list.truncate(1).unwrap();
            queue_pair.post_list(&mut list).unwrap();
            queue_pair.post_send(&region, ..MOST as usize, 2).unwrap();
            assert!(device.calls("post_send") > posted);
        }
    }
}

#[test]
fn a_datagram_has_to_fit_the_ports_mtu() {
    let device = device();
    device.change_port(1, |port| port.max_msg_sz = 1 << 30);
    device.change_port(1, |port| port.active_mtu = ffi::ibv_mtu::IBV_MTU_512);
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let region = domain.allocate::<u8>(1024).unwrap();
    let prepared = builder(&domain, &queue, Ud).build().unwrap();
    let path = AddressVector::to_peer(&context, 1, &prepared.endpoint()).unwrap();
    let path = domain.create_ah(&path).unwrap();
    let mut queue_pair = prepared.activate().unwrap();
    let to = DatagramPeer { path: &path, number: queue_pair.number(), qkey: 7 };
    let datagram = |bytes| {
        let element = region.gather_element(..bytes).unwrap();
        SendWorkRequest::new(element).to(to)
    };
    // SAFETY: the region and the path stay until the end of the test, when the queue pair is gone.
    unsafe {
        for error in [
            queue_pair.post(datagram(LONG), 1).unwrap_err(),
            queue_pair.batch(|batch| batch.add(datagram(LONG), 1)).unwrap_err(),
        ] {
            let text = "by the port's MTU, which a datagram has to fit, the length of the message is \
                        513, and must be within 0..=512";
            assert!(error.to_string().contains(text), "{error}");
        }
        queue_pair.post(datagram(512), 1).unwrap();
    }
    drop(queue_pair);
}
