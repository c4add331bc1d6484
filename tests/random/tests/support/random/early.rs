//! Posting in the states other than RTS and ERR, and resizing.

use ibverbs::queue_pair::StateTransition;
use ibverbs::{
    AccessFlags, CompletionQueue, ErrorKind, QueuePair, QueuePairState,
    queue_pair::AddressVector,
    settings::{MaximumTransferUnit, MinRnrTimer},
};
use proptest::prelude::*;
use proptest::sample::Index;

use super::Bed;
use super::world::{LEN, Outcome, State, World, pick};

/// Takes a queue pair from RESET to a state before RTS, with itself as its peer.
fn raise(pair: &mut QueuePair<'static>, to: QueuePairState) -> ibverbs::Result<()> {
    if to == QueuePairState::Reset {
        return Ok(());
    }
    let access = AccessFlags::empty();
    let init = StateTransition::to(QueuePairState::Init).port(1).pkey_index(0).access(access);
    pair.modify(init)?;
    if to == QueuePairState::Init {
        return Ok(());
    }
    let endpoint = pair.endpoint();
    let path = AddressVector::to_peer(pair.protection_domain().context(), 1, &endpoint)?;
    pair.modify(
        StateTransition::to(to)
            .path(path)
            .path_mtu(MaximumTransferUnit::Mtu256)
            .remote_number(endpoint.num())
            .receive_psn(Default::default())
            .max_dest_rd_atomic(1)
            .min_rnr_timer(MinRnrTimer::SHORTEST),
    )
}

impl<B: Bed> World<'_, B> {
    /// Posts in RESET, INIT or RTR. The reset takes back what was queued, whether the post failed or not.
    pub(crate) fn early(&mut self, end: usize, region: &Index, state: usize) -> Outcome {
        use QueuePairState as S;

        let state = [S::Reset, S::Init, S::ReadyToReceive][state];
        let suits = |&at: &usize| {
            let region = &self.regions[at];
            region.memory.is_some() && region.domain == self.ends[end].domain && !region.is_busy()
        };
        let regions: Vec<_> = (0..self.regions.len()).filter(suits).collect();
        let Some(&region) = pick(&regions, region) else { return Ok(()) };
        let mut pair = match self.ends[end].pair.take() {
            Some(State::Prepared(pair)) => pair.into_queue_pair(),
            other => {
                self.ends[end].pair = other;
                return Ok(());
            }
        };
        raise(&mut pair, state).unwrap();
        let (first, second) = (self.next, self.next + 1);
        self.next += 2;
        let memory = self.regions[region].memory.as_mut().expect("it is there");
        // SAFETY: the reset below ends both requests, and the region is not touched until then.
        let (sent, received) = unsafe {
            let sent = pair.post_send(memory, ..LEN, first);
            (sent, pair.post_receive(memory, .., second))
        };
        let refused = |result: ibverbs::Result<()>| {
            let error = result.expect_err("this state does not allow it");
            let text = format!("the queue pair is in {state}, and must be in ");
            prop_assert!(error.to_string().contains(&text), "{}", error);
            prop_assert_eq!(error.kind(), ErrorKind::InvalidInput);
            Ok(())
        };
        refused(sent)?;
        // rxe takes receives in RESET too.
        match received {
            Err(_) if state == S::Reset => refused(received)?,
            received => prop_assert!(received.is_ok(), "{:?}", received),
        }
        let pair = pair.reset().unwrap();
        self.ends[end].pair = Some(State::Prepared(pair));
        self.lost.extend([first, second]);
        let at = &self.regions[region];
        let memory = at.memory.as_ref().expect("it is there");
        prop_assert_eq!(&at.content[..], &memory[..], "the device wrote it");
        Ok(())
    }

    /// Posts a send in SQD, which is carried out when the queue pair is in RTS again.
    pub(crate) fn drained(&mut self, end: usize, region: usize) -> Outcome {
        // rxe needs one more post before it goes on.
        if self.ends[end].troubled || self.bed.is_slow() {
            return Ok(());
        }
        let Some(State::Connected(pair)) = &mut self.ends[end].pair else { return Ok(()) };
        pair.drain(false).unwrap();
        self.send(end, region, LEN, true)?;
        let Some(State::Connected(pair)) = &mut self.ends[end].pair else { unreachable!() };
        prop_assert_eq!(pair.state().unwrap(), QueuePairState::SendQueueDrained);
        pair.resume().unwrap();
        Ok(())
    }

    /// A resize that fails leaves the queue as it was.
    pub(crate) fn resize(
        &mut self,
        queue: &CompletionQueue<'_>,
        entries: u32,
        fails: bool,
    ) -> Outcome {
        let before = queue.capacity();
        let fails = fails && self.bed.can_fail();
        if fails {
            self.bed.disturb("resize_cq", 1);
        }
        let result = queue.resize(entries);
        self.bed.calm();
        match result {
            Ok(()) => prop_assert!(!fails && queue.capacity() >= entries),
            Err(error) => {
                // A queue of Soft-RoCE would be lost.
                let unsupported = error.kind() == ErrorKind::Unsupported;
                prop_assert!(fails || unsupported && !self.bed.can_fail(), "{}", error);
                prop_assert_eq!(queue.capacity(), before);
            }
        }
        Ok(())
    }
}
