use std::sync::Arc;
use std::time::Duration;

use super::Channel;
use super::core::CoreSettings;
use super::credits::{self, CreditWords};
use super::in_flight::InFlight;
use super::link::{Link, QueuePairSettings};
use super::operation::Limits;
use super::prepared_channel::PreparedChannel;
use super::wait::Sleep;
use crate::base::{Error, QueuePairType, Result, debug, ffi, setters};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::Context;
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::memory::AccessFlags;
use crate::verbs::queue_pair::{
    ConnectionSettings, DriverTransport, QueuePairBuilder, SharedReceiveQueue, connection_settings,
};
use crate::verbs::settings::{
    AckTimeout, FlowLabel, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber, ServiceLevel, StaticRate,
};

/// The settings of a channel and its connection: see [`Channel::builder`](crate::Channel::builder).
///
/// Every setting has a default that works on RoCE, InfiniBand and Soft-RoCE. [`ConnectionSettings`] describes those of the
/// connection, and [`QueuePairBuilder`] the others of the queue pair.
///
/// ```
/// use ibverbs::Channel;
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let prepared = Channel::builder(&domain).max_send_wr(64).max_recv_wr(64).build()?;
/// println!("tell the peer: {}", prepared.endpoint());
/// # let remote = prepared.endpoint();
/// let channel = prepared.handshake(remote)?;
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct ChannelBuilder<'res> {
    pub(super) domain: DomainRef<'res>,
    /// The queue of a [`Loop`](crate::Loop), which also posts.
    of_loop: Option<Arc<CompletionQueue<'res>>>,
    shared_receives: Option<Arc<SharedReceiveQueue<'res>>>,
    queue_pair_type: QueuePairType,
    /// If the type is `Driver`.
    driver: Option<DriverTransport>,
    pub(super) capacities: ffi::ibv_qp_cap,
    inline_if_possible: bool,
    pub(super) connection: ConnectionSettings,
    settle_timeout: Duration,
    sleep_after: Option<u32>,
    flow_control: bool,
}

const VERB: &str = "ibv_create_qp";

const DEFAULT_INLINE: u32 = 64;

