//! The devices of a network, and the packets that are under way between them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Weak};

use super::clock::{LAST, duration, nanoseconds};
use super::conditions::Conditions;
use super::member::Member as Device;
use super::settings::Settings;
use super::trace::{PacketFate, Trace};
use crate::link::Time;
use crate::random::Random;

/// The headers in front of each packet: Ethernet, IPv4 and UDP. They count for the bandwidth.
const HEADERS: u64 = 14 + 20 + 8;

/// The limit of the random time for which a packet is held back is at least this long.
const HELD_BACK: Time = 10_000;

#[derive(Debug)]
pub(super) struct State {
    seed: u64,
    queue: usize,
    pub(super) conditions: Conditions,
    pub(super) members: BTreeMap<u64, Member>,
    next_member: u64,
    /// The random numbers for each source and destination.
    random: BTreeMap<(IpAddr, IpAddr), Random>,
    /// Ordered by time of delivery, then by sending.
    pub(super) under_way: BTreeMap<(Time, u64), UnderWay>,
    sent: u64,
    /// Times of alarms: the clock stops at each, even if no packet arrives then.
    pub(super) alarms: BTreeSet<Time>,
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
pub(super) struct Member {
    addresses: Vec<IpAddr>,
    pub(super) groups: BTreeSet<IpAddr>,
    pub(super) device: Option<Weak<dyn Device>>,
    /// The time at which its link is free: all packets that were sent so far have left the device.
    free_at: Time,
    /// Decides the first packet sequence numbers of its queue pairs.
    pub(super) random: Random,
}

impl Member {
    fn device(&self) -> Option<Arc<dyn Device>> {
        self.device.as_ref()?.upgrade()
    }
}

#[derive(Debug)]
pub(super) struct UnderWay {
    pub(super) sender: u64,
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) bytes: Vec<u8>,
    /// Its number in the trace.
    pub(super) traced: u64,
}

impl State {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
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
        }
    }

    /// Adds a device; without addresses, it gets a free one. Returns its number.
    pub(super) fn join(&mut self, ports: &mut Vec<Vec<IpAddr>>) -> io::Result<u64> {
        if ports.is_empty() {
            ports.push(vec![self.free_address()?]);
        }
        let addresses = ports.concat();
        self.check_free(0, &addresses)?;
        let number = self.next_member;
        self.next_member += 1;
        let joined = self.joined.entry(addresses[0]).or_insert(0);
        let seed = joined.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        *joined += 1;
        let random = Random::between(self.seed ^ seed, addresses[0], addresses[0]);
        let (groups, device) = (BTreeSet::new(), None);
        self.members.insert(number, Member { addresses, groups, device, free_at: 0, random });
        Ok(number)
    }

    pub(super) fn expel(&mut self, number: u64) {
        self.members.remove(&number);
        let is_other = |&(from, to): &(u64, u64)| from != number && to != number;
        self.cut.retain(is_other);
        self.between.retain(|pair, _| is_other(pair));
    }

    /// How long any packet is under way at least.
    pub(super) fn latency(&self) -> Time {
        let all = self.between.values().chain([&self.conditions]);
        nanoseconds(all.map(|conditions| conditions.delay).min().unwrap_or_default())
    }

    pub(super) fn device(&self, number: u64) -> Option<Arc<dyn Device>> {
        self.members.get(&number)?.device()
    }

    pub(super) fn member_at(&self, address: IpAddr) -> Option<u64> {
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

    /// Whether one has to decide about a connection.
    pub(super) fn a_program_is_to_decide(&self) -> bool {
        let mut devices = self.members.values().filter_map(|member| member.device());
        devices.any(|device| device.waits_for_program())
    }

    /// The earliest timer of a device, perhaps without those of the connection manager; of two at one time, that of the
    /// device that was made first.
    pub(super) fn next_timer(&self, without_connections: bool) -> Option<(Time, Arc<dyn Device>)> {
        let mut next: Option<(Time, Arc<dyn Device>)> = None;
        for member in self.members.values() {
            let Some(device) = member.device() else { continue };
            let Some(due) = device.due(without_connections) else { continue };
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

    pub(super) fn send(
        &mut self,
        now: Time,
        sender: u64,
        addresses: (IpAddr, IpAddr),
        bytes: &[u8],
    ) {
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
    pub(super) fn put(
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
        self.under_way.insert((at.min(LAST), self.sent), packet);
    }

    /// The devices that a packet reaches, and what happens to it.
    pub(super) fn receivers(
        &self,
        packet: &UnderWay,
        now: Time,
    ) -> (Vec<Arc<dyn Device>>, PacketFate) {
        let mut devices = Vec::new();
        let mut cut = false;
        for (&number, member) in &self.members {
            if !member.addresses.contains(&packet.to) && !member.groups.contains(&packet.to) {
                continue;
            }
            if self.cut.contains(&(packet.sender, number)) {
                cut = true;
            } else if let Some(device) = member.device() {
                devices.push(device);
            }
        }
        let fate = match (devices.is_empty(), cut) {
            (false, _) => PacketFate::Delivered(duration(now)),
            (true, true) => PacketFate::Partitioned,
            (true, false) => PacketFate::NoReceiver,
        };
        (devices, fate)
    }

    /// Changes the addresses of a device.
    pub(super) fn move_to(&mut self, number: u64, addresses: Vec<IpAddr>) -> io::Result<()> {
        self.check_free(number, &addresses)?;
        if let Some(member) = self.members.get_mut(&number) {
            member.addresses = addresses;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Network;

    #[test]
    fn what_is_said_of_a_device_ends_with_it() {
        let mut state = State::new(&Network::builder().0);
        let [one, two, gone] = [(); 3].map(|()| state.join(&mut Vec::new()).unwrap());
        let pairs = [(one, gone), (one, two), (gone, two), (two, one)];
        state.cut.extend(pairs);
        state.between.extend(pairs.map(|pair| (pair, state.conditions)));
        state.expel(gone);
        let left = [(one, two), (two, one)];
        assert!(state.members.keys().eq(&[one, two]));
        assert!(state.cut.iter().eq(&left), "{:?}", state.cut);
        assert!(state.between.keys().eq(&left), "{:?}", state.between);
    }
}
