use std::mem::{self, ManuallyDrop};
use std::net::TcpStream;
use std::sync::Arc;

use super::core::{Core, CoreSettings};
use super::credits::{self, CreditRegion, CreditWords};
use super::in_flight::InFlight;
use super::peer_sign::PeerSign;
use crate::base::{Error, ErrorKind, Leak, QueuePairType, Result, debug, ffi, trace};
use crate::verbs::device::Gid;
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::queue_pair::{AddressVector, ConnectionSettings, QueuePair, QueuePairEndpoint};

pub(crate) struct Link<'res> {
    pub(crate) core: Arc<Core>,
    /// Keeps its parents alive, also after the destroy verb (`core.destroyed`).
    pub(super) queue_pair: ManuallyDrop<QueuePair<'res, QueuePairType>>,
    leaked: bool,
    /// Closed after the queue pair is destroyed.
    pub(crate) stream: Option<TcpStream>,
    /// Tells that the peer is gone, if there is no stream.
    pub(crate) sign: Option<Box<dyn PeerSign>>,
    /// The peer keeps its end of the stream open as long as its channel, so that the end of the one is that of the other.
    pub(crate) peer_keeps: bool,
    template: QueuePairSettings,
    known: KnownState,
    /// The device may access it until the queue pair is destroyed. Boxed, since few channels have flow control.
    credit_region: Option<Box<CreditRegion<'res>>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum KnownState {
    /// RESET, with nothing in flight and an empty completion queue.
    Reset,
    /// INIT, unless the core was stopped. The core accepts receives.
    Receiving,
    /// Any state, or destroyed.
    Used,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct QueuePairSettings {
    /// As the program asked.
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
    /// The queue pair is in RESET. It has one completion queue, which only this link or a loop uses.
    pub(super) fn new(
        queue_pair: QueuePair<'res, QueuePairType>,
        template: QueuePairSettings,
        settings: CoreSettings,
        credit_words: Option<CreditWords>,
        table: InFlight,
        credit_region: Option<CreditRegion<'res>>,
    ) -> Self {
        // SAFETY: the link owns the live queue pair, and destroys it through the core only. It owns the region of the
        // credit words, and leaks it if the destroy verb fails.
        let core = unsafe { Core::new(queue_pair.as_raw(), settings, credit_words, table, None) };
        core.count_credits();
        Self {
            core,
            queue_pair: ManuallyDrop::new(queue_pair),
            leaked: false,
            stream: None,
            sign: None,
            peer_keeps: false,
            template,
            known: KnownState::Reset,
            credit_region: credit_region.map(Box::new),
        }
    }

    pub(crate) fn endpoint(&self) -> QueuePairEndpoint {
        QueuePairEndpoint { credit_word: self.credit_word(), ..self.queue_pair.endpoint() }
    }

    pub(crate) fn peer_sign(&self) -> Option<&dyn PeerSign> {
        let stream = self.stream.as_ref().map(|stream| stream as &dyn PeerSign);
        stream.or(self.sign.as_deref()).filter(|_| self.peer_keeps)
    }

    /// The program has connected the channel over it.
    pub(crate) fn keep_stream(&mut self, stream: TcpStream) {
        (self.stream, self.peer_keeps) = (Some(stream), true);
    }

    /// The connection manager's.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn set_sign(&mut self, sign: Box<dyn PeerSign>) {
        (self.sign, self.peer_keeps) = (Some(sign), true);
    }

    pub(crate) fn credit_word(&self) -> Option<RemoteMemoryRegion> {
        self.credit_region.as_deref().and_then(credits::word_for_peer)
    }

    pub(crate) fn set_peer_credit_word(&self, word: Option<RemoteMemoryRegion>) -> Result<()> {
        credits::agree(self.core.credits.as_deref(), word)
    }

    /// Only the core may post to it and change its state.
    pub(crate) fn queue_pair(&self) -> &QueuePair<'res, QueuePairType> {
        &self.queue_pair
    }

    pub(crate) fn depths(&self) -> [u32; 2] {
        let ffi::ibv_qp_cap { max_send_wr, max_recv_wr, .. } = self.template.capacities;
        [max_send_wr, max_recv_wr]
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn live_queue_pair(&mut self) -> Result<&mut QueuePair<'res, QueuePairType>> {
        let reason = "the queue pair had to be destroyed";
        Error::invalid_if(self.core.destroyed.get(), "ibv_modify_qp", reason)?;
        Ok(&mut self.queue_pair)
    }

    /// From RESET to INIT, unless it is there.
    pub(crate) fn open_receives(&mut self) -> Result<()> {
        if !self.is_receiving() {
            self.ensure_reset()?;
            self.known = KnownState::Used;
            self.queue_pair.initialize()?;
            self.core.open_receives();
            self.known = KnownState::Receiving;
        }
        Ok(())
    }

    pub(crate) fn is_reset(&self) -> bool {
        self.known == KnownState::Reset
    }

    pub(crate) fn is_receiving(&self) -> bool {
        self.known == KnownState::Receiving && self.core.table.is_open_for_receives()
    }

    /// From RESET or INIT to RTS. After a failure it goes back to RESET if possible, and nothing is in flight.
    pub(crate) fn connect(&mut self, remote: &QueuePairEndpoint) -> Result<()> {
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

    pub(crate) fn join(&mut self, path: &AddressVector) -> Result<()> {
        self.queue_pair.attach_multicast(path.gid().unwrap_or(Gid::ZERO), path.lid())
    }

    pub(crate) fn leave(&mut self, path: &AddressVector) -> Result<()> {
        self.queue_pair.detach_multicast(path.gid().unwrap_or(Gid::ZERO), path.lid())
    }

    /// From RESET to RTS, without a peer.
    pub(super) fn activate(&mut self) -> Result<()> {
        self.known = KnownState::Used;
        self.queue_pair.connect(None)?;
        self.core.open();
        Ok(())
    }

    /// Goes to RESET, and takes another queue pair.
    ///
    /// A packet names only the queue pair that it is for, so one with the old number would receive what the old peer
    /// still sends. The peer decides how long it retries: no wait here helps. Nor do random packet numbers alone: a
    /// late acknowledgement counts for all packets before its number.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.known = KnownState::Used;
        self.ensure_reset()?;
        trace::channel_reset(self.core.number);
        match self.replace_queue_pair() {
            // The device has no room for a second one. The first gets random packet numbers at least.
            Err(error) if error.kind() == ErrorKind::Resource => {
                self.queue_pair.complete_reset();
                self.queue_pair.renew_psns();
                Ok(())
            }
            result => result,
        }
    }

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

    /// The caller has taken the queue pair to INIT, and calls [`Core::open_unless_stopped`] once it is in RTS.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn open_receives_of_init(&mut self) {
        if !self.is_receiving() {
            self.core.open_receives();
        }
        self.known = KnownState::Used;
    }

    /// The present one is in RESET.
    fn replace_queue_pair(&mut self) -> Result<()> {
        let QueuePairSettings { capacities, mut connection } = self.template;
        // The caller chose these numbers for the first connection only.
        (connection.send_psn, connection.receive_psn) = (None, None);
        let flow_control = self.credit_region.is_some();
        let table = InFlight::of_channel(&capacities, flow_control, self.core.settings.of_loop)?;
        let capacities = credits::with_own_sends(capacities, flow_control);
        let fresh = self.queue_pair.another(capacities, connection)?;
        let mut settings = self.core.settings;
        settings.limits.messages = *fresh.message_limits();
        let words = self.core.credits.as_deref().map(|credits| credits.words);
        // SAFETY: as in `new`. The old core is used no more when the new one begins to count credits.
        let core = unsafe { Core::new(fresh.as_raw(), settings, words, table, Some(&self.core)) };
        core.count_credits();
        let old_core = mem::replace(&mut self.core, core);
        let old = mem::replace(&mut self.queue_pair, ManuallyDrop::new(fresh));
        let destroyed = old_core.destroy();
        ManuallyDrop::into_inner(old).disown(destroyed.is_ok());
        destroyed
    }

    pub(crate) fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The destroy verb is called once, even if it fails. So operations with borrowed buffers end before it: the
    /// program may free the buffers of unpolled ones next. Owned buffers are leaked if it fails.
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
