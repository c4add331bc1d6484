//! The resources of a measurement: memory, queues, and the queue pairs of either layer.

use std::error::Error;
use std::fmt;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, AddressHandle, Channel, CompletionQueue, Context, PreparedChannel,
    PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairEndpoint, QueuePairType,
    RemoteMemoryRegion, SharedMemoryRegion, WorkCompletion,
    memory::SharedMemorySlice,
    queue_pair::AddressVector,
    settings::{MaxRnrRetries, MaximumTransferUnit, MinRnrTimer},
};

use crate::options::Side;
use crate::plan::{Layer, Operation, Plan, Transport};
use crate::wire::{Address, PATIENCE};

pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The bytes before a datagram in its receive: room for a global route header.
pub(crate) const ROUTE: usize = 40;
/// The Q_Key of our datagrams.
pub(crate) const QKEY: u32 = 0x1111_1111;

/// The RNR timer of perftest: a peer that finds no receive tries again after this time.
const RNR_TIMER: Duration = Duration::from_micros(640);

/// Nothing has completed or arrived for this long.
#[derive(Debug)]
pub(crate) struct Silence(pub(crate) Transport);

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing has completed for {PATIENCE:?}")?;
        match self.0 {
            Transport::Reliable => Ok(()),
            transport => write!(f, "; on {transport}, messages may be lost"),
        }
    }
}

impl Error for Silence {}

/// Creates a queue for the completions of this many requests.
pub(crate) fn queue<'a>(
    context: &'a Context<'a>,
    plan: &Plan,
    depth: u32,
) -> Result<CompletionQueue<'a>> {
    let builder = CompletionQueue::builder(context, depth * plan.queue_pairs);
    Ok(if plan.events { builder.own_channel() } else { builder }.build()?)
}

/// The memory of each queue pair: peers write there, so it is never seen as a slice of Rust.
pub(crate) fn regions<'a>(
    domain: &'a ProtectionDomain<'a>,
    plan: &Plan,
) -> Result<Vec<SharedMemoryRegion<'a, u8>>> {
    let region = |_| Ok(domain.allocate_shared(plan.memory(), access(plan))?);
    (0..plan.queue_pairs).map(region).collect()
}

/// The peer's access to the memory: only what the operation needs.
fn access(plan: &Plan) -> AccessFlags {
    AccessFlags::LOCAL_WRITE
        | match plan.operation {
            Operation::Send => AccessFlags::empty(),
            Operation::Write => AccessFlags::REMOTE_WRITE,
            Operation::Read => AccessFlags::REMOTE_READ,
            Operation::FetchAdd | Operation::CompareSwap => AccessFlags::REMOTE_ATOMIC,
        }
}

/// The memory of one queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    /// The source of sends and writes, and the memory that the peer reads.
    pub(crate) source: SharedMemorySlice<'a, u8>,
    /// The memory for messages that arrive, and for the results of reads and atomics.
    pub(crate) target: SharedMemorySlice<'a, u8>,
}

impl<'a> Memory<'a> {
    pub(crate) fn of(region: &'a SharedMemoryRegion<'_, u8>, plan: &Plan) -> Result<Self> {
        let (source, target) = region.as_slice().split_at(plan.half())?;
        Ok(Self { source, target })
    }
}

/// The other end of a queue pair.
#[derive(Debug)]
pub(crate) struct Peer<'a> {
    memory: RemoteMemoryRegion,
    half: u64,
    pub(crate) number: u32,
    /// The address handle of the peer, for datagrams.
    pub(crate) path: Option<AddressHandle<'a>>,
}

impl Peer<'_> {
    /// The peer's memory that an operation on this many bytes works on.
    pub(crate) fn memory(&self, operation: Operation, size: u32) -> Result<RemoteMemoryRegion> {
        let offset = if operation == Operation::Read { 0 } else { self.half };
        Ok(self.memory.sub_region(offset, size.into())?)
    }
}

