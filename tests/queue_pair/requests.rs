//! Requests, one by one and in lists.

use super::*;
use ibverbs::memory::{GatherElement, ScatterElement};
use ibverbs::operation::PreparedRequest;
use ibverbs::operation::{LocalInvalidateWorkRequest, PreparedReceive, ReceiveList, SendList};
use ibverbs::queue_pair::AddressVector;
use ibverbs::settings::MaxRnrRetries;
use ibverbs::{Inline, Rc, SendWorkRequest, operation::DatagramPeer};
use ibverbs_function_device::{Posted, Progress};

fn sge(element: &GatherElement<'_>) -> (u64, u32, u32) {
    let raw = element.as_raw();
    (raw.addr, raw.length, raw.lkey)
}

/// Opcode and flags.
fn kind(posted: &Posted) -> (ffi::ibv_wr_opcode, u32) {
    (posted.send.opcode, posted.send.send_flags)
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
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let elements = [region.gather_element(..2).unwrap(), region.gather_element(4..5).unwrap()];
    let list: Vec<_> = elements.iter().map(sge).collect();

    let send = SendWorkRequest::new(&elements);
    let immediate = SendWorkRequest::new(&elements).immediate(0x0a0b_0c0d).solicited();
    let invalidate = SendWorkRequest::new(&elements).invalidate(0x55).fence();
    let write = WriteWorkRequest::new(&elements, there).unsignaled();
    let notify = WriteWorkRequest::new(&elements, there).immediate(7);
    let local = LocalInvalidateWorkRequest::new(0x77);
    // SAFETY: nothing is carried out, as the device does nothing by itself; the memory lives on.
    unsafe {
        queue_pair.post(send, 1).unwrap();
        queue_pair.post(immediate, 2).unwrap();
        queue_pair.post(invalidate, 3).unwrap();
        queue_pair.post(write, 4).unwrap();
        queue_pair.post(notify, 5).unwrap();
        queue_pair.post(local, 6).unwrap();
        queue_pair.post(send, 7).unwrap();
    }
    let posted = |back| device.posted(back).unwrap();
    for (back, wr_id, expected) in [
        (6, 1, (op::IBV_WR_SEND, 2)),
        (5, 2, (op::IBV_WR_SEND_WITH_IMM, 2 | 4)),
        (4, 3, (op::IBV_WR_SEND_WITH_INV, 2 | 1)),
        (3, 4, (op::IBV_WR_RDMA_WRITE, 0)),
        (2, 5, (op::IBV_WR_RDMA_WRITE_WITH_IMM, 2)),
        (1, 6, (op::IBV_WR_LOCAL_INV, 2)),
        (0, 7, (op::IBV_WR_SEND, 2)),
    ] {
        let posted = posted(back);
        assert_eq!((posted.wr_id, kind(&posted)), (wr_id, expected));
        assert_eq!(posted.list, if wr_id == 6 { vec![] } else { list.clone() });
        assert!(!posted.receive && posted.qp_num == queue_pair.number());
    }
    // SAFETY: each arm is the one that the opcode has.
    unsafe {
        let word = |back| posted(back).send.__bindgen_anon_1;
        assert_eq!(word(5).imm_data.to_ne_bytes(), [10, 11, 12, 13], "network order");
        assert_eq!((word(4).invalidate_rkey, word(1).invalidate_rkey), (0x55, 0x77));
        assert_eq!(word(2).imm_data, 7_u32.to_be());
        let rdma = posted(3).send.wr.rdma;
        assert_eq!((rdma.remote_addr, rdma.rkey), (there.address(), there.rkey()));
    }

    let word = there.sub_region(8, 8).unwrap();
    let (read, rest) = results.slice_mut(..).unwrap().split_at(2).unwrap();
    let (swapped, added) = rest.split_at(1).unwrap();
    let mut scatter = [read.into_scatter_element().unwrap()];
    let mut swapped = swapped.into_scatter_element().unwrap();
    let mut added = added.slice(..1).unwrap().into_scatter_element().unwrap();
    let read = ReadWorkRequest::new(&mut scatter, there);
    let swap = CompareSwapWorkRequest::new(&mut swapped, word, 3, 4);
    let add = FetchAddWorkRequest::new(&mut added, word, 5).fence();
    // SAFETY: as above.
    unsafe {
        queue_pair.post(read, 8).unwrap();
        queue_pair.post(swap, 9).unwrap();
        queue_pair.post(add, 10).unwrap();
    }
    assert_eq!(kind(&posted(2)), (op::IBV_WR_RDMA_READ, 2));
    assert_eq!(posted(2).list[0].1, 16);
    assert_eq!(kind(&posted(1)), (op::IBV_WR_ATOMIC_CMP_AND_SWP, 2));
    assert_eq!(kind(&posted(0)), (op::IBV_WR_ATOMIC_FETCH_AND_ADD, 2 | 1));
    // SAFETY: each arm is the one that the opcode has.
    unsafe {
        let atomic = posted(1).send.wr.atomic;
        assert_eq!((atomic.remote_addr, atomic.rkey), (word.address(), word.rkey()));
        assert_eq!((atomic.compare_add, atomic.swap), (3, 4));
        assert_eq!(posted(0).send.wr.atomic.compare_add, 5);
    }
    queue_pair.close().unwrap();
}