macro_rules! setting_methods {
    (
        any peer { $($(#[$meta:meta])* [$bound:ident] $name:ident: $type:ty, $stored:ty = $default:expr;)+ }
        datagrams $datagrams:tt
    ) => {
        impl ChannelBuilder<'_> {
            $(
                #[doc = concat!("As [`ConnectionSettings::", stringify!($name), "`].")]
                pub fn $name(mut self, value: $type) -> Self {
                    self.connection.$name = value.into();
                    self
                }
            )+
        }
    };
}

connection_settings!(setting_methods);

impl<'res> Channel<'res> {
    /// Starts to build a channel: see [`ChannelBuilder::new`].
    pub fn builder(domain: impl Into<DomainRef<'res>>) -> ChannelBuilder<'res> {
        ChannelBuilder::new(domain)
    }
}

impl<'res> ChannelBuilder<'res> {
    /// Starts to build a channel for memory of this domain.
    pub fn new(domain: impl Into<DomainRef<'res>>) -> Self {
        Self {
            domain: domain.into(),
            of_loop: None,
            shared_receives: None,
            queue_pair_type: QueuePairType::ReliableConnected,
            driver: None,
            capacities: ffi::ibv_qp_cap {
                max_send_wr: 16,
                max_recv_wr: 16,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: DEFAULT_INLINE,
            },
            inline_if_possible: true,
            connection: ConnectionSettings::default(),
            settle_timeout: Duration::from_secs(5),
            sleep_after: None,
            flow_control: false,
        }
    }

    setters! { self,
        /// How many bytes a request can carry [inline](crate::Inline). Unless set, it is 64, or 0 on a device that cannot do
        /// that; the device may allow more.
        max_inline_data(value: u32) => {
            (self.capacities.max_inline_data, self.inline_if_possible) = (value, false);
        };

        /// The transport: [`ReliableConnected`](QueuePairType::ReliableConnected) unless set, or
        /// [`UnreliableConnected`](QueuePairType::UnreliableConnected), on which messages may be lost and
        /// which has neither reads nor atomics.
        queue_pair_type(value: QueuePairType) => self.queue_pair_type = value;

        /// The most sends, writes, reads and atomics that can be in flight (16 unless set). One more fails
        /// with [`QueueFull`](crate::TransportError::QueueFull).
        max_send_wr(value: u32) => self.capacities.max_send_wr = value;

        /// The most receives that can be in flight (16 unless set). One more fails with
        /// [`QueueFull`](crate::TransportError::QueueFull).
        max_recv_wr(value: u32) => self.capacities.max_recv_wr = value;

        /// As [`QueuePairBuilder::max_send_sge`].
        max_send_sge(value: u32) => self.capacities.max_send_sge = value;

        /// As [`QueuePairBuilder::max_recv_sge`].
        max_recv_sge(value: u32) => self.capacities.max_recv_sge = value;

        /// Replaces all settings of the connection.
        connection_settings(settings: ConnectionSettings) => self.connection = settings;
    }

    /// Lets the peer read and write, in addition to [`access`](Self::access).
    pub fn allow_remote_rw(mut self) -> Self {
        self.connection.access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        self
    }

    /// The channel takes its receives from `shared`, if any.
    pub(crate) fn of_loop(
        mut self,
        queue: &Arc<CompletionQueue<'res>>,
        shared: Option<Arc<SharedReceiveQueue<'res>>>,
    ) -> Self {
        (self.of_loop, self.shared_receives) = (Some(queue.clone()), shared);
        self
    }

    setters! { self,
        /// How long to poll for the completions of flushed operations before the queue pair is reset (5 s
        /// unless set). It takes effect only after time-outs, failures and panics, and only if the device does
        /// not answer.
        settle_timeout(value: Duration) => self.settle_timeout = value;

        /// Makes waits sleep after this number of polls that found nothing, until the device wakes them. (By
        /// default they poll until the operation has ended, which is much faster and keeps a CPU busy.)
        ///
        /// The completion queue then gets a [`CompletionChannel`](crate::CompletionChannel) of its own.
        sleep_after(polls: u32) => self.sleep_after = Some(polls);

        /// Has the channel send only what the peer has posted receives for (`false` unless set). Both sides need it,
        /// or connecting fails.
        ///
        /// Without it, the device of the sender tries again when the peer has no receive for a message, and the
        /// connection fails when it gives up ([`max_rnr_retries`](Self::max_rnr_retries)); on iWARP it fails at
        /// once. With it, each receive that the peer has posted is a **credit**: a send, a send with an immediate
        /// and a write with an immediate use up one each. Without a credit,
        ///
        ///  - blocking operations wait, within their deadline. If that passes, nothing was posted, the error is
        ///    [`NoCredit`](crate::TransportError::NoCredit), and the channel is not stopped; nor is it if the wait is
        ///    [cancelled](crate::Channel::cancel_handle).
        ///  - the futures of an [`AsyncChannel`](crate::AsyncChannel) wait, as for room in the queue.
        ///  - all others are refused with [`NoCredit`](crate::TransportError::NoCredit), as if the queue were full.
        ///    [`Channel::wait_for_credit`](crate::Channel::wait_for_credit) waits until they can be posted.
        ///
        /// A channel counts its receives in a word of memory, which the peer reads by an RDMA read when its credits
        /// run low. So the receiving side need not do anything in time, and the sending side reads about once per
        /// half of the receives that the peer keeps posted. While it waits without credit it reads again and again,
        /// with pauses that grow to a millisecond.
        ///
        /// It takes a place in the send queue and the completion queue beyond those of the program, a region of
        /// memory, and time: operations do not take the fast path. It needs a reliable connection and receives
        /// that are the channel's own, not shared ones, and lets the peer
        /// [read](AccessFlags::REMOTE_READ) memory whose region allows that.
        ///
        /// The [endpoint](PreparedChannel::endpoint) tells the peer where the word is. The connection manager, which
        /// exchanges no endpoints, sends it in front of the private data, where it takes up 24 bytes.
        flow_control(value: bool) => self.flow_control = value;
    }

    /// A queue pair of SRD or DC.
    #[cfg(any(feature = "efa", feature = "mlx5"))]
    pub(super) fn of_driver(mut self, driver: DriverTransport) -> Self {
        (self.queue_pair_type, self.driver) = (QueuePairType::Driver, Some(driver));
        self
    }

    pub(crate) fn shares_receives(&self) -> bool {
        self.shared_receives.is_some()
    }

    fn check_flow_control(&self) -> Result<()> {
        let ConnectionSettings { max_rd_atomic, max_dest_rd_atomic, .. } = self.connection;
        let reason = if self.queue_pair_type != QueuePairType::ReliableConnected {
            "flow control needs a reliable connection: elsewhere messages are lost, and credits with them"
        } else if self.shares_receives() {
            "flow control counts the receives of one channel: it cannot count those of a shared receive \
             queue"
        } else if max_rd_atomic == Some(0) || max_dest_rd_atomic == Some(0) {
            "flow control needs reads: max_rd_atomic and max_dest_rd_atomic must not be 0"
        } else {
            return Ok(());
        };
        Err(Error::invalid(VERB, reason))
    }

    /// `ibv_create_qp`: creates the queue pair, and its completion queue unless that is a loop's.
    ///
    /// This allocates all that the channel will ever need.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`] and [`QueuePairBuilder::build`], and
    ///
    ///  - `EINVAL`: the type of the queue pair is neither RC nor UC; or the shared receives belong to another context; or a channel with
    ///    [`flow_control`](Self::flow_control) is not of type RC, may not read, or shares its receives; or a channel
    ///    of a [`Loop`](crate::Loop) has `sleep_after`.
    #[doc(alias = "ibv_create_qp")]
    pub fn build(self) -> Result<PreparedChannel<'res>> {
        let is_connected = matches!(
            self.queue_pair_type,
            QueuePairType::ReliableConnected | QueuePairType::UnreliableConnected
        );
        let reason = "a channel is of type RC or UC; for datagrams there is Loop::add_datagrams";
        Error::invalid_if(!is_connected, VERB, reason)?;
        Ok(PreparedChannel { link: self.build_link()? })
    }

    /// `mlx5dv_create_qp`: creates a DC target for a loop, which adds it as a channel. It takes the messages of any initiator
    /// that names `access_key`, from the shared receives of [`Loop::create_sharing_channel`](crate::Loop::create_sharing_channel),
    /// and sends nothing. Its [`endpoint`](crate::Loop::endpoint) is what initiators need, with the key.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePairBuilder::build_dc_target`], and
    ///
    ///  - `EINVAL`: the builder is not of `create_sharing_channel`.
    #[cfg(feature = "mlx5")]
    #[doc(alias = "mlx5dv_create_qp")]
    pub fn build_dc_target(mut self, access_key: u64) -> Result<super::Channel<'res>> {
        let reason =
            "a DC target takes shared receives: build it with Loop::create_sharing_channel";
        Error::invalid_if(!self.shares_receives(), "mlx5dv_create_qp", reason)?;
        self.capacities.max_send_wr = 0;
        let mut link = self.of_driver(DriverTransport::DcTarget { access_key }).build_link()?;
        link.activate()?;
        Ok(super::Channel::connected(link))
    }

    pub(super) fn build_link(self) -> Result<Link<'res>> {
        let reliable =
            self.queue_pair_type == QueuePairType::ReliableConnected || self.driver.is_some();
        let (mut capacities, mut connection) = (self.capacities, self.connection);
        if self.flow_control {
            self.check_flow_control()?;
            connection.access |= AccessFlags::REMOTE_READ;
        }
        let of_loop = self.of_loop.is_some();
        let reason = "a channel of a loop does not sleep itself: leave sleep_after out";
        Error::invalid_if(of_loop && self.sleep_after.is_some(), VERB, reason)?;
        if self.shares_receives() {
            capacities.max_recv_wr = 0;
        }
        capacities.max_send_sge = capacities.max_send_sge.max(1);
        capacities.max_recv_sge = capacities.max_recv_sge.max(1);
        let with_own = credits::with_own_sends(capacities, self.flow_control);
        let queue = match self.of_loop {
            Some(queue) => {
                check_context(VERB, &self.domain, &queue)?;
                queue
            }
            None => {
                let depth = with_own.max_send_wr.saturating_add(with_own.max_recv_wr);
                let queue = CompletionQueue::builder(self.domain.context_parent(), depth);
                let queue = if self.sleep_after.is_some() { queue.own_channel() } else { queue };
                let context = self.domain.context();
                Arc::new(queue.build().map_err(|error| too_deep(context, depth).unwrap_or(error))?)
            }
        };
        let domain = self.flow_control.then(|| self.domain.clone());
        let builder = QueuePairBuilder::new(self.domain, &queue, &queue, self.queue_pair_type);
        let builder = builder.driver(self.driver);
        let builder = match &self.shared_receives {
            Some(shared) => builder.srq(shared),
            None => builder,
        };
        // The completion queue has room for both depths, so they are within the device's limits.
        let table = InFlight::of_channel(&capacities, self.flow_control, of_loop)?;
        let credit_region = domain.map(credits::register).transpose()?;
        let credit_words = credit_region.as_ref().map(CreditWords::new).transpose()?;
        let prepared = builder
            .capacities(with_own, self.inline_if_possible)
            .connection_settings(connection)
            .build()?;
        let queue_pair = prepared.into_queue_pair();
        // For the queue pairs of later resets.
        if self.inline_if_possible {
            capacities.max_inline_data = DEFAULT_INLINE.min(queue_pair.max_inline_data());
        }
        // Even if the device grants more: the queue and the table have no room for it.
        let limits = Limits {
            max_send_sge: capacities.max_send_sge,
            max_recv_sge: capacities.max_recv_sge,
            messages: *queue_pair.message_limits(),
            reliable,
            private_reads: reliable && !queue_pair.protection_domain().context().is_iwarp(),
        };
        let settings = CoreSettings {
            limits,
            settle_timeout: self.settle_timeout,
            // The queue pair holds the queue in an `Arc`, so its address stays the same.
            sleep: self.sleep_after.map(|after| Sleep { after, queue: Arc::as_ptr(&queue).cast() }),
            of_loop,
        };
        let template = QueuePairSettings { capacities, connection };
        Ok(Link::new(queue_pair, template, settings, credit_words, table, credit_region))
    }
}

