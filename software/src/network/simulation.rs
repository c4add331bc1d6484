//! The network itself: packets under way, and what happens next.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::builder::NetworkBuilder;
use super::conditions::{Conditions, Random};
use super::link::VirtualClock;
use super::sleep::Sleepers;
use super::trace::{PacketFate, Trace, TracedPacket};
use super::{START, nanoseconds};
use crate::device::Shared;
use crate::link::Clock;
use crate::link::Time;
use crate::wire::{PORT, Packet};

/// The headers in front of each packet: Ethernet, IPv4 and UDP. They count for the bandwidth.
const HEADERS: u64 = 14 + 20 + 8;

/// The limit of the random time for which a packet is held back is at least this long.
const HELD_BACK: Time = 10_000;

#[derive(Debug)]
pub(crate) struct Simulation {
    state: Mutex<State>,
    made: Instant,
    pub(super) clock: Arc<VirtualClock>,
    /// Held while something happens: one thing after the other. Taken before an engine's lock, which is
    /// taken before that of `state`.
    driving: Mutex<()>,
    pub(super) sleepers: Sleepers,
    pub(super) manual: bool,
    /// A simulation of a whole program drives it: who polls in vain need not let others run.
    is_driven: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct State {
    seed: u64,
    queue: usize,
    pub(super) conditions: Conditions,
    members: BTreeMap<u64, Member>,
    next_member: u64,
    /// The random numbers for each source and destination.
    random: BTreeMap<(IpAddr, IpAddr), Random>,
    /// By the time of delivery, and the order in which they were sent.
    under_way: BTreeMap<(Time, u64), UnderWay>,
    sent: u64,
    /// Times of alarms: the clock stops at each, even if no packet arrives then.
    alarms: BTreeSet<Time>,
    /// How many of them have passed.
    pub(super) rung: u64,
    /// The devices between which all packets are lost: from, to.
    pub(super) cut: BTreeSet<(u64, u64)>,
    /// How packets from one device to another are treated, where that differs.
    pub(super) between: BTreeMap<(u64, u64), Conditions>,
    /// How many devices have had each address: a later one begins with other random numbers.
    joined: BTreeMap<IpAddr, u64>,
    pub(super) trace: Trace,
}

#[derive(Debug)]
struct Member {
    addresses: Vec<IpAddr>,
    groups: BTreeSet<IpAddr>,
    device: Weak<Shared>,
    /// The time at which its link is free: all packets that were sent so far have left the device.
    free_at: Time,
    /// Decides the first packet sequence numbers of its queue pairs.
    random: Random,
}

#[derive(Debug)]
struct UnderWay {
    sender: u64,
    from: IpAddr,
    to: IpAddr,
    bytes: Vec<u8>,
    /// Its number in the trace.
    traced: u64,
}

/// A device's place in a network.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) network: Arc<Simulation>,
    pub(crate) number: u64,
}

/// What happens next.
enum Next {
    Packet(UnderWay),
    Alarm,
    Timer(Arc<Shared>),
}

