//! A completion queue that is too small for the completions, on the verbs layer. A channel's queue has room
//! for all that the channel can post.

use std::time::{Duration, Instant};

use ibverbs::device::{AsyncEventKind, AsyncEventSubject};
use ibverbs::{CompletionQueue, ErrorKind, QueuePairType, WorkCompletion};

use crate::alone;
use crate::figures::figure;
use crate::vm::{PATIENCE, assert_nothing_left, completions};

const SOON: Duration = Duration::from_millis(50);

#[test]
fn a_queue_that_overruns_says_so() {
    let _alone = alone("overrun", 250);
    let (mut posted, mut found) = (0, 0);
    let mut slowest = Duration::ZERO;
    for more in [1, 2, 20] {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let events = context.async_events().unwrap();
        assert_eq!(events.next_event().unwrap(), None);
        assert_eq!(
            events.wait_until(Instant::now() + SOON).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        let sends = context.create_cq(64).unwrap();
        let small = CompletionQueue::builder(&context, 1).token(77).own_channel().build().unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let reliable = QueuePairType::ReliableConnected;
        let builder = domain.create_qp(&sends, &small, reliable).max_send_wr(64).max_recv_wr(64);
        let prepared = builder.build().unwrap();
        let itself = prepared.endpoint();
        let mut pair = prepared.handshake(itself).unwrap();
        let message = domain.allocate::<u8>(16).unwrap();
        let mut exchange = |wr_id| {
            // SAFETY: the regions outlive the queue pair, and are not looked at.
            unsafe {
                pair.post_receive(&mut region, .., wr_id + 1000).unwrap();
                pair.post_send(&message, .., wr_id).unwrap();
            }
        };
        let room = u64::from(small.capacity());
        for wr_id in 0..room {
            exchange(wr_id);
        }
        completions(&sends, room as usize);
        // The queue is full to the last entry, and nothing has failed yet.
        assert_eq!(
            events.wait_until(Instant::now() + SOON).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        let start = Instant::now();
        for wr_id in room..room + more {
            exchange(wr_id);
        }
        let event = loop {
            let event = events.wait_until(Instant::now() + PATIENCE).unwrap();
            if event.kind() == AsyncEventKind::CompletionQueueError {
                break event;
            }
        };
        slowest = slowest.max(start.elapsed());
        assert_eq!(event.subject(), AsyncEventSubject::CompletionQueue(77));
        // All sends have arrived. Of the receives, as many completed as the queue had room for, in order. A
        // wait for the others ends.
        completions(&sends, more as usize);
        let mut slots = [WorkCompletion::default(); 64];
        let seen = small.poll(&mut slots).unwrap().iter().map(WorkCompletion::wr_id);
        assert!(seen.eq(1000..1000 + room));
        let error = small.wait_until(&mut slots, Instant::now() + SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        posted += room + more;
        found += room;
        pair.close().unwrap();
        small.close().unwrap();
    }
    assert_nothing_left("rxe0");
    figure(
        "cq-overrun",
        &format!(
            "Soft-RoCE: CompletionQueueError, naming the queue by its token, within {slowest:.1?} of \
             the first completion too many (bound {PATIENCE:?}) and not before; of {posted} receives \
             {found} completions found in order, {} lost as reported; waits end at their deadline; \
             all closed, resources at baseline",
            posted - found
        ),
    );
}
