//! The extended posting interface.

use super::*;
use ibverbs::memory::InlineList;
use ibverbs::memory::ScatterElement;
use ibverbs::operation::{
    AtomicWriteWorkRequest, FlushWorkRequest, LocalInvalidateWorkRequest, SegmentedSendWorkRequest,
    XrcPeer,
};
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{FlushPlacement, SendOperations};
use ibverbs::{
    CompareSwapWorkRequest, FetchAddWorkRequest, ReadWorkRequest, SendWorkRequest,
    WriteWorkRequest, operation::DatagramPeer,
};
use ibverbs_function_device::{Builder, Posted, Progress};
use std::io::IoSlice;
use std::panic::{AssertUnwindSafe, catch_unwind};

fn everything() -> SendOperations {
    SendOperations::all() - SendOperations::TSO
}

#[test]
fn every_request_arrives_as_it_was_made() {
    use ffi::ibv_wr_opcode as op;

    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let region = domain.allocate::<u64>(8).unwrap();
    let mut results = domain.allocate::<u64>(8).unwrap();
    let shared = domain
        .allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC)
        .unwrap();
    let there = remote(&shared);
    let word = there.sub_region(16, 8).unwrap();
    let builder = builder(&domain, &queue, Rc);
    let mut queue_pair = to_itself(builder.extended(everything()));
    let element = region.gather_element(..1).unwrap();
    let (lkey, address) = (region.lkey(), element.as_raw().addr);
    let one = (address, 8, lkey);
    let mut result = results.scatter_element(..1).unwrap();
    // SAFETY: nothing is carried out, as the device does nothing by itself; the memory lives on.
    let count = unsafe {
        queue_pair.batch(|b| {
            b.add(SendWorkRequest::new(&[element]), 1)?;
            b.add(
                SendWorkRequest::new(&[element, element])
                    .immediate(0x0102_0304)
                    .solicited()
                    .unsignaled(),
                2,
            )?;
            b.add(SendWorkRequest::new(&[element]).invalidate(0x33).unsignaled(), 3)?;
            b.add(WriteWorkRequest::new(Inline(b"inline"), there), 4)?;
            b.add(WriteWorkRequest::new([element].as_slice(), there).immediate(7).fence(), 5)?;
            b.add(ReadWorkRequest::new(std::slice::from_mut(&mut result), there).unsignaled(), 6)?;
            b.add(CompareSwapWorkRequest::new(&mut result, word, 8, 9).unsignaled(), 7)?;
            b.add(FetchAddWorkRequest::new(&mut result, word, 10).unsignaled(), 8)?;
            b.add(AtomicWriteWorkRequest::new(word, 0x0506).unsignaled(), 9)?;
            b.add(LocalInvalidateWorkRequest::new(0x44).unsignaled(), 10)?;
            b.add(FlushWorkRequest::new(there, FlushPlacement::GLOBAL).unsignaled(), 11)?;
            let pieces = [IoSlice::new(b"in "), IoSlice::new(b""), IoSlice::new(b"pieces")];
            b.add(SendWorkRequest::new(InlineList(&pieces)), 12)?;
            Ok::<_, ibverbs::Error>(12)
        })
    }
    .unwrap();
    let inline = 8;
    for (wr_id, opcode, flags, list, data) in [
        (1, op::IBV_WR_SEND, 2, vec![one], &b""[..]),
        (2, op::IBV_WR_SEND_WITH_IMM, 4, vec![one, one], b""),
        (3, op::IBV_WR_SEND_WITH_INV, 0, vec![one], b""),
        (4, op::IBV_WR_RDMA_WRITE, 2 | inline, vec![], b"inline"),
        (5, op::IBV_WR_RDMA_WRITE_WITH_IMM, 2 | 1, vec![one], b""),
        (6, op::IBV_WR_RDMA_READ, 0, vec![(result.as_raw().addr, 8, results_key(&result))], b""),
        (
            7,
            op::IBV_WR_ATOMIC_CMP_AND_SWP,
            0,
            vec![(result.as_raw().addr, 8, results_key(&result))],
            b"",
        ),
        (
            8,
            op::IBV_WR_ATOMIC_FETCH_AND_ADD,
            0,
            vec![(result.as_raw().addr, 8, results_key(&result))],
            b"",
        ),
        (9, op::IBV_WR_ATOMIC_WRITE, inline, vec![], &0x0506_u64.to_ne_bytes()),
        (10, op::IBV_WR_LOCAL_INV, 0, vec![], b""),
        (11, op::IBV_WR_FLUSH, 0, vec![], b""),
        (12, op::IBV_WR_SEND, 2 | inline, vec![], b"in pieces"),
    ] {
        let posted: Posted = device.posted(count - wr_id as u32).unwrap();
        assert_eq!((posted.wr_id, posted.send.opcode), (wr_id, opcode));
        assert_eq!(posted.send.send_flags, flags, "{opcode:?}");
        assert_eq!((&posted.list, &posted.inline[..]), (&list, data), "{opcode:?}");
    }
    let send = |wr_id| device.posted(count - wr_id).unwrap().send;
    // SAFETY: each arm is the one that the opcode has.
    unsafe {
        assert_eq!(send(2).__bindgen_anon_1.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(send(3).__bindgen_anon_1.invalidate_rkey, 0x33);
        assert_eq!(send(5).__bindgen_anon_1.imm_data, 7_u32.to_be());
        assert_eq!(send(10).__bindgen_anon_1.invalidate_rkey, 0x44);
        for wr_id in [4, 5, 6, 11] {
            let rdma = send(wr_id).wr.rdma;
            assert_eq!((rdma.remote_addr, rdma.rkey), (there.address(), there.rkey()));
        }
        let swap = send(7).wr.atomic;
        assert_eq!((swap.compare_add, swap.swap, swap.remote_addr), (8, 9, word.address()));
        let add = send(8).wr.atomic;
        assert_eq!((add.compare_add, add.rkey), (10, word.rkey()));
        assert_eq!(send(9).wr.rdma.remote_addr, word.address());
    }
    queue_pair.close().unwrap();
}

