//! Two honest sides, and an attacker between them who changes, drops, repeats and injects frames in any state.
//!
//! The test tries the committed corpus and bytes of a seed, and `fuzz/` those that coverage leads to.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ibverbs::settings::{AckTimeout, MaxAckRetries};
use ibverbs_rails::{Event, PeerId, RailMemory, Transfer, TransferId};
use ibverbs_software::Network;

use super::frames::Frame;
use super::support::{Pipe, Queue, World};

/// How many steps the attacker takes.
const STEPS: usize = 120;
const INBOX: u8 = 10;

/// The frames of one direction, and what the attacker does to them.
#[derive(Default)]
struct Direction {
    /// Bytes that are no whole frame yet.
    rest: Vec<u8>,
    /// Acts on the next frames, in this order.
    acts: VecDeque<Act>,
    /// Goes behind the next frame.
    held: Option<Vec<u8>>,
}

#[derive(Clone, Copy)]
enum Act {
    Drop,
    Repeat,
    Change { at: u8, with: u8 },
    Shorten,
    Hold,
}

/// A number of the input; 0 if there is none left.
fn next(input: &mut &[u8]) -> u8 {
    let Some((&first, rest)) = input.split_first() else { return 0 };
    *input = rest;
    first
}

fn with_length(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// Words that are true at another time, or never.
fn word(input: &mut &[u8]) -> Frame {
    let (kind, number) = (next(input), next(input));
    let (pair, epoch, below) = (number & 3, u32::from(number >> 2), u64::from(number));
    let reason = String::from("no");
    match kind % 9 {
        0 => Frame::Taken { below },
        1 => Frame::Confirmed { below },
        2 => Frame::Abandoned { number: below },
        3 => Frame::Down { pair, epoch, reason },
        4 => Frame::DownSeen { pair, epoch },
        5 => Frame::Up { pair, epoch },
        6 => Frame::CannotOpen { pair, epoch, reason },
        7 => Frame::Refused { version: below as u32, reason },
        _ => Frame::Ready,
    }
}

/// The attacker.
struct Between {
    /// For each side: what it says, what the other hears, and what is done to that.
    lines: [(Queue, Queue, Direction); 2],
    /// All frames that went past.
    seen: Vec<Vec<u8>>,
    /// Whether it has told a side other slots than the peer's: then its writes may go anywhere.
    has_moved_slots: bool,
    has_acted: bool,
}

impl Between {
    fn new() -> ([Pipe; 2], Self) {
        let [near, far] =
            [[Queue::default(), Queue::default()], [Queue::default(), Queue::default()]];
        let pipe =
            |[input, output]: &[Queue; 2]| Pipe { input: input.clone(), output: output.clone() };
        let pipes = [pipe(&near), pipe(&far)];
        let [[near_hears, near_says], [far_hears, far_says]] = [near, far];
        let lines = [
            (near_says, far_hears, Direction::default()),
            (far_says, near_hears, Direction::default()),
        ];
        (pipes, Self { lines, seen: Vec::new(), has_moved_slots: false, has_acted: false })
    }

    /// Does the next thing of the input.
    fn act(&mut self, side: usize, world: &World, input: &mut &[u8]) {
        self.has_acted = true;
        let act = match next(input) % 11 {
            0 => Act::Drop,
            1 => Act::Repeat,
            2 => Act::Change { at: next(input), with: next(input) },
            3 => Act::Shorten,
            4 => Act::Hold,
            5 | 6 => return self.inject(side, &word(input).to_bytes()),
            7 => {
                let place = usize::from(next(input));
                let again = self.seen.get(place % self.seen.len().max(1)).cloned();
                return again.into_iter().for_each(|frame| self.inject(side, &frame));
            }
            kind @ (8 | 9) => {
                let (bytes, rest) = input.split_at(input.len().min(usize::from(next(input) % 32)));
                *input = rest;
                let bytes = if kind == 8 { with_length(bytes) } else { bytes.to_vec() };
                return self.inject(side, &bytes);
            }
            _ => {
                let rail = usize::from(next(input));
                let [one, other] = [&world.devices[0][rail % 2], &world.devices[1][rail % 2]];
                return match rail / 2 % 2 {
                    0 => world.network.partition(one, other),
                    _ => world.network.heal(one, other),
                };
            }
        };
        self.lines[side].2.acts.push_back(act);
    }

    fn inject(&mut self, side: usize, bytes: &[u8]) {
        self.has_moved_slots |= bytes.get(4) == Some(&INBOX);
        self.lines[side].1.lock().unwrap().bytes.extend(bytes);
    }

    /// Takes over what was said.
    fn pass(&mut self) {
        for (says, hears, direction) in &mut self.lines {
            let Direction { rest, acts, held } = direction;
            let mut says = says.lock().unwrap();
            rest.extend(says.bytes.drain(..));
            let is_closed = says.is_closed;
            drop(says);
            let mut hears = hears.lock().unwrap();
            let mut pass = |bytes: &[u8]| hears.bytes.extend(bytes);
            while let Some((length, after)) = rest.split_first_chunk()
                && let Some(body) = after.get(..u32::from_be_bytes(*length) as usize)
            {
                let (mut body, end) = (body.to_vec(), 4 + body.len());
                rest.drain(..end);
                self.seen.push(with_length(&body));
                let act = acts.pop_front();
                if matches!(act, Some(Act::Change { .. } | Act::Shorten)) {
                    self.has_moved_slots |= body.first() == Some(&INBOX);
                }
                match act {
                    Some(Act::Drop) => continue,
                    Some(Act::Repeat) => pass(&with_length(&body)),
                    Some(Act::Change { at, with }) => {
                        let at = usize::from(at) % body.len();
                        body[at] ^= with;
                        self.has_moved_slots |= body[0] == INBOX;
                    }
                    Some(Act::Shorten) => drop(body.pop()),
                    Some(Act::Hold) => {
                        let before = held.replace(with_length(&body));
                        before.iter().for_each(|frame| pass(frame));
                        continue;
                    }
                    None => {}
                }
                pass(&with_length(&body));
                held.take().iter().for_each(|frame| pass(frame));
            }
            hears.is_closed |= is_closed;
        }
    }
}

/// One side's view of a connection.
#[derive(Default)]
struct Seen {
    messages: Vec<u16>,
    tags: Vec<u16>,
    /// For each transfer: whether it is a message, its number, and how it has ended.
    posted: HashMap<TransferId, (bool, u16, Option<bool>)>,
    is_connected: bool,
    is_gone: bool,
}

impl Seen {
    fn notes(&mut self, event: Event) {
        assert!(!self.is_gone, "after the end: {event:?}");
        match event {
            Event::Connected(_) => assert!(!std::mem::replace(&mut self.is_connected, true)),
            Event::Disconnected { .. } => self.is_gone = true,
            Event::Ended { transfer, result, .. } => {
                let end = self.posted.get_mut(&transfer).expect("it was posted");
                assert_eq!(end.2.replace(result.is_ok()), None, "it ends once");
            }
            Event::Message { bytes, .. } => {
                assert!(self.is_connected);
                // Whoever moves slots may bring anything.
                self.messages.extend(bytes.try_into().map(u16::from_le_bytes));
            }
            Event::Notified { tag, .. } => {
                assert!(self.is_connected);
                self.tags.push(tag);
            }
            _ => {}
        }
    }
}

fn peer_of(event: &Event) -> PeerId {
    match *event {
        Event::Connected(peer)
        | Event::Disconnected { peer, .. }
        | Event::Ended { peer, .. }
        | Event::Message { peer, .. }
        | Event::Notified { peer, .. }
        | Event::RailDown { peer, .. }
        | Event::RailUp { peer, .. } => peer,
        _ => panic!("an event of another kind: {event:?}"),
    }
}

/// Both sides' programs.
struct Programs {
    world: World,
    /// The peers by side and connection. The attacker is on the first connection only.
    peers: [[PeerId; 2]; 2],
    seen: [[Seen; 2]; 2],
    memory: [RailMemory; 2],
}

impl Programs {
    /// Time passes. The programs take their events, or not.
    fn step(&mut self, between: &mut Between, takes_events: bool) {
        self.world.network.advance(self.world.step);
        between.pass();
        let now = self.world.now();
        for (side, rails) in self.world.sides.iter_mut().enumerate() {
            rails.turn(now);
            if !takes_events {
                continue;
            }
            let events: Vec<_> = std::iter::from_fn(|| rails.next_event()).collect();
            for peer in self.peers[side] {
                let of_peer = || events.iter().filter(|&event| peer_of(event) == peer);
                let messages = of_peer().filter(|event| matches!(event, Event::Message { .. }));
                let tags = of_peer().filter(|event| matches!(event, Event::Notified { .. }));
                let is_rail =
                    |event: &&Event| matches!(event, Event::RailUp { .. } | Event::RailDown { .. });
                assert!(messages.count() <= 32 && tags.count() <= 48);
                assert!(of_peer().filter(is_rail).count() <= 4);
            }
            for event in events {
                let peer = peer_of(&event);
                let place = self.peers[side].iter().position(|&other| other == peer);
                self.seen[side][place.expect("a peer of ours")].notes(event);
            }
        }
    }

    /// Each side sends a message on each connection, and the first side writes to the other's memory.
    fn post(&mut self, number: u16) {
        for side in 0..2 {
            for place in 0..2 {
                let (peer, seen) = (self.peers[side][place], &mut self.seen[side][place]);
                if !seen.is_connected || seen.is_gone {
                    continue;
                }
                let rails = &mut self.world.sides[side];
                let message = rails.send(peer, number.to_le_bytes());
                seen.posted.extend(message.map(|id| (id, (true, number, None))));
                if side == 0 {
                    let [ours, theirs] = &self.memory;
                    let write = Transfer::write(ours.slice(..).unwrap(), theirs.remote());
                    seen.posted.extend(
                        rails
                            .post(peer, write.notify(number))
                            .map(|id| (id, (false, number, None))),
                    );
                }
            }
        }
    }
}

/// Whatever the attacker does to the frames of two honest sides: neither side panics, waits without end, or keeps more than
/// is allowed; each transfer and each message ends once; after the end of a peer nothing of it comes; and another connection of
/// the same two sides does not suffer.
///
/// Returns whether both sides were connected all the same.
pub(crate) fn frames_between(mut input: &[u8]) -> bool {
    let network =
        Network::builder().manual().trace_bytes(0).delay(Duration::from_micros(2)).build();
    let mut world = World::unconnected([2, 2], network, |rails| {
        let (timeout, retries) = (AckTimeout::new(9).unwrap(), MaxAckRetries::new(1).unwrap());
        rails.peers(2).longest_message(64).ack_timeout(timeout).max_ack_retries(retries)
    });
    world.step = Duration::from_micros(200);
    let access = ibverbs::AccessFlags::REMOTE_WRITE;
    let memory = world.sides.each_ref().map(|side| side.allocate(100_000, access).unwrap());
    let ([near, far], mut between) = Between::new();
    let [other_near, other_far] = Pipe::pair();
    let [one, two] = &mut world.sides;
    let peers = [
        [one.connect_over(near).unwrap(), one.connect_over(other_near).unwrap()],
        [two.accept_over(far).unwrap(), two.accept_over(other_far).unwrap()],
    ];
    let mut programs = Programs { world, peers, seen: Default::default(), memory };

    let mut wait = None;
    for step in 0..STEPS {
        while !input.is_empty() {
            let (at, side) = *wait.get_or_insert_with(|| {
                let first = next(&mut input);
                (step + usize::from(first & 0x3f), usize::from(first >> 6 & 1))
            });
            if at > step {
                break;
            }
            wait = None;
            between.act(side, &programs.world, &mut input);
        }
        programs.step(&mut between, step % 4 == 0);
        if step % 8 == 0 {
            programs.post(step as u16);
        }
    }

    // The attacker is gone, and all rails work.
    programs.world.network.heal_all();
    between.lines.iter_mut().for_each(|(.., direction)| *direction = Direction::default());
    programs.world.step = Duration::from_millis(1);
    let is_over = |seen: &Seen| seen.posted.values().all(|(.., end)| end.is_some());
    // A transfer that succeeded has arrived. One that failed with all rails may have.
    let has_all = |programs: &Programs, place: usize| {
        let [one, two] = [&programs.seen[0][place], &programs.seen[1][place]];
        let has_got = |got: &Seen, sent: &Seen| {
            sent.posted.values().all(|(is_message, number, end)| match (end, is_message) {
                (None, _) => false,
                (Some(false), _) => true,
                (Some(true), true) => got.messages.contains(number),
                (Some(true), false) => got.tags.contains(number),
            })
        };
        has_got(two, one) && has_got(one, two)
    };
    let mut steps = 0;
    while !has_all(&programs, 1) && !between.has_moved_slots {
        programs.step(&mut between, true);
        steps += 1;
        assert!(steps < 20_000, "the other connection stands");
    }
    if !between.has_moved_slots {
        for side in &programs.seen {
            assert!(side[1].is_connected && !side[1].is_gone);
            for numbers in [&side[1].messages, &side[1].tags] {
                let mut once = numbers.clone();
                once.sort_unstable();
                once.dedup();
                assert_eq!(once.len(), numbers.len(), "none comes twice: {numbers:?}");
            }
            assert!(side[1].messages.is_sorted(), "{:?}", side[1].messages);
        }
    }
    if !between.has_acted {
        assert!(has_all(&programs, 0), "nothing was done to it");
    }
    for (side, peers) in programs.peers.into_iter().enumerate() {
        programs.world.sides[side].remove(peers[0]);
    }
    programs.step(&mut between, true);
    for side in &programs.seen {
        assert!(is_over(&side[0]), "each ends once");
    }
    let World { sides, devices, .. } = programs.world;
    drop((sides, programs.memory));
    for device in devices.iter().flatten() {
        let left = device.live_objects();
        assert_eq!((left.queue_pairs, left.memory_regions), (0, 0));
    }
    programs.seen.iter().all(|side| side[0].is_connected)
}
