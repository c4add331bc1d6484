use std::collections::HashMap;
use std::ffi::c_int;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Channel;
use super::builder::ChannelBuilder;
use super::directed::EndDestination;
use super::error::TransportError;
use super::operation::Target;
use crate::base::{Error, Leak, QueuePairType, Result, debug, ffi, setters};
use crate::verbs::completion::{CompletionQueue, WorkSuccess};
use crate::verbs::device::{Gid, GidEntry, GidType};
use crate::verbs::domain::DomainRef;
use crate::verbs::operation::DatagramDestination;
#[cfg(any(feature = "efa", feature = "mlx5"))]
use crate::verbs::queue_pair::DriverTransport;
#[cfg(feature = "efa")]
use crate::verbs::queue_pair::SrdOptions;
use crate::verbs::queue_pair::{
    AddressHandle, AddressVector, ConnectionSettings, GlobalRouteHeader, QueuePairEndpoint,
    gid_like,
};

/// The settings of a datagram end: a UD queue pair of a [`Loop`](crate::Loop::add_datagrams) or a
/// [`Reactor`](crate::Reactor::datagrams), which sends to any peer and receives from all.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::sync::Arc;
/// use ibverbs::{AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest};
/// use ibverbs::channel::DatagramsBuilder;
/// use ibverbs::pool::DatagramBuffer;
///
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let pool = BufferPool::new(&domain, 40 + 1024, 16, AccessFlags::empty())?;
/// let mut server = Loop::<PooledBuffer>::new(domain.context_parent(), 64)?;
/// let end = server.add_datagrams(DatagramsBuilder::new(&domain).qkey(7))?;
/// println!("tell the peers: {}", server.endpoint(end).ok_or("it is there")?);
/// # let itself = server.endpoint(end).unwrap();
/// let buffer = pool.take().ok_or("all buffers are in use")?;
/// server.post(end, ReceiveWorkRequest::new(buffer), 0)?;
/// # let to = server.destination(end, &itself)?;
/// # server.send_to(end, pool.take_from(b"ping")?.unwrap(), &to, 9)?;
/// # if server.wait_ended()?.token == 0 { return Err("the send ends first".into()) }
/// let ended = server.wait_ended()?;
/// let success = ended.result()?;
/// let message = DatagramBuffer::from(ended.buffer);
/// println!("{:?} from {:?}", &message[..], message.header().source());
/// # assert_eq!(message[..], *b"ping");
/// let sender = server.sender(end, &success, &message.header())?;
/// server.send_to(end, message, &sender, 1)?; // back to its sender
/// # assert_eq!(server.wait_ended()?.token, 1);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct DatagramsBuilder<'res> {
    channel: ChannelBuilder<'res>,
    kind: EndKind,
    address_handles: usize,
}

impl<'res> DatagramsBuilder<'res> {
    /// Starts to build a datagram end for memory of this domain.
    pub fn new(domain: impl Into<DomainRef<'res>>) -> Self {
        let channel =
            ChannelBuilder::new(domain).queue_pair_type(QueuePairType::UnreliableDatagram);
        Self { channel, kind: EndKind::Unreliable, address_handles: 64 }
    }

    setters! { self,
        /// The Q_Key (0x11111111 unless set): a datagram that carries another one is dropped by the device. One whose highest bit
        /// is set is for privileged programs.
        qkey(value: u32) => self.channel.connection.qkey = value;

        /// The port (1 unless set). Ports count from 1.
        port(value: u8) => self.channel.connection.port = value;

        /// The index of the partition key (0 unless set).
        pkey_index(value: u16) => self.channel.connection.pkey_index = value;

        /// The most sends that can be in flight (16 unless set).
        max_send_wr(value: u32) => self.channel.capacities.max_send_wr = value;

        /// The most receives that can be in flight (16 unless set). The device drops a datagram for which there is none.
        max_recv_wr(value: u32) => self.channel.capacities.max_recv_wr = value;

        /// How many pieces a message that is sent can have (1 unless set).
        max_send_sge(value: u32) => self.channel.capacities.max_send_sge = value;

        /// How many address handles are kept for the next message to the same path (64 unless set, 1 at least). The one that was
        /// not used for longest makes room. Each send in flight has one beside these.
        address_handles(value: usize) => self.address_handles = value.max(1);

        /// As [`ChannelBuilder::max_inline_data`].
        max_inline_data(value: u32) => self.channel = self.channel.max_inline_data(value);

        /// Replaces all settings of the connection: beside those above, the retries of SRD and DC and the path of DC.
        connection_settings(settings: ConnectionSettings) => self.channel.connection = settings;

        /// As [`ChannelBuilder::settle_timeout`].
        settle_timeout(value: Duration) => self.channel = self.channel.settle_timeout(value);
    }

