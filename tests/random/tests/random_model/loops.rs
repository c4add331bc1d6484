//! Random programs of loops: operations on channels and datagram ends that come and go, verbs that fail, and
//! false completions.

use std::mem::forget;
use std::sync::Arc;

use ibverbs::channel::{AnyBuffer, DatagramsBuilder};
use ibverbs::queue_pair::{GlobalRouteHeader, QueuePairEndpoint};
use ibverbs::{
    ChannelId, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest, SendWorkRequest,
    settings::MaxRnrRetries,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use crate::ledger::Ledger;
use crate::model::Model;
use crate::property_tests;

type Outcome = Result<(), TestCaseError>;

#[derive(Clone, Debug)]
enum Step {
    Send(Index, usize),
    Receive(Index, usize),
    Take(usize),
    /// Takes what has ended, and forgets it.
    Forget(usize),
    Run,
    Stranger(Index, usize, u8),
    Fail(&'static str, u32),
    Connect,
    /// Removes both ends, or one.
    Remove(Index, Option<usize>),
    End(usize),
    /// Sends from one datagram end to another one, which may be gone by then.
    SendTo(Index, Index),
    SendToGroup(Index),
    ReceiveAt(Index),
    Join(Index),
    Leave(Index),
    /// Posts a send without a destination.
    Misuse(Index),
    RemoveEnd(Index),
}

/// Programs with destroy verbs that fail, and things that are forgotten; or without.
fn program(leaking: bool) -> impl Strategy<Value = Vec<Step>> {
    let side = || 0..2_usize;
    let at = any::<Index>;
    let mut verbs =
        vec!["poll_cq", "modify_qp", "post_send", "post_recv", "ring_doorbell", "create_ah"];
    verbs.extend(["attach_mcast", "detach_mcast"]);
    verbs.extend(leaking.then_some(["destroy_qp", "destroy_ah"]).into_iter().flatten());
    let verb = prop::sample::select(verbs);
    let step = prop_oneof![
        12 => (at(), side()).prop_map(|(at, side)| Step::Send(at, side)),
        12 => (at(), side()).prop_map(|(at, side)| Step::Receive(at, side)),
        16 => side().prop_map(Step::Take),
        1 => side().prop_map(move |side| if leaking { Step::Forget(side) } else { Step::Take(side) }),
        6 => Just(Step::Run),
        4 => (at(), side(), any::<u8>()).prop_map(|(at, side, which)| Step::Stranger(at, side, which)),
        2 => (verb, 1..3_u32).prop_map(|(verb, times)| Step::Fail(verb, times)),
        2 => Just(Step::Connect),
        3 => (at(), prop::option::of(side())).prop_map(|(at, side)| Step::Remove(at, side)),
        3 => side().prop_map(Step::End),
        10 => (at(), at()).prop_map(|(from, to)| Step::SendTo(from, to)),
        4 => at().prop_map(Step::SendToGroup),
        10 => at().prop_map(Step::ReceiveAt),
        3 => at().prop_map(Step::Join),
        1 => at().prop_map(Step::Leave),
        1 => at().prop_map(Step::Misuse),
        2 => at().prop_map(Step::RemoveEnd),
    ];
    vec(step, 1..120)
}

const RECEIVED: u64 = 0;
const SENT: u64 = 1;
const DATAGRAM: u64 = 2;

struct World {
    loops: [Loop<'static, AnyBuffer>; 2],
    /// Connections: a channel of each loop, unless it was removed.
    pairs: Vec<[Option<ChannelId>; 2]>,
    /// Datagram ends: of which loop, and where they are or were.
    ends: Vec<(usize, ChannelId, QueuePairEndpoint)>,
    domain: Arc<ProtectionDomain<'static>>,
    ledger: Ledger,
}

impl World {
    fn connect(&mut self) {
        let prepared = [0, 1].map(|side| {
            let builder = self.loops[side].create_channel(&self.domain);
            let builder = builder.max_send_wr(4).max_recv_wr(4);
            builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap()
        });
        let [to_one, to_two] = [0, 1].map(|side| prepared[side].endpoint());
        let [one, two] = prepared;
        // A verb may fail, if the program wants.
        let (Ok(one), Ok(two)) = (one.handshake(to_two), two.handshake(to_one)) else { return };
        let numbers = [one.number(), two.number()];
        let [here, there] = &mut self.loops;
        if let (Ok(one), Ok(two)) = (here.add(one), there.add(two)) {
            numbers.into_iter().for_each(|number| self.ledger.add(number));
            self.pairs.push([Some(one), Some(two)]);
        }
    }

    fn at(&self, at: &Index, side: usize) -> Option<ChannelId> {
        if self.pairs.is_empty() { None } else { self.pairs[at.index(self.pairs.len())][side] }
    }

    /// Takes what ends next: a message, or another buffer.
    fn take(
        &mut self,
        side: usize,
    ) -> Result<Option<Result<PooledBuffer, AnyBuffer>>, TestCaseError> {
        let Ok(Some(ended)) = self.loops[side].next_ended() else { return Ok(None) };
        let (result, token) = (ended.result(), ended.token);
        if token == SENT {
            return Ok(Some(Err(ended.buffer)));
        }
        let message = ended.buffer.downcast::<PooledBuffer>();
        if let (Ok(success), Ok(message)) = (result, &message) {
            prop_assert_eq!(success.byte_len() as usize, message.len());
            let header = if token == DATAGRAM { GlobalRouteHeader::LEN } else { 0 };
            Ledger::check_message(&message[header..])?;
            if token == DATAGRAM {
                let (header, _) = GlobalRouteHeader::split(message).unwrap();
                let here = &self.loops[side];
                let sender = here.sender(ended.channel, &success, &header);
                let known = here.endpoint(ended.channel).map(|_| success.source_queue_pair());
                prop_assert_eq!(sender.ok().map(|sender| sender.number), known);
            }
        }
        Ok(Some(message))
    }

    fn step(&mut self, step: &Step) -> Outcome {
        match *step {
            Step::Send(ref at, side) => {
                let Some(channel) = self.at(at, side) else { return Ok(()) };
                let Some(buffer) = self.ledger.buffer() else { return Ok(()) };
                let _ = self.loops[side].post(channel, SendWorkRequest::new(buffer), SENT);
            }
            Step::Receive(ref at, side) => {
                let Some(channel) = self.at(at, side) else { return Ok(()) };
                let Some(buffer) = self.ledger.buffer() else { return Ok(()) };
                let _ = self.loops[side].post(channel, ReceiveWorkRequest::new(buffer), RECEIVED);
            }
            Step::Take(side) => drop(self.take(side)?),
            Step::Forget(side) => forget(self.take(side)?),
            Step::Run => _ = self.ledger.device.run(),
            Step::Stranger(ref at, side, which) => {
                let Some(channel) = self.at(at, side) else { return Ok(()) };
                let Some(endpoint) = self.loops[side].endpoint(channel) else { return Ok(()) };
                self.ledger.inject_stranger(self.loops[side].as_raw(), endpoint.num(), which);
            }
            Step::Fail(verb, times) => {
                self.ledger.device.fail(verb).errno(libc::EIO).times(times);
            }
            Step::Connect => self.connect(),
            Step::Remove(ref at, only) if !self.pairs.is_empty() => {
                let at = at.index(self.pairs.len());
                for side in 0..2 {
                    if only.is_none_or(|only| only == side)
                        && let Some(channel) = self.pairs[at][side].take()
                    {
                        let _ = self.loops[side].remove(channel);
                    }
                }
                if self.pairs[at] == [None; 2] {
                    self.pairs.swap_remove(at);
                }
            }
            Step::Remove(..) => {}
            Step::End(side) => {
                let end = DatagramsBuilder::new(&self.domain).address_handles(1);
                let end = end.max_send_wr(4).max_recv_wr(4);
                if let Ok(end) = self.loops[side].add_datagrams(end) {
                    let endpoint = self.loops[side].endpoint(end).unwrap();
                    self.ledger.add(endpoint.num());
                    self.ends.push((side, end, endpoint));
                }
            }
            ref step => self.datagram_step(step),
        }
        Ok(())
    }

    fn datagram_step(&mut self, step: &Step) {
        let ends = self.ends.len();
        if ends == 0 {
            return;
        }
        let of = |at: &Index| at.index(ends);
        let (Step::SendTo(at, _)
        | Step::SendToGroup(at)
        | Step::ReceiveAt(at)
        | Step::Join(at)
        | Step::Leave(at)
        | Step::Misuse(at)
        | Step::RemoveEnd(at)) = step
        else {
            unreachable!("it is of datagrams")
        };
        let (side, end, _) = self.ends[of(at)];
        let here = &mut self.loops[side];
        let group = here.group(end, "239.0.0.7".parse().unwrap());
        match step {
            Step::SendTo(..) | Step::SendToGroup(_) => {
                let to = match step {
                    Step::SendTo(_, to) => here.destination(end, &self.ends[of(to)].2),
                    _ => group,
                };
                let (Ok(to), Some(buffer)) = (to, self.ledger.buffer()) else { return };
                let _ = here.send_to(end, buffer, &to, SENT);
            }
            Step::ReceiveAt(_) => {
                let Some(buffer) = self.ledger.datagram() else { return };
                let _ = here.post(end, ReceiveWorkRequest::new(buffer), DATAGRAM);
            }
            Step::Join(_) | Step::Leave(_) => {
                let Ok(group) = group else { return };
                let _ = match step {
                    Step::Join(_) => here.join(end, &group),
                    _ => here.leave(end, &group),
                };
            }
            Step::Misuse(_) => {
                let Some(buffer) = self.ledger.buffer() else { return };
                assert!(here.post(end, SendWorkRequest::new(buffer), SENT).is_err());
            }
            _ => {
                let _ = here.remove(end);
                // Others may still send there.
                if ends > 8 {
                    self.ends.swap_remove(of(at));
                }
            }
        }
    }
}

/// Runs the program. Returns the number of buffers that did not come back.
fn run(steps: &[Step], bed: &Model) -> Result<usize, TestCaseError> {
    let domain = Arc::new(ProtectionDomain::new(Arc::new(bed.device.context())).unwrap());
    let ledger = Ledger::new(&bed.device, &domain);
    // Three connections fit, and two datagram ends.
    let loops = [(); 2].map(|()| Loop::new(domain.context_parent(), 40).unwrap());
    let mut world = World { loops, pairs: vec![], ends: vec![], domain, ledger };
    world.connect();
    for step in steps {
        world.step(step)?;
        world.ledger.check()?;
    }
    world.ledger.device.clear_faults();
    let World { loops, ledger, .. } = world;
    for each in loops {
        drop(each);
        ledger.check()?;
    }
    ledger.device.run();
    ledger.check()?;
    Ok(ledger.away())
}

proptest! {
    #![proptest_config(property_tests::config(75))]

    #[test]
    fn loops_in_any_order(steps in program(false), stale: bool) {
        let bed = Model::new(stale);
        prop_assert_eq!(run(&steps, &bed)?, 0);
        bed.device.assert_clean();
    }

    /// A loop leaks what is forgotten or cannot be destroyed, with what the device may use.
    #[test]
    fn forgotten_loops_in_any_order(steps in program(true), stale: bool) {
        run(&steps, &Model::new(stale))?;
    }
}
