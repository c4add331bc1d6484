//! A queue pair between its creation and its connection.

use super::QueuePair;
use super::endpoint::QueuePairEndpoint;
use super::transition::StateTransition;
use super::transport::{Connected, Rc, Transport, Unconnected};
use crate::error::Result;
use crate::foreign_enum::setters;
use crate::settings::{MaximumTransferUnit, PacketSequenceNumber};
use crate::state_error::StateError;

/// A queue pair that is not connected: in the RESET state, with the address that a peer needs.
#[derive(Debug)]
#[must_use]
pub struct PreparedQueuePair<'res, T = Rc> {
    queue_pair: QueuePair<'res, T>,
}

impl<'res, T: Transport> PreparedQueuePair<'res, T> {
    pub(super) fn new(queue_pair: QueuePair<'res, T>) -> Self {
        Self { queue_pair }
    }

    /// The address of the queue pair, which the peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.queue_pair.endpoint()
    }

    /// The number of the first packet that we send. The [endpoint](Self::endpoint) contains it. A peer that
    /// gets the number by other means passes it to its `receive_psn`.
    pub fn send_psn(&self) -> PacketSequenceNumber {
        self.queue_pair.send_psn()
    }

    setters! { self,
        /// Sets the number of the first packet that we send on the next connection, as
        /// [`QueuePairBuilder::send_psn`](crate::QueuePairBuilder::send_psn) does.
        set_send_psn(psn: PacketSequenceNumber) => self.queue_pair.set_send_psn(psn);

        /// Sets the number of the first packet that we receive, as
        /// [`QueuePairBuilder::receive_psn`](crate::QueuePairBuilder::receive_psn) does, if
        /// the peer's endpoint does not contain it.
        receive_psn(psn: PacketSequenceNumber) => self.queue_pair.set_receive_psn(psn);

        /// Sets the largest MTU of the path, as [`QueuePairBuilder::path_mtu`](crate::QueuePairBuilder::path_mtu) does.
        /// The endpoint contains it too.
        path_mtu(mtu: MaximumTransferUnit) => self.queue_pair.set_path_mtu(mtu);
    }

    /// The queue pair in the RESET state, to ask what it is.
    pub fn queue_pair(&self) -> &QueuePair<'res, T> {
        &self.queue_pair
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn queue_pair_mut(&mut self) -> &mut QueuePair<'res, T> {
        &mut self.queue_pair
    }

    /// The queue pair in the RESET state, for a caller that changes its state step by step with
    /// [`QueuePair::modify`].
    pub fn into_queue_pair(self) -> QueuePair<'res, T> {
        self.queue_pair
    }

    /// `ibv_destroy_qp`: destroys the queue pair and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The queue pair is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(self) -> Result<()> {
        self.queue_pair.close()
    }

    /// `ibv_modify_qp`: connects the queue pair to the peer's: RESET, INIT, RTR, RTS.
    ///
    /// Both sides derive the same parameters from the two endpoints: the smaller path MTU, at most as many
    /// outstanding reads and atomics as the other side answers, the numbers of the first packets, and the
    /// best matching pair of their GIDs.
    ///
    /// The peer may call this earlier or later. The device retries what is sent before the peer is ready,
    /// as often as the settings allow. For a queue pair that has no peer, such as a UD one, call
    /// [`activate`](Self::activate) instead.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a setting is wrong for this device (the error names it if known), or the endpoint
    ///    is of another type or partition (the error names both), or belongs to the other link layer.
    ///  - `EADDRNOTAVAIL`: none of our GIDs matches one of the peer's (the error names both), or our GID
    ///    was removed from the port's table meanwhile.
    ///  - `ETIMEDOUT`: on RoCE, the peer's MAC address could not be resolved.
    ///  - `ENETUNREACH`, `EHOSTUNREACH`: on RoCE, there is no route to the peer's GID.
    ///  - `ENOMEM`: the device has run out of a resource.
    ///  - `EOPNOTSUPP`: the device speaks iWARP, where only the connection manager can connect (feature
    ///    `rdmacm`).
    ///
    /// The queue pair comes back in the [`StateError`], in RESET and with the same endpoint, for another
    /// attempt.
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(
        self,
        remote: QueuePairEndpoint,
    ) -> Result<QueuePair<'res, T>, StateError<Self>>
    where
        T: Connected,
    {
        self.connected(Some(&remote))
    }

    /// The three changes of state that [`handshake`](Self::handshake) makes with this peer: to INIT, RTR and RTS. A program
    /// that needs them otherwise sets attributes of these values, and applies them to the
    /// [queue pair](Self::into_queue_pair) in this order.
    ///
    /// ```
    /// use ibverbs::{MinRnrTimer, Rc};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// # let queue = context.create_cq(16)?;
    /// let prepared = domain.create_qp(&queue, &queue, Rc).build()?;
    /// let remote = prepared.endpoint(); // here the peer's would come in
    /// let [init, to_receive, to_send] = prepared.transitions(&remote)?;
    /// let mut queue_pair = prepared.into_queue_pair();
    /// for step in [init, to_receive.min_rnr_timer(MinRnrTimer::SHORTEST), to_send] {
    ///     queue_pair.modify(step)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`handshake`](Self::handshake) that are found before the first change: a setting is wrong for the port
    /// (`EINVAL`), no GID of ours fits the peer's (`EADDRNOTAVAIL`), or the device speaks iWARP (`EOPNOTSUPP`).
    pub fn transitions(&self, remote: &QueuePairEndpoint) -> Result<[StateTransition; 3]>
    where
        T: Connected,
    {
        self.queue_pair.steps(Some(remote))
    }

    /// `ibv_modify_qp`: makes a queue pair that has no peer ready, such as a UD one: RESET, INIT, RTR, RTS.
    /// Each send then names its destination.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a setting is wrong for this device, or the type of the queue pair requires a peer.
    ///
    /// The queue pair comes back in the [`StateError`], in RESET, for another attempt.
    #[doc(alias = "ibv_modify_qp")]
    pub fn activate(self) -> Result<QueuePair<'res, T>, StateError<Self>>
    where
        T: Unconnected,
    {
        self.connected(None)
    }

    fn connected(
        mut self,
        remote: Option<&QueuePairEndpoint>,
    ) -> Result<QueuePair<'res, T>, StateError<Self>> {
        match self.queue_pair.connect(remote) {
            Ok(()) => Ok(self.queue_pair),
            Err(error) => {
                self.queue_pair.back_to_reset();
                Err(StateError::new(self, error))
            }
        }
    }
}
