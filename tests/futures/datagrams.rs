//! Datagrams of hostile peers, on the function device.

use std::sync::Arc;

use ibverbs::channel::DatagramsBuilder;
use ibverbs::{AccessFlags, BufferPool, ProtectionDomain, Reactor, ffi};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::rig::poll;

/// Its header is what the sender wrote there.
#[test]
fn a_datagram_whose_header_names_no_gid_of_ours_does_not_end_a_receive() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let pool = BufferPool::new(&domain, 40 + 16, 1, AccessFlags::empty()).unwrap();
    let reactor = Reactor::new(&context, 16).unwrap();
    let end = reactor.datagrams(DatagramsBuilder::new(&domain).max_send_wr(2).max_recv_wr(8));
    let end = end.unwrap();
    let queue = device.last_call("create_qp").unwrap().qp_init_attr.recv_cq;
    let arrives = |flags, number| {
        let posted = device.posted(0).unwrap();
        let datagram = ffi::ibv_wc {
            wr_id: posted.wr_id,
            qp_num: posted.qp_num,
            opcode: ffi::ibv_wc_opcode::IBV_WC_RECV,
            byte_len: 44,
            src_qp: number,
            wc_flags: flags,
            ..Default::default()
        };
        device.inject(queue, &datagram);
        while reactor.turn().unwrap() > 0 {}
    };
    // What the peers write.
    drop(pool.take_from(&[0xff; 40 + 16]).unwrap());
    let mut receive = Box::pin(end.recv_from(pool.take().unwrap()));
    assert!(poll(&mut receive).is_none());
    for _ in 0..3 {
        arrives(ffi::ibv_wc_flags::IBV_WC_GRH.0, 5);
        let ended = poll(&mut receive);
        assert!(ended.is_none(), "it is not for us: {ended:?}");
        assert_eq!(pool.available(), 0, "its buffer receives the next");
    }
    arrives(0, 7);
    let (message, sender) = poll(&mut receive).expect("an answer is possible").unwrap();
    assert_eq!((message.len(), sender.number), (4, 7));
}
