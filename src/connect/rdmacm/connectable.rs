//! The types that can be connected: queue pairs and channels.

use std::os::raw::c_int;

use super::error::ConnectionError;
use super::id::Id;
use crate::base::{Error, QueuePairState, QueuePairType, Result, ffi};
use crate::connect::handshake::Handshake;
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::queue_pair::{PreparedQueuePair, QueuePair, Rc, Transport};

/// The objects that the connection manager can connect, all of type RC: [`PreparedQueuePair`] (becomes a [`QueuePair`]),
/// [`PreparedChannel`](crate::PreparedChannel) ([`Channel`](crate::Channel)) and
/// [`PreparedAsyncChannel`](crate::future::PreparedAsyncChannel) ([`AsyncChannel`](crate::AsyncChannel)).
pub trait Connectable: Handshake<Connected: sealed::Connected> + sealed::Object {}

impl Connectable for PreparedQueuePair<'_, Rc> {}
impl Connectable for PreparedQueuePair<'_, QueuePairType> {}

pub(super) type Connected<P> = <P as Handshake>::Connected;

pub(crate) mod sealed {
    use crate::base::{Result, ffi};
    #[cfg(feature = "channel")]
    use crate::channel::parts::PeerSign;
    use crate::verbs::memory::RemoteMemoryRegion;
    use crate::verbs::queue_pair::ConnectionSettings;

    /// The facts of a queue pair that the connection manager needs.
    #[derive(Clone, Copy, Debug)]
    pub struct Settings {
        pub(in crate::connect::rdmacm) number: u32,
        pub(in crate::connect::rdmacm) shared_receives: bool,
        pub(in crate::connect::rdmacm) connection: ConnectionSettings,
        pub(in crate::connect::rdmacm) credit_word: Option<RemoteMemoryRegion>,
    }

    impl Settings {
        /// How many reads and atomics: of the peer at a time, and of its own in flight.
        pub(in crate::connect::rdmacm) fn reads(&self) -> (u8, u8) {
            let ConnectionSettings { max_dest_rd_atomic, max_rd_atomic, .. } = self.connection;
            (max_dest_rd_atomic.unwrap_or(1), max_rd_atomic.unwrap_or(1))
        }
    }

    /// A queue pair in RTS or on its way there.
    pub trait Connected: Object + Sized {
        /// The queue pair is in RTS: allows every post. May be called more than once.
        fn established(&mut self);

        /// Ends what is in flight, as far as possible.
        fn end(&mut self);

        /// Takes what tells that the peer has left.
        #[cfg(feature = "channel")]
        fn watch(&mut self, _: Box<dyn PeerSign>) -> Result<()> {
            Ok(())
        }

        /// For iWARP, before the connection is established: either drop may wait for the peer.
        fn give_up(self, id: impl Send + 'static) {
            drop((self, id));
        }
    }

    /// Holds a queue pair.
    pub trait Object {
        fn settings(&self) -> Settings;

        /// Takes the peer's credit word. Fails if only one side has flow control.
        fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()>;

        fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()>;
    }
}

use sealed::{Object, Settings};

/// The attributes that libibverbs knows.
const KNOWN: u32 = crate::verbs::queue_pair::AttributeMask::all().bits();

impl<T: Transport> Object for QueuePair<'_, T> {
    fn settings(&self) -> Settings {
        Settings {
            number: self.number(),
            shared_receives: self.shared_receive_queue().is_some(),
            connection: *QueuePair::settings(self),
            credit_word: None,
        }
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
        // SAFETY: the queue pair is live; only defined bits are set, which fit.
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

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.queue_pair().agree(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        Object::modify(self.queue_pair_mut(), attributes, mask)
    }
}

#[cfg(feature = "channel")]
mod channels {
    use super::sealed::Connected;
    use super::{Connectable, Object, Settings};
    use crate::base::{Result, ffi};
    use crate::channel::parts::PeerSign;
    use crate::channel::{Channel, PreparedChannel};
    use crate::verbs::memory::RemoteMemoryRegion;

    impl Connectable for PreparedChannel<'_> {}

    macro_rules! objects {
        ($($channel:ident)+) => {
            $(impl Object for $channel<'_> {
                fn settings(&self) -> Settings {
                    let link = &self.link;
                    Settings { credit_word: link.credit_word(), ..Object::settings(link.queue_pair()) }
                }

                fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
                    self.link.set_peer_credit_word(theirs)
                }

                fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
                    Object::modify(self.link.live_queue_pair()?, attributes, mask)
                }
            })+
        };
    }

    objects! { PreparedChannel Channel }

    impl Connected for Channel<'_> {
        fn established(&mut self) {
            self.allow_sends();
        }

        fn end(&mut self) {
            // On failure the operations stay in flight until the channel is dropped.
            let _ = self.try_end();
        }

        fn watch(&mut self, sign: Box<dyn PeerSign>) -> Result<()> {
            self.link.set_sign(sign);
            Ok(())
        }
    }
}

/// The object then notices that the peer has left. On iWARP its queue pair does by itself.
#[cfg_attr(not(feature = "channel"), expect(clippy::unnecessary_wraps))]
pub(super) fn watch(object: &mut impl sealed::Connected, id: &mut Id, iwarp: bool) -> Result<()> {
    #[cfg(feature = "channel")]
    if !iwarp {
        return object.watch(id.sign());
    }
    let _ = (object, id, iwarp);
    Ok(())
}

pub(super) fn check(id: &Id, prepared: &impl Connectable) -> Result<(), ConnectionError> {
    let (context, kind) = prepared.place();
    let reason = "the connection manager connects queue pairs of type RC";
    Error::invalid_if(kind != QueuePairType::ReliableConnected, "rdma_connect", reason)?;
    id.check(context, prepared.settings().connection.port)
}

/// Sets what both sides have agreed on: path, queue pair and packet numbers, MTU, outstanding reads. Access rights,
/// time-outs and retry counts are the queue pair's own.
pub(super) fn advance(id: &mut Id, object: &mut impl Object, state: QueuePairState) -> Result<()> {
    let settings = object.settings();
    let (answered, in_flight) = settings.reads();
    let settings = settings.connection;
    let (mut raw, mask) = id.queue_pair_attributes(state)?;
    raw.qp_access_flags = settings.access.bits();
    raw.min_rnr_timer = settings.min_rnr_timer.value();
    raw.timeout = settings.ack_timeout.value();
    raw.retry_cnt = settings.max_ack_retries.value();
    raw.rnr_retry = settings.max_rnr_retries.value();
    raw.max_rd_atomic = raw.max_rd_atomic.min(in_flight);
    raw.max_dest_rd_atomic = raw.max_dest_rd_atomic.min(answered);
    // Some kernels set bits that libibverbs does not know.
    object.modify(&mut raw, mask & KNOWN)
}
