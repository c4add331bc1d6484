//! The core types on Soft-RoCE: from the list of devices to a transfer, and to the destruction of all objects.
//! To be run by `script/test rxe`, in the machine that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;

use ibverbs::completion::WorkOpcode;
use ibverbs::device::{GidType, LinkLayer, NodeType, PhysicalState, PortState, TransportType};
use ibverbs::queue_pair::Transport;
use ibverbs::settings::ServiceLevel;
use ibverbs::{
    AccessFlags, CompletionQueue, Context, ErrorKind, Gid, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairType, Rc, Result, ffi,
    settings::{AckTimeout, MaximumTransferUnit, PacketSequenceNumber},
};

use vm::{assert_nothing_left, completions, one_at_a_time, resources, run, success};

const GUIDS: [(&str, &str); 2] = [("rxe0", "5054:00ff:fe77:ff00"), ("rxe1", "5054:00ff:fe77:ff01")];

#[test]
#[ignore = "Soft-RoCE: its GUIDs"]
fn both_devices_are_listed() {
    let _lock = one_at_a_time();
    let list = ibverbs::devices().unwrap();
    assert_eq!(list.len(), 2, "{list:?}");
    let mut indices = Vec::new();
    for (device, (name, guid)) in list.iter().zip(GUIDS) {
        assert_eq!((device.name(), device.guid().to_string().as_str()), (name, guid));
        assert_eq!(device.node_type(), NodeType::ChannelAdapter);
        assert_eq!(device.transport_type(), TransportType::InfiniBand);
        assert_eq!(device.sysfs_path().to_str(), Some(&*format!("/sys/class/infiniband/{name}")));
        let node_type = std::fs::read_to_string(device.sysfs_path().join("node_type")).unwrap();
        assert_eq!(node_type.trim(), "1: CA");
        indices.push(device.index().expect("this kernel says"));
    }
    assert_ne!(indices[0], indices[1]);
    assert_nothing_left("rxe0");
}

#[test]
#[ignore = "Soft-RoCE: its GUIDs"]
fn a_device_opens_by_name_and_from_the_list() {
    let _lock = one_at_a_time();
    let by_name: Context<'static> = ibverbs::open("rxe1").unwrap();
    let list = ibverbs::devices().unwrap();
    let from_list = list.get(1).unwrap().open().unwrap();
    assert_eq!((by_name.name(), from_list.name()), ("rxe1", "rxe1"));
    assert!(resources("rxe1").contains("ctx 2"), "{}", resources("rxe1"));
    drop(from_list);
    drop(list);
    // An opened context does not need the list of devices.
    assert_eq!(by_name.query_device().unwrap().node_guid().to_string(), GUIDS[1].1);
    by_name.close().unwrap();
    assert_nothing_left("rxe1");
}

#[test]
#[ignore = "Soft-RoCE: its attributes"]
fn queries_tell_what_the_kernel_says() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let device = context.query_device().unwrap();
    assert_eq!((device.phys_port_cnt(), device.vendor_id()), (1, 0xff_ffff));
    assert_eq!((device.max_qp_wr(), device.max_sge(), device.max_cqe()), (1 << 20, 32, 32_767));
    assert_eq!(device.max_mr_size(), u64::MAX);
    assert_eq!(device.max_pkeys(), 64);
    let port = context.query_port(1).unwrap();
    assert_eq!((port.state(), port.physical_state()), (PortState::Active, PhysicalState::LinkUp));
    assert_eq!((port.link_layer(), port.lid()), (LinkLayer::Ethernet, 0));
    assert_eq!(port.active_mtu(), Some(MaximumTransferUnit::Mtu1024));
    assert_eq!(port.max_mtu(), Some(MaximumTransferUnit::Mtu4096));
    assert_eq!((port.gid_table_len(), port.pkey_table_len()), (1024, 1));
    // 2 GiB; on Linux 6.1, 8 MiB.
    let said = run("ibv_devinfo -v -d rxe0 | sed -n 's/.*max_msg_sz:\\s*0x//p'");
    let said = u32::from_str_radix(said.trim(), 16).unwrap();
    assert_eq!(port.max_message_size(), said);
    assert!([1 << 23, 1 << 31].contains(&said), "{said}");
    assert!(port.grh_required());
    assert_eq!(context.query_pkey(1, 0).unwrap(), 0xffff);
    let processors = std::thread::available_parallelism().unwrap().get();
    assert_eq!(context.completion_vectors() as usize, processors);
}

