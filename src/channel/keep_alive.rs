use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::TransportResult;
use crate::base::{Error, Result};
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::operation::WriteWorkRequest;

/// For a write without bytes: the peer does not look at the key.
pub(crate) fn nowhere() -> RemoteMemoryRegion {
    RemoteMemoryRegion::new(0, 0, 0).expect("nothing overflows")
}

pub(crate) fn check_reliable(core: &Core) -> Result<()> {
    if core.settings.limits.reliable {
        return Ok(());
    }
    let reason = "only the peer of a reliable connection acknowledges a write";
    Err(Error::with_reason("ibv_post_send", libc::EOPNOTSUPP, reason))
}

/// # Signs of life
impl Channel<'_> {
    /// `ibv_post_send`: if the connection is idle, writes 0 bytes to the peer, whose device acknowledges that without
    /// the peer's program. If the device does not answer, the connection fails, and a later call says so. It
    /// never waits.
    ///
    /// Without it, it goes unnoticed that the peer of an idle connection has lost its power or its network. Call this
    /// from a timer: a dead peer is then noticed within the period of the timer, plus the time that the device
    /// retries ([`ack_timeout`](crate::ChannelBuilder::ack_timeout),
    /// [`max_ack_retries`](crate::ChannelBuilder::max_ack_retries)), plus the period again, as the next call reports
    /// it. Receives that are posted end at once when the connection fails.
    ///
    /// If a send, write, read or atomic is in flight, its result will show it, and nothing is written. Otherwise
    /// this costs one place in the send queue, and one packet in each direction.
    ///
    /// The peer's channel must be built with
    /// [`access`](crate::ChannelBuilder::access) [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE), although no
    /// memory is written: its device ends the connection otherwise.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs peers
    /// # fn tick(channels: &mut Vec<ibverbs::Channel<'static>>) {
    /// // Every second:
    /// channels.retain_mut(|channel| match channel.keep_alive() {
    ///     Ok(()) => true,
    ///     Err(error) => {
    ///         eprintln!("the peer of {:#x} is gone: {error}", channel.number());
    ///         false
    ///     }
    /// });
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`Work`](crate::TransportError::Work): the peer did not answer, or the connection had failed before.
    ///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): the channel is
    ///    stopped.
    ///  - [`Verbs`](crate::TransportError::Verbs): `EOPNOTSUPP`, the connection is not reliable, so the peer
    ///    acknowledges nothing; `ENOTCONN`, the connection has ended, and the device does not complete what is in
    ///    flight (iWARP), so the channel was stopped; or polling or posting failed.
    pub fn keep_alive(&mut self) -> TransportResult<()> {
        check_reliable(self.core())?;
        let core = self.core();
        while core.settle()? {}
        if let Some(mut probe) = self.probe.take() {
            match probe.poll(self) {
                None => {
                    self.probe = Some(probe);
                    return self.check_silent_device();
                }
                Some(ended) => drop(ended?),
            }
        }
        if self.core().table.outstanding_sends() > 0 {
            return self.check_silent_device();
        }
        // SAFETY: there is no memory.
        match unsafe { self.post_unpolled(WriteWorkRequest::new((), nowhere())) } {
            Ok(probe) => {
                self.probe = Some(probe);
                Ok(())
            }
            // The program has not taken results yet, so it has heard from the peer.
            Err(error) if error.is_queue_full() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Soft-iWARP completes nothing that was posted after the end of a connection, so this also checks the queue
    /// pair.
    fn check_silent_device(&self) -> TransportResult<()> {
        let core = self.core();
        let checked = core.check_device_if_due(Instant::now());
        if checked.is_err() && core.table.is_open() {
            core.stop();
        }
        Ok(checked?)
    }
}
