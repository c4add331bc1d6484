//! State that all queue pairs of a device share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use super::counters::{Counters, PortCounters};
use super::device_memory::DeviceMemory;
use super::drops::{DropReason, Told};
use super::events::{self, Record};
use super::memory::Keys;
use super::queues::{Armed, CompletionQueue, SharedReceiveQueue};
use super::table::{Table, Tag};
use super::timers::{Timer, Timers};
use super::work::{Completion, FlowStep, InboundFlow, Path};
use super::xrc_domains::XrcDomains;
use crate::ffi::ibv_event_type;
use crate::link::{Clock, DirectAccess, Link, Time};
use crate::random::Random;
use crate::settings::Settings;
use crate::transport::completion_faults::CompletionFaults;
use crate::wire::header::Bth;
use crate::wire::{Packet, icrc};

/// How long after a link had no room for a packet it is asked again, in nanoseconds.
const SEND_AGAIN: Time = 200_000;

/// The time until the next attempt to write to a full event file.
const FULL_FILE: Time = 1_000_000;

/// The number that the completion of a message has from an address without a handle here.
const UNKNOWN_ADDRESS: u16 = u16::MAX;

#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) active: bool,
    /// One GID each.
    pub(crate) addresses: Vec<IpAddr>,
    /// Its table of GIDs is as adapters have it.
    adapter_gids: bool,
    pub(crate) counters: PortCounters,
}

/// How many entries of such a table programs take for granted.
const ADAPTER_GIDS: usize = 4;

/// The first three groups of interface identifiers of link-local GIDs that name an IPv4 address, which follows.
const LINK_LOCAL: [u16; 6] = [0xfe80, 0, 0, 0, 0x6962, 0x7673];

impl Port {
    /// The table of its GIDs, as IPv6 addresses, and the addresses that packets have.
    pub(crate) fn gids(&self) -> Vec<(Ipv6Addr, IpAddr)> {
        let gid = |&address: &IpAddr| match address {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped(), address),
            IpAddr::V6(v6) => (v6, address),
        };
        let mut gids: Vec<_> = self.addresses.iter().map(gid).collect();
        if !self.adapter_gids {
            return gids;
        }
        let first = gids[0];
        let v4 = self.addresses.iter().find_map(|address| match address {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        });
        if let Some(v4) = v4 {
            gids.insert(0, (link_local(v4), v4.into()));
        }
        while gids.len() < ADAPTER_GIDS {
            gids.push(first);
        }
        gids
    }
}

fn link_local(address: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = address.octets();
    let [g, h, i, j, k, l] = LINK_LOCAL;
    let last = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
    Ipv6Addr::new(g, h, i, j, k, l, last[0], last[1])
}