/// Queue pairs of either layer before they are connected.
pub(crate) enum Prepared<'a> {
    Verbs(Vec<PreparedQueuePair<'a, QueuePairType>>),
    Channel(Box<PreparedChannel<'a>>),
}

/// Queue pairs of either layer.
pub(crate) enum Ends<'a> {
    Verbs(Vec<QueuePair<'a, QueuePairType>>),
    Channel(Box<Channel<'a>>),
}

impl<'a> Prepared<'a> {
    pub(crate) fn new(
        domain: &'a ProtectionDomain<'a>,
        send_cq: &'a CompletionQueue<'a>,
        receive_cq: &'a CompletionQueue<'a>,
        plan: &Plan,
        side: &Side,
        mtu: MaximumTransferUnit,
    ) -> Result<Self> {
        let kind = match plan.transport {
            Transport::Reliable => QueuePairType::ReliableConnected,
            Transport::Unreliable => QueuePairType::UnreliableConnected,
            Transport::Datagram => QueuePairType::UnreliableDatagram,
        };
        // Both kinds of builders have the same settings, but no common trait.
        macro_rules! settings {
            ($builder:expr) => {{
                let builder = $builder
                    .max_send_wr(plan.send_depth)
                    .max_recv_wr(plan.receive_depth)
                    .max_inline_data(plan.inline)
                    .port(side.port)
                    .access(access(plan))
                    .path_mtu(mtu)
                    .max_rd_atomic(plan.outstanding)
                    .max_dest_rd_atomic(plan.outstanding)
                    .min_rnr_timer(MinRnrTimer::from_duration(RNR_TIMER)?)
                    .max_rnr_retries(MaxRnrRetries::UNLIMITED);
                match side.gid_index {
                    Some(index) => builder.gid_index(index),
                    None => builder,
                }
            }};
        }
        if plan.layer == Layer::Channel {
            let mut builder = settings!(Channel::builder(domain)).queue_pair_type(kind);
            if plan.events {
                builder = builder.sleep_after(0);
            }
            return Ok(Self::Channel(Box::new(builder.build()?)));
        }
        let build = |_| {
            let builder = settings!(domain.create_qp(send_cq, receive_cq, kind)).qkey(QKEY);
            Ok(builder.build()?)
        };
        Ok(Self::Verbs((0..plan.queue_pairs).map(build).collect::<Result<_>>()?))
    }

    pub(crate) fn endpoints(&self) -> Vec<QueuePairEndpoint> {
        match self {
            Self::Verbs(queue_pairs) => queue_pairs.iter().map(|one| one.endpoint()).collect(),
            Self::Channel(channel) => vec![channel.endpoint()],
        }
    }

    pub(crate) fn connect(self, theirs: &Address, transport: Transport) -> Result<Ends<'a>> {
        let connect = |(one, remote): (PreparedQueuePair<'a, QueuePairType>, _)| {
            Ok(match transport {
                Transport::Datagram => one.activate()?,
                _ => one.handshake(remote)?,
            })
        };
        Ok(match self {
            Self::Verbs(queue_pairs) => {
                let pairs = queue_pairs.into_iter().zip(theirs.endpoints.iter().copied());
                Ends::Verbs(pairs.map(connect).collect::<Result<_>>()?)
            }
            Self::Channel(channel) => {
                let channel = channel.handshake(theirs.endpoints[0])?;
                Ends::Channel(Box::new(channel))
            }
        })
    }
}

/// The other ends, as the peer described them.
pub(crate) fn peers<'a>(
    domain: &'a ProtectionDomain<'a>,
    theirs: &Address,
    plan: &Plan,
    side: &Side,
) -> Result<Vec<Peer<'a>>> {
    let count = plan.queue_pairs as usize;
    if theirs.endpoints.len() != count || theirs.memory.len() != count {
        return Err("the peer has another number of queue pairs".into());
    }
    let peer = |(endpoint, memory): (&QueuePairEndpoint, &RemoteMemoryRegion)| {
        let mut path = None;
        if plan.transport == Transport::Datagram {
            let mut vector = AddressVector::to_peer(domain.context(), side.port, endpoint)?;
            if let (Some(index), Some(gid)) = (side.gid_index, vector.gid()) {
                vector = vector.global(gid, index);
            }
            path = Some(AddressHandle::new(domain, &vector)?);
        }
        let (memory, half) = (*memory, plan.half() as u64);
        Ok(Peer { memory, half, number: endpoint.num(), path })
    };
    theirs.endpoints.iter().zip(&theirs.memory).map(peer).collect()
}

/// Polls, or sleeps, until something has completed, or until `patience` is over: then it returns none.
pub(crate) fn wait<'c>(
    queue: &CompletionQueue<'_>,
    events: bool,
    room: &'c mut [WorkCompletion],
    patience: Duration,
) -> Result<&'c [WorkCompletion]> {
    if events {
        return match queue.wait_until(room, Instant::now() + patience) {
            Ok(found) => Ok(found.len()),
            Err(error) if error.kind() == ibverbs::ErrorKind::TimedOut => Ok(0),
            Err(error) => Err(error.into()),
        }
        .map(|found| &room[..found]);
    }
    let (mut polls, mut start) = (0_u32, None);
    loop {
        let found = queue.poll(room)?.len();
        if found > 0 {
            return Ok(&room[..found]);
        }
        // Reading the clock takes longer than polling.
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(1024) && start.get_or_insert_with(Instant::now).elapsed() > patience
        {
            return Ok(&[]);
        }
    }
}