/// A request without data needs none of the functions that give it data.
#[test]
fn what_has_no_data_needs_no_function_for_data() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let region = domain.allocate::<u8>(8).unwrap();
    let operations = SendOperations::SEND | SendOperations::LOCAL_INVALIDATE;
    use ffi::ibv_qp_init_attr_mask as mask;
    let mut attributes = ffi::ibv_qp_init_attr_ex {
        send_cq: queue.as_raw(),
        recv_cq: queue.as_raw(),
        qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
        cap: ffi::ibv_qp_cap {
            max_send_wr: 4,
            max_send_sge: 2,
            max_inline_data: 8,
            ..Default::default()
        },
        comp_mask: (mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).0,
        pd: domain.as_raw(),
        send_ops_flags: operations.bits(),
        ..Default::default()
    };
    // SAFETY: context, domain and queue are live, and so is the queue pair, which nothing uses yet and is handed over.
    let prepared = unsafe {
        let raw = ffi::ibv_create_qp_ex(context.as_raw(), &mut attributes);
        let extended = &mut *ffi::ibv_qp_to_qp_ex(raw);
        (extended.wr_set_sge, extended.wr_set_sge_list) = (None, None);
        (extended.wr_set_inline_data, extended.wr_set_inline_data_list) = (None, None);
        domain.create_qp(&queue, &queue, Rc).extended(operations).adopt(raw).unwrap()
    };
    let own = prepared.endpoint();
    let mut queue_pair = prepared.handshake(own).unwrap();
    let element = region.gather_element(..1).unwrap();
    // SAFETY: nothing is carried out, as the device does nothing by itself.
    unsafe {
        queue_pair.batch(|b| {
            b.add(LocalInvalidateWorkRequest::new(0x44), 1)?;
            for (added, function) in [
                (b.add(SendWorkRequest::new(&[element]), 2), "ibv_wr_set_sge"),
                (b.add(SendWorkRequest::new(&[element; 2]), 3), "ibv_wr_set_sge_list"),
                (b.add(SendWorkRequest::new(Inline(b"inline")), 4), "ibv_wr_set_inline_data"),
            ] {
                let error = added.unwrap_err();
                assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, function));
            }
            Ok::<_, ibverbs::Error>(())
        })
    }
    .unwrap();
    assert_eq!(device.posted(0).unwrap().wr_id, 1);
    assert!(device.posted(1).is_none());
    queue_pair.close().unwrap();
}