/// The IPv4 address that a link-local GID names, if it is one of those.
pub(crate) fn named_by_link_local(gid: Ipv6Addr) -> Option<Ipv4Addr> {
    let [.., a, b, c, d] = gid.octets();
    (gid.segments()[..6] == LINK_LOCAL).then(|| Ipv4Addr::new(a, b, c, d))
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) settings: Settings,
    pub(crate) ports: Vec<Port>,
    pub(crate) keys: Keys,
    pub(crate) cqs: Table<CompletionQueue>,
    /// How many of them are armed by programs that do not receive packets themselves.
    pub(crate) armed: u32,
    /// The completion queue that the thread which receives polls next, and whether it has slept for it.
    pub(crate) polling: Option<(u32, bool)>,
    /// Their numbers have 24 bits, as packets of extended reliable connections have them.
    pub(crate) srqs: Table<SharedReceiveQueue>,
    pub(crate) xrc_domains: XrcDomains,
    /// How many objects use each protection domain.
    pub(crate) pds: Table<u32>,
    /// The files of asynchronous events of the open contexts.
    pub(crate) contexts: BTreeMap<u32, c_int>,
    pub(crate) next_context: u32,
    pub(crate) address_handles: u32,
    /// The numbers of the address handles of EFA devices, by protection domain and address, and how many share each.
    address_numbers: BTreeMap<(u32, IpAddr), (u16, u32)>,
    pub(crate) thread_domains: u32,
    pub(crate) parent_domains: u32,
    /// How many outstanding READ and atomic requests the queue pairs answer together.
    pub(crate) answers: u32,
    /// How many memory windows there are.
    pub(crate) windows: u32,
    /// The queue pairs in each multicast group.
    pub(crate) groups: BTreeMap<IpAddr, Vec<u32>>,
    pub(crate) timers: Timers,
    /// Queue pairs that have more packets to send than fit in one turn.
    pub(crate) runnable: VecDeque<u32>,
    /// Queue pairs that do not learn of losses, and wait for room.
    pub(crate) parked: Vec<u32>,
    /// A thread of the program receives: it will soon post, or poll again.
    pub(crate) holds_answers: bool,
    /// Queue pairs whose acknowledgement waits for that.
    pub(crate) held: Vec<u32>,
    /// Completion queues that were overrun since the last `settle`.
    pub(crate) overrun: Vec<u32>,
    /// The flows of this device: queue pairs that no program knows.
    pub(crate) flows: usize,
    /// Those of peers, by the peer's address and the place of its flow's number.
    pub(crate) inbound: BTreeMap<(IpAddr, u16), InboundFlow>,
    /// Some of those have ended since the last search.
    pub(crate) inbound_ended: bool,
    pub(crate) flow_steps: VecDeque<FlowStep>,
    /// When the last flow of this device began.
    pub(crate) last_flow: u64,
    pub(crate) random: Random,
    /// Counts the calls from outside: in each, a queue pair has one turn.
    pub(crate) round: u64,
    pub(crate) counters: Counters,
    told: Told,
    pub(crate) completion_faults: CompletionFaults,
    /// A test counts early deregistrations: of regions that a request names which was not carried out yet.
    pub(crate) is_observed: bool,
    pub(crate) early_deregistrations: u64,
    /// The bytes of all registered regions.
    pub(crate) registered: u64,
    pub(crate) device_memory: DeviceMemory,
    /// Events that did not fit into their file.
    late: VecDeque<(c_int, Record)>,
    late_scheduled: Option<Time>,
    clock: Arc<dyn Clock>,
    /// Gives peers access to this process's memory.
    pub(super) direct_access: Option<Arc<DirectAccess>>,
    link: Box<dyn Link>,
    link_scheduled: Option<Time>,
    outbox: Vec<Packet>,
    spare: Vec<Vec<u8>>,
}

impl Core {
    pub(crate) fn new(settings: Settings, clock: Arc<dyn Clock>, link: Box<dyn Link>) -> Self {
        let adapter_gids = settings.adapter_gids;
        let port = |addresses: &Vec<IpAddr>| Port {
            active: true,
            addresses: addresses.clone(),
            adapter_gids,
            counters: PortCounters::default(),
        };
        Self {
            ports: settings.ports.iter().map(port).collect(),
            keys: Keys(Table::new(Tag::Low, 1, settings.max_mr.saturating_add(settings.max_mw))),
            cqs: Table::new(Tag::Low, 1, settings.max_cq),
            armed: 0,
            polling: None,
            srqs: Table::new(Tag::High, 1, settings.max_srq),
            xrc_domains: XrcDomains::new(),
            pds: Table::new(Tag::Low, 1, settings.max_pd),
            contexts: BTreeMap::new(),
            next_context: 0,
            address_handles: 0,
            address_numbers: BTreeMap::new(),
            thread_domains: 0,
            parent_domains: 0,
            answers: 0,
            windows: 0,
            groups: BTreeMap::new(),
            timers: Timers::default(),
            runnable: VecDeque::new(),
            parked: Vec::new(),
            holds_answers: false,
            held: Vec::new(),
            overrun: Vec::new(),
            flows: 0,
            inbound: BTreeMap::new(),
            inbound_ended: false,
            flow_steps: VecDeque::new(),
            last_flow: 0,
            random: Random::new(link.seed() ^ settings.guid()),
            round: 1,
            counters: Counters::default(),
            told: Told::default(),
            completion_faults: CompletionFaults::default(),
            is_observed: false,
            early_deregistrations: 0,
            registered: 0,
            device_memory: DeviceMemory::new(settings.max_device_memory),
            late: VecDeque::new(),
            late_scheduled: None,
            clock,
            direct_access: link.direct_access(),
            link,
            link_scheduled: None,
            outbox: Vec::new(),
            spare: Vec::new(),
            settings,
        }
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// A moment for a flow that begins, later than that of every earlier one.
    pub(crate) fn begin_flow(&mut self) -> u64 {
        self.last_flow = self.clock.wall_clock().max(self.last_flow + 1);
        self.last_flow
    }

    pub(crate) fn timeout(&self, configured: Time, late: bool) -> Time {
        self.clock.timeout(configured, late)
    }

    // ---- Packets ----

    /// Queues a packet: `bth`, then what `fill` appends, of which `bth.pad` follows from its length.
    pub(crate) fn transmit(
        &mut self,
        path: Path,
        mut bth: Bth,
        fill: impl FnOnce(&Keys, &mut Vec<u8>) -> Result<(), super::memory::Denied>,
    ) -> Result<(), super::memory::Denied> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(&bth.bytes());
        if let Err(denied) = fill(&self.keys, &mut bytes) {
            self.spare.push(bytes);
            return Err(denied);
        }
        bth.pad = (bytes.len().wrapping_neg() & 3) as u8;
        bytes.resize(bytes.len() + usize::from(bth.pad), 0);
        bytes[..Bth::SIZE].copy_from_slice(&bth.bytes());
        bytes.extend_from_slice(&[0; icrc::SIZE]);
        let addresses = Some((path.from, path.to));
        let mut packet = Packet { addresses, bytes, ..Packet::default() };
        if self.settings.strict || !self.link.seals() {
            packet.seal();
        }
        let counters = self.port_counters(path.from);
        counters.packets_sent += 1;
        counters.bytes_sent += packet.bytes.len() as u64;
        self.outbox.push(packet);
        // Bounds the memory of the outbox when a program posts a long list.
        if self.outbox.len() >= 64 {
            self.flush();
        }
        Ok(())
    }