#[test]
#[ignore = "Soft-RoCE: the GIDs of a network interface"]
fn the_gid_table_is_that_of_the_network_interface() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let table = context.gid_table().unwrap();
    let interface = run("cat /sys/class/net/veth0/ifindex").trim().parse().unwrap();
    assert_eq!(table.len(), 2, "{table:?}");
    for (index, (entry, gid)) in
        table.iter().zip(["fe80::5054:ff:fe77:ff00", "::ffff:10.77.0.1"]).enumerate()
    {
        assert_eq!(entry.gid, gid.parse().unwrap());
        assert_eq!((entry.index as usize, entry.port, entry.gid_type), (index, 1, GidType::RoceV2));
        assert_eq!(entry.interface_index, Some(interface));
        assert_eq!(context.query_gid(1, entry.index).unwrap(), *entry);
    }
    assert_eq!(context.routable_gid(1).unwrap(), table[1]);
    assert_eq!(table[1].gid.to_ipv4(), Some(Ipv4Addr::new(10, 77, 0, 1)));
}

/// The device has more GIDs than the first query has room for.
#[test]
#[ignore = "Soft-RoCE: the GIDs of a network interface"]
fn a_long_gid_table_is_read_whole() {
    let _lock = one_at_a_time();
    run("ip link add nic8 type dummy
        ip link set nic8 up
        rdma link add rxe8 type rxe netdev nic8
        for n in {1..20}; do echo addr add 10.80.0.$n/24 dev nic8; done | ip -batch -");
    let context = ibverbs::open("rxe8").unwrap();
    let table = context.gid_table().unwrap();
    for n in 1..=20 {
        let gid = Gid::from(Ipv4Addr::new(10, 80, 0, n));
        let entry = table.iter().find(|entry| entry.gid == gid).expect("each address has an entry");
        assert_eq!(context.query_gid(1, entry.index).unwrap(), *entry);
    }
    drop(context);
    run("rdma link delete rxe8; ip link delete nic8");
}

#[test]
#[ignore = "Soft-RoCE: the GIDs of a network interface"]
fn the_routable_gid_is_the_best_that_there_is() {
    let _lock = one_at_a_time();
    run("ip link add nic7 type dummy
        ip link set nic7 address 52:54:00:77:01:01 up
        rdma link add rxe7 type rxe netdev nic7");
    let context = ibverbs::open("rxe7").unwrap();
    let routable = || context.routable_gid(1).unwrap().gid.to_string();
    assert_eq!(routable(), "fe80::5054:ff:fe77:101", "there is only the link-local one");
    run("ip addr add 2001:db8::7/64 dev nic7 nodad");
    assert_eq!(routable(), "2001:db8::7", "a global one is better");
    run("ip addr add 10.79.1.1/24 dev nic7");
    assert_eq!(routable(), "::ffff:10.79.1.1", "one of IPv4 is best");
    run("ip addr flush dev nic7");
    match context.routable_gid(1) {
        // The kernel keeps the default GID, made of the interface's address.
        Ok(entry) => assert!(entry.gid.is_link_local(), "{entry:?}"),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENODATA), "{error}"),
    }
    drop(context);
    run("rdma link delete rxe7; ip link delete nic7");
}

