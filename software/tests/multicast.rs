//! Multicast groups. IPv6 on real sockets needs an interface with a route for groups: `tests/pair_software` has one.

#[path = "support/multicast.rs"]
mod multicast;
#[path = "support/patience.rs"]
mod patience;

use ibverbs_software::{Device, Network};

use multicast::{a_group_hears_what_is_sent_to_it, only_its_members_hear_a_group};

#[test]
fn a_group_of_ipv4_hears() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    a_group_hears_what_is_sent_to_it(&contexts, 0, "::ffff:239.1.2.3".parse().unwrap());
    // As the connection manager writes it.
    a_group_hears_what_is_sent_to_it(&contexts, 0, "ff0e::ffff:239.1.2.3".parse().unwrap());
}

#[test]
fn a_group_of_ipv6_hears() {
    let network = Network::new();
    let contexts = ["fd00::1", "fd00::2"].map(|address| {
        let device = Device::builder().network(&network).address(address.parse().unwrap());
        device.build().unwrap().open().unwrap()
    });
    for group in ["ff02::1:2", "ff0e::1234"] {
        a_group_hears_what_is_sent_to_it(&contexts, 0, group.parse().unwrap());
    }
}

#[test]
fn a_group_of_ipv6_hears_on_devices_of_ipv4() {
    let network = Network::new();
    let simulated =
        [(); 2].map(|()| Device::builder().network(&network).build().unwrap().open().unwrap());
    let real = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    for contexts in [simulated, real] {
        for group in ["ff02::1:2", "ff0e::1234"] {
            a_group_hears_what_is_sent_to_it(&contexts, 0, group.parse().unwrap());
        }
    }
}

/// The same group of IPv4 stands for both of these: the last 24 bits of their CRC32 are equal.
#[test]
fn groups_that_share_a_stand_in_are_told_apart() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    only_its_members_hear_a_group(&contexts, ["ff0e::1234", "ff0e::189:92fb"]);
}

/// A device that has only addresses of IPv6.
#[test]
fn a_group_of_ipv4_is_refused_on_a_device_of_ipv6() {
    let device = Device::builder().address("::1".parse().unwrap()).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let kind = ibverbs::Ud;
    let queue_pair = domain.create_qp(&queue, &queue, kind).qkey(1).build().unwrap();
    let mut queue_pair = queue_pair.activate().unwrap();
    // Again and again: the group has no member.
    for _ in 0..2 {
        let error =
            queue_pair.attach_multicast("::ffff:239.1.2.3".parse().unwrap(), 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL));
    }
}

#[test]
fn only_datagrams_are_sent_to_groups_and_only_to_groups() {
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let datagrams = domain.create_qp(&queue, &queue, ibverbs::Ud).qkey(1).build().unwrap();
    let datagrams = datagrams.activate().unwrap();
    let connected = domain.create_qp(&queue, &queue, ibverbs::Rc).build().unwrap();
    let connected = connected.into_queue_pair();
    let attach = |pair: *mut ibverbs::ffi::ibv_qp, address: &str| {
        let gid: ibverbs::Gid = address.parse().unwrap();
        let raw = ibverbs::ffi::ibv_gid { raw: gid.to_bytes() };
        // SAFETY: the queue pair is live, and so is the GID.
        unsafe { ibverbs::ffi::ibv_attach_mcast(pair, &raw, 0) }
    };
    assert_eq!(attach(datagrams.as_raw(), "::ffff:10.1.2.3"), libc::EINVAL);
    assert_eq!(attach(connected.as_raw(), "::ffff:239.1.2.3"), libc::EINVAL);
}