    /// Hands the queued packets to the link.
    pub(crate) fn flush(&mut self) {
        if self.outbox.is_empty() {
            return;
        }
        if self.ports.iter().any(|port| !port.active) {
            let mut outbox = std::mem::take(&mut self.outbox);
            outbox.retain(|packet| packet.addresses.is_none_or(|(from, _)| self.is_up(from)));
            self.outbox = outbox;
        }
        let all_sent = self.link.send(&mut self.outbox);
        for packet in self.outbox.drain(..) {
            if self.spare.len() < 256 {
                self.spare.push(packet.bytes);
            }
        }
        if !all_sent {
            self.send_rest_later();
        }
    }

    fn send_rest_later(&mut self) {
        let at = self.now() + SEND_AGAIN;
        self.timers.set(Timer::Link, at, &mut self.link_scheduled);
    }

    /// Sends what the link had no room for.
    pub(crate) fn link_timer(&mut self) {
        self.link_scheduled = None;
        if !self.link.send_rest() {
            self.send_rest_later();
        }
        self.runnable.extend(self.parked.drain(..));
    }

    /// Whether packets on this path would find no room.
    pub(crate) fn is_full(&mut self, path: Path) -> bool {
        self.link.is_full(path.from, path.to)
    }

    /// Has a queue pair go on when there may be room.
    pub(crate) fn park(&mut self, number: u32) {
        self.parked.push(number);
        self.send_rest_later();
    }

    /// Drops the unsent packets of a port, counted from 0.
    pub(crate) fn drop_rest(&mut self, port: usize) {
        self.link.drop_rest(&self.ports[port].addresses);
    }

    pub(crate) fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    /// A packet from this address to a queue pair of this number was dropped.
    pub(crate) fn count_drop(&mut self, from: IpAddr, number: u32, why: DropReason) {
        self.told.count(&mut self.counters, self.settings.strict, (from, number), why);
    }

    /// Counts a packet that came late, which is no mistake.
    pub(crate) fn count_late(&mut self, why: DropReason) {
        *why.explain(&mut self.counters).1 += 1;
    }

    // ---- Completions ----

