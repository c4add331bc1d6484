//! The owner of a channel's queue pair, connected or not.

use std::mem;
use std::mem::ManuallyDrop;
use std::net::TcpStream;
use std::sync::Arc;

use super::core::{Core, CoreSettings};
use super::credits::CreditRegion;
use super::in_flight::InFlight;
use super::{Channel, credits};
use crate::debug::debug;
use crate::device::Gid;
use crate::error::{Error, ErrorKind, Result};
use crate::foreign_enum::setters;
use crate::handle::Leak;
use crate::memory::RemoteMemoryRegion;
use crate::queue_pair::{AddressVector, ConnectionSettings, QueuePair, QueuePairEndpoint};
use crate::queue_pair_state::QueuePairType;
use crate::settings::{MaximumTransferUnit, PacketSequenceNumber};
use crate::state_error::StateError;
use crate::{ffi, trace};

/// Owns the queue pair and the core that uses it.
pub(crate) struct Link<'res> {
    pub(super) core: Arc<Core>,
    /// If `core.destroyed` is set, the destroy verb was called on its C object. Either way it keeps its
    /// parents alive.
    queue_pair: ManuallyDrop<QueuePair<'res, QueuePairType>>,
    /// The destroy verb failed.
    leaked: bool,
    /// The TCP stream over which the two sides have connected, if they used one. It is closed after the
    /// queue pair is destroyed.
    pub(super) stream: Option<TcpStream>,
    template: QueuePairSettings,
    known: KnownState,
    /// The words of the flow control, which the device may access until the queue pair is destroyed. The core
    /// points to them. Boxed, since few channels have flow control.
    credit_region: Option<Box<CreditRegion<'res>>>,
}

/// The state of the queue pair, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KnownState {
    /// It is in RESET, with nothing in flight and nothing in the completion queue.
    Reset,
    /// It is in INIT, unless the core was stopped. The core accepts receives.
    Receiving,
    /// It is in any state, or gone.
    Used,
}

/// The settings for a channel's queue pairs: the first one, and one for each reset.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuePairSettings {
    /// What the program asked for.
    pub(super) capacities: ffi::ibv_qp_cap,
    pub(super) connection: ConnectionSettings,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
        // SAFETY: it is taken once, here. The C object was destroyed or is leaked.
        unsafe { ManuallyDrop::take(&mut self.queue_pair) }.disown(!self.leaked);
        if self.leaked
            && let Some(region) = &self.credit_region
        {
            region.leak();
        }
    }
}

impl<'res> Link<'res> {
    /// The link of a queue pair in the RESET state. Its send and receive completion queues are one queue,
    /// which only this link uses, or a loop.
    pub(super) fn new(
        queue_pair: QueuePair<'res, QueuePairType>,
        template: QueuePairSettings,
        settings: &CoreSettings,
        table: InFlight,
        credit_region: Option<CreditRegion<'res>>,
    ) -> Self {
        // SAFETY: the queue pair is live. The link owns it, and destroys it through the core only. It owns the
        // region of the credit words too, and leaks it if destroying the queue pair fails.
        let core = unsafe { Core::new(queue_pair.as_raw(), settings, table, None) };
        core.count_credits();
        Self {
            core,
            queue_pair: ManuallyDrop::new(queue_pair),
            leaked: false,
            stream: None,
            template,
            known: KnownState::Reset,
            credit_region: credit_region.map(Box::new),
        }
    }

    pub(crate) fn endpoint(&self) -> QueuePairEndpoint {
        QueuePairEndpoint { credit_word: self.credit_word(), ..self.queue_pair.endpoint() }
    }

    /// Where the peer finds how many receives the channel has posted, if it has flow control.
    pub(crate) fn credit_word(&self) -> Option<RemoteMemoryRegion> {
        self.credit_region.as_deref().and_then(credits::word_for_peer)
    }

    /// Sets where the peer's count of receives is.
    pub(crate) fn set_peer_credit_word(&self, word: Option<RemoteMemoryRegion>) -> Result<()> {
        credits::agree(self.core.credits.as_deref(), word)
    }