    /// Makes the end one of EFA's SRD (scalable reliable datagrams): each message arrives or its completion reports the
    /// failure, **in any order**. It has [writes](crate::WriteWorkRequest), also with an immediate, and
    /// [reads](crate::ReadWorkRequest), where [the device has them](crate::device::EfaAttributes::send_operations):
    /// [`Loop::post_to`](crate::Loop::post_to) posts them. No 40 bytes precede a message. What fails harms no other operation, and the end goes on.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::sync::Arc;
    /// use ibverbs::channel::DatagramsBuilder;
    /// use ibverbs::queue_pair::SrdOptions;
    /// use ibverbs::{AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, WriteWorkRequest};
    ///
    /// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rdmap0s6")?)?);
    /// let pool = BufferPool::new(&domain, 4096, 16, AccessFlags::empty())?;
    /// let mut client = Loop::<PooledBuffer>::new(domain.context_parent(), 64)?;
    /// let end = client.add_datagrams(DatagramsBuilder::new(&domain).srd(SrdOptions::default()))?;
    /// # let peer = client.endpoint(end).ok_or("it is there")?;
    /// # let window = ibverbs::RemoteMemoryRegion::new(4096, 4096, 1)?;
    /// // The peer has sent its endpoint and a remote region.
    /// let to = client.destination(end, &peer)?;
    /// let data = pool.take_from(b"block 7")?.ok_or("all buffers are in use")?;
    /// client.post_to(end, WriteWorkRequest::new(data, window.slice(..7)?).immediate(7), &to, 1)?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "efa")]
    pub fn srd(mut self, options: SrdOptions) -> Self {
        let driver = DriverTransport::Srd { options, rnr_retry: false };
        (self.channel, self.kind) = (self.channel.of_driver(driver), EndKind::Srd);
        self
    }

    /// Makes the end a DC initiator of mlx5, which sends, writes, reads and adds to any
    /// [target](ChannelBuilder::build_dc_target), in the order of its posts, and receives nothing. Each operation names its
    /// target by a [`DcDestination`](crate::operation::DcDestination). What fails one ends the others: remove the end then,
    /// and add another.
    #[cfg(feature = "mlx5")]
    pub fn dc_initiator(mut self) -> Self {
        let driver = DriverTransport::DcInitiator(None);
        (self.channel, self.kind) = (self.channel.of_driver(driver), EndKind::Dc);
        self.channel.capacities.max_recv_wr = 0;
        self
    }

    /// The queue pair is then in RTS.
    pub(crate) fn build(
        self,
        queue: &Arc<CompletionQueue<'res>>,
    ) -> Result<(Channel<'res>, DatagramEnd<'res>)> {
        let domain = self.channel.domain.clone();
        let ConnectionSettings { port, qkey, .. } = self.channel.connection;
        let sends = self.channel.capacities.max_send_wr;
        let mut link = self.channel.of_loop(queue, None).build_link()?;
        link.activate()?;
        let core = &link.core;
        core.target.set(match self.kind {
            EndKind::Unreliable => Target::with(core.queue_pair, refuse_send, post_receive),
            _ => core.target.get().with_send(refuse_send),
        });
        let of_port = |entry: &GidEntry| entry.port == port;
        let gids = domain.context().gid_table()?.into_iter().filter(of_port).collect();
        let mut in_flight = Vec::new();
        in_flight.try_reserve(sends as usize).map_err(|_| super::error::no_memory())?;
        in_flight.resize(sends as usize, None);
        let known = HashMap::with_hasher(PathHasher(RandomState::new().hash_one(0)));
        let (uses, last, held, spent) = Default::default();
        let (kind, endpoint) = (self.kind, link.endpoint());
        let functions = link.queue_pair().extended_functions();
        let at = Arc::new(DatagramPort { domain, endpoint, kind, functions, port, qkey, gids });
        let most = self.address_handles;
        let end = DatagramEnd { at, known, uses, last, most, in_flight, held, spent };
        Ok((Channel::connected(link), end))
    }
}

