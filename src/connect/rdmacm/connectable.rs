//! The types that can be connected: queue pairs and channels.

use std::os::raw::c_int;

use super::error::ConnectionError;
use super::id::Id;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::RemoteMemoryRegion;
use crate::queue_pair::{PreparedQueuePair, QueuePair, Rc, Transport};
use crate::queue_pair_state::{QueuePairState, QueuePairType};

/// A type that the connection manager can connect: a [`PreparedQueuePair`], which becomes a [`QueuePair`],
/// a [`PreparedChannel`](crate::PreparedChannel), which becomes a [`Channel`](crate::Channel), and a
/// [`PreparedAsyncChannel`](crate::PreparedAsyncChannel), which becomes an [`AsyncChannel`](crate::AsyncChannel). All
/// must be of type RC.
pub trait Connectable: sealed::Prepared {}

impl Connectable for PreparedQueuePair<'_, Rc> {}
impl Connectable for PreparedQueuePair<'_, QueuePairType> {}

/// The connected form of a [`Connectable`].
pub(super) type Connected<P> = <P as sealed::Prepared>::Connected;

pub(crate) mod sealed {
    use crate::connect::rdmacm::attempt::GiveUp;
    use crate::error::Result;
    use crate::ffi;
    use crate::memory::RemoteMemoryRegion;

    /// The settings of a queue pair that the connection manager needs.
    #[derive(Clone, Copy, Debug)]
    pub struct Settings {
        pub(in crate::connect::rdmacm) number: u32,
        pub(in crate::connect::rdmacm) port: u8,
        pub(in crate::connect::rdmacm) access: u32,
        pub(in crate::connect::rdmacm) shared_receives: bool,
        pub(in crate::connect::rdmacm) max_rd_atomic: u8,
        pub(in crate::connect::rdmacm) max_dest_rd_atomic: u8,
        pub(in crate::connect::rdmacm) min_rnr_timer: u8,
        pub(in crate::connect::rdmacm) ack_timeout: u8,
        pub(in crate::connect::rdmacm) max_ack_retries: u8,
        pub(in crate::connect::rdmacm) max_rnr_retries: u8,
        pub(in crate::connect::rdmacm) credit_word: Option<RemoteMemoryRegion>,
    }

    /// A queue pair in RESET.
    pub trait Prepared: Object + Sized {
        /// The connected form.
        type Connected: Connected;

        /// Converts the object once its queue pair has left RESET.
        fn into_connected(self) -> Self::Connected;
    }

    /// A queue pair on its way to RTS, or there.
    pub trait Connected: Object + Sized {
        /// How it is dropped on iWARP, with the identifier of its connection, before that is established. `None`: as
        /// everywhere else.
        const GIVE_UP: Option<GiveUp<Self>> = None;

        /// Lets everything be posted: the queue pair is in RTS. May be called more than once.
        fn established(&mut self);

        /// Ends all operations in flight, as far as possible.
        fn end(&mut self);
    }

    /// An object that holds a queue pair.
    pub trait Object {
        /// The settings that the connection manager needs.
        fn settings(&self) -> Settings;

        /// The context of the queue pair, and whether its type is RC.
        fn place(&self) -> (*mut ffi::ibv_context, bool);

        /// Takes the peer's credit word. Fails if only one side has flow control.
        fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()>;

        /// Changes its state.
        fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()>;
    }
}

use sealed::{Object, Settings};

/// The attributes that libibverbs knows.
const KNOWN: u32 = crate::queue_pair::AttributeMask::all().bits();

impl<T: Transport> Object for QueuePair<'_, T> {
    fn settings(&self) -> Settings {
        let s = QueuePair::settings(self);
        Settings {
            number: self.number(),
            port: s.port,
            access: s.access.bits(),
            shared_receives: self.shared_receive_queue().is_some(),
            max_rd_atomic: s.max_rd_atomic.unwrap_or(1),
            max_dest_rd_atomic: s.max_dest_rd_atomic.unwrap_or(1),
            min_rnr_timer: s.min_rnr_timer.value(),
            ack_timeout: s.ack_timeout.value(),
            max_ack_retries: s.max_ack_retries.value(),
            max_rnr_retries: s.max_rnr_retries.value(),
            credit_word: None,
        }
    }

    fn place(&self) -> (*mut ffi::ibv_context, bool) {
        let context = self.protection_domain().context().as_raw();
        (context, self.queue_pair_type() == QueuePairType::ReliableConnected)
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        if theirs.is_none() {
            return Ok(());
        }
        let reason =
            "the peer's channel was built with flow_control, which a queue pair does not have";
        Err(Error::invalid("rdma_accept", reason))
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: the queue pair is live; the bits are defined ones, which fit.
        let returned = unsafe { ffi::ibv_modify_qp(self.as_raw(), attributes, mask as c_int) };
        ffi::status("ibv_modify_qp", returned)
    }
}

impl<T: Transport> sealed::Connected for QueuePair<'_, T> {
    fn established(&mut self) {}

    fn end(&mut self) {
        let _ = self.to_error();
    }
}

impl<T: Transport> Object for PreparedQueuePair<'_, T> {
    fn settings(&self) -> Settings {
        Object::settings(self.queue_pair())
    }

    fn place(&self) -> (*mut ffi::ibv_context, bool) {
        self.queue_pair().place()
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.queue_pair().agree(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        Object::modify(self.queue_pair_mut(), attributes, mask)
    }
}

impl<'res, T: Transport> sealed::Prepared for PreparedQueuePair<'res, T> {
    type Connected = QueuePair<'res, T>;

    fn into_connected(self) -> QueuePair<'res, T> {
        self.into_queue_pair()
    }
}

/// Checks that `object` can use the connection of `id`.
pub(super) fn check(id: &Id, object: &impl Object) -> Result<(), ConnectionError> {
    let (context, reliable) = object.place();
    if !reliable {
        let reason = "the connection manager connects queue pairs of type RC";
        return Err(Error::invalid("rdma_connect", reason).into());
    }
    id.check(context, object.settings().port)
}

/// Takes the queue pair to `state`, with the attributes that the connection manager gives.
///
/// Both sides have agreed through the connection manager on the path, the numbers of queue pair and
/// packets, the MTU and the outstanding reads. The peer's access rights, the time-outs and the numbers of
/// retries are those that the queue pair was built with.
pub(super) fn advance(id: &mut Id, object: &mut impl Object, state: QueuePairState) -> Result<()> {
    let settings = object.settings();
    let (mut raw, mask) = id.queue_pair_attributes(state)?;
    raw.qp_access_flags = settings.access;
    raw.min_rnr_timer = settings.min_rnr_timer;
    raw.timeout = settings.ack_timeout;
    raw.retry_cnt = settings.max_ack_retries;
    raw.rnr_retry = settings.max_rnr_retries;
    raw.max_rd_atomic = raw.max_rd_atomic.min(settings.max_rd_atomic);
    raw.max_dest_rd_atomic = raw.max_dest_rd_atomic.min(settings.max_dest_rd_atomic);
    // Some kernels set bits beyond those that libibverbs knows.
    object.modify(&mut raw, mask & KNOWN)
}