#[test]
fn the_methods_by_name_move_bytes() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u64>(8).unwrap();
    let all = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let shared = domain.allocate_shared::<u64>(4, all).unwrap();
    let there = remote(&shared);
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    (region[0], region[1]) = (11, 22);
    // SAFETY: the region lives on, and is not touched before the completions.
    unsafe {
        queue_pair.post_write(&region, ..2, there, 1).unwrap();
        queue_pair.post_read(&mut region, 4..6, there, 2).unwrap();
        assert_eq!(successes(&queue), [1, 2]);
    }
    assert_eq!(region[4..6], [11, 22]);
    // SAFETY: as above.
    let mut refused = |range, remote| unsafe {
        let write = queue_pair.post_write(&region, range, remote, 3).unwrap_err();
        assert!(write.to_string().contains("the remote region"), "{write}");
    };
    refused(0..5, there);
    refused(0..2, there.sub_region(0, 8).unwrap());
    // SAFETY: as above.
    unsafe {
        assert!(queue_pair.post_read(&mut region, ..5, there, 3).is_err());
        assert!(queue_pair.post_read(&mut region, ..9, there, 3).is_err());
        assert!(queue_pair.post_send(&region, 7..9, 3).is_err());
        queue_pair.post_receive(&mut region, 6.., 4).unwrap();
        queue_pair.post_send(&region, ..1, 5).unwrap();
    }
    assert_eq!((successes(&queue).len(), region[6]), (2, 11));
}

#[test]
fn inline_data_is_gone_when_the_post_returns() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let most = queue_pair.max_inline_data();
    let mut text = Vec::from(*b"hello");
    // SAFETY: the region is not touched before the completion of 1; 2 and 3 are inline.
    unsafe {
        queue_pair.post_receive(&mut region, ..32, 1).unwrap();
        queue_pair.post(SendWorkRequest::new(Inline(&text)), 2).unwrap();
    }
    text.fill(0);
    device.run();
    assert_eq!(successes(&queue).len(), 2);
    assert_eq!(&region[..5], b"hello");
    // SAFETY: nothing is posted.
    let error =
        unsafe { queue_pair.post(SendWorkRequest::new(Inline(&vec![0; most as usize + 1])), 3) }
            .unwrap_err();
    assert!(error.to_string().contains("the length of inline data"), "{error}");
    let elements = [region.gather_element(..).unwrap(); 4];
    let request = SendWorkRequest::new(&elements).inline();
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post(request, 3) }.unwrap_err();
    assert!(error.to_string().contains("inline data is 256"), "{error}");
    let error = PreparedRequest::<Rc>::new(request, most).unwrap_err();
    assert!(error.to_string().contains("inline data is 256"), "{error}");
    // The provider refuses a request that was prepared for another queue pair, and the error explains it.
    let mut request = PreparedRequest::new(request, u32::MAX).unwrap();
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post_prepared(&mut request, 3) }.unwrap_err();
    assert!(error.to_string().contains("inline data is 256"), "{error}");
    assert_eq!(device.outstanding(queue_pair.number()), (0, 0));
}

