//! Tables of GIDs as adapters have them, and the interface of each entry.

#[path = "support/patience.rs"]
mod patience;

use std::net::{IpAddr, Ipv6Addr};

use ibverbs::{
    Gid, SendWorkRequest, Ud, WorkCompletion, operation::DatagramPeer, queue_pair::AddressVector,
};
use ibverbs_software::Device;

use patience::deadline;

#[test]
fn each_entry_has_its_interface() {
    for adapter_gids in [false, true] {
        let device = Device::builder().adapter_gids(adapter_gids).build().unwrap();
        let IpAddr::V4(address) = device.address() else { panic!("IPv4") };
        let context = device.open().unwrap();
        let entries = context.gid_table().unwrap();
        let gids: Vec<Ipv6Addr> = entries.iter().map(|entry| entry.gid.to_bytes().into()).collect();
        let mapped = address.to_ipv6_mapped();
        if adapter_gids {
            assert!(gids[0].is_unicast_link_local() && gids[1..] == [mapped; 3], "{gids:?}");
        } else {
            assert_eq!(gids, [mapped]);
        }
        for entry in entries {
            assert_eq!(entry.interface_name().as_deref(), Some("lo"));
        }
    }
}

/// A datagram from and to any index arrives.
#[test]
fn every_index_reaches_every_index() {
    let contexts =
        [(); 2].map(|()| Device::builder().adapter_gids(true).build().unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(64).unwrap());
    let [mut one, mut other] = [0, 1].map(|at: usize| {
        let builder = domains[at].create_qp(&queues[at], &queues[at], Ud).qkey(1);
        builder.max_send_wr(32).max_recv_wr(32).build().unwrap().activate().unwrap()
    });
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(64).unwrap();
    let gids: Vec<Gid> = (0..4).map(|index| contexts[1].query_gid(1, index).unwrap().gid).collect();
    for (index, gid) in (0..4).flat_map(|index| gids.iter().map(move |gid| (index, *gid))) {
        let path = domains[0].create_ah(&AddressVector::new(1, 0).global(gid, index)).unwrap();
        // SAFETY: nobody looks at the memory.
        unsafe { other.post_receive(&mut to, .., 1).unwrap() };
        let elements = [from.gather_element(..).unwrap()];
        let peer = DatagramPeer { path: &path, number: other.number(), qkey: 1 };
        // SAFETY: as above.
        unsafe { one.post(SendWorkRequest::new(&elements).to(peer), 1).unwrap() };
        for queue in &queues {
            let (mut room, end) = ([WorkCompletion::default()], deadline());
            while queue.poll(&mut room).unwrap().is_empty() {
                assert!(std::time::Instant::now() < end, "from index {index} to {gid}");
            }
            assert!(room[0].is_success());
        }
    }
}
