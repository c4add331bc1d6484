//! Bad input and missing resources on Soft-RoCE: each gives a typed error that names the cause, and
//! leaks nothing. To be run by `script/test rxe`, in the machine of `script/vm`.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/vm/mod.rs"]
mod vm;

use std::ops::Bound;
use std::time::Instant;

use ibverbs::device::PortState;
use ibverbs::{
    AccessFlags, CompletionQueue, Context, Error, ErrorKind, Gid, MemoryRegion, PreparedQueuePair,
    ProtectionDomain, QueuePairBuilder, QueuePairEndpoint, Rc, Result, WorkStatus,
    settings::MaximumTransferUnit,
};

use figures::figure;
use vm::process::{Limit, as_nobody, pinned_kib};
use vm::{PATIENCE, assert_nothing_left, completions, one_at_a_time, resources, run, success};

/// The error: its text contains all of these words.
#[track_caller]
fn error<T>(result: Result<T>, kind: ErrorKind, errno: i32, words: &[&str]) -> Error {
    let Err(error) = result else { panic!("it succeeded, and should have said {words:?}") };
    assert_eq!((error.kind(), error.raw_os_error()), (kind, Some(errno)), "{error}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "'{text}' should have {words:?}");
    error
}

/// An error that says that an argument is wrong.
#[track_caller]
fn invalid<T>(result: Result<T>, words: &[&str]) -> Error {
    error(result, ErrorKind::InvalidInput, libc::EINVAL, words)
}

/// Runs a test with a context, a domain and a queue on rxe0, and checks that it leaves nothing behind.
fn with_rxe0(test: impl FnOnce(&Context<'_>, &ProtectionDomain<'_>, &CompletionQueue<'_>)) {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    {
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(64).unwrap();
        test(&context, &domain, &queue);
        queue.close().unwrap();
        domain.close().unwrap();
    }
    context.close().unwrap();
    assert_nothing_left("rxe0");
}

fn reliable<'res>(
    domain: &'res ProtectionDomain<'res>,
    queue: &'res CompletionQueue<'res>,
) -> QueuePairBuilder<'res> {
    domain.create_qp(queue, queue, Rc)
}

fn prepared<'res>(
    domain: &'res ProtectionDomain<'res>,
    queue: &'res CompletionQueue<'res>,
) -> PreparedQueuePair<'res> {
    reliable(domain, queue).build().unwrap()
}

#[test]
fn there_is_no_such_device() {
    let _lock = one_at_a_time();
    for name in ["", "rxe", "rxe00", "rxe0\0", "../rxe0", "\u{1f9ed}", &"x".repeat(1 << 16)] {
        error(ibverbs::open(name), ErrorKind::NotFound, libc::ENODEV, &["no RDMA device"]);
    }
}

#[test]
#[ignore = "Soft-RoCE: it has a device file"]
fn the_device_file_may_not_be_opened() {
    let _lock = one_at_a_time();
    run("chmod 600 /dev/infiniband/uverbs*");
    as_nobody(|| {
        // Everybody may list devices.
        let devices = ibverbs::devices().unwrap();
        let words = ["ibv_open_device", "/dev/infiniband/uverbs"];
        for device in &devices {
            error(device.open(), ErrorKind::Permission, libc::EACCES, &words);
        }
        assert_eq!(devices.len(), 2);
        error(ibverbs::open("rxe1"), ErrorKind::Permission, libc::EACCES, &words);
    });
    run("chmod 666 /dev/infiniband/uverbs*");
    as_nobody(|| ibverbs::open("rxe1").unwrap().close().unwrap());
    assert_nothing_left("rxe1");
}

