//! Devices, their GIDs, and objects that are made with what no device has.

use super::*;

#[test]
fn each_device_has_a_guid_of_its_own() {
    let network = Network::new();
    let devices = [network.device().unwrap(), network.device().unwrap()];
    let v6 = Device::builder().network(&network).address("2001:db8:0:1::4001".parse().unwrap());
    let devices = [&devices[0], &devices[1], &v6.build().unwrap()];
    let guids = devices.map(|device| {
        let context = device.open().unwrap();
        let attributes = context.query_device().unwrap();
        assert_eq!(context.guid(), attributes.node_guid());
        assert_eq!(context.guid(), attributes.system_image_guid());
        // The GUID stays when the addresses change.
        let (before, old) = (context.guid(), device.address());
        device.set_addresses(1, ["10.9.9.9".parse().unwrap()]).unwrap();
        assert_eq!(context.guid(), before);
        device.set_addresses(1, [old]).unwrap();
        before
    });
    // 10.0.0.1, as a locally administered EUI-64.
    assert_eq!(guids[0].to_string(), "0200:0aff:fe00:0001");
    // Both halves of the address, and the bit that says "locally administered".
    assert_eq!(guids[2].to_string(), "1b70:0000:0002:0003");
    assert!(guids[0] != guids[1] && guids[1] != guids[2]);
    assert!(guids.iter().all(|guid| !guid.is_zero()));
    devices[0].register();
    let list = ibverbs::devices().unwrap();
    let listed = list.iter().find(|listed| listed.name() == devices[0].name()).unwrap();
    assert_eq!(listed.guid(), guids[0]);
}