/// Registered memory can be sent inline too: its bytes, not its elements, and several pieces as one.
#[test]
fn registered_memory_is_inline_on_request() {
    for operations in [SendOperations::empty(), SendOperations::SEND] {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let mut region = domain.allocate::<u8>(10).unwrap();
        region.copy_from_slice(b"inline..OK");
        let builder = builder(&domain, &queue, Rc);
        let mut queue_pair = to_itself(builder.extended(operations));
        let elements = [0..6, 8..10].map(|range| region.gather_element(range).unwrap());
        let inline = ffi::ibv_send_flags::IBV_SEND_INLINE.0;
        let signaled = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: nothing is carried out, as the device does nothing by itself; the data is copied.
        unsafe {
            queue_pair.batch(|b| {
                b.add(SendWorkRequest::new(elements[0]).inline(), 1)?;
                b.add(SendWorkRequest::new(&elements).inline(), 2)?;
                b.add(SendWorkRequest::new(elements[0]), 3)
            })
        }
        .unwrap();
        for (back, flags, bytes) in
            [(2, inline, &b"inline"[..]), (1, inline, b"inlineOK"), (0, 0, b"")]
        {
            let posted = device.posted(back).unwrap();
            assert_eq!(posted.send.send_flags, signaled | flags);
            assert_eq!(&posted.inline[..], bytes);
        }
        queue_pair.close().unwrap();
    }
}

/// In both ways of posting, a request has a completion unless it is unsignaled.
#[test]
fn a_request_has_a_completion_unless_it_says_otherwise() {
    for operations in [SendOperations::empty(), SendOperations::SEND] {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let region = domain.allocate::<u64>(1).unwrap();
        let builder = builder(&domain, &queue, Rc);
        let mut queue_pair = to_itself(builder.extended(operations));
        let elements = [region.gather_element(..).unwrap()];
        let last = || device.posted(0).unwrap().send.send_flags;
        let signaled = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: nothing is carried out, as the device does nothing by itself; the memory lives on.
        unsafe {
            queue_pair.post_send(&region, .., 1).unwrap();
            assert_eq!(last(), signaled);
            let request = SendWorkRequest::new(&elements);
            queue_pair.post(request, 2).unwrap();
            assert_eq!(last(), signaled);
            queue_pair.post(request.unsignaled(), 3).unwrap();
            assert_eq!(last(), 0);
            queue_pair.batch(|b| b.add(SendWorkRequest::new(&elements), 4)).unwrap();
            assert_eq!(last(), signaled);
            queue_pair.batch(|b| b.add(SendWorkRequest::new(&elements), 5)).unwrap();
            assert_eq!(last(), signaled);
            queue_pair.batch(|b| b.add(SendWorkRequest::new(&elements).unsignaled(), 6)).unwrap();
            assert_eq!(last(), 0);
        }
        queue_pair.close().unwrap();
    }
}

fn results_key(result: &ScatterElement<'_>) -> u32 {
    result.as_raw().lkey
}