#[test]
#[ignore = "Soft-RoCE: the kernel locks registered memory"]
fn too_little_memory_may_be_locked() {
    const ROUNDS: u32 = 20;
    with_rxe0(|context, domain, queue| {
        // Root has no such limit, so this runs as another user.
        let limit = Limit::new(libc::RLIMIT_MEMLOCK, 64 << 10);
        let (locked, before) = (pinned_kib(), resources("rxe0"));
        let words = ["ibv_reg_mr", "RLIMIT_MEMLOCK"];
        as_nobody(|| {
            let mut borrowed = vec![0_u8; 1 << 20];
            for _ in 0..ROUNDS {
                let region = domain.allocate::<u8>(1 << 20);
                error(region, ErrorKind::Resource, libc::ENOMEM, &words);
                let region = domain.allocate_shared::<u64>(1 << 17, AccessFlags::REMOTE_WRITE);
                error(region, ErrorKind::Resource, libc::ENOMEM, &words);
                let region = domain.register(&mut borrowed);
                error(region, ErrorKind::Resource, libc::ENOMEM, &words);
            }
            assert_eq!((pinned_kib(), resources("rxe0")), (locked, before), "nothing is leaked");
        });
        // Refused registrations do not count towards the limit.
        let (mut small, region) = as_nobody(|| {
            (domain.allocate::<u8>(100).unwrap(), domain.allocate::<u8>(32 << 10).unwrap())
        });
        assert!(pinned_kib() > locked);
        let prepared = prepared(domain, queue);
        let endpoint = prepared.endpoint();
        let mut queue_pair = prepared.handshake(endpoint).unwrap();
        // SAFETY: both completions are polled.
        unsafe {
            queue_pair.post_receive(&mut small, .., 1).unwrap();
            queue_pair.post_send(&region, ..100, 2).unwrap();
        }
        assert_eq!(success(&completions(queue, 2), 1).byte_len(), 100);
        region.close().unwrap();
        small.close().unwrap();
        queue_pair.close().unwrap();
        assert_eq!(pinned_kib(), locked);
        drop(limit);
        assert!(context.query_port(1).is_ok());
    });
    figure(
        "no-memlock",
        &format!(
            "RLIMIT_MEMLOCK 64 KiB, not root: {} registrations of 1 MiB refused (Resource, ENOMEM), \
             each naming the limit; locked memory and resources unchanged; smaller regions work and \
             carry data; resources at baseline",
            3 * ROUNDS
        ),
    );
}

#[test]
#[ignore = "Soft-RoCE: the sizes of its tables"]
fn ports_and_table_entries_that_are_not_there() {
    with_rxe0(|context, domain, queue| {
        for port in [0, 2, 255] {
            let value = format!("port number is {port}");
            invalid(context.query_port(port), &["ibv_query_port", &value, "1..=1"]);
            invalid(context.query_gid(port, 0), &[&value]);
            invalid(context.query_pkey(port, 0), &[&value]);
            invalid(context.routable_gid(port), &[&value]);
            invalid(reliable(domain, queue).port(port).build(), &[&value]);
        }
        for index in [1024, u32::MAX] {
            let value = format!("GID index is {index}");
            invalid(context.query_gid(1, index), &["ibv_query_gid_ex", &value, "0..=1023"]);
        }
        let empty = ["the GID table of port 1 is empty at index 200"];
        error(context.query_gid(1, 200), ErrorKind::NotFound, libc::ENODATA, &empty);
        let built = reliable(domain, queue).gid_index(200).build();
        error(built, ErrorKind::NotFound, libc::ENODATA, &empty);
        for index in [1, u16::MAX] {
            let value = format!("pkey_index is {index}");
            invalid(context.query_pkey(1, index), &["ibv_query_pkey", &value, "0..=0"]);
            let prepared = reliable(domain, queue).pkey_index(index).build().unwrap();
            let endpoint = prepared.endpoint();
            let refused = prepared.handshake(endpoint).map_err(Error::from);
            invalid(refused, &["ibv_modify_qp", &value, "0..=0"]);
        }
    });
}

#[test]
#[ignore = "the machine has less than 3 GiB"]
fn regions_of_impossible_lengths() {
    with_rxe0(|_, domain, _| {
        invalid(domain.allocate::<u8>(0), &["ibv_reg_mr", "empty"]);
        invalid(domain.allocate::<()>(17), &["ibv_reg_mr", "empty"]);
        invalid(domain.allocate_shared::<u64>(0, AccessFlags::empty()), &["ibv_reg_mr", "empty"]);
        for len in [usize::MAX, usize::MAX / 8, isize::MAX as usize] {
            invalid(domain.allocate::<u64>(len), &["ibv_reg_mr", "longer than memory"]);
        }
        // 64 TiB, which no machine has, and 3 GiB, which this one has not.
        let words = ["ibv_reg_mr"];
        for len in [64 << 40, 3 << 30] {
            error(domain.allocate::<u8>(len), ErrorKind::Resource, libc::ENOMEM, &words);
        }
    });
}

