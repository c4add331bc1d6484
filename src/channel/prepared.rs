//! Channels that are not connected yet.

use super::Channel;
use super::core::Core;
use super::link::Link;
use crate::error::Result;
use crate::foreign_enum::setters;
use crate::queue_pair::QueuePairEndpoint;
use crate::settings::{MaximumTransferUnit, PacketSequenceNumber};
use crate::state_error::StateError;

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