#[test]
fn what_the_provider_refuses_is_explained() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let most = queue_pair.max_send_sge() as usize;
    let elements = vec![region.gather_element(..1).unwrap(); most + 1];
    let send = SendWorkRequest::new(&elements);
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post(send, 1) }.unwrap_err();
    let text = format!("gather elements is {}, and must be within 0..={most}", most + 1);
    assert!(error.to_string().contains(&text), "{error}");
    let most = queue_pair.max_recv_sge() as usize;
    let mut parts: Vec<_> = region.slice_mut(..most + 1).unwrap().chunks(1).unwrap().collect();
    let mut elements: Vec<_> =
        parts.iter_mut().map(|part| part.scatter_element().unwrap()).collect();
    let receive = ReceiveWorkRequest::new(&mut elements);
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post(receive, 1) }.unwrap_err();
    assert!(error.to_string().contains("scatter elements is"), "{error}");

    device.pause(queue_pair.number(), true);
    // SAFETY: the region is not touched.
    let full = (0..100).find_map(|n| unsafe { queue_pair.post_send(&region, ..1, n) }.err());
    assert_eq!(full.unwrap().kind(), ErrorKind::QueueFull);
    device.fail("post_send").errno(libc::EIO).times(1);
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post_send(&region, ..1, 0) }.unwrap_err();
    assert_eq!((error.raw_os_error(), error.verb()), (Some(libc::EIO), "ibv_post_send"));
}

#[test]
fn a_list_is_posted_in_order_and_again() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let (there, here) = region.slice_mut(..).unwrap().split_at(32).unwrap();
    let mut parts: Vec<_> = here.chunks(8).unwrap().collect();
    let mut lists: Vec<_> =
        parts.iter_mut().map(|part| [part.scatter_element().unwrap()]).collect();
    let mut receives: Vec<PreparedReceive<'_>> = lists.iter_mut().map(receive).collect();
    let mut receives = ReceiveList::new(&mut receives).unwrap();
    receives.set_wr_ids(100);
    let short = there.slice(..3).unwrap();
    let short = [short.gather_element().unwrap()];
    let mut entries = [
        PreparedRequest::new(SendWorkRequest::new(&short).unsignaled(), 0).unwrap(),
        PreparedRequest::new(SendWorkRequest::new(&short).immediate(9), 0).unwrap(),
        PreparedRequest::new(LocalInvalidateWorkRequest::new(1).unsignaled(), 0).unwrap(),
        PreparedRequest::new(SendWorkRequest::new(()), 0).unwrap(),
    ];
    let mut sends = SendList::new(&mut entries).unwrap();
    sends.truncate(2).unwrap();
    for round in 0..2 {
        receives.truncate(2).unwrap();
        sends.set_wr_ids(10 * round);
        // SAFETY: the memory lives on, and is not touched before the completions.
        unsafe {
            queue_pair.post_receive_list(&mut receives).unwrap();
            queue_pair.post_list(&mut sends).unwrap();
        }
        let mut done = successes(&queue);
        done.sort_unstable();
        assert_eq!(done, [10 * round + 1, 100, 101]);
    }
}

