//! DC (feature `mlx5`): the dynamically connected transport of ConnectX and BlueField.
//!
//! One initiator reaches any number of targets, and connects to each while it has requests for it. The initiator is a
//! [`QueuePair`] that only posts, in batches, and names the target of its requests. A [`DcTarget`] only receives and
//! answers.

use super::QueuePair;
use super::address_vector::AddressVector;
use super::builder::QueuePairBuilder;
use super::dc_options::{CREATE, DcStreams};
use super::endpoint::QueuePairEndpoint;
use super::shared_receive_queue::SharedReceiveQueue;
use super::transition::StateTransition;
use super::transport::{Dci, DriverTransport, Transport};
use crate::base::{
    Detail, Error, Parent, QueuePairState, QueuePairType, Result, debug, ffi, getters,
};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::mlx5;
use crate::verbs::domain::ProtectionDomain;
use crate::verbs::queue_pair::SendOperations;
use crate::verbs::settings::MaximumTransferUnit;

impl QueuePairBuilder<'_, Dci> {
    /// `struct mlx5dv_dci_streams`: divides the requests into streams (not unless set). A request names its stream in
    /// [`DcPeer::stream`](crate::operation::DcPeer::stream).
    #[doc(alias = "mlx5dv_dci_streams")]
    pub fn dc_streams(mut self, streams: DcStreams) -> Self {
        self.driver = Some(DriverTransport::DcInitiator(Some(streams)));
        self
    }
}

impl<T: Transport> QueuePairBuilder<'_, T> {
    pub(super) fn prepare_dc_initiator(&mut self, streams: Option<DcStreams>) -> Result<()> {
        use SendOperations as S;

        let device = self.parents.domain.context().query_mlx5()?;
        if let Some(streams) = streams {
            let Some((concurrent, errored)) = device.max_dc_streams() else {
                let reason = "the device has no streams of DC initiators";
                return Err(Error::with_reason(CREATE, libc::EOPNOTSUPP, reason));
            };
            Error::within(CREATE, "log_num_concurent", streams.log_concurrent, 0, concurrent)?;
            Error::within(CREATE, "log_num_errored", streams.log_errored, 0, errored)?;
        }
        Error::invalid_if(self.parents.srq.is_some(), CREATE, "a DC initiator receives nothing")?;
        (self.capacities.max_recv_wr, self.capacities.max_recv_sge) = (0, 0);
        let usual = S::SEND
            | S::SEND_WITH_IMMEDIATE
            | S::WRITE
            | S::WRITE_WITH_IMMEDIATE
            | S::READ
            | S::COMPARE_SWAP
            | S::FETCH_ADD;
        // No other way of posting names a target.
        let wanted = self.extended.map_or(usual, |(wanted, _)| wanted);
        self.extended = Some((if wanted.is_empty() { usual } else { wanted }, false));
        Ok(())
    }

    pub(super) fn prepare_dc_target(&mut self) -> Result<()> {
        self.parents.domain.context().query_mlx5()?;
        self.capacities = ffi::ibv_qp_cap::default();
        self.extended = None;
        Ok(())
    }
}

impl<'res> QueuePairBuilder<'res, QueuePairType> {
    /// `mlx5dv_create_qp(3)`: creates a DC target, and takes it to RTR, its working state.
    /// Initiators must name `access_key`. The builder is of type [`Driver`](QueuePairType::Driver), with a [shared
    /// receive queue](Self::srq).
    ///
    /// These settings apply: port, GID, partition, [`access`](Self::access), `path_mtu`, `min_rnr_timer`, `hop_limit`,
    /// `traffic_class`, `flow_label` and `service_level`.
    ///
    /// ```no_run
    /// use ibverbs::{QueuePairType, SharedReceiveQueue};
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// let context = ibverbs::open("mlx5_0")?;
    /// let domain = context.alloc_pd()?;
    /// let queue = context.create_cq(64)?;
    /// let receives = SharedReceiveQueue::new(&domain, 32, 1)?;
    /// let target = domain
    ///     .create_qp(&queue, &queue, QueuePairType::Driver)
    ///     .srq(&receives)
    ///     .allow_remote_rw()
    ///     .build_dc_target(0x5ec2e7)?;
    /// println!("tell the initiators: {} and the key", target.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no mlx5 device, or it has no DC.
    ///  - `EINVAL`: there is no shared receive queue, or a setting is wrong for this device.
    ///  - Those of [`build`](Self::build) about the port.
    #[doc(alias = "mlx5dv_create_qp")]
    pub fn build_dc_target(mut self, access_key: u64) -> Result<DcTarget<'res>> {
        self.kind = QueuePairType::Driver;
        self.driver = Some(DriverTransport::DcTarget { access_key });
        let Some(shared_receive_queue) = self.parents.srq.clone() else {
            let reason = "a DC target receives from a shared receive queue: srq() names it";
            return Err(Error::invalid(CREATE, reason));
        };
        let mut queue_pair = self.build()?.into_queue_pair();
        queue_pair.start_dc_target()?;
        Ok(DcTarget { queue_pair, shared_receive_queue, access_key })
    }
}

