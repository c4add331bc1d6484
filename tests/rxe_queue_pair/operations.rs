//! Every operation, on every transport.

use super::*;
use ibverbs::completion::WorkOpcode;
use ibverbs::memory::MemoryWindowType;
use ibverbs::operation::WindowBinding;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{CreateFlags, SendOperations};
use ibverbs::settings::{MaxRnrRetries, MinRnrTimer};
use ibverbs::{Inline, Rc, SendWorkRequest, operation::DatagramPeer};

#[test]
fn a_reliable_connection_carries_every_request() {
    with_rxe0(|_, domain, queue| {
        let mut here = domain.allocate::<u64>(16).unwrap();
        let mut there = domain.allocate::<u64>(64).unwrap();
        let target = shared(domain);
        let remote = target.remote();
        let (mut one, mut two) = pair(|| reliable(domain, queue));
        here[..3].copy_from_slice(&[11, 22, 33]);

        // Sends: plain of two elements, with an immediate, inline, empty, unsignaled.
        // SAFETY: the regions are not touched before the completions, here and below.
        unsafe {
            for n in 0..5 {
                let from = n as usize * 8;
                two.post_receive(&mut there, from..from + 8, 100 + n).unwrap();
            }
            let elements = [here.gather_element(..1).unwrap(), here.gather_element(2..3).unwrap()];
            let request = SendWorkRequest::new(&elements);
            one.post(request, 0).unwrap();
            let request = SendWorkRequest::new(&elements[1..]).immediate(0xabcd);
            one.post(request, 1).unwrap();
            let bytes = [7_u64.to_ne_bytes(), 8_u64.to_ne_bytes()].concat();
            one.post(SendWorkRequest::new(Inline(&bytes)), 2).unwrap();
            let request = SendWorkRequest::new(()).unsignaled();
            one.post(request, 3).unwrap();
            let request = SendWorkRequest::new(&elements).inline().solicited().fence();
            one.post(request, 4).unwrap();
        }
        let done = completions(queue, 9);
        for wr_id in [0, 1, 2, 4] {
            assert_eq!(success(&done, wr_id).opcode(), WorkOpcode::Send);
        }
        let received: Vec<_> = (100..105).map(|n| success(&done, n).byte_len()).collect();
        assert_eq!(received, [16, 8, 16, 0, 16]);
        assert_eq!(success(&done, 101).immediate(), Some(0xabcd));
        assert_eq!((success(&done, 100).immediate(), there[8]), (None, 33));
        assert_eq!(
            (&there[..2], &there[16..18], &there[32..34]),
            (&[11, 33][..], &[7, 8][..], &[11, 33][..])
        );

        // Writes and reads.
        // SAFETY: as above.
        unsafe {
            two.post_receive(&mut there, ..1, 200).unwrap();
            one.post_write(&here, ..3, remote, 1).unwrap();
            let element = [here.gather_element(1..2).unwrap()];
            let part = remote.sub_region(64, 8).unwrap();
            let request = WriteWorkRequest::new(&element, part).immediate(5);
            one.post(request, 2).unwrap();
            one.post_read(&mut here, 8..12, remote.sub_region(8, 32).unwrap(), 3).unwrap();
        }
        let done = completions(queue, 4);
        assert_eq!(success(&done, 1).opcode(), WorkOpcode::Write);
        assert_eq!(success(&done, 3).opcode(), WorkOpcode::Read);
        let notified = success(&done, 200);
        assert_eq!(notified.opcode(), WorkOpcode::ReceiveWriteWithImmediate);
        assert_eq!(notified.immediate(), Some(5));
        assert_eq!((&words(&target)[..3], words(&target)[8]), (&[11, 22, 33][..], 22));
        assert_eq!(here[8..12], [22, 33, 0, 0]);

        // Atomics.
        let word = remote.sub_region(0, 8).unwrap();
        {
            let (swapped, added) = here.slice_mut(..2).unwrap().split_at(1).unwrap();
            let mut swapped = swapped.into_scatter_element().unwrap();
            let mut added = added.into_scatter_element().unwrap();
            let swap = CompareSwapWorkRequest::new(&mut swapped, word, 11, 40);
            let add = FetchAddWorkRequest::new(&mut added, word, 2).fence();
            // SAFETY: as above.
            unsafe {
                one.post(swap, 1).unwrap();
                one.post(add, 2).unwrap();
            }
        }
        let done = completions(queue, 2);
        assert_eq!(success(&done, 1).opcode(), WorkOpcode::CompareSwap);
        assert_eq!(success(&done, 2).opcode(), WorkOpcode::FetchAdd);
        assert_eq!((here[0], here[1], words(&target)[0]), (11, 40, 42));
    });
}

