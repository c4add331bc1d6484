//! Multicast groups. IPv6 on real sockets needs an interface with a route for groups: `tests/pair_software` has one.

#[allow(dead_code, reason = "other programs need more of it")]
#[path = "support/child.rs"]
mod child;
#[path = "support/multicast.rs"]
mod multicast;
#[path = "support/patience.rs"]
mod patience;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use ibverbs::{Gid, queue_pair::AddressVector};
use ibverbs_software::{Device, Network};

use child::{Process, is_child, parent};
use multicast::{Member, a_group_hears_what_is_sent_to_it, only_its_members_hear_a_group};
use patience::deadline;

/// A group of IPv4, and two of IPv6. Groups are the machine's: each test of each process has its own.
fn groups(test: u8, process: u16) -> [Gid; 3] {
    let [high, low] = process.to_be_bytes();
    [
        format!("::ffff:239.{test}.{high}.{low}"),
        format!("ff02::{test:x}:{process:x}"),
        format!("ff0e::{test:x}:{process:x}"),
    ]
    .map(|group| group.parse().unwrap())
}

fn own_groups(test: u8) -> [Gid; 3] {
    groups(test, std::process::id() as u16)
}

#[test]
fn a_group_of_ipv4_hears() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    let [group, ..] = own_groups(13);
    a_group_hears_what_is_sent_to_it(&contexts, 0, group);
    // The connection manager writes the group in this form.
    let mut bytes = group.to_bytes();
    bytes[..2].copy_from_slice(&[0xff, 0x0e]);
    a_group_hears_what_is_sent_to_it(&contexts, 0, Gid::from_bytes(bytes));
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
        for group in &own_groups(10)[1..] {
            a_group_hears_what_is_sent_to_it(&contexts, 0, *group);
        }
    }
}

/// Each process sends once to each group, and both hear it.
fn take_turns(mut other: TcpStream, groups: [Gid; 3], is_first: bool) {
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    for group in groups {
        let path = AddressVector::new(1, 0).global(group, 0).hop_limit(1);
        let queues = [(); 2].map(|()| context.create_cq(8).unwrap());
        let [mut sender, mut member] = queues.each_ref().map(|queue| Member::new(&domain, queue));
        member.queue_pair.attach_multicast(group, 0).unwrap();
        for (number, sends) in [(1, is_first), (2, !is_first)] {
            member.post_receive(number);
            other.write_all(b"!").unwrap();
            other.read_exact(&mut [0]).unwrap();
            let text = [number as u8; 5];
            if sends {
                sender.send(&domain, &path, &text);
            }
            member.hears(number, &text, group);
        }
        member.queue_pair.detach_multicast(group, 0).unwrap();
    }
}

#[test]
fn hears_its_parent() {
    if is_child("hears_its_parent") {
        let groups = groups(11, parent().port());
        take_turns(TcpStream::connect(parent()).unwrap(), groups, false);
        println!("all heard");
    }
}

#[test]
fn groups_are_those_of_all_processes_of_the_machine() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut child = Process::run("hears_its_parent", address);
    take_turns(listener.accept().unwrap().0, groups(11, address.port()), true);
    child.wait_for("all heard");
}

/// One group of IPv4 stands in for both of these: the last 24 bits of their CRC32 are equal.
#[test]
fn groups_with_the_same_ipv4_group_are_told_apart() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    only_its_members_hear_a_group(&contexts, ["ff0e::1234", "ff0e::189:92fb"]);
}

/// A device that has only addresses of IPv6.
#[test]
fn a_group_of_ipv4_is_refused_on_a_device_of_ipv6() {
    let end = deadline();
    let device = loop {
        match Device::builder().address("::1".parse().unwrap()).build() {
            Err(e) if e.kind() == std::io::ErrorKind::AddrNotAvailable => {
                eprintln!("NOT CHECKED: this machine has no IPv6");
                return;
            }
            // Another test of this machine has it.
            Err(e)
                if e.kind() == std::io::ErrorKind::AddrInUse && std::time::Instant::now() < end =>
            {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            device => break device.unwrap(),
        }
    };
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let kind = ibverbs::Ud;
    let queue_pair = domain.create_qp(&queue, &queue, kind).qkey(1).build().unwrap();
    let mut queue_pair = queue_pair.activate().unwrap();
    // The error comes again and again: the group has no member.
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
