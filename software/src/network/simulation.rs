//! The network itself: what happens next.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::clock::{LAST, START, VirtualClock, duration, nanoseconds};
use super::conditions::Conditions;
use super::member::Member;
use super::settings::Settings;
use super::sleepers::Sleepers;
use super::state::{State, UnderWay};
use super::trace::{PacketFate, TracedPacket};
use crate::link::Clock;
use crate::link::Time;
use crate::wire::{PORT, Packet};

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
    /// A simulation of a whole program drives it: a thread that polls in vain need not let others run.
    is_driven: AtomicBool,
}

/// A device's place in a network.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) network: Arc<Simulation>,
    pub(crate) number: u64,
}

/// When a device's timers are to run.
type Timer = (Time, Arc<dyn Member>);

/// The next event.
enum Next {
    Packet(UnderWay),
    Alarm,
    /// The connection manager's timers run too, unless they wait.
    Timer(Arc<dyn Member>, bool),
}

impl Simulation {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            state: Mutex::new(State::new(&settings)),
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

    /// The time when this has passed.
    pub(super) fn after(&self, time: Duration) -> Time {
        self.now().saturating_add(nanoseconds(time)).min(LAST)
    }

    pub(crate) fn set_time(&self, time: Time) {
        self.clock.set(time);
    }

    /// The time, as a moment of the machine's clock. It will reach `at`, which some thread waits for, if it can.
    pub(crate) fn time(&self, at: Option<Instant>) -> Instant {
        let now = self.now();
        if let Some(at) = at.map(|at| nanoseconds(at.saturating_duration_since(self.made)))
            && (now..LAST).contains(&at)
        {
            self.state().alarms.insert(at + START);
            self.sleepers.wake();
        }
        // 584 years are too much for no machine's clock.
        self.made + duration(now)
    }

    // ---- Devices ----

    /// Adds a device; without addresses, it gets a free one.
    pub(crate) fn join(
        self: &Arc<Self>,
        ports: &mut Vec<Vec<IpAddr>>,
    ) -> io::Result<Arc<Membership>> {
        self.state().conditions.check()?;
        let number = self.state().join(ports)?;
        Ok(Arc::new(Membership { network: self.clone(), number }))
    }

    /// Packets can reach the device from now on.
    pub(crate) fn attach(&self, number: u64, device: &Arc<impl Member + 'static>) {
        if let Some(member) = self.state().members.get_mut(&number) {
            let device: Arc<dyn Member> = device.clone();
            member.device = Some(Arc::downgrade(&device));
        }
    }

    /// Nothing reaches the device from now on, and it sends nothing.
    pub(crate) fn expel(&self, number: u64) {
        self.state().expel(number);
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
        self.state().latency()
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
        let at = self.after(state.conditions.delay);
        let sender = state.member_at(packet.from()).unwrap_or(0);
        state.put(now, at, sender, (packet.from(), packet.to()), packet.bytes(), true);
        drop(state);
        self.sleepers.wake();
    }

    /// Whether there is no packet under way, and no timer runs.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        state.under_way.is_empty() && state.alarms.is_empty() && self.next_timer(&state).0.is_none()
    }

    /// Lets the next thing happen that is due by `until`; returns whether there was one.
    pub(crate) fn step(&self, until: Time) -> bool {
        let _driving = self.driving.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(next) = self.next(until) else { return false };
        match next {
            Next::Timer(device, waits) => device.advance(waits),
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
        let timer = self.next_timer(&state).0.map(|(due, _)| due);
        [packet, timer, state.alarms.first().copied()].into_iter().flatten().min()
    }

    /// The next timer, and whether those of the connection manager wait: while a program has yet to decide about a connection.
    /// Virtual time would else pass all its repetitions by, before the program's thread has woken. A
    /// simulation of a whole program lets time pass only when its hosts are done.
    fn next_timer(&self, state: &State) -> (Option<Timer>, bool) {
        let waits = !self.is_driven() && state.a_program_is_to_decide();
        (state.next_timer(waits), waits)
    }

    /// Takes what is next, and sets the clock to its time.
    fn next(&self, until: Time) -> Option<Next> {
        let mut state = self.state();
        let packet = state.under_way.first_key_value().map(|(&key, _)| key);
        let (timer, waits) = self.next_timer(&state);
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
        Some(Next::Timer(device, waits))
    }

    fn deliver(&self, packet: &UnderWay) {
        let mut state = self.state();
        let (members, fate) = state.receivers(packet, self.now());
        state.trace.set_fate(packet.traced, fate);
        let is_for_nobody = fate == PacketFate::NoReceiver && packet.to.is_multicast();
        let sender = if is_for_nobody { state.device(packet.sender) } else { None };
        drop(state);
        if let Some(sender) = sender {
            sender.reached_nobody(packet.to);
        }
        for device in members {
            device.receive((packet.from, PORT), packet.to, &packet.bytes);
        }
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

    /// Decides the numbers of the device's connections. It takes none of the numbers that `first_psn` gives.
    pub(crate) fn seed(&self) -> u64 {
        let state = self.network.state();
        let member = state.members.get(&self.number);
        member.map_or(0, |member| member.random.clone().next())
    }

    /// Changes the addresses of the device.
    pub(crate) fn set_addresses(&self, addresses: Vec<IpAddr>) -> io::Result<()> {
        self.network.state().move_to(self.number, addresses)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::network::Network;

    #[test]
    fn at_the_last_moment_of_a_run_packets_arrive_and_then_alarms_ring() {
        let network = Simulation::new(Network::builder().0);
        let due = START + 5;
        network.time(Some(network.made + Duration::from_nanos(5)));
        let nowhere = IpAddr::from(Ipv4Addr::LOCALHOST);
        network.state().put(START, due, 1, (nowhere, nowhere), b"", false);
        let look = || {
            let state = network.state();
            (state.under_way.len(), state.alarms.len(), state.rung)
        };
        assert!(!network.step(due - 1));
        assert_eq!((look(), network.now()), ((1, 1, 0), START));
        assert!(network.step(due));
        assert_eq!((look(), network.now()), ((0, 1, 0), due));
        assert!(!network.step(due - 1));
        assert!(network.step(due));
        assert_eq!((look(), network.now()), ((0, 0, 1), due));
        assert!(!network.step(Time::MAX) && network.is_idle());
        // What is to come later than at the end comes then.
        network.state().put(due, Time::MAX, 1, (nowhere, nowhere), b"", false);
        assert!(network.step(Time::MAX));
        assert_eq!(network.now(), LAST);
    }
}