#[test]
#[ignore = "Soft-RoCE: takes a read over UC and fails it later; the software device refuses the post"]
fn an_unreliable_connection_carries_what_it_can() {
    with_rxe0(|_, domain, queue| {
        let mut here = domain.allocate::<u64>(4).unwrap();
        let mut there = domain.allocate::<u64>(8).unwrap();
        let target = shared(domain);
        let (mut one, mut two) = pair(|| builder(domain, queue, Uc));
        here.fill(9);
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            two.post_receive(&mut there, ..4, 100).unwrap();
            two.post_receive(&mut there, 4.., 101).unwrap();
            one.post_send(&here, .., 1).unwrap();
            one.post_write(&here, ..2, target.remote(), 2).unwrap();
            let element = [here.gather_element(..1).unwrap()];
            let part = target.remote().sub_region(24, 8).unwrap();
            let request = WriteWorkRequest::new(&element, part).immediate(3);
            one.post(request, 3).unwrap();
        }
        let done = completions(queue, 5);
        assert_eq!(
            (success(&done, 100).byte_len(), success(&done, 101).immediate()),
            (32, Some(3))
        );
        assert_eq!((&there[..4], &words(&target)[..4]), (&[9; 4][..], &[9, 9, 0, 9][..]));
        // UC has no reads: the completion has the error. SAFETY: as above.
        unsafe { one.erase().post_read(&mut here, ..1, target.remote(), 4).unwrap() };
        assert!(completions(queue, 1)[0].result().is_err());
    });
}

#[test]
fn datagrams_go_where_each_says() {
    if !has_address_handles() {
        return;
    }
    with_rxe0(|_, domain, queue| {
        let text = domain.allocate::<u8>(8).unwrap();
        let mut there = domain.allocate::<u8>(512).unwrap();
        let new = |qkey| {
            let builder = builder(domain, queue, Ud).qkey(qkey);
            builder.extended(SendOperations::SEND | SendOperations::SEND_WITH_IMMEDIATE)
        };
        let mut one = new(5).build().unwrap().activate().unwrap();
        let mut two = new(6).build().unwrap().activate().unwrap();
        let mut three = new(7).build().unwrap().activate().unwrap();
        let index = domain.context().routable_gid(1).unwrap().index as u8;
        let path = AddressVector::new(1, 0).global(two.endpoint().gid(), index);
        let path = domain.create_ah(&path).unwrap();
        let elements = [text.gather_element(..).unwrap()];
        let to_two = DatagramPeer { path: &path, number: two.number(), qkey: 6 };
        let to_three = DatagramPeer { path: &path, number: three.number(), qkey: 7 };
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            for n in 0..2 {
                let from = n as usize * 64;
                two.post_receive(&mut there, from..from + 64, 100 + n).unwrap();
                three.post_receive(&mut there, from + 256..from + 320, 200 + n).unwrap();
            }
            let request = SendWorkRequest::new(&elements);
            one.post(request.immediate(1).to(to_two), 1).unwrap();
            one.post(request.to(to_three), 2).unwrap();
            one.batch(|b| {
                b.add(SendWorkRequest::new(Inline(b"inline")).to(to_two), 3)?;
                b.add(SendWorkRequest::new(&elements).immediate(2).to(to_three), 4)
            })
            .unwrap();
        }
        let done = completions(queue, 8);
        let received = |wr_id| success(&done, wr_id);
        assert_eq!((received(100).byte_len(), received(100).immediate()), (48, Some(1)));
        assert_eq!((received(101).byte_len(), received(101).immediate()), (46, None));
        assert_eq!(received(100).source_queue_pair(), one.number());
        assert_eq!((received(200).byte_len(), received(201).immediate()), (48, Some(2)));
        assert_eq!(&there[64 + 40..64 + 46], b"inline");
        path.close().unwrap();
    });
}

#[test]
fn both_sides_work_in_threads_of_their_own() {
    with_rxe0(|context, domain, _| {
        let (sent, received) = (context.create_cq(16).unwrap(), context.create_cq(16).unwrap());
        let mut there = domain.allocate::<u64>(1).unwrap();
        let prepared = QueuePair::builder(domain, &sent, &received, Rc)
            .max_inline_data(8)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .min_rnr_timer(MinRnrTimer::SHORTEST)
            .build()
            .unwrap();
        let itself = prepared.endpoint();
        let mut queue_pair = prepared.handshake(itself).unwrap();
        let (mut send, mut receive) = queue_pair.split();
        std::thread::scope(|scope| {
            let sent = &sent;
            scope.spawn(move || {
                for n in 0..50_u64 {
                    // SAFETY: one request is outstanding at a time.
                    unsafe {
                        send.post(SendWorkRequest::new(Inline(&n.to_ne_bytes())), n).unwrap()
                    };
                    success(&completions(sent, 1), n);
                }
            });
            for n in 0..50_u64 {
                // SAFETY: the region is not touched before the completion.
                unsafe { receive.post_receive(&mut there, .., n).unwrap() };
                success(&completions(&received, 1), n);
                assert_eq!(there[0], n);
            }
        });
    });
}

