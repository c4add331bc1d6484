//! Changes and queries of queue pairs.

use super::QueuePair;
use super::address_vector::AddressVector;
use super::attributes::{AttributeMask, QueuePairAttributes};
use super::builder::PreparedQueuePair;
use super::endpoint::QueuePairEndpoint;
use super::transition::{StateTransition, rule};
use super::transport::Transport;
use crate::base::{Error, QueuePairState, QueuePairType, Result, StateError, trace};
use crate::verbs::device::quirks;

const VERB: &str = "ibv_modify_qp";

impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_modify_qp`: changes the state, attributes, or both. After an error nothing has changed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the state has no such transition; or an attribute is missing, not allowed, or has a value that the
    ///    device or port does not support. The error names it if known.
    ///  - `ETIMEDOUT`: on RoCE, the peer's MAC address could not be resolved.
    ///  - `ENETUNREACH`, `EHOSTUNREACH`: on RoCE, there is no route to the peer's GID.
    ///  - `ENOMEM`: the device has run out of a resource.
    ///  - `EOPNOTSUPP`: the device lacks an attribute.
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, transition: StateTransition) -> Result<()> {
        let (kind, before) = (self.queue_pair_type(), self.last_state());
        if transition.check(kind, before).is_err() {
            // The device may have changed the state since libibverbs last read it.
            transition.check(kind, self.state()?)?;
        }
        // SAFETY: the queue pair is live.
        match unsafe { transition.apply(self.as_raw()) } {
            Ok(()) => {
                if self.last_state() == QueuePairState::Reset {
                    self.complete_reset();
                }
                trace::state_changed(self.number(), before, self.last_state());
                Ok(())
            }
            Err(error) => Err(self.explain(error, &transition)).inspect_err(trace::verb_failed),
        }
    }

    /// Resets again on Soft-RoCE.
    ///
    /// The kernel's Soft-RoCE (Linux 6.12) notes the index of the next send before it empties the queue. The next
    /// connection would begin with the emptied entries: RDMA writes of no data, which a peer may refuse. A second reset
    /// finds the queue empty.
    pub(crate) fn complete_reset(&self) {
        let device = self.protection_domain().context().query_device();
        if device.is_ok_and(|device| quirks::is_rxe(&device)) {
            // SAFETY: the queue pair is live.
            let reset = unsafe { StateTransition::to(QueuePairState::Reset).apply(self.as_raw()) };
            // Fails only if the device is gone, and the queue pair with it.
            let _ = reset.inspect_err(trace::verb_failed);
        }
    }

    fn last_state(&self) -> QueuePairState {
        // SAFETY: the queue pair is live.
        unsafe { (*self.as_raw()).state }.into()
    }

    /// In RTS it costs no system call.
    #[cold]
    pub(crate) fn state_before_rts(&self) -> Option<QueuePairState> {
        use QueuePairState as S;

        let before = |state: &S| matches!(state, S::Reset | S::Init | S::ReadyToReceive);
        // The connection manager of iWARP changes the state without libibverbs.
        Some(self.last_state()).filter(before).and_then(|_| self.state().ok()).filter(before)
    }

    #[cold]
    fn explain(&self, error: Error, transition: &StateTransition) -> Error {
        if let Some(path) = transition.attributes().path() {
            let error = path.explain_unreachable(self.protection_domain().context(), error);
            if error.errno() != libc::EINVAL {
                return error;
            }
        }
        if error.errno() != libc::EINVAL {
            return error;
        }
        self.check_state(transition)
            .and_then(|()| self.check_values(transition))
            .err()
            .unwrap_or(error)
    }

    fn check_state(&self, transition: &StateTransition) -> Result<()> {
        let Ok(state) = self.state() else { return Ok(()) };
        transition.check(self.queue_pair_type(), state)
    }

    fn check_values(&self, transition: &StateTransition) -> Result<()> {
        let context = self.protection_domain().context();
        let attributes = transition.attributes();
        let within = |what, value: u32, low, high: u32| Error::within(VERB, what, value, low, high);
        if let Ok(device) = context.query_device() {
            if let Some(port) = attributes.port() {
                within("port_num", port.into(), 1, device.phys_port_cnt().into())?;
            }
            if let Some(value) = attributes.max_rd_atomic() {
                within("max_rd_atomic", value.into(), 0, device.max_qp_init_rd_atom())?;
            }
            if let Some(value) = attributes.max_dest_rd_atomic() {
                within("max_dest_rd_atomic", value.into(), 0, device.max_qp_rd_atom())?;
            }
        }
        let path = attributes.path();
        let own = || self.query_attributes(AttributeMask::PORT).ok()?.port();
        let number = attributes.port().or_else(own).unwrap_or(self.settings().port);
        if let Some(path) = path.filter(|path| path.port() != number) {
            return within("ah_attr.port_num", path.port().into(), number.into(), number.into());
        }
        let Ok(port) = context.query_port(number) else { return Ok(()) };
        if let Some(index) = attributes.pkey_index() {
            port.check_pkey_index(VERB, index)?;
        }
        if let Some(path) = path {
            path.check_route(VERB, context, &port)?;
        }
        attributes.path_mtu().map_or(Ok(()), |mtu| port.check_path_mtu(VERB, mtu))
    }

    /// `ibv_query_qp`: the state.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, `EIO` and `ENODEV` of [`query_attributes`](Self::query_attributes).
    pub fn state(&self) -> Result<QueuePairState> {
        Ok(self.query_attributes(AttributeMask::STATE)?.as_raw().qp_state.into())
    }

    /// `ibv_query_qp`: all attributes that the device reports.
    ///
    /// # Errors
    ///
    /// Those of [`query_attributes`](Self::query_attributes).
    #[doc(alias = "ibv_query_qp")]
    pub fn query(&self) -> Result<QueuePairAttributes> {
        use AttributeMask as A;

        // No queue pair stores these three.
        let usual = A::all() - A::CURRENT_STATE - A::DRAIN_NOTIFICATION - A::RATE_LIMIT;
        // EFA rejects queries for any others.
        let least = A::STATE | A::PORT | A::QKEY | A::SEND_PSN | A::CAPACITIES;
        match self.query_attributes(usual) {
            Err(error) if error.errno() == libc::EOPNOTSUPP => self.query_attributes(least),
            result => result,
        }
    }

    /// `ibv_query_qp`: the attributes in `mask`.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not report one of them.
    ///  - `ENOMEM`: out of memory.
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub fn query_attributes(&self, mask: AttributeMask) -> Result<QueuePairAttributes> {
        // SAFETY: the queue pair is live.
        unsafe { QueuePairAttributes::query(self.as_raw(), mask) }
    }

    /// `ibv_modify_qp`: moves the queue pair to ERR. All outstanding requests complete as
    /// [`Flushed`](crate::WorkStatus::Flushed).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue pair is in RESET.
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub fn to_error(&mut self) -> Result<()> {
        self.modify(StateTransition::to(QueuePairState::Error))
    }

    /// `ibv_modify_qp`: moves the queue pair from RTS to SQD. The device completes the sends that it has begun; later
    /// ones wait until [`resume`](Self::resume).
    ///
    /// [`QueuePairAttributes::is_draining`] tells when they have completed; with `notify` so does the event
    /// `IBV_EVENT_SQ_DRAINED`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue pair is not in RTS, or the device has no SQD.
    pub fn drain(&mut self, notify: bool) -> Result<()> {
        let mut transition = StateTransition::to(QueuePairState::SendQueueDrained);
        if notify {
            transition = transition.drain_notification(true);
        }
        self.modify(transition)
    }

    /// `ibv_modify_qp`: moves the queue pair from SQD or SQE back to RTS. The device carries out the requests posted
    /// meanwhile; Soft-RoCE only after one more post.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue pair is in neither state, or still draining.
    pub fn resume(&mut self) -> Result<()> {
        self.modify(StateTransition::to(QueuePairState::ReadyToSend))
    }

    /// `ibv_modify_qp`: moves the queue pair to RESET, from which it can connect again, to any peer.
    ///
    /// Outstanding requests end without completions. The device may discard completions that you have not polled: if
    /// they matter, call [`to_error`](Self::to_error) first and poll until there are none. The endpoint changes: it
    /// gets a new random packet number.
    ///
    /// The old peer does not notice. It retransmits for as long as its
    /// [`max_ack_retries`](crate::QueuePairBuilder::max_ack_retries) and
    /// [`ack_timeout`](crate::QueuePairBuilder::ack_timeout) allow, often seconds, and these packets reach the next
    /// connection, because the queue pair keeps its number. The random packet numbers keep all but 1 in 16 million of
    /// its messages out, but not all late acknowledgements: on Soft-RoCE one with a higher number acknowledges
    /// everything before it. So reset both sides before either connects again, and wait until the old peer has given
    /// up; or create another queue pair, as `Channel::reset` does.
    ///
    /// # Errors
    ///
    /// The queue pair comes back in the [`StateError`].
    ///
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub fn reset(mut self) -> Result<PreparedQueuePair<'res, T>, StateError<Self>> {
        match self.modify(StateTransition::to(QueuePairState::Reset)) {
            Ok(()) => {
                self.renew_psns();
                Ok(PreparedQueuePair::new(self))
            }
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    /// If it fails, the next attempt to connect resets.
    pub(crate) fn into_prepared(self) -> PreparedQueuePair<'res, T> {
        self.reset().unwrap_or_else(|failed| PreparedQueuePair::new(failed.object))
    }

    /// If it fails, the next attempt to connect resets.
    pub(super) fn back_to_reset(&mut self) {
        if self.last_state() != QueuePairState::Reset {
            let _ = self.modify(StateTransition::to(QueuePairState::Reset));
        }
    }

    pub(crate) fn initialize(&mut self) -> Result<()> {
        self.check_connects_by_hand()?;
        let early = self.early_attributes();
        self.modify(self.step(&early, QueuePairState::Reset, QueuePairState::Init))
    }

    fn check_connects_by_hand(&self) -> Result<()> {
        let reason = "iWARP queue pairs are connected by the connection manager alone: use \
                          Listener and Route, of feature rdmacm";
        Error::unsupported_if(self.protection_domain().context().is_iwarp(), VERB, reason)?;
        Ok(())
    }

    pub(super) fn early_attributes(&self) -> StateTransition {
        let s = self.settings();
        StateTransition::stay()
            .port(s.port)
            .pkey_index(s.pkey_index)
            .access(s.access)
            .qkey(s.qkey)
            .send_psn(self.send_psn())
            .max_dest_rd_atomic(s.max_dest_rd_atomic.unwrap_or(1))
            .min_rnr_timer(s.min_rnr_timer)
            .ack_timeout(s.ack_timeout)
            .max_ack_retries(s.max_ack_retries)
            .max_rnr_retries(s.max_rnr_retries)
    }

    pub(super) fn step(
        &self,
        attributes: &StateTransition,
        from: QueuePairState,
        to: QueuePairState,
    ) -> StateTransition {
        let required = rule(self.queue_pair_type(), from, to).map(|rule| rule.required);
        let mut required = required.unwrap_or(AttributeMask::empty());
        if let Some(driver) = self.object.properties.driver {
            required = driver.attributes(from, to, required);
        }
        attributes.part(required, to)
    }

    /// Types that have a peer require `remote`.
    pub(super) fn steps(&self, remote: Option<&QueuePairEndpoint>) -> Result<[StateTransition; 3]> {
        use QueuePairState as S;

        self.check_connects_by_hand()?;
        let s = *self.settings();
        let mut all = self.early_attributes();
        let port = self.protection_domain().context().query_port(s.port)?;
        port.check_pkey_index(VERB, s.pkey_index)?;
        if self.is_connected_type() {
            if let Some(mtu) = s.path_mtu {
                port.check_path_mtu(VERB, mtu)?;
            }
            let Some(remote) = remote else {
                let reason = "a queue pair of this type has a peer: use handshake";
                return Err(Error::invalid(VERB, reason));
            };
            self.object.properties.endpoint.check_agrees(VERB, remote)?;
            let context = self.protection_domain().context();
            let own = (s.port, s.gid_index);
            let ours = &self.object.properties.endpoint.gids;
            let path = AddressVector::to_endpoint(
                VERB,
                context,
                &port,
                own,
                ours,
                remote,
                s.global_route,
            )?
            .service_level(s.service_level)
            .static_rate(s.static_rate)
            .traffic_class(s.traffic_class)
            .flow_label(s.flow_label)
            .hop_limit(s.hop_limit);
            let reads = s.max_rd_atomic.unwrap_or(1);
            all = all
                .path(path)
                .remote_number(remote.num())
                .receive_psn(s.receive_psn.or(remote.send_psn()).unwrap_or_default())
                .max_rd_atomic(reads.min(remote.max_dest_rd_atomic().unwrap_or(reads)));
            if let Some(mtu) = s.path_mtu.into_iter().chain(remote.path_mtu()).min() {
                all = all.path_mtu(mtu);
            }
        }
        #[cfg(feature = "mlx5")]
        if self.object.properties.driver.is_some_and(super::transport::DriverTransport::is_dc) {
            all = self.dc_attributes(all, port.active_mtu());
        }
        let states = [S::Reset, S::Init, S::ReadyToReceive, S::ReadyToSend];
        Ok(std::array::from_fn(|at| self.step(&all, states[at], states[at + 1])))
    }

    pub(crate) fn connect(&mut self, remote: Option<&QueuePairEndpoint>) -> Result<()> {
        use QueuePairState as S;

        #[cfg(feature = "mlx5")]
        if let Some(super::transport::DriverTransport::DcTarget { .. }) =
            self.object.properties.driver
        {
            return self.start_dc_target();
        }

        let [to_init, to_receive, to_send] = self.steps(remote)?;
        let state = self.last_state();
        if state != S::Init {
            if state != S::Reset {
                // An earlier attempt failed, and so did its reset.
                self.modify(StateTransition::to(S::Reset))?;
            }
            self.modify(to_init)?;
        }
        self.modify(to_receive)?;
        self.modify(to_send)
    }

    fn is_connected_type(&self) -> bool {
        use QueuePairType as Q;

        let kind = self.queue_pair_type();
        matches!(kind, Q::ReliableConnected | Q::UnreliableConnected | Q::XrcSend | Q::XrcReceive)
    }
}