#[test]
fn a_batch_that_fails_or_panics_posts_nothing() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let builder = builder(&domain, &queue, Rc);
    let mut queue_pair = to_itself(builder.extended(SendOperations::SEND));
    let number = queue_pair.number();
    let sends = || device.outstanding(number).0;
    // SAFETY: what is posted is inline, under a number of its own.
    unsafe {
        let error = queue_pair.batch::<(), ibverbs::Error>(|b| {
            b.add(SendWorkRequest::new(Inline(b"one")), 1)?;
            b.add(LocalInvalidateWorkRequest::new(1), 2)
        });
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(sends(), 0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            queue_pair.batch::<(), ibverbs::Error>(|b| {
                b.add(SendWorkRequest::new(Inline(b"one")), 1)?;
                panic!("half-built")
            })
        }));
        assert!(panic.is_err());
        assert_eq!(sends(), 0);
        device.fail("wr_complete").errno(libc::EINVAL).times(1);
        let error =
            queue_pair.batch(|b| b.add(SendWorkRequest::new(Inline(b"one")), 1)).unwrap_err();
        assert_eq!((error.verb(), error.raw_os_error()), ("ibv_wr_complete", Some(libc::EINVAL)));
        assert_eq!(sends(), 0);
        let full = queue_pair.batch(|b| {
            (0..=u64::from(u8::MAX)).try_for_each(|n| b.add(SendWorkRequest::new(Inline(b"x")), n))
        });
        assert_eq!(full.unwrap_err().kind(), ErrorKind::QueueFull);
        assert_eq!(sends(), 0);
        // The earlier failures have no effect: the queue pair works.
        queue_pair.post_receive(&mut region, .., 8).unwrap();
        queue_pair.batch(|b| b.add(SendWorkRequest::new(Inline(b"whole")), 9)).unwrap();
    }
    assert_eq!(successes(&queue).len(), 2);
    assert_eq!(&region[..5], b"whole");
    drop(queue_pair);
    drop(region);
    drop(queue);
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_request_that_is_refused_adds_nothing() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let region = domain.allocate::<u64>(8).unwrap();
    let shared = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    let there = remote(&shared);
    // The transport is a value here: the compiler does not look at destinations.
    let builder = builder(&domain, &queue, QueuePairType::ReliableConnected);
    let mut queue_pair = to_itself(builder.extended(everything()));
    let element = region.gather_element(..).unwrap();
    let most = queue_pair.max_inline_data() as usize;
    let long = vec![0; most + 1];
    let pieces = [IoSlice::new(&long[1..]), IoSlice::new(&[0])];
    let path = AddressVector::new(1, 0).global(queue_pair.endpoint().gid(), 1);
    let path = domain.create_ah(&path).unwrap();
    let check = |result: Result<()>, kind, text: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(text), "{error}, not {text}");
    };
    let input = ErrorKind::InvalidInput;
    // SAFETY: the one that is posted is inline, and the only one.
    unsafe {
        queue_pair.batch(|b| {
            check(
                b.add(SendWorkRequest::new(Inline(&long)), 1),
                input,
                "the length of inline data is",
            );
            check(
                b.add(SendWorkRequest::new(InlineList(&pieces)), 1),
                input,
                "the length of inline data is",
            );
            check(
                b.add(SendWorkRequest::new(&[element; 5]), 1),
                input,
                "the number of elements is 5",
            );
            check(
                b.add(WriteWorkRequest::new(&[element; 2], there), 1),
                input,
                "the remote region, is 128",
            );
            let short = there.sub_region(0, 4).unwrap();
            check(b.add(AtomicWriteWorkRequest::new(short, 0), 1), input, "must be within 0..=4");
            let odd = there.sub_region(4, 8).unwrap();
            check(b.add(AtomicWriteWorkRequest::new(odd, 0), 1), input, "not a multiple of 8");
            let lacking = ErrorKind::Unsupported;
            let send = SendWorkRequest::new(element);
            let to = DatagramPeer { path: &path, number: 1, qkey: 1 };
            check(b.add(send.to(to), 1), lacking, "does not send datagrams");
            check(b.add(send.to(XrcPeer(1)), 1), lacking, "not a sending XRC one");
            let header = [0; 20];
            let tso = b.add(SegmentedSendWorkRequest::new(&[element], &header, 100), 1);
            check(tso, lacking, "was not built for this operation");
            b.add(SendWorkRequest::new(Inline(&long[1..])), 2)
        })
    }
    .unwrap();
    assert_eq!(device.outstanding(queue_pair.number()).0, 1);
    assert_eq!(device.posted(0).unwrap().inline.len(), most);
    queue_pair.close().unwrap();
}