/// Hardware and Soft-RoCE number GIDs so: a program that takes index 0 for granted does not reach a peer's
/// IPv4 address.
#[test]
fn gid_0_may_be_link_local() {
    let network = Network::new();
    let contexts = [1, 2].map(|host| {
        let link_local = format!("fe80::{host}").parse().unwrap();
        let device =
            Device::builder().network(&network).port([link_local, [10, 7, 0, host].into()]);
        device.build().unwrap().open().unwrap()
    });
    let gid = |index| contexts[0].query_gid(1, index).unwrap().gid;
    assert_eq!([gid(0), gid(1)].map(|gid| gid.to_ipv4()), [None, Some([10, 7, 0, 1].into())]);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let path = |index| AddressVector::new(1, 0).global("::ffff:10.7.0.2".parse().unwrap(), index);
    assert_eq!(domains[0].create_ah(&path(0)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    domains[0].create_ah(&path(1)).unwrap();
    // A handshake finds the addresses that both sides have.
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [mut one, mut other] = pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        other.post_receive(&mut to, .., 1).unwrap();
        one.post_send(&from, .., 1).unwrap();
    }
    assert!(next(&queues[0]).is_success() && next(&queues[1]).is_success());
}

/// A program that was built with a later header has larger entries, one with an earlier header smaller ones.
#[test]
fn a_table_of_gids_has_entries_of_any_length() {
    let context = Network::new().device().unwrap().open().unwrap();
    const LENGTH: usize = size_of::<ffi::ibv_gid_entry>();
    for length in [LENGTH, LENGTH + 8, LENGTH - 4] {
        let mut room = [0xff_u8; 3 * (LENGTH + 8)];
        // SAFETY: there is room for three entries, in words.
        let found = unsafe {
            let entries = room.as_mut_ptr().cast();
            ffi::_ibv_query_gid_table(context.as_raw(), entries, 3, 0, length)
        };
        assert_eq!(found, 1, "{length}");
        let gid = context.query_gid(1, 0).unwrap().gid;
        assert_eq!(room[..16], gid.to_bytes());
        assert!(room[length.min(LENGTH)..length].iter().all(|&byte| byte == 0 || byte == 0xff));
        assert!(room[length..].iter().all(|&byte| byte == 0xff));
    }
}

/// The kernel finds an object by its number in the context of the call.
#[test]
fn objects_of_two_contexts_do_not_go_together() {
    let device = Network::new().device().unwrap();
    let [here, there] = [(); 2].map(|()| device.open().unwrap());
    let domain = here.alloc_pd().unwrap();
    let (ours, theirs) = (here.create_cq(4).unwrap(), there.create_cq(4).unwrap());
    let create = |send: &CompletionQueue<'_>, receive: &CompletionQueue<'_>| {
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: send.as_raw(),
            recv_cq: receive.as_raw(),
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: the objects are live; what is made is destroyed.
        unsafe {
            let made = ffi::ibv_create_qp(domain.as_raw(), &mut attr);
            if made.is_null() {
                return std::io::Error::last_os_error().raw_os_error();
            }
            assert_eq!(ffi::ibv_destroy_qp(made), 0);
        }
        None
    };
    assert_eq!(create(&ours, &ours), None);
    // A region moves to a domain of its own context only.
    let (second, foreign) = (here.alloc_pd().unwrap(), there.alloc_pd().unwrap());
    let mut memory = [0_u8; 8];
    let change = ffi::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_PD.0 as i32;
    // SAFETY: the memory lives longer than the region.
    unsafe {
        let mr = ffi::ibv_reg_mr(domain.as_raw(), memory.as_mut_ptr().cast(), 8, 0);
        for (to, is_possible) in [(&foreign, false), (&second, true)] {
            let done = ffi::ibv_rereg_mr(mr, change, to.as_raw(), null_mut(), 0, 0) == 0;
            assert_eq!(done, is_possible);
        }
        assert_eq!(ffi::ibv_dereg_mr(mr), 0);
    }
    for (send, receive) in [(&ours, &theirs), (&theirs, &ours), (&theirs, &theirs)] {
        assert_eq!(create(send, receive), Some(libc::EINVAL));
    }
}

/// Each capacity has its limit.
#[test]
fn a_queue_pair_has_what_the_device_offers_and_no_more() {
    let device = Device::builder().network(&Network::new()).max_qp_wr(4).max_sge(2);
    let context = device.max_inline_data(8).build().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let create = |[send, receive, gather, scatter, inline]: [u32; 5]| {
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: queue.as_raw(),
            recv_cq: queue.as_raw(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: send,
                max_recv_wr: receive,
                max_send_sge: gather,
                max_recv_sge: scatter,
                max_inline_data: inline,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: the objects are live; what is made is destroyed.
        unsafe {
            let made = ffi::ibv_create_qp(domain.as_raw(), &mut attr);
            !made.is_null() && ffi::ibv_destroy_qp(made) == 0
        }
    };
    let most = [4, 4, 2, 2, 8];
    assert!(create(most));
    for i in 0..most.len() {
        let mut more = most;
        more[i] += 1;
        assert!(!create(more), "{more:?}");
    }
}

#[test]
fn a_region_is_not_longer_than_the_device_offers() {
    let device = Device::builder().network(&Network::new()).max_mr_size(64).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut memory = [0_u8; 65];
    let start = memory.as_mut_ptr().cast();
    let change = ffi::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_TRANSLATION.0 as i32;
    // SAFETY: the memory lives longer than the regions.
    unsafe {
        assert!(ffi::ibv_reg_mr(domain.as_raw(), start, 65, 0).is_null());
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
        let mr = ffi::ibv_reg_mr(domain.as_raw(), start, 64, 0);
        assert_ne!(ffi::ibv_rereg_mr(mr, change, null_mut(), start, 65, 0), 0);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(ffi::ibv_dereg_mr(mr), 0);
    }
}

#[test]
fn only_unknown_rights_that_are_not_optional_are_refused() {
    let context = Network::new().device().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut memory = [0_u8; 64];
    const OPTIONAL: std::ops::Range<u32> = 20..30;
    const LOCAL: u32 = Access::IBV_ACCESS_LOCAL_WRITE.0;
    let mut register = |access: u32| {
        // SAFETY: the memory lives longer than the region.
        unsafe {
            let start = memory.as_mut_ptr().cast();
            let change = ffi::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0 as i32;
            // libibverbs keeps optional rights from a device when a region is made, and not when it changes.
            let plain = ffi::ibv_reg_mr(domain.as_raw(), start, 64, LOCAL as i32);
            let refused =
                ffi::ibv_rereg_mr(plain, change, null_mut(), null_mut(), 0, access as i32) != 0;
            assert_eq!(ffi::ibv_dereg_mr(plain), 0);
            let mr = ffi::ibv_reg_mr(domain.as_raw(), start, 64, access as i32);
            assert_eq!(mr.is_null(), refused, "{access:#x}");
            if mr.is_null() {
                return std::io::Error::last_os_error().raw_os_error();
            }
            assert_eq!(ffi::ibv_dereg_mr(mr), 0);
        }
        None
    };
    let known = Access::IBV_ACCESS_LOCAL_WRITE
        | Access::IBV_ACCESS_REMOTE_WRITE
        | Access::IBV_ACCESS_REMOTE_READ
        | Access::IBV_ACCESS_REMOTE_ATOMIC
        | Access::IBV_ACCESS_MW_BIND
        | Access::IBV_ACCESS_ZERO_BASED
        | Access::IBV_ACCESS_ON_DEMAND
        | Access::IBV_ACCESS_HUGETLB
        | Access::IBV_ACCESS_FLUSH_GLOBAL;
    for bit in 0..31 {
        let right = 1 << bit;
        let refused = right & known.0 == 0 && !OPTIONAL.contains(&bit);
        let expected = refused.then_some(libc::EINVAL);
        assert_eq!(register(right | LOCAL), expected, "bit {bit}");
    }
}
