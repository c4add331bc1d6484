//! The devices of this side: which, and how they are set up.

use std::collections::VecDeque;
use std::sync::Arc;

use ibverbs::channel::AnyBuffer;
use ibverbs::device::{LinkLayer, PortState};
use ibverbs::{
    AccessFlags, ChannelBuilder, ChannelId, Context, Loop, ProtectionDomain, SharedMemoryRegion,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries},
};
use ibverbs_transfer::{PciAddress, PciDistance, PciFunction};

use crate::control::MAX_ADDRESSES;
use crate::error::{RailsError, Result};
use crate::event::{PeerId, TransferId};
use crate::pairing::{Facts, Link};
use crate::transfer::Piece;

/// Receives per queue pair: each piece of a notified transfer takes one.
pub(crate) const RECEIVES: u32 = 64;
/// Requests in flight per queue pair.
pub(crate) const SENDS: u32 = 32;
/// The bytes that receives and probes have. Nothing else uses them.
const SCRATCH: usize = 64;

/// An open device with all that its queue pairs need.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) port: u8,
    pub(crate) facts: Facts,
    /// Dropped before the domain and the context.
    pub(crate) engine: Loop<'static, AnyBuffer>,
    /// The lanes, by the index of their channel in the loop.
    pub(crate) lanes: Vec<Lane>,
    pub(crate) scratch: Arc<SharedMemoryRegion<'static, u8>>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) context: Arc<Context<'static>>,
    /// Whether its file is among those that wake the rails: since it was armed the last time.
    pub(crate) watched: bool,
    settings: Settings,
}

/// The purpose of a request in a send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Piece(TransferId, Piece),
    Message(u64),
    Probe,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) peer: PeerId,
    pub(crate) pair: usize,
    /// Whether the pair still has it.
    pub(crate) is_open: bool,
    /// The requests of its send queue, which end in their order.
    pub(crate) sends: VecDeque<Work>,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    ack_timeout: AckTimeout,
    max_ack_retries: MaxAckRetries,
}

impl Device {
    fn new(name: &str, port: u8, builder: &RailsBuilder) -> Result<Self> {
        let error = |error| RailsError::verbs(name, error);
        let context = Arc::new(ibverbs::open(name).map_err(error)?);
        let facts = facts(&context, port).map_err(error)?;
        let domain = Arc::new(ProtectionDomain::new(&context).map_err(error)?);
        let access = AccessFlags::REMOTE_READ;
        let scratch = SharedMemoryRegion::new(&domain, SCRATCH, access).map_err(error)?;
        let queue_pairs = builder.peers.saturating_mul(u32::from(builder.queue_pairs));
        let most = context.query_device().map_err(error)?.max_cqe();
        let entries = queue_pairs.saturating_mul(SENDS + RECEIVES);
        if entries > most {
            let peers = builder.peers;
            return Err(RailsError::InvalidInput(format!(
                "{peers} peers take a completion queue of {entries} entries, and {name} has {most} at most"
            )));
        }
        let engine = Loop::new(&context, entries).map_err(error)?;
        let settings =
            Settings { ack_timeout: builder.ack_timeout, max_ack_retries: builder.max_ack_retries };
        let (name, scratch) = (name.to_owned(), Arc::new(scratch));
        let (lanes, watched) = (Vec::new(), false);
        Ok(Self { name, port, facts, engine, lanes, scratch, domain, context, watched, settings })
    }

    /// A channel of the loop is a queue pair of this pair.
    pub(crate) fn add_lane(&mut self, channel: ChannelId, peer: PeerId, pair: usize) {
        let vacant = || Lane { peer, pair, is_open: false, sends: VecDeque::new() };
        self.lanes.resize_with(self.lanes.len().max(channel.index() + 1), vacant);
        let sends = VecDeque::with_capacity(SENDS as usize);
        self.lanes[channel.index()] = Lane { peer, pair, is_open: true, sends };
    }

    /// The queue pair among these that has the least to do, if it can have more.
    #[inline]
    pub(crate) fn least_busy(&self, channels: &[ChannelId]) -> Option<ChannelId> {
        let (mut best, mut least) = (None, SENDS as usize);
        for &channel in channels {
            let busy = self.lanes[channel.index()].sends.len();
            if busy < least {
                (best, least) = (Some(channel), busy);
            }
        }
        best
    }

    /// The settings of a queue pair to a peer.
    pub(crate) fn channel(&self) -> ChannelBuilder<'static> {
        let access =
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        self.engine
            .create_channel(&self.domain)
            .port(self.port)
            .access(access)
            .max_send_wr(SENDS)
            .max_recv_wr(RECEIVES)
            .ack_timeout(self.settings.ack_timeout)
            .max_ack_retries(self.settings.max_ack_retries)
            // A peer that is slow is not gone.
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
    }

    pub(crate) fn is_active(&self) -> bool {
        let port = self.context.query_port(self.port);
        port.is_ok_and(|port| port.state() == PortState::Active)
    }
}

fn facts(context: &Context<'_>, port: u8) -> ibverbs::Result<Facts> {
    let attributes = context.query_port(port)?;
    let gids = context.gid_table()?;
    let gids = gids.iter().filter(|entry| entry.port == port);
    let link = match attributes.link_layer() {
        LinkLayer::InfiniBand => Link::InfiniBand,
        _ => Link::Ethernet,
    };
    Ok(Facts {
        name: context.name().to_owned(),
        link,
        gids: gids.map(|entry| entry.gid.into()).collect(),
        speed: context.query_port_speed(port).map_or(0, |speed| speed as u32),
    })
}