#[test]
fn a_peer_invalidates_a_window_with_a_send() {
    with_rxe0(|_, domain, queue| {
        let options = RegionOptions::new()
            .access(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ)
            .access(AccessFlags::MW_BIND);
        let region = domain.allocate_shared::<u64>(4, options).unwrap();
        let mut there = domain.allocate::<u64>(4).unwrap();
        let here = domain.allocate::<u64>(1).unwrap();
        let (mut one, mut two) = pair(|| reliable(domain, queue));
        let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
        let binding = WindowBinding::new(&region, .., AccessFlags::REMOTE_WRITE).unwrap();
        // SAFETY: all numbers are different, and the regions are not touched before the completions.
        unsafe {
            let remote = two.post_bind_mw(&mut window, binding, 1).unwrap();
            success(&completions(queue, 1), 1);
            two.post_receive(&mut there, .., 2).unwrap();
            one.post_write(&here, .., remote, 3).unwrap();
            let elements = [here.gather_element(..).unwrap()];
            let send = SendWorkRequest::new(&elements).invalidate(remote.rkey());
            one.post(send, 4).unwrap();
            let done = completions(queue, 3);
            success(&done, 3);
            success(&done, 4);
            assert_eq!(success(&done, 2).byte_len(), 8);
            // The window is closed.
            one.post_write(&here, .., remote, 5).unwrap();
        }
        let error = completions(queue, 1)[0].result().unwrap_err();
        assert_eq!(error.status(), WorkStatus::RemoteAccess);
        window.close().unwrap();
    });
}

#[test]
fn a_shared_receive_queue_serves_two_queue_pairs() {
    with_rxe0(|_, domain, queue| {
        let receives = domain.create_srq(8, 1).unwrap();
        let mut there = domain.allocate::<u8>(64).unwrap();
        let new = || reliable(domain, queue).srq(&receives);
        let (mut one, mut two) = pair(new);
        // SAFETY: the region is not touched before the completions.
        unsafe {
            receives.post_receive(&mut there, ..32, 1).unwrap();
            receives.post_receive(&mut there, 32.., 2).unwrap();
            one.post(SendWorkRequest::new(Inline(b"from one")), 3).unwrap();
            two.post(SendWorkRequest::new(Inline(b"from two")), 4).unwrap();
        }
        let done = completions(queue, 4);
        let to = |wr_id| done.iter().find(|c| c.wr_id() == wr_id).unwrap().queue_pair_number();
        (1..=4).for_each(|wr_id| assert!(success(&done, wr_id).byte_len() <= 8));
        let (mut numbers, mut ours) = ([to(1), to(2)], [one.number(), two.number()]);
        numbers.sort_unstable();
        ours.sort_unstable();
        assert_eq!(numbers, ours);
        // SAFETY: nothing is posted.
        let error = unsafe { one.post_receive(&mut there, .., 5) }.unwrap_err();
        assert!(error.to_string().contains("shared receive queue"), "{error}");
        drop((one, two));
        receives.close().unwrap();
    });
}

#[test]
fn what_is_too_much_is_named() {
    with_rxe0(|_, domain, queue| {
        let mut region = domain.allocate::<u8>(1024).unwrap();
        let (mut one, _two) = pair(|| reliable(domain, queue));
        let most = one.max_send_sge() as usize;
        let elements = vec![region.gather_element(..1).unwrap(); most + 1];
        // SAFETY: nothing is posted.
        unsafe {
            let send = SendWorkRequest::new(&elements);
            let error = one.post(send, 1).unwrap_err();
            let text = format!("the number of gather elements is {}", most + 1);
            assert!(error.to_string().contains(&text), "{error}");
            let long = vec![0; one.max_inline_data() as usize + 1];
            let error = one.post(SendWorkRequest::new(Inline(&long)), 1).unwrap_err();
            assert!(error.to_string().contains("the length of inline data"), "{error}");
            let whole = [region.gather_element(..).unwrap()];
            let send = SendWorkRequest::new(&whole).inline();
            let error = one.post(send, 1).unwrap_err();
            assert!(error.to_string().contains("the length of inline data is 1024"), "{error}");
            let mut full = None;
            for n in 0..1000 {
                full = one.post_receive(&mut region, ..1, n).err();
                if full.is_some() {
                    break;
                }
            }
            assert_eq!(full.unwrap().kind(), ErrorKind::QueueFull);
        }
        let tso = reliable(domain, queue).extended(SendOperations::TSO).build().unwrap_err();
        assert_eq!(tso.kind(), ErrorKind::Unsupported);
        let plain = reliable(domain, queue)
            .extended_if_available(SendOperations::TSO)
            .build()
            .unwrap()
            .into_queue_pair();
        assert!(plain.extended_operations().is_empty());
        let flags = builder(domain, queue, Ud)
            .create_flags(CreateFlags::BLOCK_SELF_MULTICAST_LOOPBACK)
            .build()
            .unwrap_err();
        assert_eq!(flags.kind(), ErrorKind::Unsupported);
    });
}
