//! Many requests, by the extended interface.

use ibverbs::memory::InlineList;
use ibverbs::operation::{AtomicWriteWorkRequest, FlushWorkRequest};
use ibverbs::queue_pair::{FlushPlacement, SendOperations};
use ibverbs::{
    CompareSwapWorkRequest, FetchAddWorkRequest, ReadWorkRequest, SendWorkRequest, WriteWorkRequest,
};
use std::io::IoSlice;

use super::*;

#[test]
fn a_batch_carries_every_request() {
    with_rxe0(|_, domain, queue| {
        let mut here = domain.allocate::<u64>(16).unwrap();
        let mut there = domain.allocate::<u64>(64).unwrap();
        let target = shared(domain);
        let remote = target.remote();
        let all = SendOperations::all() - SendOperations::TSO;
        let new = || reliable(domain, queue).extended(all);
        let (mut one, mut two) = pair(new);
        assert_eq!(one.extended_operations(), all);
        here[..3].copy_from_slice(&[11, 22, 33]);
        let (source, rest) = here.slice_mut(..).unwrap().split_at(4).unwrap();
        let (read, atomics) = rest.split_at(4).unwrap();
        let (swapped, added) = atomics.slice(..2).unwrap().split_at(1).unwrap();
        let elements = [
            source.as_slice().slice(..1).unwrap().gather_element().unwrap(),
            source.as_slice().slice(2..3).unwrap().gather_element().unwrap(),
        ];
        let mut read = [read.into_scatter_element().unwrap()];
        let mut swapped = swapped.into_scatter_element().unwrap();
        let mut added = added.into_scatter_element().unwrap();
        let word = remote.sub_region(120, 8).unwrap();
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            for n in 0..5 {
                let from = n as usize * 8;
                two.post_receive(&mut there, from..from + 8, 100 + n).unwrap();
            }
            one.batch(|b| {
                b.add(SendWorkRequest::new(&elements), 1)?;
                b.add(
                    SendWorkRequest::new(&[elements[1]]).immediate(0xabcd).solicited().unsignaled(),
                    2,
                )?;
                b.add(SendWorkRequest::new(Inline(&7_u64.to_ne_bytes())), 3)?;
                let pieces = [8_u64.to_ne_bytes(), 9_u64.to_ne_bytes()];
                let pieces = pieces.each_ref().map(|piece| IoSlice::new(piece));
                b.add(SendWorkRequest::new(InlineList(&pieces)), 4)?;
                b.add(WriteWorkRequest::new(&elements, remote), 5)?;
                b.add(WriteWorkRequest::new((), remote).immediate(5), 6)?;
                b.add(WriteWorkRequest::new(Inline(&[1; 8]), remote.sub_region(16, 8)?), 7)?;
                b.add(ReadWorkRequest::new(&mut read, remote).fence(), 8)?;
                b.add(FetchAddWorkRequest::new(&mut added, word, 3), 9)?;
                b.add(CompareSwapWorkRequest::new(&mut swapped, word, 3, 50), 10)?;
                b.add(AtomicWriteWorkRequest::new(remote.sub_region(112, 8)?, 0x77), 11)?;
                b.add(FlushWorkRequest::new(remote, FlushPlacement::GLOBAL), 12)
            })
            .unwrap();
        }
        let done = completions(queue, 10 + 5);
        let received: Vec<_> = (100..105).map(|n| success(&done, n).byte_len()).collect();
        assert_eq!(received, [16, 8, 8, 16, 0]);
        assert_eq!(success(&done, 101).immediate(), Some(0xabcd));
        assert_eq!(success(&done, 104).immediate(), Some(5));
        assert_eq!(there[..2], [11, 33]);
        assert_eq!((there[16], &there[24..26]), (7, &[8, 9][..]));
        for wr_id in [1, 3, 4, 5, 6, 7, 8, 9, 10] {
            success(&done, wr_id);
        }
        let ones = u64::from_ne_bytes([1; 8]);
        assert_eq!(here[4..8], [11, 33, ones, 0], "read");
        assert_eq!((here[8], here[9]), (3, 0), "what the word was");
        assert_eq!(words(&target)[15], 50);
    });
}

#[test]
fn a_failing_batch_leaves_a_working_queue_pair() {
    with_rxe0(|_, domain, queue| {
        let target = shared(domain);
        let new = || reliable(domain, queue).extended(SendOperations::WRITE);
        let (mut one, _two) = pair(new);
        let part = |n: u64| target.remote().sub_region(n * 8, 8).unwrap();
        let word = |n: u64| n.to_ne_bytes();
        // SAFETY: all data is inline, and no two outstanding requests have the same number.
        unsafe {
            let error = one.batch::<(), ibverbs::Error>(|b| {
                b.add(WriteWorkRequest::new(Inline(&word(1)), part(0)), 1)?;
                b.add(SendWorkRequest::new(Inline(b"not asked for")), 2)
            });
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                one.batch::<(), ibverbs::Error>(|b| {
                    b.add(WriteWorkRequest::new(Inline(&word(1)), part(0)), 1)?;
                    panic!("half-built")
                })
            }));
            assert!(unwound.is_err());
            let full = one.batch(|b| {
                (0..1000)
                    .try_for_each(|n| b.add(WriteWorkRequest::new(Inline(&word(1)), part(0)), n))
            });
            assert_eq!(full.unwrap_err().kind(), ErrorKind::QueueFull);
            one.batch(|b| b.add(WriteWorkRequest::new(Inline(&word(7)), part(1)), 3)).unwrap();
        }
        let done = completions(queue, 1);
        success(&done, 3);
        assert_eq!(words(&target)[..2], [0, 7]);
    });
}

/// rxe takes the first element's length for all elements of a list.
#[test]
#[ignore = "Soft-RoCE: what it lacks"]
fn elements_of_different_lengths_are_refused() {
    with_rxe0(|_, domain, queue| {
        let region = domain.allocate::<u8>(24).unwrap();
        let target = shared(domain);
        let new = || reliable(domain, queue).extended(SendOperations::WRITE);
        let (mut one, _two) = pair(new);
        let elements = |ranges: [std::ops::Range<usize>; 2]| {
            ranges.map(|range| region.gather_element(range).unwrap())
        };
        let (different, equal) = (elements([0..4, 8..20]), elements([0..8, 8..16]));
        // SAFETY: the region is not touched before the completion.
        unsafe {
            let refused = one
                .batch::<(), ibverbs::Error>(|b| {
                    b.add(WriteWorkRequest::new(&different, target.remote()), 1)
                })
                .unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
            assert!(refused.to_string().contains("give them one length"), "{refused}");
            one.batch(|b| b.add(WriteWorkRequest::new(&equal, target.remote()), 2)).unwrap();
        }
        success(&completions(queue, 1), 2);
    });
}