debug! { DatagramsBuilder<'_>, self, channel: self.channel, address_handles: self.address_handles }

/// Tells the addresses of peers.
pub(crate) struct DatagramPort<'res> {
    pub(crate) domain: DomainRef<'res>,
    #[cfg_attr(
        not(feature = "async"),
        expect(dead_code, reason = "a loop has it with its member")
    )]
    pub(crate) endpoint: QueuePairEndpoint,
    pub(crate) kind: EndKind,
    /// Those of the extended interface, by which all but UD post. UD has none.
    pub(crate) functions: u64,
    port: u8,
    qkey: u32,
    /// Those of the port at the time of `build`.
    gids: Vec<GidEntry>,
}

pub(crate) struct DatagramEnd<'res> {
    pub(crate) at: Arc<DatagramPort<'res>>,
    /// With the number of the last use.
    known: HashMap<AddressVector, (Shared<'res>, u64), PathHasher>,
    uses: u64,
    /// The path that was used last. It is one of the known ones, so replacing it here destroys no handle.
    last: Option<(AddressVector, Shared<'res>)>,
    most: usize,
    /// By the place of the send. The device may still use it.
    in_flight: Vec<Option<Shared<'res>>>,
    /// Of refused sends that the device may have.
    held: Vec<Shared<'res>>,
    /// Dropping calls a verb, so it waits until the loop is not borrowed.
    spent: Vec<Shared<'res>>,
}

type Shared<'res> = Arc<AddressHandle<'res>>;

/// Each send hashes a path. A peer chooses parts of it, but does not know the number that the hash begins with.
#[derive(Clone)]
struct PathHasher(u64);

impl BuildHasher for PathHasher {
    type Hasher = Self;

    #[inline]
    fn build_hasher(&self) -> Self {
        self.clone()
    }
}

impl Hasher for PathHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    #[inline]
    fn write_u128(&mut self, words: u128) {
        self.write_u64(words as u64);
        self.write_u64((words >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The transport of a datagram end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(dead_code, reason = "a build may have none of these features: `efa`, `mlx5`, `async`")]
pub(crate) enum EndKind {
    Unreliable,
    Srd,
    Dc,
}

impl DatagramPort<'_> {
    /// # Errors
    ///
    ///  - `EINVAL`: the end does not send there.
    pub(crate) fn check<D: EndDestination>(&self) -> Result<()> {
        let reason =
            "a DC initiator sends to a DcDestination, and other ends to a DatagramDestination";
        Error::invalid_if(D::IS_DC != (self.kind == EndKind::Dc), "ibv_create_ah", reason)
    }

    pub(crate) fn destination(&self, peer: &QueuePairEndpoint) -> Result<DatagramDestination> {
        let path = AddressVector::to_peer(self.domain.context(), self.port, peer)?;
        Ok(DatagramDestination { path, number: peer.num(), qkey: self.qkey })
    }

    /// RoCE only.
    pub(crate) fn group(&self, group: IpAddr) -> Result<DatagramDestination> {
        const VERB: &str = "ibv_create_ah";
        Error::invalid_if(
            !group.is_multicast(),
            VERB,
            "the address is not that of a multicast group",
        )?;
        if self.gids.iter().all(|entry| entry.gid_type == GidType::InfiniBand) {
            let reason = "on InfiniBand the subnet manager says what a group's address is: join it with \
                          rdmacm::MulticastMembership, and take its peer().destination";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        let gid = match group {
            IpAddr::V4(group) => Gid::from(group),
            IpAddr::V6(group) => Gid::from(group),
        };
        let is_v2 = |entry: &&GidEntry| entry.gid_type == GidType::RoceV2;
        let Some(index) = gid_like(self.gids.iter().filter(is_v2), gid) else {
            let reason = "the port has no RoCE v2 GID of the group's family of addresses";
            return Err(Error::with_reason(VERB, libc::EADDRNOTAVAIL, reason));
        };
        let path = AddressVector::new(self.port, 0).global(gid, index);
        Ok(DatagramDestination { path, number: DatagramDestination::MEMBERS, qkey: self.qkey })
    }

    pub(crate) fn sender(
        &self,
        success: &WorkSuccess,
        header: &GlobalRouteHeader,
    ) -> Result<DatagramDestination> {
        let Self { domain, port, gids, .. } = self;
        let path = AddressVector::reply_from(gids, *port, success.as_raw(), header)
            // The GIDs of the port may have changed. If it does not tell them any more, they have not.
            .or_else(|unknown| {
                let reply = AddressVector::reply_to(domain.context(), *port, success, header);
                reply.map_err(|_| unknown)
            })?;
        Ok(DatagramDestination { path, number: success.source_queue_pair(), qkey: self.qkey })
    }
}

impl<'res> DatagramEnd<'res> {
    /// # Errors
    ///
    ///  - `EINVAL`: the path goes through another port.
    pub(crate) fn known(&mut self, path: &AddressVector) -> Result<Option<Shared<'res>>> {
        if path.port() != self.at.port {
            let reason = "the path goes through another port than that of the datagram end";
            return Err(Error::invalid("ibv_create_ah", reason));
        }
        if let Some((last, handle)) = &self.last
            && last == path
        {
            return Ok(Some(handle.clone()));
        }
        self.uses += 1;
        let known = self.known.get_mut(path);
        Ok(known.map(|(handle, last)| {
            *last = self.uses;
            self.last = Some((*path, handle.clone()));
            handle.clone()
        }))
    }

    /// Returns what the caller drops while the loop is not borrowed.
    pub(crate) fn keep(
        &mut self,
        path: &AddressVector,
        handle: &Shared<'res>,
    ) -> [Option<Shared<'res>>; 2] {
        let Self { known, uses, last, most, .. } = self;
        let mut oldest = None;
        if known.len() >= *most && !known.contains_key(path) {
            let oldest_path =
                known.iter().min_by_key(|(_, (_, last))| *last).map(|(path, _)| *path);
            oldest = oldest_path.and_then(|path| known.remove(&path));
        }
        *last = None;
        let room = known.try_reserve(1).ok();
        let before = room.and_then(|()| {
            *last = Some((*path, handle.clone()));
            known.insert(*path, (handle.clone(), *uses))
        });
        [oldest, before].map(|replaced| replaced.map(|(handle, _)| handle))
    }

    pub(crate) fn posted(&mut self, place: usize, handle: Shared<'res>) {
        if let Some(in_flight) = self.in_flight.get_mut(place)
            && let Some(before) = in_flight.replace(handle)
            && Arc::strong_count(&before) == 1
            && self.spent.try_reserve(1).is_ok()
        {
            self.spent.push(before);
        }
    }

    /// The device may have a send with it, in an unknown place.
    pub(crate) fn hold(&mut self, handle: Shared<'res>) {
        match self.held.try_reserve(1) {
            Ok(()) => self.held.push(handle),
            Err(_) => mem::forget(handle),
        }
    }

    /// To be dropped while the loop is not borrowed.
    pub(crate) fn take_spent(&mut self) -> Vec<Shared<'res>> {
        mem::take(&mut self.spent)
    }
}

impl Leak for DatagramEnd<'_> {
    /// The device may use the handles for ever.
    fn leak(&self) {
        let Self { known, in_flight, held, .. } = self;
        let known = known.values().map(|(handle, _)| handle);
        for handle in known.chain(in_flight.iter().flatten()).chain(held) {
            mem::forget(handle.clone());
        }
    }
}