/// The state of the queue pair that the kernel reports, and the address that it was connected with.
fn state(queue_pair: &QueuePair<'_, impl Transport>) -> (ffi::ibv_qp_state, ffi::ibv_qp_attr) {
    let mut attributes = ffi::ibv_qp_attr::default();
    let mut init = ffi::ibv_qp_init_attr::default();
    let mask = ffi::ibv_qp_attr_mask(!0 >> 12).0 as i32;
    // SAFETY: the queue pair is live and both structs are writable.
    let returned =
        unsafe { ffi::ibv_query_qp(queue_pair.as_raw(), &mut attributes, mask, &mut init) };
    assert_eq!(returned, 0);
    (attributes.qp_state, attributes)
}

#[test]
#[ignore = "Soft-RoCE: the GIDs of a network interface"]
fn the_handshake_reaches_ready_to_send_on_every_type() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    for queue_pair_type in [
        QueuePairType::ReliableConnected,
        QueuePairType::UnreliableConnected,
        QueuePairType::UnreliableDatagram,
    ] {
        let prepared = domain.create_qp(&queue, &queue, queue_pair_type).build().unwrap();
        let endpoint = prepared.endpoint();
        assert_eq!((endpoint.lid(), endpoint.gid()), (0, Ipv4Addr::new(10, 77, 0, 1).into()));
        let queue_pair = prepared.handshake(endpoint).unwrap();
        assert_eq!(queue_pair.number(), endpoint.num());
        assert_eq!(queue_pair.queue_pair_type(), queue_pair_type);
        assert_eq!(state(&queue_pair).0, ffi::ibv_qp_state::IBV_QPS_RTS, "{queue_pair_type:?}");
        queue_pair.close().unwrap();
    }
}

#[test]
fn settings_arrive_at_the_device() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
        .max_send_wr(17)
        .max_recv_wr(33)
        .gid_index(0)
        .path_mtu(MaximumTransferUnit::Mtu1024)
        .send_psn(PacketSequenceNumber::new(0xabcdef).unwrap())
        .ack_timeout(AckTimeout::new(11).unwrap())
        .max_ack_retries(3.try_into().unwrap())
        .max_rnr_retries(5.try_into().unwrap())
        .min_rnr_timer(9.try_into().unwrap())
        .service_level(ServiceLevel::new(3).unwrap())
        .traffic_class(104)
        .hop_limit(9)
        .max_rd_atomic(4)
        .max_dest_rd_atomic(8)
        .build()
        .unwrap();
    let endpoint = prepared.endpoint();
    assert_eq!(endpoint.gid(), context.query_gid(1, 0).unwrap().gid);
    // The attributes that only the peer knows are set late.
    let queue_pair = prepared
        .receive_psn(PacketSequenceNumber::new(0x123456).unwrap())
        .path_mtu(MaximumTransferUnit::Mtu512)
        .handshake(endpoint)
        .unwrap();
    assert!(queue_pair.max_send_wr() >= 17 && queue_pair.max_recv_wr() >= 33);
    let (_, a) = state(&queue_pair);
    assert_eq!((a.sq_psn, a.rq_psn, a.path_mtu.0), (0xabcdef, 0x123456, 2));
    assert_eq!((a.timeout, a.retry_cnt, a.rnr_retry, a.min_rnr_timer), (11, 3, 5, 9));
    assert_eq!((a.max_rd_atomic, a.max_dest_rd_atomic), (4, 8));
    assert_eq!((a.dest_qp_num, a.port_num), (endpoint.num(), 1));
    let (path, route) = (a.ah_attr, a.ah_attr.grh);
    // Soft-RoCE forgets the service level, and the kernel takes the hop limit from the route.
    assert_eq!(path.is_global, 1);
    assert_eq!((route.sgid_index, route.traffic_class), (0, 104));
    assert_eq!(Gid::from(route.dgid), endpoint.gid());
}