impl<T: Transport> QueuePair<'_, T> {
    pub(super) fn dc_attributes(
        &self,
        all: StateTransition,
        mtu: Option<MaximumTransferUnit>,
    ) -> StateTransition {
        let s = self.settings();
        let all = all.max_rd_atomic(s.max_rd_atomic.unwrap_or(1));
        match s.path_mtu.or(mtu) {
            Some(mtu) => all.path_mtu(mtu),
            None => all,
        }
    }

    pub(super) fn start_dc_target(&mut self) -> Result<()> {
        use QueuePairState as S;

        let s = *self.settings();
        let context = self.protection_domain().context();
        let port = context.query_port(s.port)?;
        let gid = match s.gid_index {
            Some(index) => context.query_gid(s.port, index.into())?,
            None => context.routable_gid(s.port)?,
        };
        let index = u8::try_from(gid.index).map_err(|_| {
            Error::with(CREATE, libc::EINVAL, Detail::GidIndex { index: gid.index, port: s.port })
        })?;
        // Initiators differ, so only our end of the path counts.
        let path = AddressVector::new(s.port, port.lid())
            .global(gid.gid, index)
            .service_level(s.service_level)
            .static_rate(s.static_rate)
            .traffic_class(s.traffic_class)
            .flow_label(s.flow_label)
            .hop_limit(s.hop_limit);
        let all = self.dc_attributes(self.early_attributes().path(path), port.active_mtu());
        self.modify(self.step(&all, S::Reset, S::Init))?;
        self.modify(self.step(&all, S::Init, S::ReadyToReceive))?;
        self.object.properties.endpoint.num = self.number();
        Ok(())
    }

    /// `mlx5dv_dci_stream_id_reset(3)`: makes a stream of a DC initiator usable again
    /// after one of its requests has failed.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: it is not a DC initiator with streams in RTS, or the device lacks this.
    #[doc(alias = "mlx5dv_dci_stream_id_reset")]
    pub fn reset_dc_stream(&mut self, stream: u16) -> Result<()> {
        const VERB: &str = "mlx5dv_dci_stream_id_reset";
        if !matches!(self.object.properties.driver, Some(DriverTransport::DcInitiator(Some(_)))) {
            let reason = "the queue pair is not a DC initiator with streams";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        // SAFETY: the queue pair is live, and of mlx5, whose verb created it.
        let returned = unsafe { ffi::mlx5dv_dci_stream_id_reset(self.as_raw(), stream) };
        ffi::status(VERB, returned).map_err(|error| mlx5::explain(VERB, error))
    }
}

/// A DC target (DCT): it receives from initiators that name its number and access key, and answers their reads, writes
/// and atomics. See [`QueuePairBuilder::build_dc_target`].
///
/// It is in RTR from the beginning. Receives are posted to its shared receive queue, and complete on the receive
/// completion queue.
#[doc(alias = "DCT")]
pub struct DcTarget<'res> {
    queue_pair: QueuePair<'res, QueuePairType>,
    shared_receive_queue: Parent<'res, SharedReceiveQueue<'res>>,
    access_key: u64,
}

impl<'res> DcTarget<'res> {
    getters! { self,
        /// The number by which initiators address it.
        number: u32 => self.queue_pair.number();

        /// The address that initiators need, with the access key.
        endpoint: QueuePairEndpoint => self.queue_pair.endpoint();

        /// The key that initiators must name.
        access_key: u64 => self.access_key;

        /// The domain that it was created in.
        protection_domain: &ProtectionDomain<'res> => self.queue_pair.protection_domain();

        /// The queue that receives are posted to.
        shared_receive_queue: &SharedReceiveQueue<'res> => &self.shared_receive_queue;

        /// The completion queue of its receives.
        receive_cq: &CompletionQueue<'res> => self.queue_pair.receive_cq();

        /// The C object, valid while the target is.
        as_raw: *mut ffi::ibv_qp => self.queue_pair.as_raw();
    }

    /// `ibv_destroy_qp`, as [`QueuePair::close`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::close`].
    #[doc(alias = "ibv_destroy_qp")]
    pub fn close(self) -> Result<()> {
        self.queue_pair.close()
    }
}

debug! {
    DcTarget<'_>, self,
    // Without the secret key.
    number: self.number(), ..
}