/// # Safety
///
/// As for `ibv_post_send`.
pub(crate) unsafe extern "C" fn refuse_send(
    _: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { *refused = request };
    libc::EDESTADDRREQ
}

/// Refuses a receive without room for the 40 bytes that precede the message.
///
/// # Safety
///
/// As for `ibv_post_recv`.
pub(super) unsafe extern "C" fn post_receive(
    queue_pair: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    refused: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches for the request and its list.
    let room: u64 = unsafe {
        let ffi::ibv_recv_wr { sg_list, num_sge, .. } = *request;
        (0..num_sge as usize).map(|piece| u64::from((*sg_list.add(piece)).length)).sum()
    };
    if room < GlobalRouteHeader::LEN as u64 {
        // SAFETY: as above.
        unsafe { *refused = request };
        return libc::EMSGSIZE;
    }
    // SAFETY: the caller vouches for everything.
    unsafe { ffi::ibv_post_recv(queue_pair, request, refused) }
}

/// For errors of the functions above.
#[cold]
pub(crate) fn explain(verb: &'static str, returned: c_int) -> TransportError {
    let reason = match returned {
        libc::EDESTADDRREQ => {
            "a datagram names its destination: send each with send_to; a datagram end of UD has no writes and reads"
        }
        libc::EMSGSIZE if verb == "ibv_post_recv" => {
            "40 bytes precede each datagram: the buffer of a receive must have room for them and the message"
        }
        _ => return ffi::failed(verb, returned).into(),
    };
    Error::with_reason(verb, returned, reason).into()
}