#[test]
fn datagrams_need_a_destination() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(256).unwrap();
    let builder = builder(&domain, &queue, Ud);
    let prepared = builder.qkey(5).extended(SendOperations::SEND).build().unwrap();
    // The transport is a value here: a request that goes nowhere compiles, and is refused.
    let mut queue_pair = prepared.activate().unwrap().erase();
    let number = queue_pair.number();
    let path = AddressVector::new(1, 0).global(queue_pair.endpoint().gid(), 1);
    let path = domain.create_ah(&path).unwrap();
    // SAFETY: the region is not touched before the completions.
    unsafe {
        queue_pair.post_receive(&mut region, ..64, 1).unwrap();
        queue_pair.post_receive(&mut region, 64..128, 2).unwrap();
        queue_pair
            .batch(|b| {
                let error = b.add(SendWorkRequest::new(Inline(b"nowhere")), 3).unwrap_err();
                assert!(error.to_string().contains("where it goes"), "{error}");
                let to = |number| DatagramPeer { path: &path, number, qkey: 5 };
                let wrong = SendWorkRequest::new(Inline(b"nowhere")).to(to(1 << 24));
                assert!(b.add(wrong, 3).is_err());
                b.add(SendWorkRequest::new(Inline(b"one")).to(to(number)), 3)?;
                b.add(SendWorkRequest::new(Inline(b"two")).to(to(number)), 4)
            })
            .unwrap();
    }
    let mut done = successes(&queue);
    done.sort_unstable();
    assert_eq!(done, [1, 2, 3, 4]);
    assert_eq!((&region[40..43], &region[104..107]), (&b"one"[..], &b"two"[..]));
}

#[test]
fn the_send_half_has_batches_too() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let builder = builder(&domain, &queue, Rc);
    let mut queue_pair = to_itself(builder.extended(SendOperations::SEND));
    let (mut send, mut receive) = queue_pair.split();
    // SAFETY: the region is not touched before the completions.
    unsafe {
        receive.post_receive(&mut region, .., 1).unwrap();
        send.batch(|b| b.add(SendWorkRequest::new(Inline(b"half")), 2)).unwrap();
    }
    assert_eq!(successes(&queue).len(), 2);
    assert_eq!(&region[..4], b"half");
}

/// A failure of the program's own aborts the batch, and comes back as it is.
#[test]
fn a_batch_fails_with_any_error_of_the_program() {
    #[derive(Debug, PartialEq)]
    enum Failure {
        NothingToDo,
        Verbs(ibverbs::Error),
    }

    impl From<ibverbs::Error> for Failure {
        fn from(error: ibverbs::Error) -> Self {
            Self::Verbs(error)
        }
    }

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let region = domain.allocate::<u8>(8).unwrap();
    let builder = builder(&domain, &queue, Rc);
    let mut queue_pair = to_itself(builder.extended(everything()));
    let element = region.gather_element(..).unwrap();
    // SAFETY: the memory lives on, and is not written.
    let failed = unsafe {
        queue_pair.batch(|batch| {
            batch.add(SendWorkRequest::new(&[element]), 1)?;
            Err::<(), _>(Failure::NothingToDo)
        })
    };
    assert_eq!(failed, Err(Failure::NothingToDo));
    assert_eq!(device.outstanding(queue_pair.number()).0, 0, "nothing was posted");
    let too_many = [element; 100];
    // SAFETY: as above.
    let failed = unsafe {
        queue_pair.batch(|batch| {
            Ok::<_, Failure>(batch.add(SendWorkRequest::new(&too_many).unsignaled(), 1)?)
        })
    };
    assert!(
        matches!(failed, Err(Failure::Verbs(error)) if error.kind() == ErrorKind::InvalidInput)
    );
}

/// The provider rxe takes the first element's length for all elements of a list.
#[test]
fn elements_of_different_lengths_are_refused_on_soft_roce() {
    for (vendor_id, is_rxe) in [(0xff_ffff, true), (0x02c9, false)] {
        let device = Builder::model().limits(|limits| limits.vendor_id = vendor_id).build();
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(16).unwrap();
        let region = domain.allocate::<u8>(24).unwrap();
        let builder = builder(&domain, &queue, Rc);
        let mut queue_pair = to_itself(builder.extended(SendOperations::SEND));
        let elements = [0..4, 8..20].map(|range| region.gather_element(range).unwrap());
        // SAFETY: the region is not touched before the queue pair is destroyed.
        let sent = unsafe { queue_pair.batch(|b| b.add(SendWorkRequest::new(&elements), 1)) };
        assert_eq!(sent.is_err(), is_rxe, "{sent:?}");
        if let Err(error) = sent {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("give them one length"), "{error}");
        }
        // SAFETY: as above.
        unsafe { queue_pair.batch(|b| b.add(SendWorkRequest::new(&elements[..1]), 2)).unwrap() };
    }
}