#[test]
fn numbered_receives_are_posted_in_one_step() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut source = domain.allocate::<u8>(16).unwrap();
    let mut sink = domain.allocate::<u8>(32).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    source.copy_from_slice(b"one step, twice.");
    let (head, body) =
        ([source.gather_element(..8).unwrap()], [source.gather_element(8..).unwrap()]);
    let mut parts: Vec<_> = sink.slice_mut(..).unwrap().chunks(16).unwrap().collect();
    let mut lists: Vec<_> =
        parts.iter_mut().map(|part| [part.scatter_element().unwrap()]).collect();
    let receives = lists.iter_mut().map(receive);
    let (a, b) = (SendWorkRequest::new(&head), SendWorkRequest::new(&body));
    // SAFETY: the memory lives on, and is not touched before the completions.
    unsafe {
        queue_pair.post_receives((100..).zip(receives)).unwrap();
        queue_pair
            .batch(|batch| {
                batch.add(a, 7)?;
                batch.add(b, 3)
            })
            .unwrap();
    }
    let mut done = successes(&queue);
    done.sort_unstable();
    assert_eq!(done, [3, 7, 100, 101]);
    assert_eq!(device.calls("post_send"), 1, "one call for both");
    assert_eq!((&sink[..8], &sink[16..24]), (&b"one step"[..], &b", twice."[..]));
    let none: [(u64, PreparedReceive<'_>); 0] = [];
    // SAFETY: as above.
    let error = unsafe { queue_pair.post_receives(none) }.unwrap_err();
    assert_eq!((error.posted, error.error.kind()), (0, ErrorKind::InvalidInput));
}

/// A receive in C's form.
fn receive<'l>(list: &'l mut [ScatterElement<'_>; 1]) -> PreparedReceive<'l> {
    PreparedReceive::new(ReceiveWorkRequest::new(list)).unwrap()
}

#[test]
fn a_list_that_fails_says_how_far_it_came() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let all = AccessFlags::REMOTE_WRITE;
    let shared = domain.allocate_shared::<u64>(4, all).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    {
        let element = [region.gather_element(..8).unwrap()];
        let many = [region.gather_element(..1).unwrap(); 5];
        let write =
            |list| PreparedRequest::new(WriteWorkRequest::new(list, remote(&shared)), 0).unwrap();
        let mut entries = [write(&element[..]), write(&element), write(&many), write(&element)];
        let mut list = SendList::new(&mut entries).unwrap();
        list.set_wr_ids(1);
        // SAFETY: the memory lives on, and is not touched before the completions.
        let error = unsafe { queue_pair.post_list(&mut list) }.unwrap_err();
        assert_eq!(error.posted, 2);
        assert!(
            error.to_string().contains("request 3 of 4 was refused, counted from 1"),
            "{error}"
        );
        assert!(error.error.to_string().contains("the number of gather elements is 5"));
        assert_eq!(successes(&queue), [1, 2]);
        // The provider names the request that it has refused, and returns 0.
        device.fail("lose_error").times(1);
        // SAFETY: as above.
        let error = unsafe { queue_pair.post_list(&mut list) }.unwrap_err();
        assert_eq!(error.posted, 2);
        assert!(error.error.to_string().contains("the number of gather elements is 5"));
        assert_eq!(successes(&queue), [1, 2]);
        device.fail("lose_error").times(1);
        device.fail("post_send").errno(libc::ENOMEM).skip(1).times(1);
        // SAFETY: as above.
        let error = unsafe { queue_pair.post_list(&mut list) }.unwrap_err();
        assert_eq!((error.posted, error.error.kind()), (1, ErrorKind::QueueFull));
        assert!(error.to_string().contains("the provider does not say why"), "{error}");
        assert_eq!(successes(&queue), [1]);
        // The rest of the list can be posted: the failure has no later effect.
        list.truncate(2).unwrap();
        device.fail("post_send").errno(libc::ENOMEM).times(1);
        // SAFETY: as above.
        let error = unsafe { queue_pair.post_list(&mut list) }.unwrap_err();
        assert_eq!((error.posted, error.error.kind()), (0, ErrorKind::QueueFull));
        // SAFETY: as above.
        unsafe { queue_pair.post_list(&mut list) }.unwrap();
        assert_eq!(successes(&queue), [1, 2]);
        // All requests are queued, though the device could not be told.
        device.fail("ring_doorbell").errno(libc::EACCES).times(1);
        // SAFETY: as above.
        let error = unsafe { queue_pair.post_list(&mut list) }.unwrap_err();
        assert_eq!((error.posted, error.error.kind()), (2, ErrorKind::Permission));
        assert!(error.to_string().starts_with("all 2 requests were queued"), "{error}");
        assert_eq!(successes(&queue), [1, 2]);
    }
    let mut parts: Vec<_> = region.slice_mut(..).unwrap().chunks(16).unwrap().collect();
    let mut lists: Vec<_> =
        parts.iter_mut().map(|part| [part.scatter_element().unwrap()]).collect();
    let mut entries: Vec<PreparedReceive<'_>> = lists.iter_mut().map(receive).collect();
    let mut list = ReceiveList::new(&mut entries).unwrap();
    device.fail("post_recv").errno(libc::ENOMEM).skip(3).times(1);
    // SAFETY: the memory lives on, and is not touched before the completions.
    let error = unsafe { queue_pair.post_receive_list(&mut list) }.unwrap_err();
    assert_eq!((error.posted, error.error.kind()), (3, ErrorKind::QueueFull));
    assert_eq!(device.outstanding(queue_pair.number()).1, 3);
    queue_pair.close().unwrap();
}

#[test]
fn two_threads_use_the_two_sides() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let (sent, received) = (context.create_cq(64).unwrap(), context.create_cq(64).unwrap());
    let mut region = domain.allocate::<u64>(8).unwrap();
    let prepared = QueuePair::builder(&domain, &sent, &received, Rc)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_inline_data(8)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()
        .unwrap();
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint).unwrap();
    let (mut send, mut receive) = queue_pair.split();
    assert_eq!(send.queue_pair().number(), receive.queue_pair().number());
    std::thread::scope(|scope| {
        let sent = &sent;
        scope.spawn(move || {
            let mut completion = [WorkCompletion::default()];
            for n in 0..200_u64 {
                // SAFETY: one request is outstanding at a time.
                unsafe { send.post(SendWorkRequest::new(Inline(&n.to_ne_bytes())), n).unwrap() };
                while sent.poll(&mut completion).unwrap().is_empty() {}
                assert!(completion[0].is_success() && completion[0].wr_id() == n);
            }
        });
        let mut completion = [WorkCompletion::default()];
        for n in 0..200_u64 {
            let mut elements = [region.scatter_element(..1).unwrap()];
            let request = ReceiveWorkRequest::new(&mut elements);
            // SAFETY: the region is not touched before the completion.
            unsafe { receive.post(request, n).unwrap() };
            while received.poll(&mut completion).unwrap().is_empty() {}
            assert!(completion[0].is_success() && completion[0].wr_id() == n);
            assert_eq!(region[0], n);
        }
    });
    drop(queue_pair);
    drop(region);
    drop((sent, received));
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn datagrams_go_where_each_says() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut region = domain.allocate::<u8>(256).unwrap();
    let one = builder(&domain, &queue, Ud).qkey(5).build().unwrap();
    let mut one = one.activate().unwrap();
    let two = builder(&domain, &queue, Ud).qkey(6).build().unwrap();
    let mut two = two.activate().unwrap();
    let path = AddressVector::new(1, one.endpoint().lid()).global(one.endpoint().gid(), 1);
    let path = domain.create_ah(&path).unwrap();
    let text = domain.allocate::<u8>(4).unwrap();
    let elements = [text.gather_element(..).unwrap()];
    let request = || SendWorkRequest::new(&elements);
    let number = two.number();
    let send = request().immediate(3).to(DatagramPeer { path: &path, number, qkey: 6 });
    // SAFETY: the memory lives on, and is not touched before the completions.
    unsafe {
        two.post_receive(&mut region, .., 1).unwrap();
        one.post(send, 2).unwrap();
    }
    let posted = device.posted(0).unwrap();
    // SAFETY: the arm is the one of datagrams.
    let ud = unsafe { posted.send.wr.ud };
    assert_eq!((ud.ah, ud.remote_qpn, ud.remote_qkey), (path.as_raw(), two.number(), 6));
    let done = completions(&queue);
    let received = done.iter().find(|(wr_id, _)| *wr_id == 1).unwrap().1.unwrap();
    assert_eq!((received.immediate(), received.byte_len()), (Some(3), 44));
    assert_eq!(received.source_queue_pair(), one.number());
    // A request without an address handle does not compile; with the transport as a value, it is refused before the
    // provider follows it.
    let mut one = one.erase();
    // SAFETY: nothing is posted.
    unsafe {
        let errors = [
            one.post_send(&region, ..4, 3).unwrap_err(),
            one.post(SendWorkRequest::new(Inline(b"text")), 3).unwrap_err(),
            one.post_write(&region, ..4, RemoteMemoryRegion::new(0, 8, 0).unwrap(), 3).unwrap_err(),
            one.post_read(&mut region, ..4, RemoteMemoryRegion::new(0, 8, 0).unwrap(), 3)
                .unwrap_err(),
        ];
        assert!(errors.iter().all(|error| error.to_string().contains("has no peer")), "{errors:?}");
        let mut prepared = [PreparedRequest::new(request(), 0).unwrap()];
        let alone = one.post_prepared(&mut prepared[0], 3).unwrap_err();
        let mut list = SendList::new(&mut prepared).unwrap();
        let listed = one.post_list(&mut list).unwrap_err();
        assert_eq!((alone, listed.error, listed.posted), (errors[0], errors[0], 0));
    }
    // A prepared one with a destination is for any queue pair of its transport.
    let addressed = request().to(DatagramPeer { path: &path, number, qkey: 6 });
    let mut addressed = PreparedRequest::new(addressed, 0).unwrap();
    // SAFETY: the memory lives on, and is not touched before the completions.
    unsafe {
        two.post_receive(&mut region, .., 4).unwrap();
        one.post_prepared(&mut addressed, 5).unwrap();
    }
    assert_eq!(completions(&queue).len(), 2);
    let wrong = request().to(DatagramPeer { path: &path, number: 1 << 24, qkey: 6 });
    // SAFETY: nothing is posted.
    let error = unsafe { one.post(wrong, 3) }.unwrap_err();
    assert!(error.to_string().contains("remote queue pair is 16777216"), "{error}");
}

/// To mlx4 and mthca a length of 0 is 2 GiB.
#[test]
fn an_empty_range_is_posted_as_no_element() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
        .allow_remote_rw()
        .max_send_wr(8)
        .max_recv_wr(8)
        .build()
        .unwrap();
    let endpoint = prepared.endpoint();
    let mut pair = prepared.handshake(endpoint).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let there = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    let lists = |range: std::ops::Range<usize>, expected: &[u32]| {
        let check = |result: Result<()>| {
            result.unwrap();
            let list = device.posted(0).unwrap().list;
            let lengths: Vec<_> = list.iter().map(|&(_, length, _)| length).collect();
            assert_eq!(lengths, expected);
        };
        // SAFETY: the region outlives the queue pair and the shared receive queue, and is not touched.
        unsafe {
            check(pair.post_receive(&mut region, range.clone(), 1));
            check(receives.post_receive(&mut region, range.clone(), 2));
            check(pair.post_send(&region, range.clone(), 3));
            check(pair.post_write(&region, range.clone(), there.remote(), 4));
            check(pair.post_read(&mut region, range, there.remote(), 5));
        }
    };
    let mut lists = lists;
    lists(7..7, &[]);
    lists(7..15, &[8]);
    drop((pair, receives));
}
