//! All hosts of a simulation, and what happens next.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use super::clock::HostClock;
use super::process::Process;
use super::wire::Wire;
use crate::device::Device;
use crate::link::Time;
use crate::network::{Conditions, Network, nanoseconds};
use crate::random::Random;

pub(super) struct Inner {
    pub(super) network: Network,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) hosts: Vec<HostState>,
    pub(super) wire: Wire,
    /// Runtimes of hosts that have crashed. They are dropped where no task runs.
    dead: Vec<Arc<Process>>,
    /// The host whose program has panicked.
    pub(super) failed: Option<String>,
    /// Pairs of a sending and a receiving host.
    pub(super) cut: BTreeSet<(usize, usize)>,
    between: BTreeMap<(usize, usize), Conditions>,
    random: Option<Random>,
}

pub(super) struct HostState {
    pub(super) name: String,
    pub(super) clock: HostClock,
    pub(super) process: Option<Arc<Process>>,
    /// The network's numbers of its devices.
    devices: Vec<u64>,
}

/// The address of a host's streams and its first device.
pub(super) fn address(host: usize) -> IpAddr {
    let [high, low] = (host as u16).to_be_bytes();
    Ipv4Addr::new(10, 128 | high, low, 1).into()
}

impl Inner {
    pub(super) fn new(network: Network, seed: u64) -> Self {
        let state = State { random: Some(Random::new(seed)), ..State::default() };
        Self { network, state: Mutex::new(state) }
    }

    /// Adds a host, and returns its number.
    ///
    /// # Panics
    ///
    /// If there are 32,768 hosts already.
    pub(super) fn add_host(&self, name: &str) -> usize {
        let mut state = self.state();
        let number = state.hosts.len();
        assert!(number < 1 << 15, "a simulation has at most 32,768 hosts");
        let (name, clock) = (name.to_owned(), HostClock::new());
        state.hosts.push(HostState { name, clock, process: None, devices: Vec::new() });
        number
    }

    /// See [`World::random`](super::World::random).
    pub(super) fn random(&self, limit: u64) -> u64 {
        self.state().random.as_mut().map_or(0, |random| random.below(limit))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Time {
        self.network.0.now()
    }

    pub(super) fn clock(&self, host: usize) -> HostClock {
        self.state().hosts[host].clock.clone()
    }

    // ---- Called by the simulation, while no task runs ----

    /// Drops the tasks of hosts that have crashed.
    pub(super) fn bury(&self) {
        let dead = std::mem::take(&mut self.state().dead);
        drop(dead);
    }

    /// Ends all hosts.
    pub(super) fn end(&self) {
        let hosts = self.state().hosts.len();
        (0..hosts).for_each(|host| self.crash(host));
        self.bury();
    }

    pub(super) fn failed(&self) -> Option<String> {
        self.state().failed.take()
    }

    /// Gives each host that has something to do a turn. Returns whether there was one.
    pub(super) fn run_hosts(&self) -> bool {
        let (now, mut ran) = (self.now(), false);
        for host in 0.. {
            let Some(process) = self.state().hosts.get(host).map(|host| host.process.clone())
            else {
                return ran;
            };
            if let Some(process) = process
                && process.is_due(now)
            {
                process.run(now);
                ran = true;
            }
        }
        ran
    }

    /// When the next timer of a host may be due.
    pub(super) fn next_tick(&self) -> Option<Time> {
        let now = self.now();
        let state = self.state();
        let running = state.hosts.iter().filter(|host| host.process.is_some());
        running.map(|host| host.clock.next_tick(now)).min()
    }

    /// Lets the next thing happen, or the time pass until `tick` if that is earlier.
    pub(super) fn happen(&self, tick: Time) {
        let packet = self.network.0.next_due().unwrap_or(Time::MAX);
        let stream = self.state().wire.next_due().unwrap_or(Time::MAX);
        if packet.min(stream) > tick {
            self.network.0.set_time(tick);
        } else if packet <= stream {
            self.network.0.step(packet.max(self.now()));
        } else {
            self.network.0.set_time(stream);
            let others = self.network.conditions();
            let waker = {
                let State { wire, cut, between, random, .. } = &mut *self.state();
                wire.deliver(cut, |from, to| {
                    let conditions = between.get(&(from, to)).unwrap_or(&others);
                    arrival(stream, conditions, random)
                })
            };
            waker.into_iter().for_each(Waker::wake);
        }
    }

    // ---- Hosts ----

    /// Ends all programs of a host. Nothing that they still do has an effect.
    pub(super) fn crash(&self, host: usize) {
        let mut state = self.state();
        let of = &mut state.hosts[host];
        let devices = std::mem::take(&mut of.devices);
        let process = of.process.take();
        state.dead.extend(process);
        let ends = state.wire.ends_of(host);
        drop(state);
        ends.into_iter().for_each(|end| self.reset(end));
        devices.into_iter().for_each(|device| self.network.0.expel(device));
    }

    /// Cuts and conditions concern the devices that a host makes later, too.
    pub(super) fn add_device(&self, host: usize, device: &Device) {
        let Some(number) = device.membership().map(|member| member.number) else { return };
        let mut state = self.state();
        state.hosts[host].devices.push(number);
        let others = (0..state.hosts.len()).filter(|&other| other != host);
        for other in others {
            for (from, to) in [(host, other), (other, host)] {
                let conditions = state.between.get(&(from, to));
                for &peer in &state.hosts[other].devices {
                    let pair = if from == host { (number, peer) } else { (peer, number) };
                    if state.cut.contains(&(from, to)) {
                        self.network.0.set_cut(pair.0, pair.1, true);
                    }
                    if let Some(&conditions) = conditions {
                        self.network.0.set_between(pair.0, pair.1, conditions);
                    }
                }
            }
        }
    }

    /// Calls `each` with all pairs of devices of two hosts.
    fn each_pair(&self, from: usize, to: usize, each: impl Fn(u64, u64)) {
        let state = self.state();
        for &from in &state.hosts[from].devices {
            state.hosts[to].devices.iter().for_each(|&to| each(from, to));
        }
    }

    pub(super) fn set_cut(&self, from: usize, to: usize, is_cut: bool) {
        if is_cut {
            self.state().cut.insert((from, to));
        } else if self.state().cut.remove(&(from, to)) {
            let arrival = self.arrival(from, to);
            self.state().wire.release(from, to, arrival);
        }
        self.each_pair(from, to, |from, to| self.network.0.set_cut(from, to, is_cut));
    }

    pub(super) fn set_between(&self, from: usize, to: usize, conditions: Conditions) {
        self.state().between.insert((from, to), conditions);
        self.each_pair(from, to, |from, to| self.network.0.set_between(from, to, conditions));
    }

    /// When what is sent now arrives.
    pub(super) fn arrival(&self, from: usize, to: usize) -> Time {
        let others = self.network.conditions();
        let State { between, random, .. } = &mut *self.state();
        arrival(self.now(), between.get(&(from, to)).unwrap_or(&others), random)
    }
}

fn arrival(now: Time, conditions: &Conditions, random: &mut Option<Random>) -> Time {
    let jitter = nanoseconds(conditions.jitter).saturating_add(1);
    let jitter = random.as_mut().map_or(0, |random| random.below(jitter));
    now.saturating_add(nanoseconds(conditions.delay)).saturating_add(jitter)
}