/// Sends `size` bytes from `sender` to `receiver` and checks all of them.
fn exchange(
    (sender, send_cq): (&mut QueuePair<'_>, &CompletionQueue<'_>),
    (receiver, receive_cq): (&mut QueuePair<'_>, &CompletionQueue<'_>),
    source: &mut MemoryRegion<'_, u8>,
    target: &mut MemoryRegion<'_, u8>,
    size: usize,
) {
    for (index, byte) in source.iter_mut().enumerate() {
        *byte = (index as u8).wrapping_mul(31) ^ size as u8;
    }
    target.fill(0);
    // SAFETY: both completions are polled below before the memory is used.
    unsafe {
        receiver.post_receive(target, 1..=size, 7).unwrap();
        sender.post_send(source, ..size, 8).unwrap();
    }
    assert_eq!(success(&completions(send_cq, 1), 8).opcode(), WorkOpcode::Send);
    let found = completions(receive_cq, 1);
    let received = success(&found, 7);
    assert_eq!((received.opcode(), received.byte_len() as usize), (WorkOpcode::Receive, size));
    assert_eq!(target[1..=size], source[..size]);
    assert_eq!((target[0], target[size + 1..].iter().any(|&byte| byte != 0)), (0, false));
}

const SIZES: [usize; 6] = [1, 17, 1_023, 1_025, 65_536, 70_000];

#[test]
fn messages_arrive_whole_from_a_queue_pair_to_itself() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut source = domain.allocate(70_000).unwrap();
    let mut target = domain.allocate(70_002).unwrap();
    for queue_pair_type in [QueuePairType::ReliableConnected, QueuePairType::UnreliableConnected] {
        let prepared = domain.create_qp(&queue, &queue, queue_pair_type).build().unwrap();
        let endpoint = prepared.endpoint();
        let queue_pair = &mut prepared.handshake(endpoint).unwrap();
        for size in SIZES {
            loopback(queue_pair, &queue, &mut source, &mut target, size);
        }
    }
}

/// [`exchange`] for a queue pair that is connected to itself.
fn loopback(
    queue_pair: &mut QueuePair<'_, QueuePairType>,
    queue: &CompletionQueue<'_>,
    source: &mut MemoryRegion<'_, u8>,
    target: &mut MemoryRegion<'_, u8>,
    size: usize,
) {
    source.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index * 7 + size) as u8);
    target.fill(0);
    // SAFETY: both completions are polled below before the memory is used.
    unsafe {
        queue_pair.post_receive(target, 1..=size, 1).unwrap();
        queue_pair.post_send(source, ..size, 2).unwrap();
    }
    let found = completions(queue, 2);
    assert_eq!(success(&found, 2).opcode(), WorkOpcode::Send);
    let received = success(&found, 1);
    assert_eq!((received.opcode(), received.byte_len() as usize), (WorkOpcode::Receive, size));
    assert!(found.iter().all(|c| c.queue_pair_number() == queue_pair.number()));
    assert_eq!(target[1..=size], source[..size]);
    assert_eq!((target[0], target[size + 1..].iter().any(|&byte| byte != 0)), (0, false));
}

#[test]
fn messages_pass_between_two_devices() {
    let _lock = one_at_a_time();
    let devices = ibverbs::devices().unwrap();
    let contexts = [0, 1].map(|index| devices.get(index).unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(8).unwrap());
    let mut source = domains[0].allocate(70_000).unwrap();
    let mut target = domains[1].allocate(70_002).unwrap();
    let [first, second] = [0, 1].map(|n| {
        let builder = domains[n].create_qp(&queues[n], &queues[n], Rc);
        builder.build().unwrap()
    });
    let endpoints = [first.endpoint(), second.endpoint()];
    let mut first = first.handshake(endpoints[1]).unwrap();
    let mut second = second.handshake(endpoints[0]).unwrap();
    for size in SIZES {
        exchange(
            (&mut first, &queues[0]),
            (&mut second, &queues[1]),
            &mut source,
            &mut target,
            size,
        );
    }
}

#[test]
fn regions_hold_other_elements_than_bytes() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut region = domain.allocate::<u64>(8).unwrap();
    assert_eq!(*region, [0; 8]);
    region[1] = u64::MAX - 5;
    let prepared = domain.create_qp(&queue, &queue, Rc).build().unwrap();
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint).unwrap();
    // SAFETY: both completions are polled below before the memory is used.
    unsafe {
        queue_pair.post_receive(&mut region, 4..6, 1).unwrap();
        queue_pair.post_send(&region, 0..=1, 2).unwrap();
    }
    assert_eq!(success(&completions(&queue, 2), 1).byte_len(), 16, "ranges count elements");
    assert_eq!(*region, [0, u64::MAX - 5, 0, 0, 0, u64::MAX - 5, 0, 0]);
}