/// Chooses the devices of [`Rails`](crate::Rails), and how queue pairs are set up on them.
#[derive(Clone, Debug)]
#[must_use]
pub struct RailsBuilder {
    names: Vec<String>,
    nearest: Option<Place>,
    port: u8,
    pub(crate) queue_pairs: u8,
    pub(crate) peers: u32,
    pub(crate) longest_message: u32,
    ack_timeout: AckTimeout,
    max_ack_retries: MaxAckRetries,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Function(PciAddress),
    Node(u32),
}

impl RailsBuilder {
    pub(crate) fn new() -> Self {
        Self {
            names: Vec::new(),
            nearest: None,
            port: 1,
            queue_pairs: 1,
            peers: 16,
            longest_message: 4096,
            ack_timeout: AckTimeout::new(14).expect("within the limits"),
            // Soft-RoCE takes 7 for an endless number.
            max_ack_retries: MaxAckRetries::new(6).expect("within the limits"),
        }
    }

    /// Takes the device of this name. Without any, all devices with an active port are taken.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }

    /// Keeps only the devices nearest to this PCI function: a GPU, or a disk.
    pub fn near(mut self, function: PciAddress) -> Self {
        self.nearest = Some(Place::Function(function));
        self
    }

    /// Keeps only the devices of this NUMA node.
    pub fn numa_node(mut self, node: u32) -> Self {
        self.nearest = Some(Place::Node(node));
        self
    }

    /// The port of each device: 1 by default.
    pub fn port(mut self, port: u8) -> Self {
        self.port = port;
        self
    }

    /// Queue pairs per pair of devices: 1 by default. Some devices need two for their full speed.
    pub fn queue_pairs(mut self, number: u8) -> Self {
        self.queue_pairs = number.max(1);
        self
    }

    /// How many peers there can be at a time: 16 by default. Completion queues are made for them.
    pub fn peers(mut self, number: u32) -> Self {
        self.peers = number.max(1);
        self
    }

    /// The longest [message](crate::Rails::send) in bytes: 4,096 by default. For each peer, 64 messages of this length are
    /// allocated and registered.
    ///
    /// It is 1 GiB at most; more counts as that.
    pub fn longest_message(mut self, bytes: u32) -> Self {
        self.longest_message = bytes.min(1 << 30);
        self
    }

    /// How long a packet waits for its acknowledgement: 67 ms by default. With the
    /// [retries](Self::max_ack_retries), it decides how soon a rail counts as failed.
    pub fn ack_timeout(mut self, value: AckTimeout) -> Self {
        self.ack_timeout = value;
        self
    }

    /// How often a packet is sent again: 6 times by default. With 7, Soft-RoCE never gives up, and a rail that fails is not
    /// noticed.
    pub fn max_ack_retries(mut self, value: MaxAckRetries) -> Self {
        self.max_ack_retries = value;
        self
    }

    /// Opens the devices.
    pub(crate) fn open(&self) -> Result<Vec<Device>> {
        let names = self.choose()?;
        let mut devices = (names.iter().map(|name| Device::new(name, self.port, self)))
            .collect::<Result<Vec<_>>>()?;
        let most = MAX_ADDRESSES / devices.len();
        devices.iter_mut().for_each(|device| device.facts.gids.truncate(most));
        Ok(devices)
    }

    fn choose(&self) -> Result<Vec<String>> {
        let list = ibverbs::devices().map_err(|error| RailsError::verbs("(all)", error))?;
        let mut found = Vec::new();
        for device in &list {
            let name = device.name();
            let is_asked_for = self.names.iter().any(|asked| asked == name);
            if is_asked_for || self.names.is_empty() && self.has_active_port(name) {
                found.push((self.distance(PciFunction::of(&device)), name.to_owned()));
            }
        }
        if let Some(missing) = self.names.iter().find(|&name| !found.iter().any(|(_, n)| n == name))
        {
            return Err(RailsError::InvalidInput(format!("there is no device {missing}")));
        }
        if self.nearest.is_some() {
            let nearest = found.iter().filter_map(|(distance, _)| *distance).min();
            found.retain(|(distance, _)| distance.is_some() && *distance == nearest);
        }
        // In the order in which they were asked for.
        found.sort_by_key(|(_, name)| self.names.iter().position(|asked| asked == name));
        if !(1..=255).contains(&found.len()) {
            let text = format!("{} devices can be used, and must be within 1..=255", found.len());
            return Err(RailsError::InvalidInput(text));
        }
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    fn has_active_port(&self, name: &str) -> bool {
        let port = ibverbs::open(name).and_then(|context| context.query_port(self.port));
        port.is_ok_and(|port| port.state() == PortState::Active)
    }

    fn distance(&self, function: Option<PciFunction>) -> Option<PciDistance> {
        match self.nearest? {
            Place::Function(address) => function?.distance(&PciFunction::find(address)?),
            Place::Node(node) => {
                let distance = function?.distance_to_node(node)?;
                (distance != PciDistance::OtherNode).then_some(distance)
            }
        }
    }
}