#[test]
fn ranges_out_of_bounds() {
    with_rxe0(|_, domain, queue| {
        let mut region = domain.allocate::<u32>(16).unwrap();
        let shared = domain.allocate_shared::<u32>(16, AccessFlags::empty()).unwrap();
        let endpoint;
        let mut queue_pair = {
            let prepared = prepared(domain, queue);
            endpoint = prepared.endpoint();
            prepared.handshake(endpoint).unwrap()
        };
        let bad = [
            (Bound::Included(0), Bound::Excluded(17)),
            (Bound::Included(17), Bound::Unbounded),
            (Bound::Included(5), Bound::Excluded(3)),
            (Bound::Included(0), Bound::Included(usize::MAX)),
            (Bound::Excluded(usize::MAX), Bound::Unbounded),
            (Bound::Included(usize::MAX), Bound::Excluded(usize::MAX)),
            (Bound::Included(usize::MAX / 4), Bound::Included(usize::MAX / 4 + 1)),
        ];
        for range in bad {
            invalid(region.slice(range), &["range"]);
            invalid(region.slice_mut(range), &["range"]);
            invalid(region.gather_element(range), &["range"]);
            invalid(region.scatter_element(range), &["range"]);
            invalid(shared.gather_element(range), &["range"]);
            // SAFETY: nothing is posted.
            unsafe {
                invalid(queue_pair.post_send(&region, range, 1), &["range"]);
                invalid(queue_pair.post_receive(&mut region, range, 1), &["range"]);
            }
        }
        for (index, len) in [(16, 1), (0, 17), (usize::MAX, 1), (usize::MAX, 0)] {
            invalid(shared.read(index, &mut vec![0; len]), &["range"]);
            invalid(shared.write(index, &vec![0; len]), &["range"]);
        }
        // A range of no elements is a message of no bytes, not an error.
        // SAFETY: both completions are polled below.
        unsafe {
            queue_pair.post_receive(&mut region, 16.., 1).unwrap();
            queue_pair.post_send(&region, 3..3, 2).unwrap();
        }
        assert_eq!(success(&completions(queue, 2), 1).byte_len(), 0);
    });
}

#[test]
#[ignore = "Soft-RoCE: its limits"]
fn more_than_the_device_has() {
    with_rxe0(|context, domain, queue| {
        let device = context.query_device().unwrap();
        let new = || reliable(domain, queue);
        let most = device.max_qp_wr();
        for depth in [most + 1, u32::MAX] {
            let (value, range) = (format!("is {depth}"), format!("0..={most}"));
            let words = ["ibv_create_qp", "max_send_wr", &value, &range];
            invalid(new().max_send_wr(depth).build(), &words);
            let words = ["ibv_create_qp", "max_recv_wr", &value, &range];
            invalid(new().max_recv_wr(depth).build(), &words);
        }
        invalid(new().max_send_sge(33).build(), &["max_send_sge is 33", "0..=32"]);
        invalid(new().max_recv_sge(u32::MAX).build(), &["max_recv_sge", "0..=32"]);
        invalid(new().max_rd_atomic(129).build(), &["max_rd_atomic is 129", "0..=128"]);
        invalid(new().max_dest_rd_atomic(255).build(), &["max_dest_rd_atomic is 255", "0..=128"]);
        invalid(new().max_inline_data(1 << 20).build(), &["max_inline_data"]);
        for entries in [0, device.max_cqe() + 1, u32::MAX] {
            let (value, range) = (format!("is {entries}"), format!("1..={}", device.max_cqe()));
            let words = ["ibv_create_cq", "number of entries", &value, &range];
            invalid(context.create_cq(entries), &words);
        }
        let mtu = MaximumTransferUnit::Mtu4096;
        let prepared = new().path_mtu(mtu).build().unwrap();
        let endpoint = prepared.endpoint();
        let refused = prepared.handshake(endpoint).map_err(Error::from);
        invalid(refused, &["ibv_modify_qp", "path_mtu is 4096", "256..=1024"]);
    });
}

#[test]
fn objects_of_another_device() {
    with_rxe0(|_, domain, queue| {
        let other = ibverbs::open("rxe1").unwrap();
        let foreign = other.create_cq(8).unwrap();
        for (send, receive) in [(queue, &foreign), (&foreign, queue)] {
            let builder = QueuePairBuilder::new(domain, send, receive, Rc);
            invalid(builder.build(), &["completion queue belongs to another context"]);
        }
    });
    assert_nothing_left("rxe1");
}

#[test]
fn a_full_queue_says_so() {
    with_rxe0(|_, domain, queue| {
        let mut region = domain.allocate::<u8>(64).unwrap();
        let prepared = reliable(domain, queue).max_recv_wr(5).build().unwrap();
        let endpoint = prepared.endpoint();
        let mut queue_pair = prepared.handshake(endpoint).unwrap();
        for posted in 0.. {
            // SAFETY: nothing is sent, and the memory outlives the queue pair.
            match unsafe { queue_pair.post_receive(&mut region, .., posted) } {
                // Linux before 6.2 has room for more entries than it reports.
                Ok(()) => {
                    assert!(posted < 4 * u64::from(queue_pair.max_recv_wr()), "never full");
                }
                full => {
                    let words = ["ibv_post_recv", "queue is full"];
                    error(full, ErrorKind::QueueFull, libc::ENOMEM, &words);
                    assert!(posted >= 5, "only {posted} were posted");
                    break;
                }
            }
        }
    });
}