    /// The queue pair. Only the core may post to it and change its state.
    pub(crate) fn queue_pair(&self) -> &QueuePair<'res, QueuePairType> {
        &self.queue_pair
    }

    /// How many requests the two queues have room for.
    pub(super) fn depths(&self) -> [u32; 2] {
        let ffi::ibv_qp_cap { max_send_wr, max_recv_wr, .. } = self.template.capacities;
        [max_send_wr, max_recv_wr]
    }

    /// The queue pair, for changing the settings of the next connection.
    pub(super) fn queue_pair_mut(&mut self) -> &mut QueuePair<'res, QueuePairType> {
        &mut self.queue_pair
    }

    /// The queue pair, unless its C object was destroyed.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn live_queue_pair(&mut self) -> Result<&mut QueuePair<'res, QueuePairType>> {
        let reason = "the queue pair had to be destroyed";
        Error::invalid_if(self.core.destroyed.get(), "ibv_modify_qp", reason)?;
        Ok(&mut self.queue_pair)
    }

    /// Takes the queue pair from RESET to INIT, if it is not there yet, so that receives can be posted.
    pub(super) fn open_receives(&mut self) -> Result<()> {
        if !self.is_receiving() {
            self.ensure_reset()?;
            self.known = KnownState::Used;
            self.queue_pair.initialize()?;
            self.core.open_receives();
            self.known = KnownState::Receiving;
        }
        Ok(())
    }

    /// Whether the queue pair is in RESET, with nothing in flight.
    pub(super) fn is_reset(&self) -> bool {
        self.known == KnownState::Reset
    }

    /// Whether the queue pair is in INIT, where receives may be in flight.
    pub(super) fn is_receiving(&self) -> bool {
        self.known == KnownState::Receiving && self.core.table.is_open_for_receives()
    }

    /// Takes the queue pair from RESET or INIT to RTS, with nothing in flight but receives. After a failure
    /// it goes back to RESET, as far as possible, and nothing is in flight.
    pub(super) fn connect(&mut self, remote: &QueuePairEndpoint) -> Result<()> {
        if !self.is_receiving() {
            self.ensure_reset()?;
        }
        self.set_peer_credit_word(remote.credit_word())?;
        credits::check_reads(&self.queue_pair.endpoint(), remote)?;
        self.known = KnownState::Used;
        if let Err(error) = self.queue_pair.connect(Some(remote)) {
            // If this fails, the next attempt does it again.
            let _ = self.ensure_reset();
            return Err(error);
        }
        self.core.open();
        trace::channel_connected(self.core.number, remote.num());
        Ok(())
    }

    /// Lets it receive what is sent to the group that this path leads to.
    pub(crate) fn join(&mut self, path: &AddressVector) -> Result<()> {
        self.queue_pair.attach_multicast(path.gid().unwrap_or(Gid::ZERO), path.lid())
    }

    /// Leaves that group.
    pub(crate) fn leave(&mut self, path: &AddressVector) -> Result<()> {
        self.queue_pair.detach_multicast(path.gid().unwrap_or(Gid::ZERO), path.lid())
    }

    /// Takes a queue pair that has no peer from RESET to RTS.
    pub(super) fn activate(&mut self) -> Result<()> {
        self.known = KnownState::Used;
        self.queue_pair.connect(None)?;
        self.core.open();
        Ok(())
    }

    /// Takes the queue pair to RESET, with nothing in flight and nothing in the completion queue, and
    /// replaces it by another one.
    ///
    /// A packet names the queue pair that it is for, but not the one that it comes from. If the new queue
    /// pair had the old one's number, it would receive what the peer of the old connection still sends.
    /// Waiting on this side would not help, because the peer decides how long it retries. Random packet
    /// numbers alone would not help either, because a late acknowledgement counts for all packets before
    /// its number.
    pub(super) fn reset(&mut self) -> Result<()> {
        self.known = KnownState::Used;
        self.ensure_reset()?;
        trace::channel_reset(self.core.number);
        match self.replace_queue_pair() {
            // The device has no room for a second one. The first has random packet numbers at least.
            Err(error) if error.kind() == ErrorKind::Resource => {
                self.queue_pair.complete_reset();
                self.queue_pair.renew_psns();
                Ok(())
            }
            result => result,
        }
    }

    /// Takes the queue pair to RESET, with nothing in flight and nothing in the completion queue.
    fn ensure_reset(&mut self) -> Result<()> {
        let reason = "the queue pair had to be destroyed";
        Error::invalid_if(self.core.destroyed.get(), "ibv_modify_qp", reason)?;
        if self.known != KnownState::Reset {
            self.core.close();
            self.core.reset()?;
            self.core.discard()?;
            if let Some(credits) = &self.core.credits {
                credits.forget_peer();
            }
            self.known = KnownState::Reset;
        }
        Ok(())
    }

    /// For a caller that has taken the queue pair to INIT, where it may have been before: lets receives be
    /// posted. The caller then calls [`Core::open_unless_stopped`], when the queue pair is in RTS.
    #[cfg(feature = "rdmacm")]
    pub(super) fn open_receives_of_init(&mut self) {
        if !self.is_receiving() {
            self.core.open_receives();
        }
        self.known = KnownState::Used;
    }

    /// Creates another queue pair of the same kind, and destroys the present one, which is in RESET.
    fn replace_queue_pair(&mut self) -> Result<()> {
        let QueuePairSettings { capacities, mut connection } = self.template;
        // The caller chose these numbers for the first connection only.
        (connection.send_psn, connection.receive_psn) = (None, None);
        let flow_control = self.credit_region.is_some();
        let ffi::ibv_qp_cap { max_send_wr, max_recv_wr, .. } = capacities;
        let (sends, receives) = if self.core.of_loop { (0, 0) } else { (max_send_wr, max_recv_wr) };
        let table = InFlight::new(sends, receives, flow_control)?;
        let capacities = credits::with_own_sends(capacities, flow_control);
        let fresh = self.queue_pair.another(capacities, connection)?;
        let mut settings = self.core.settings();
        settings.limits.messages = *fresh.message_limits();
        // SAFETY: as in `new`. The old core is used no more when the new one begins to count credits.
        let core = unsafe { Core::new(fresh.as_raw(), &settings, table, Some(&*self.core)) };
        core.count_credits();
        let old_core = mem::replace(&mut self.core, core);
        let old = mem::replace(&mut self.queue_pair, ManuallyDrop::new(fresh));
        let destroyed = old_core.destroy();
        ManuallyDrop::into_inner(old).disown(destroyed.is_ok());
        destroyed
    }

    /// Destroys the queue pair and reports a failure.
    pub(super) fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The destroy verb is called only once, even if it fails. So operations with borrowed buffers must not
    /// depend on it to end: unpolled ones may be in flight, and the program may free their buffers next.
    /// Operations that own their buffers may depend on it: if it fails, the buffers are leaked.
    fn destroy(&mut self) -> Result<()> {
        if !self.core.destroyed.get()
            && self.core.table.outstanding() > 0
            && self.core.reset().is_err()
        {
            self.core.stop();
        }
        if self.core.destroyed.get() {
            return Ok(());
        }
        self.queue_pair.leave_groups();
        self.core.destroy().inspect_err(|_| self.leaked = true)
    }
}