impl Simulation {
    pub(super) fn new(settings: NetworkBuilder) -> Self {
        let state = State {
            seed: settings.seed,
            queue: settings.queue,
            conditions: settings.conditions,
            members: BTreeMap::new(),
            next_member: 1,
            random: BTreeMap::new(),
            under_way: BTreeMap::new(),
            sent: 0,
            alarms: BTreeSet::new(),
            rung: 0,
            cut: BTreeSet::new(),
            between: BTreeMap::new(),
            joined: BTreeMap::new(),
            trace: Trace::new(settings.trace_bytes),
        };
        Self {
            state: Mutex::new(state),
            made: Instant::now(),
            clock: Arc::new(VirtualClock::new()),
            driving: Mutex::new(()),
            sleepers: Sleepers::default(),
            manual: settings.manual,
            is_driven: AtomicBool::new(false),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn clock(&self) -> Arc<VirtualClock> {
        self.clock.clone()
    }

    pub(crate) fn sleepers(&self) -> &Sleepers {
        &self.sleepers
    }

    #[cfg(any(test, feature = "tokio"))]
    pub(crate) fn set_driven(&self) {
        self.is_driven.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_driven(&self) -> bool {
        self.is_driven.load(Ordering::Relaxed)
    }

    pub(crate) fn is_manual(&self) -> bool {
        self.manual
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    pub(crate) fn set_time(&self, time: Time) {
        self.clock.set(time);
    }

    /// The time, as a moment of the machine's clock. It will reach `at`, which some thread waits for.
    pub(crate) fn time(&self, at: Option<Instant>) -> Instant {
        let now = self.now();
        if let Some(at) = at.map(|at| nanoseconds(at.saturating_duration_since(self.made)))
            && at.saturating_add(START) > now
        {
            self.state().alarms.insert(at.saturating_add(START));
            self.sleepers.wake();
        }
        // 584 years are too much for no machine's clock.
        self.made + super::duration(now)
    }

    // ---- Devices ----

    /// Adds a device; without addresses, it gets a free one.
    pub(crate) fn join(
        self: &Arc<Self>,
        ports: &mut Vec<Vec<IpAddr>>,
    ) -> io::Result<Arc<Membership>> {
        let mut state = self.state();
        if ports.is_empty() {
            ports.push(vec![state.free_address()?]);
        }
        let addresses = ports.concat();
        state.check_free(0, &addresses)?;
        let number = state.next_member;
        state.next_member += 1;
        let joined = state.joined.entry(addresses[0]).or_insert(0);
        let seed = joined.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        *joined += 1;
        let random = Random::between(state.seed ^ seed, addresses[0], addresses[0]);
        let (groups, device) = (BTreeSet::new(), Weak::new());
        state.members.insert(number, Member { addresses, groups, device, free_at: 0, random });
        drop(state);
        Ok(Arc::new(Membership { network: self.clone(), number }))
    }

    /// Packets can reach the device from now on.
    pub(crate) fn attach(&self, number: u64, device: &Arc<Shared>) {
        if let Some(member) = self.state().members.get_mut(&number) {
            member.device = Arc::downgrade(device);
        }
    }

    /// Nothing reaches the device from now on, and it sends nothing.
    pub(crate) fn expel(&self, number: u64) {
        let mut state = self.state();
        state.members.remove(&number);
        let is_other = |&(from, to): &(u64, u64)| from != number && to != number;
        state.cut.retain(is_other);
        state.between.retain(|pair, _| is_other(pair));
    }

    pub(crate) fn set_cut(&self, from: u64, to: u64, is_cut: bool) {
        let cut = &mut self.state().cut;
        if is_cut {
            cut.insert((from, to))
        } else {
            cut.remove(&(from, to))
        };
    }

    pub(crate) fn set_between(&self, from: u64, to: u64, conditions: Conditions) {
        self.state().between.insert((from, to), conditions);
    }

    /// How long any packet is under way at least.
    pub(super) fn latency(&self) -> Time {
        let state = self.state();
        let all = state.between.values().chain([&state.conditions]);
        nanoseconds(all.map(|conditions| conditions.delay).min().unwrap_or_default())
    }

    pub(super) fn change_groups(&self, number: u64, change: impl FnOnce(&mut BTreeSet<IpAddr>)) {
        if let Some(member) = self.state().members.get_mut(&number) {
            change(&mut member.groups);
        }
    }

    // ---- Packets ----

    pub(super) fn send(&self, sender: u64, packets: &mut [Packet]) {
        let now = self.now();
        let mut state = self.state();
        for packet in packets {
            if let Some(addresses) = packet.addresses {
                state.send(now, sender, addresses, &packet.bytes);
            }
        }
    }

    pub(super) fn replay(&self, packet: &TracedPacket) {
        let now = self.now();
        let mut state = self.state();
        let at = now.saturating_add(nanoseconds(state.conditions.delay));
        let sender = state.member_at(packet.from()).unwrap_or(0);
        state.put(now, at, sender, (packet.from(), packet.to()), packet.bytes(), true);
        drop(state);
        self.sleepers.wake();
    }

    /// Whether there is no packet under way, and no timer runs.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        state.under_way.is_empty() && state.alarms.is_empty() && state.next_timer().is_none()
    }

    /// Lets the next thing happen that is due by `until`; returns whether there was one.
    pub(crate) fn step(&self, until: Time) -> bool {
        let _driving = self.driving.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(next) = self.next(until) else { return false };
        match next {
            Next::Timer(device) => {
                let mut engine = device.lock_to_drive();
                engine.advance();
            }
            Next::Packet(packet) => self.deliver(&packet),
            Next::Alarm => self.sleepers.wake(),
        }
        true
    }

    /// The time of what happens next.
    #[cfg(any(test, feature = "tokio"))]
    pub(crate) fn next_due(&self) -> Option<Time> {
        let state = self.state();
        let packet = state.under_way.first_key_value().map(|(key, _)| key.0);
        let timer = state.next_timer().map(|(due, _)| due);
        [packet, timer, state.alarms.first().copied()].into_iter().flatten().min()
    }

    /// Takes what is next, and sets the clock to its time.
    fn next(&self, until: Time) -> Option<Next> {
        let mut state = self.state();
        let packet = state.under_way.first_key_value().map(|(&key, _)| key);
        let timer = state.next_timer();
        // A thread that waits for a moment finds everything done that is due by then.
        let others = packet.iter().map(|key| key.0).chain(timer.iter().map(|(due, _)| *due)).min();
        if let Some(&at) = state.alarms.first()
            && others.is_none_or(|other| at < other)
        {
            if at > until {
                return None;
            }
            state.alarms.pop_first();
            state.rung += 1;
            self.set_time(at);
            return Some(Next::Alarm);
        }
        // Packets arrive before timers of the same moment expire.
        let packet_first = match (packet, &timer) {
            (Some((at, _)), Some((due, _))) => at <= (*due).max(self.now()),
            (packet, _) => packet.is_some(),
        };
        if packet_first {
            let key = packet.filter(|key| key.0 <= until)?;
            let packet = state.under_way.remove(&key)?;
            self.set_time(key.0);
            return Some(Next::Packet(packet));
        }
        let (due, device) = timer?;
        if due > until {
            return None;
        }
        self.set_time(due);
        Some(Next::Timer(device))
    }

    fn deliver(&self, packet: &UnderWay) {
        let mut state = self.state();
        let (members, fate) = state.receivers(packet, self.now());
        state.trace.set_fate(packet.traced, fate);
        drop(state);
        for device in members {
            let mut engine = device.lock_to_drive();
            engine.receive((packet.from, PORT), packet.to, &packet.bytes);
        }
    }
}

impl State {
    fn member_at(&self, address: IpAddr) -> Option<u64> {
        let mut members = self.members.iter();
        members.find(|(_, member)| member.addresses.contains(&address)).map(|(number, _)| *number)
    }

    /// Fails if another device than `number` has one of the addresses, or one is in it twice.
    fn check_free(&self, number: u64, addresses: &[IpAddr]) -> io::Result<()> {
        for (i, address) in addresses.iter().enumerate() {
            let taken = self.member_at(*address).is_some_and(|owner| owner != number);
            if taken || addresses[..i].contains(address) {
                let reason = format!("{address}: a device of this network has it");
                return Err(io::Error::new(io::ErrorKind::AddrInUse, reason));
            }
        }
        Ok(())
    }

    fn free_address(&self) -> io::Result<IpAddr> {
        let mut candidates = (1..=0xff_ffff_u32).map(|host| {
            let [_, b, c, d] = host.to_be_bytes();
            IpAddr::V4(Ipv4Addr::new(10, b, c, d))
        });
        let free = candidates.find(|address| self.member_at(*address).is_none());
        free.ok_or_else(|| io::ErrorKind::AddrInUse.into())
    }

    /// The earliest timer of a device; of two at one time, that of the device that was made first.
    fn next_timer(&self) -> Option<(Time, Arc<Shared>)> {
        let mut next: Option<(Time, Arc<Shared>)> = None;
        for member in self.members.values() {
            let Some(device) = member.device.upgrade() else { continue };
            let Some(due) = device.driver().due() else { continue };
            if next.as_ref().is_none_or(|(earliest, _)| due < *earliest) {
                next = Some((due, device));
            }
        }
        next
    }

    fn conditions_to(&self, sender: u64, to: IpAddr) -> Conditions {
        if self.between.is_empty() {
            return self.conditions;
        }
        let receiver = self.member_at(to);
        let between = receiver.and_then(|receiver| self.between.get(&(sender, receiver)));
        between.copied().unwrap_or(self.conditions)
    }

    fn send(&mut self, now: Time, sender: u64, addresses: (IpAddr, IpAddr), bytes: &[u8]) {
        let conditions = self.conditions_to(sender, addresses.1);
        let seed = self.seed;
        // A device that has left sends nothing.
        let Some(member) = self.members.get_mut(&sender) else { return };
        let mut departure = now;
        if let Some(bandwidth) = conditions.bandwidth {
            let bits = (bytes.len() as u64 + HEADERS) as u128 * 1_000_000_000;
            let takes = bits / u128::from(bandwidth.max(1));
            let takes = Time::try_from(takes).unwrap_or(Time::MAX);
            departure = departure.max(member.free_at).saturating_add(takes);
        }
        member.free_at = departure;
        let random = self.random.entry(addresses);
        let random = random.or_insert_with(|| Random::between(seed, addresses.0, addresses.1));
        // Each packet takes the same random numbers, so that one condition does not change
        // what the others do.
        let lost = random.chance(conditions.loss);
        let twice = random.chance(conditions.duplicate);
        let held_back = random.chance(conditions.reorder);
        let corrupt = random.chance(conditions.corrupt);
        let delay = nanoseconds(conditions.delay);
        let jitter = nanoseconds(conditions.jitter).saturating_add(1);
        let jitters = [random.below(jitter), random.below(jitter)];
        let extra = 1 + random.below(delay.saturating_mul(8).max(HELD_BACK));
        let bit = random.below(8 * bytes.len() as u64) as usize;

        let mut at = departure.saturating_add(delay).saturating_add(jitters[0]);
        if held_back {
            at = at.saturating_add(extra);
        }
        if lost {
            self.trace.push(now, addresses, bytes, false, PacketFate::Lost);
        } else if corrupt && !bytes.is_empty() {
            let mut changed = bytes.to_vec();
            changed[bit / 8] ^= 1 << (bit % 8);
            self.put(now, at, sender, addresses, &changed, false);
        } else {
            self.put(now, at, sender, addresses, bytes, false);
        }
        if twice {
            let again = departure.saturating_add(delay).saturating_add(jitters[1]);
            self.put(now, again.max(at).saturating_add(1), sender, addresses, bytes, true);
        }
    }

    /// Puts a packet on its way.
    fn put(
        &mut self,
        now: Time,
        at: Time,
        sender: u64,
        (from, to): (IpAddr, IpAddr),
        bytes: &[u8],
        again: bool,
    ) {
        let full = self.under_way.len() >= self.queue;
        let fate = if full { PacketFate::QueueFull } else { PacketFate::UnderWay };
        let traced = self.trace.push(now, (from, to), bytes, again, fate);
        if full {
            return;
        }
        // A partition also loses a packet that would arrive after the partition has ended.
        let cut = |to: u64| self.cut.contains(&(sender, to));
        if !to.is_multicast() && self.member_at(to).is_some_and(cut) {
            self.trace.set_fate(traced, PacketFate::Partitioned);
            return;
        }
        self.sent += 1;
        let packet = UnderWay { sender, from, to, bytes: bytes.to_vec(), traced };
        self.under_way.insert((at, self.sent), packet);
    }

    /// The devices that a packet reaches, and what happens to it.
    fn receivers(&self, packet: &UnderWay, now: Time) -> (Vec<Arc<Shared>>, PacketFate) {
        let mut devices = Vec::new();
        let mut cut = false;
        for (&number, member) in &self.members {
            if !member.addresses.contains(&packet.to) && !member.groups.contains(&packet.to) {
                continue;
            }
            if self.cut.contains(&(packet.sender, number)) {
                cut = true;
            } else if let Some(device) = member.device.upgrade() {
                devices.push(device);
            }
        }
        let fate = match (devices.is_empty(), cut) {
            (false, _) => PacketFate::Delivered(super::duration(now)),
            (true, true) => PacketFate::Partitioned,
            (true, false) => PacketFate::NoReceiver,
        };
        (devices, fate)
    }

    /// Changes the addresses of a device.
    fn move_to(&mut self, number: u64, addresses: Vec<IpAddr>) -> io::Result<()> {
        self.check_free(number, &addresses)?;
        if let Some(member) = self.members.get_mut(&number) {
            member.addresses = addresses;
        }
        Ok(())
    }
}

impl Membership {
    /// Called when the device is freed. (It is no `Drop`: the engine, which holds this, may be dropped with the
    /// network's lock held.)
    pub(crate) fn leave(&self) {
        self.network.expel(self.number);
    }

    /// A number that the seed decides; each call gives another.
    pub(crate) fn first_psn(&self) -> u32 {
        let mut state = self.network.state();
        let member = state.members.get_mut(&self.number);
        member.map_or(0, |member| member.random.below(1 << 24) as u32)
    }

    /// Changes the addresses of the device.
    pub(crate) fn set_addresses(&self, addresses: Vec<IpAddr>) -> io::Result<()> {
        self.network.state().move_to(self.number, addresses)
    }
}