    pub(crate) fn complete(&mut self, number: u32, mut completion: Completion) {
        if self.cqs.get(number).is_some_and(|cq| cq.is_timed) {
            completion.time = self.clock.now();
            completion.wall_clock = self.clock.wall_clock();
        }
        if self.completion_faults.take(number, &completion) {
            return;
        }
        let Some(cq) = self.cqs.get_mut(number) else { return };
        if cq.ready.len() >= cq.capacity as usize {
            if !std::mem::replace(&mut cq.overrun, true) {
                cq.async_events += 1;
                let (context, handle) = (cq.context, cq.handle);
                self.overrun.push(number);
                self.raise(context, ibv_event_type::IBV_EVENT_CQ_ERR, handle);
            }
            return;
        }
        cq.ready.push_back(completion);
        cq.publish();
        if !cq.wants(&completion) {
            return;
        }
        cq.held_back += 1;
        let (count, period) = cq.moderation;
        if cq.held_back >= count.max(1) || period == 0 {
            self.completion_event(number);
        } else if cq.due.is_none() {
            let due = self.clock.now().saturating_add(period);
            cq.due = Some(due);
            let mut scheduled = cq.scheduled;
            self.timers.set(Timer::CompletionQueue(number), due, &mut scheduled);
            if let Some(cq) = self.cqs.get_mut(number) {
                cq.scheduled = scheduled;
            }
        }
    }

    /// Lets the completions come that a test has held, in their order, or shuffled.
    pub(crate) fn release_completions(&mut self, seed: Option<u64>) {
        for (queue, completion) in self.completion_faults.release(seed) {
            self.complete(queue, completion);
        }
    }

    /// Raises an event of every completion queue that is armed: no completion will come.
    pub(crate) fn wake_sleepers(&mut self) {
        let is_armed = |cq: &CompletionQueue| cq.armed != Armed::No;
        let armed = self.cqs.iter().filter(|(_, cq)| is_armed(cq)).map(|(number, _)| number);
        let armed: Vec<u32> = armed.collect();
        armed.into_iter().for_each(|number| self.completion_event(number));
    }

    /// Raises the event that a completion queue was armed for.
    pub(crate) fn completion_event(&mut self, number: u32) {
        let Some(cq) = self.cqs.get_mut(number) else { return };
        cq.held_back = 0;
        cq.due = None;
        cq.owes = match self.polling {
            Some((polled, has_slept)) if polled == number && cq.is_attended => {
                has_slept || cq.sleepers == 0
            }
            _ => false,
        };
        if cq.owes {
            cq.missed = true;
            return;
        }
        cq.is_announced = true;
        let was_armed = std::mem::replace(&mut cq.armed, Armed::No) != Armed::No;
        self.armed -= u32::from(was_armed && !cq.is_attended);
        if let Some(fd) = cq.channel {
            cq.events += 1;
            let record = Record::completion(cq.handle);
            self.notify(fd, record);
        }
    }

    /// Handles the timer of a completion queue: a moderated event is due.
    pub(crate) fn completion_timer(&mut self, number: u32, now: Time) {
        let Some(cq) = self.cqs.get_mut(number) else { return };
        cq.scheduled = None;
        match cq.due {
            Some(due) if due <= now => self.completion_event(number),
            Some(due) => {
                let mut scheduled = None;
                self.timers.set(Timer::CompletionQueue(number), due, &mut scheduled);
                if let Some(cq) = self.cqs.get_mut(number) {
                    cq.scheduled = scheduled;
                }
            }
            None => {}
        }
    }

    // ---- Events ----

    /// Raises an asynchronous event in a context. The caller counts it for the object.
    pub(crate) fn raise(&mut self, context: u32, kind: ibv_event_type, element: u64) {
        if let Some(&fd) = self.contexts.get(&context) {
            self.notify(fd, Record::asynchronous(element, kind.0));
        }
    }

    /// Raises an event that is about a port, or about the device (`element` is 0).
    pub(crate) fn raise_in_all_contexts(&mut self, kind: ibv_event_type, element: u64) {
        let files: Vec<c_int> = self.contexts.values().copied().collect();
        for fd in files {
            self.notify(fd, Record::asynchronous(element, kind.0));
        }
    }

    /// Whether the port with this address, if there is one, is up.
    pub(crate) fn is_up(&self, address: IpAddr) -> bool {
        let mut ports = self.ports.iter();
        ports.all(|port| port.active || !port.addresses.contains(&address))
    }

    /// What the port with this address counts; what is sent to a group counts at the first.
    pub(super) fn port_counters(&mut self, address: IpAddr) -> &mut PortCounters {
        let mut ports = self.ports.iter();
        let index = match ports.len() {
            1 => 0,
            _ => ports.position(|port| port.addresses.contains(&address)).unwrap_or(0),
        };
        &mut self.ports[index].counters
    }

