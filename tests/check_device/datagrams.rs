//! Datagrams to oneself: UD, and EFA's SRD.

use ibverbs::queue_pair::Srd;
use ibverbs::queue_pair::marker::{AddressedBy, Datagram, ReceiveQueue, Sends};
use ibverbs::{
    Context, ErrorKind, PreparedQueuePair, ProtectionDomain, SendWorkRequest, Ud,
    operation::DatagramPeer, queue_pair::AddressVector,
};

use crate::device::{open, port, supported};
use crate::transport::nothing_is_left;
use crate::unsupported;
use crate::vm::{alone, completions, success};

const QKEY: u32 = 0x1234;

/// Sends a datagram to the queue pair itself. `header` is how much room comes before it in the receive.
fn to_itself<T: Datagram + ReceiveQueue + Sends + for<'a> AddressedBy<DatagramPeer<'a>>>(
    context: &Context<'_>,
    domain: &ProtectionDomain<'_>,
    prepared: PreparedQueuePair<'_, T>,
    header: usize,
) {
    let mut queue_pair = prepared.activate().unwrap();
    let mut inbox = domain.allocate::<u8>(256).unwrap();
    let mut message = domain.allocate::<u8>(32).unwrap();
    message.fill(0xa5);
    let own = queue_pair.endpoint();
    let path = domain.create_ah(&AddressVector::to_peer(context, port(context), &own).unwrap());
    let path = path.unwrap();
    let to = DatagramPeer { path: &path, number: own.num(), qkey: QKEY };
    let element = [message.gather_element(..).unwrap()];
    // SAFETY: regions and handle are not touched before the completions.
    unsafe {
        queue_pair.post_receive(&mut inbox, .., 1).unwrap();
        queue_pair.post(SendWorkRequest::new(&element).to(to), 2).unwrap();
    }
    let done = completions(queue_pair.send_cq(), 2);
    assert_eq!(success(&done, 1).byte_len() as usize, header + 32);
    success(&done, 2);
    assert!(inbox[header..header + 32].iter().all(|&byte| byte == 0xa5));
}

#[test]
fn arrive_over_ud() {
    let _alone = alone("UD", 240);
    {
        let context = open();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let builder = domain.create_qp(&queue, &queue, Ud).port(port(&context)).qkey(QKEY);
        let built = builder.max_send_wr(4).max_recv_wr(4).build();
        if let Some(prepared) = supported("UD", built) {
            to_itself(&context, &domain, prepared, 40);
        }
    }
    nothing_is_left();
}

#[test]
fn arrive_over_srd() {
    let _alone = alone("SRD", 240);
    {
        let context = open();
        // Only EFA answers.
        match context.query_efa() {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                return unsupported("SRD: the device is not EFA");
            }
            answer => drop(answer.unwrap()),
        }
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let builder = domain.create_qp(&queue, &queue, Srd).qkey(QKEY);
        let prepared = builder.max_send_wr(4).max_recv_wr(4).build().unwrap();
        to_itself(&context, &domain, prepared, 0);
    }
    nothing_is_left();
}