#[test]
#[ignore = "Soft-RoCE: the kernel looks for a route when a queue pair is connected"]
fn endpoints_that_cannot_be_reached() {
    with_rxe0(|_, domain, queue| {
        let number = 0x11;
        // The endpoint of an InfiniBand port: it has a LID and no GID.
        let infiniband = QueuePairEndpoint::new(number, 7, Gid::ZERO).unwrap();
        let words = ["ibv_modify_qp", "has no GID", "InfiniBand port?"];
        invalid(prepared(domain, queue).handshake(infiniband).map_err(Error::from), &words);
        // A GID in a network without a route, and one that nobody has.
        for gid in ["::ffff:203.0.113.9", "2001:db8:77::1", "::ffff:10.77.0.99"] {
            let endpoint = QueuePairEndpoint::new(number, 0, gid.parse().unwrap()).unwrap();
            let start = Instant::now();
            let error = prepared(domain, queue).handshake(endpoint).unwrap_err().error;
            let kinds = [ErrorKind::Unreachable, ErrorKind::TimedOut, ErrorKind::InvalidInput];
            assert!(kinds.contains(&error.kind()), "{gid}: {error}");
            assert_eq!(error.verb(), "ibv_modify_qp", "{gid}: {error}");
            assert!(start.elapsed() < PATIENCE, "{gid}: {:?}", start.elapsed());
        }
    });
}

#[test]
fn a_serialised_endpoint_that_was_spoilt() {
    with_rxe0(|_, domain, queue| {
        let config = bincode::config::standard().with_fixed_int_encoding();
        let decode = |bytes: &[u8]| {
            bincode::serde::decode_from_slice::<QueuePairEndpoint, _>(bytes, config).map(|(e, _)| e)
        };
        let prepared = prepared(domain, queue);
        let endpoint = prepared.endpoint();
        let bytes = bincode::serde::encode_to_vec(endpoint, config).unwrap();
        for len in 0..bytes.len() {
            let error = decode(&bytes[..len]).unwrap_err().to_string();
            assert!(!error.is_empty(), "{len} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut spoilt = bytes.clone();
            spoilt[bit / 8] ^= 1 << (bit % 8);
            match decode(&spoilt) {
                Err(error) => assert!(!error.to_string().is_empty(), "bit {bit}"),
                // The first nine bytes are the length and the version.
                Ok(other) => assert!(bit / 8 >= 9 && other != endpoint, "bit {bit}"),
            }
        }
        // A wrong but valid number connects to no queue pair, and sends fail at last.
        let nobody = QueuePairEndpoint::new(endpoint.num() ^ 0x80_0000, 0, endpoint.gid()).unwrap();
        let region = domain.allocate::<u8>(64).unwrap();
        let mut queue_pair = prepared.handshake(nobody).unwrap();
        // SAFETY: the completion is polled below.
        unsafe { queue_pair.post_send(&region, .., 1).unwrap() };
        let failed = completions(queue, 1)[0].result().unwrap_err();
        assert_eq!(failed.status(), WorkStatus::RetryExceeded, "{failed}");
        assert!(failed.to_string().contains("endpoint or path is wrong"), "{failed}");
    });
}

#[test]
#[ignore = "Soft-RoCE: makes a device on a network interface"]
fn the_port_is_down() {
    let _lock = one_at_a_time();
    run("ip link add nic9 type dummy
        ip addr add 10.79.0.1/24 dev nic9
        rdma link add rxe9 type rxe netdev nic9");
    {
        let context = ibverbs::open("rxe9").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        assert_eq!(context.query_port(1).unwrap().state(), PortState::Down);
        let words = ["ibv_create_qp", "port is not active"];
        let built = reliable(&domain, &queue).build();
        error(built, ErrorKind::Unreachable, libc::ENETDOWN, &words);

        run("ip link set nic9 up");
        assert_eq!(context.query_port(1).unwrap().state(), PortState::Active);
        let mut region: MemoryRegion<'_, u8> = domain.allocate(64).unwrap();
        let prepared = prepared(&domain, &queue);
        let endpoint = prepared.endpoint();
        let mut queue_pair = prepared.handshake(endpoint).unwrap();
        // SAFETY: the completion is polled below.
        unsafe { queue_pair.post_receive(&mut region, .., 1).unwrap() };
        run("ip link set nic9 down");
        // Earlier and later requests end as flushed and do not hang. Linux 6.1 has another status for a send
        // that it cannot hand to the network. SAFETY: the completion is polled below.
        unsafe { queue_pair.post_send(&region, .., 2).unwrap() };
        for completion in completions(&queue, 2) {
            let failed = completion.result().unwrap_err();
            let expected = match completion.wr_id() {
                2 => &[WorkStatus::Flushed, WorkStatus::LocalQueuePairOperation][..],
                _ => &[WorkStatus::Flushed],
            };
            assert!(expected.contains(&failed.status()), "{}: {failed}", completion.wr_id());
        }
    }
    assert_nothing_left("rxe9");
    run("rdma link delete rxe9; ip link delete nic9");
}