/// All objects of a connection, owned.
struct Server {
    queue_pair: QueuePair<'static>,
    region: MemoryRegion<'static, u8>,
    queue: Arc<CompletionQueue<'static>>,
}

#[test]
fn shared_parents_move_into_a_thread() {
    let _lock = one_at_a_time();
    let server = {
        let context = Arc::new(ibverbs::open("rxe0").unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let queue = Arc::new(CompletionQueue::new(context, 8).unwrap());
        let prepared = QueuePair::builder(&domain, &queue, &queue, Rc).build().unwrap();
        let endpoint = prepared.endpoint();
        Server {
            queue_pair: prepared.handshake(endpoint).unwrap(),
            region: MemoryRegion::new(domain, 64).unwrap(),
            queue,
        }
    };
    std::thread::spawn(move || {
        let Server { mut queue_pair, mut region, queue } = server;
        region[..5].copy_from_slice(b"hello");
        // SAFETY: both completions are polled below before the memory is used.
        unsafe {
            queue_pair.post_receive(&mut region, 32.., 1).unwrap();
            queue_pair.post_send(&region, ..5, 2).unwrap();
        }
        success(&completions(&queue, 2), 1);
        assert_eq!(&region[32..37], b"hello");
    })
    .join()
    .unwrap();
    assert_nothing_left("rxe0");
}

#[test]
fn everything_closes_in_order() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    {
        let domain = context.alloc_pd().unwrap();
        {
            let queue = context.create_cq(8).unwrap();
            let region = domain.allocate::<u8>(64).unwrap();
            let shared = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ).unwrap();
            let prepared = domain.create_qp(&queue, &queue, Rc).build().unwrap();
            let endpoint = prepared.endpoint();
            let queue_pair = prepared.handshake(endpoint).unwrap();
            let open = "pd 2 cq 2 qp 2 cm_id 0 mr 2 ctx 1 srq 0";
            assert_eq!(resources("rxe0"), open);
            queue_pair.close().unwrap();
            region.close().unwrap();
            shared.close().unwrap();
            queue.close().unwrap();
        }
        domain.close().unwrap();
    }
    assert_eq!(resources("rxe0"), "pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 1 srq 0");
    context.close().unwrap();
    assert_nothing_left("rxe0");
}

/// Whether a `close` failed, as it must.
fn busy(result: Result<()>) {
    let Err(error) = result else { panic!("it is in use") };
    assert_eq!(
        (error.kind(), error.raw_os_error()),
        (ErrorKind::Busy, Some(libc::EBUSY)),
        "{error}"
    );
}

/// A leaked object keeps its mapping of the device, and ends with the process. So this test runs itself in a
/// process of its own.
#[test]
fn what_is_in_use_does_not_close() {
    const CHILD: &str = "IBVERBS_TEST_LEAK";
    let _lock = one_at_a_time();
    if std::env::var_os(CHILD).is_some() {
        return leak_and_close();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "what_is_in_use_does_not_close", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && output.contains("1 passed"), "{child:?}");
    assert_nothing_left("rxe0");
}

fn leak_and_close() {
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let region = domain.allocate::<u8>(64).unwrap();
    let prepared = domain.create_qp(&queue, &queue, Rc).build().unwrap();
    let endpoint = prepared.endpoint();
    let queue_pair = prepared.handshake(endpoint).unwrap();

    std::mem::forget(queue_pair);
    std::mem::forget(region);
    busy(queue.close());
    busy(domain.close());
    drop(context.create_cq(8).unwrap());
    busy(context.close());
    assert_eq!(resources("rxe0"), "pd 2 cq 2 qp 2 cm_id 0 mr 1 ctx 1 srq 0");
}