pub(crate) fn check_context(
    verb: &'static str,
    domain: &ProtectionDomain<'_>,
    queue: &CompletionQueue<'_>,
) -> Result<()> {
    let reason = "the protection domain and the loop, or the reactor, are of two contexts: open the device once, and \
                  make both of that context";
    domain.context().check_same(queue.context(), verb, reason)
}

/// Says why the queue has to be so long.
#[cold]
fn too_deep(context: &Context<'_>, depth: u32) -> Option<Error> {
    let most = context.query_device().ok()?.max_cqe();
    let what = "by the device's max_cqe, the sum of max_send_wr and max_recv_wr of the channel";
    (depth > most).then(|| Error::out_of_range(VERB, what, depth.into(), 1, most.into()))
}

debug! {
    ChannelBuilder<'_>, self,
    queue_pair_type: self.queue_pair_type, capacities: self.capacities,
    connection: self.connection, settle_timeout: self.settle_timeout,
    sleep_after: self.sleep_after, flow_control: self.flow_control, ..
}

impl<'ctx> ProtectionDomain<'ctx> {
    /// Begins a channel that borrows this domain. See [`Channel::builder`](crate::Channel::builder).
    ///
    /// For a value that leaves its function: `Channel::builder(domain)`, with the domain by value or in an `Arc`.
    pub fn create_channel<'res>(&'res self) -> ChannelBuilder<'res>
    where
        'ctx: 'res,
    {
        ChannelBuilder::new(self)
    }
}
