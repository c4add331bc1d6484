use super::Channel;
use super::link::Link;
use crate::base::{Result, StateError, setters};
use crate::verbs::queue_pair::QueuePairEndpoint;
use crate::verbs::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// A channel that is not connected, with the address that the peer needs.
#[derive(Debug)]
#[must_use]
pub struct PreparedChannel<'res> {
    pub(crate) link: Link<'res>,
}

impl<'res> PreparedChannel<'res> {
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
        set_send_psn(psn: PacketSequenceNumber) => self.link.queue_pair.set_send_psn(psn);

        /// Sets the number of the first packet that we receive, as [`ChannelBuilder::receive_psn`](crate::ChannelBuilder::receive_psn) does, if the
        /// peer's endpoint does not contain it.
        receive_psn(psn: PacketSequenceNumber) => self.link.queue_pair.set_receive_psn(psn);

        /// Sets the largest MTU of the path, as [`ChannelBuilder::path_mtu`](crate::ChannelBuilder::path_mtu) does. The endpoint contains it
        /// too.
        path_mtu(mtu: MaximumTransferUnit) => self.link.queue_pair.set_path_mtu(mtu);
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

    /// The caller has taken the queue pair to INIT. The channel takes receives alone until [`Channel::allow_sends`].
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

impl<'res> Channel<'res> {
    /// `ibv_modify_qp`, `ibv_create_qp`: makes the channel ready to be connected again, to the same peer
    /// or another. Everything that was in flight has then ended. The peer of the connection has to do the
    /// same, and each needs the new [endpoint](PreparedChannel::endpoint) of the other.
    ///
    /// The channel gets another queue pair, with another number. The peer of the old connection retransmits
    /// unacknowledged packets for as long as *its* settings say, often for seconds, and the network may
    /// deliver packets late. All of these packets name the old queue pair, so the device drops them. No
    /// wait is needed.
    ///
    /// If the device has no room for a second queue pair, the channel keeps the old one. In that case, or
    /// if the device gives the old number to the new queue pair, only the random packet numbers keep the
    /// connections apart: a late packet is taken for one of the new connection if its number happens to be
    /// the next one (1 in 16 million), and a late acknowledgement may count for messages that were sent
    /// since. A program that must exclude that waits until the old peer has given up.
    ///
    /// # Errors
    ///
    /// The channel comes back in the [`StateError`]. It stays stopped, and can be reset again.
    ///
    ///  - `EINVAL`: the queue pair had to be destroyed earlier.
    ///  - `EIO`, `ENODEV`: the device is gone.
    ///  - `ENETDOWN`, `ENODATA`: the port is not active, or has no GID any more.
    ///  - `ETIMEDOUT`: the completion queue does not become empty.
    #[doc(alias = "ibv_modify_qp")]
    pub fn reset(mut self) -> Result<PreparedChannel<'res>, StateError<Self>> {
        match self.link.reset() {
            Ok(()) => Ok(PreparedChannel { link: self.link }),
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    /// A failed reset is tried again by the next attempt to connect.
    pub(crate) fn into_prepared(mut self) -> PreparedChannel<'res> {
        let _ = self.link.reset();
        PreparedChannel { link: self.link }
    }
}