debug! { Link<'_>, self, endpoint: self.endpoint(), core: self.core, .. }

// Channels that are not connected yet.

/// A channel that is not connected, with the address that the peer needs.
#[derive(Debug)]
#[must_use]
pub struct PreparedChannel<'res> {
    link: Link<'res>,
}

impl<'res> PreparedChannel<'res> {
    /// A channel that is new, or was connected before.
    pub(super) fn from_link(link: Link<'res>) -> Self {
        Self { link }
    }

    /// The address of the channel, which the peer needs. A [reset](Channel::reset) changes it, so ask again
    /// after one.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.link.endpoint()
    }

    /// The number of the first packet that we send. The [endpoint](Self::endpoint) contains it. A peer that
    /// gets the number by other means passes it to its `receive_psn`.
    pub fn send_psn(&self) -> PacketSequenceNumber {
        self.link.queue_pair().send_psn()
    }

    setters! { self,
        /// Sets the number of the first packet that we send on the next connection, as
        /// [`ChannelBuilder::send_psn`](crate::ChannelBuilder::send_psn) does.
        set_send_psn(psn: PacketSequenceNumber) => self.link.queue_pair_mut().set_send_psn(psn);

        /// Sets the number of the first packet that we receive, as [`ChannelBuilder::receive_psn`](crate::ChannelBuilder::receive_psn) does, if the
        /// peer's endpoint does not contain it.
        receive_psn(psn: PacketSequenceNumber) => self.link.queue_pair_mut().set_receive_psn(psn);

        /// Sets the largest MTU of the path, as [`ChannelBuilder::path_mtu`](crate::ChannelBuilder::path_mtu) does. The endpoint contains it
        /// too.
        path_mtu(mtu: MaximumTransferUnit) => self.link.queue_pair_mut().set_path_mtu(mtu);
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn link(&self) -> &Link<'res> {
        &self.link
    }

    pub(crate) fn link_mut(&mut self) -> &mut Link<'res> {
        &mut self.link
    }

    pub(super) fn into_link(self) -> Link<'res> {
        self.link
    }

    pub(super) fn core(&self) -> &Core {
        &self.link.core
    }

    /// `ibv_modify_qp`: connects the channel to the peer's.
    ///
    /// The peer may call this earlier or later. The device retries what is sent before the peer is ready,
    /// as often as the settings allow.
    ///
    /// # Errors
    ///
    /// Those of [`PreparedQueuePair::handshake`](crate::PreparedQueuePair::handshake). The channel comes
    /// back in the [`StateError`], with the same endpoint, for another attempt.
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(
        mut self,
        remote: QueuePairEndpoint,
    ) -> Result<Channel<'res>, StateError<Self>> {
        match self.link.connect(&remote) {
            Ok(()) => Ok(Channel::connected(self.link)),
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    /// Makes the channel of a queue pair that the caller has taken to INIT. It takes receives alone until
    /// [`Channel::allow_sends`].
    #[cfg(feature = "rdmacm")]
    pub(crate) fn into_receiving(mut self) -> Channel<'res> {
        self.link.open_receives_of_init();
        Channel::connected(self.link)
    }

    /// `ibv_destroy_qp`: destroys the queue pair and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The channel is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(self) -> Result<()> {
        self.link.close()
    }
}