    /// What the device counts, with what its ports do.
    pub(crate) fn counters(&self) -> Counters {
        self.ports.iter().fold(self.counters, |all, Port { counters, .. }| Counters {
            packets_sent: all.packets_sent + counters.packets_sent,
            packets_received: all.packets_received + counters.packets_received,
            packets_malformed: all.packets_malformed + counters.packets_malformed,
            ..all
        })
    }

    /// Writes a record to a file, or later if the file is full: events are never lost or reordered.
    fn notify(&mut self, fd: c_int, record: Record) {
        let waiting = self.late.iter().any(|late| late.0 == fd);
        if waiting || !events::put(fd, &record) {
            self.late.push_back((fd, record));
            let at = self.now() + FULL_FILE;
            self.timers.set(Timer::Events, at, &mut self.late_scheduled);
        }
    }

    /// The device is removed: reading from a completion channel fails once its events are read.
    pub(crate) fn end_channels(&mut self) {
        let channels: Vec<c_int> = self.cqs.iter().filter_map(|(_, cq)| cq.channel).collect();
        channels.into_iter().for_each(events::end);
    }

    pub(crate) fn events_timer(&mut self) {
        self.late_scheduled = None;
        let late = std::mem::take(&mut self.late);
        let mut full = Vec::new();
        for (fd, record) in late {
            if full.contains(&fd) || !events::put(fd, &record) {
                full.push(fd);
                self.late.push_back((fd, record));
            }
        }
        if !self.late.is_empty() {
            let at = self.now() + FULL_FILE;
            self.timers.set(Timer::Events, at, &mut self.late_scheduled);
        }
    }

    /// Takes back the unread events about an object that is going away; returns how many.
    pub(crate) fn take_back(
        &mut self,
        fd: Option<c_int>,
        element: u64,
        kinds: &[ibv_event_type],
    ) -> u32 {
        let Some(fd) = fd else { return 0 };
        let gone = |record: &Record| {
            record.element() == element
                && (kinds.is_empty() || kinds.iter().any(|kind| record.is(*kind)))
        };
        let before = self.late.len();
        self.late.retain(|late| late.0 != fd || !gone(&late.1));
        (before - self.late.len()) as u32 + events::take_back(fd, gone)
    }

    /// Forgets a file that is being closed.
    pub(crate) fn forget_file(&mut self, fd: c_int) {
        self.late.retain(|late| late.0 != fd);
    }

    // ---- Address handles of EFA ----

    /// Those of one protection domain to one address share a number.
    pub(crate) fn name_address(&mut self, pd: u32, to: IpAddr) -> u16 {
        if let Some((number, users)) = self.address_numbers.get_mut(&(pd, to)) {
            *users += 1;
            return *number;
        }
        let used: BTreeSet<u16> = self.address_numbers.values().map(|named| named.0).collect();
        let number =
            (0..UNKNOWN_ADDRESS).find(|number| !used.contains(number)).unwrap_or(UNKNOWN_ADDRESS);
        self.address_numbers.insert((pd, to), (number, 1));
        number
    }

    pub(crate) fn forget_address(&mut self, pd: u32, to: IpAddr) {
        let Some((_, users)) = self.address_numbers.get_mut(&(pd, to)) else { return };
        *users -= 1;
        if *users == 0 {
            self.address_numbers.remove(&(pd, to));
        }
    }

    pub(crate) fn address_number(&self, pd: u32, of: IpAddr) -> u16 {
        self.address_numbers.get(&(pd, of)).map_or(UNKNOWN_ADDRESS, |named| named.0)
    }

    // ---- Protection domains ----

    pub(crate) fn use_pd(&mut self, pd: u32) -> bool {
        self.pds.get_mut(pd).map(|users| *users += 1).is_some()
    }

    pub(crate) fn add_parent_domain(&mut self, pd: u32) -> bool {
        let found = self.use_pd(pd);
        self.parent_domains += u32::from(found);
        found
    }

    pub(crate) fn leave_pd(&mut self, pd: u32) {
        if let Some(users) = self.pds.get_mut(pd) {
            *users -= 1;
        }
    }
}
