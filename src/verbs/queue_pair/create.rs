//! Building queue pairs: from a builder to the C object.

use std::ptr::{self, NonNull};

use super::attributes::{AttributeMask, QueuePairAttributes};
use super::builder::{PreparedQueuePair, QueuePairBuilder};
use super::connection_settings::{Answers, ConnectionSettings, first_psn};
use super::endpoint::QueuePairEndpoint;
use super::message_limits::MessageLimits;
#[cfg(any(feature = "efa", feature = "mlx5"))]
use super::transport::DriverTransport;
use super::transport::Transport;
use super::{Properties, QueuePair};
use crate::base::{Error, Handle, QueuePairType, Result, ffi};
use crate::verbs::device::{
    Context, DeviceAttributes, EndpointGids, LinkLayer, PortAttributes, PortState, quirks,
};
use crate::verbs::queue_pair::{SendOperations, function};

const VERB: &str = "ibv_create_qp";

struct LookedUp {
    lid: u16,
    gids: EndpointGids,
    pkey: u16,
    messages: MessageLimits,
    settings: ConnectionSettings,
    answers: Answers,
    is_rxe: bool,
}

impl<'res, T: Transport> QueuePairBuilder<'res, T> {
    /// `ibv_create_qp`: creates the queue pair and its endpoint.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a depth, a number of elements or the port exceeds the device's limit; the GID index is out of
    ///    range; a queue or domain belongs to another context or domain; an XRC domain is missing or does not fit the
    ///    type; or the device refuses the inline size, or grants less than asked.
    ///  - `ENETDOWN`: the port is not active.
    ///  - `ENODATA`: the port has no GID, which RoCE needs.
    ///  - `ENOMEM`: the device has no queue pair left, or `RLIMIT_MEMLOCK` is too low.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device lacks this type, an option or an extended operation.
    ///  - `EPERM`: the process may not create this type.
    #[doc(alias = "ibv_create_qp")]
    #[doc(alias = "ibv_create_qp_ex")]
    pub fn build(mut self) -> Result<PreparedQueuePair<'res, T>> {
        let looked_up = self.prepare()?;
        let (raw, operations) = match self.extended.filter(|(wanted, _)| !wanted.is_empty()) {
            None => (self.create(None)?, SendOperations::empty()),
            Some((wanted, optional)) => match self.create_extended(wanted) {
                Err(error) if optional && is_unsupported(error) => {
                    (self.create(None)?, SendOperations::empty())
                }
                result => (result?, wanted),
            },
        };
        Ok(self.finish(raw, operations, looked_up))
    }

    /// Takes over a queue pair in RESET that other code created, such as a provider's own verb. `self` describes its
    /// parents, how to connect it, and whether it has the extended posting interface ([`extended`](Self::extended)).
    ///
    /// # Errors
    ///
    /// The caller then keeps the queue pair.
    ///
    ///  - `EINVAL`: the pointer is null, or type, domain or completion queues are not those of the builder.
    ///  - `EOPNOTSUPP`: it lacks an extended operation that the builder requires.
    ///  - Those of [`build`](Self::build) about the port.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live queue pair in RESET that nothing else destroys or uses, and parents that the builder
    /// does not name outlive it. If the builder asks for extended operations, available or not, the queue pair was
    /// created for some (`IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`): `ibv_qp_to_qp_ex` accesses fields that other queue pairs
    /// of many providers lack.
    pub unsafe fn adopt(mut self, raw: *mut ffi::ibv_qp) -> Result<PreparedQueuePair<'res, T>> {
        let looked_up = self.prepare()?;
        let parents = &self.parents;
        // SAFETY: the caller vouches for the pointer if it is not null.
        let fits = unsafe {
            !raw.is_null()
                && (*raw).pd == parents.domain.as_raw()
                && (*raw).send_cq == parents.send_cq.as_raw()
                && (*raw).recv_cq == parents.receive_cq.as_raw()
                && (*raw).srq == parents.srq.as_ref().map_or(ptr::null_mut(), |srq| srq.as_raw())
                && (*raw).qp_type == self.kind.into()
        };
        Error::invalid_if(!fits, VERB, "the queue pair is not one that the builder describes")?;
        // SAFETY: the queue pair is live.
        let queried = unsafe { QueuePairAttributes::query(raw, AttributeMask::CAPACITIES) }?;
        self.capacities = queried.as_raw().cap;
        let operations = match self.extended.filter(|(wanted, _)| !wanted.is_empty()) {
            None => SendOperations::empty(),
            // SAFETY: the queue pair is live, and the caller vouches for the operations.
            Some((wanted, _)) if unsafe { extended_operations(raw) }.contains(wanted) => wanted,
            Some((_, true)) => SendOperations::empty(),
            Some((_, false)) => return Err(unsupported()),
        };
        // SAFETY: the caller hands over a live queue pair.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Ok(self.finish(raw, operations, looked_up))
    }

    fn prepare(&mut self) -> Result<LookedUp> {
        let context = self.parents.domain.context();
        self.check_parents(context)?;
        let has_own_limits = self.prepare_driver()?;
        let context = self.parents.domain.context();
        let device = context.limits()?;
        if !has_own_limits {
            self.check(device)?;
        }
        let mut settings = self.settings;
        let port = context.query_port(settings.port)?;
        if !matches!(port.state(), PortState::Active | PortState::ActiveDefer | PortState::Armed) {
            return Err(Error::with_reason(VERB, libc::ENETDOWN, "the port is not active"));
        }
        let gids = match settings.gid_index {
            Some(index) => {
                let entry = context.query_gid(settings.port, index.into())?;
                EndpointGids::one(entry.gid, entry.gid_type.into())
            }
            None => context.endpoint_gids(&port, settings.port)?,
        };
        settings.path_mtu = settings.path_mtu.or(port.active_mtu());
        settings.global_route |= port.grh_required();
        let most = |limit: u32| u8::try_from(limit.min(16)).unwrap_or(16);
        settings.max_rd_atomic.get_or_insert(most(device.max_qp_init_rd_atom()));
        let answers = Answers::take(context, device, self.kind, settings.max_dest_rd_atomic);
        settings.max_dest_rd_atomic = Some(answers.count());
        // On Ethernet there is one partition.
        let pkey = match port.link_layer() {
            LinkLayer::InfiniBand => {
                context.query_pkey(settings.port, settings.pkey_index).unwrap_or(0)
            }
            _ => 0xffff,
        };
        let messages = self.message_limits(&port)?.reads(device.max_sge_rd());
        let is_rxe = quirks::is_rxe(device);
        Ok(LookedUp { lid: port.lid(), gids, pkey, messages, settings, answers, is_rxe })
    }

    /// Without inline data, whose limit only the queue pair tells.
    fn message_limits(&self, port: &PortAttributes) -> Result<MessageLimits> {
        let limits = MessageLimits::new(0, port.max_message_size());
        let limits = limits.of_domain(&self.parents.domain);
        Ok(match (self.kind, self.driver, port.active_mtu()) {
            (QueuePairType::UnreliableDatagram, _, Some(mtu)) => limits.datagram(mtu.bytes()),
            #[cfg(feature = "efa")]
            (_, Some(DriverTransport::Srd { .. }), _) => {
                limits.rdma(self.parents.domain.context().query_efa()?.max_rdma_size())
            }
            _ => limits,
        })
    }

    /// Whether the transport has its own limits, checked here, in place of `ibv_query_device`'s.
    fn prepare_driver(&mut self) -> Result<bool> {
        let Some(driver) = self.driver else { return Ok(false) };
        match driver {
            #[cfg(feature = "efa")]
            DriverTransport::Srd { options, .. } => self.prepare_srd(options).map(|()| true),
            #[cfg(feature = "mlx5")]
            DriverTransport::DcInitiator(streams) => {
                self.prepare_dc_initiator(streams).map(|()| false)
            }
            #[cfg(feature = "mlx5")]
            DriverTransport::DcTarget { .. } => self.prepare_dc_target().map(|()| false),
        }
    }

    fn check_parents(&self, context: &Context<'_>) -> Result<()> {
        let parents = &self.parents;
        for queue in [&parents.send_cq, &parents.receive_cq] {
            let reason = "a completion queue belongs to another context";
            context.check_same(queue.context(), VERB, reason)?;
        }
        if let Some(srq) = &parents.srq {
            let reason = "the shared queue belongs to another context";
            context.check_same(srq.protection_domain().context(), VERB, reason)?;
        }
        match (&parents.xrc_domain, self.kind) {
            (Some(domain), QueuePairType::XrcReceive) => {
                let reason = "the XRC domain belongs to another context";
                context.check_same(domain.context(), VERB, reason)?;
                let reason = "a receiving XRC queue pair takes no shared receive queue: each \
                                  message names its own";
                Error::invalid_if(parents.srq.is_some(), VERB, reason)?;
            }
            (None, QueuePairType::XrcReceive) => {
                let reason = "a receiving XRC queue pair needs an XRC domain";
                return Err(Error::invalid(VERB, reason));
            }
            (Some(_), _) => {
                let reason = "only a receiving XRC queue pair takes an XRC domain";
                return Err(Error::invalid(VERB, reason));
            }
            (None, _) => {}
        }
        Ok(())
    }

    fn check(&self, device: &DeviceAttributes) -> Result<()> {
        let Self { capacities: c, settings: s, .. } = self;
        let own_receives = self.parents.srq.is_none();
        let limits = [
            ("max_send_wr", c.max_send_wr, device.max_qp_wr()),
            ("max_recv_wr", if own_receives { c.max_recv_wr } else { 0 }, device.max_qp_wr()),
            ("max_send_sge", c.max_send_sge, device.max_sge()),
            ("max_recv_sge", if own_receives { c.max_recv_sge } else { 0 }, device.max_sge()),
            ("max_rd_atomic", s.max_rd_atomic.unwrap_or(0).into(), device.max_qp_init_rd_atom()),
            (
                "max_dest_rd_atomic",
                s.max_dest_rd_atomic.unwrap_or(0).into(),
                device.max_qp_rd_atom(),
            ),
            ("source_qpn", self.source_number.unwrap_or(0), 0xff_ffff),
        ];
        for (what, value, high) in limits {
            Error::within(VERB, what, value, 0, high)?;
        }
        Ok(())
    }

    fn create_extended(&mut self, wanted: SendOperations) -> Result<Handle<ffi::ibv_qp>> {
        let raw = self.create(Some(wanted))?;
        // SAFETY: the queue pair is live, and was created for extended operations.
        let there = unsafe { extended_operations(raw.as_ptr()) };
        if there.contains(wanted) { Ok(raw) } else { Err(unsupported()) }
    }

    fn create(&mut self, operations: Option<SendOperations>) -> Result<Handle<ffi::ibv_qp>> {
        use ffi::ibv_qp_init_attr_mask as mask;

        let parents = &self.parents;
        let mut attributes = ffi::ibv_qp_init_attr_ex {
            send_cq: parents.send_cq.as_raw(),
            recv_cq: parents.receive_cq.as_raw(),
            cap: self.capacities,
            qp_type: self.kind.into(),
            sq_sig_all: self.signal_all.into(),
            comp_mask: mask::IBV_QP_INIT_ATTR_PD.0,
            pd: parents.domain.as_raw(),
            create_flags: self.create_flags.bits(),
            ..Default::default()
        };
        if let Some(srq) = &parents.srq {
            attributes.srq = srq.as_raw();
            (attributes.cap.max_recv_wr, attributes.cap.max_recv_sge) = (0, 0);
        }
        if let Some(domain) = &parents.xrc_domain {
            // An XRC receiver has neither queues nor a protection domain.
            attributes.comp_mask = mask::IBV_QP_INIT_ATTR_XRCD.0;
            attributes.xrcd = domain.as_raw();
            attributes.pd = ptr::null_mut();
            (attributes.send_cq, attributes.recv_cq) = (ptr::null_mut(), ptr::null_mut());
            attributes.cap = ffi::ibv_qp_cap::default();
        }
        if let Some(number) = self.source_number {
            attributes.source_qpn = number;
            attributes.create_flags |= ffi::ibv_qp_create_flags::IBV_QP_CREATE_SOURCE_QPN.0;
        }
        if attributes.create_flags != 0 {
            attributes.comp_mask |= mask::IBV_QP_INIT_ATTR_CREATE_FLAGS.0;
        }
        if self.max_tso_header != 0 {
            attributes.max_tso_header = self.max_tso_header;
            attributes.comp_mask |= mask::IBV_QP_INIT_ATTR_MAX_TSO_HEADER.0;
        }
        if let Some(operations) = operations {
            attributes.send_ops_flags = operations.bits();
            attributes.comp_mask |= mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
        }
        let context = parents.domain.context().as_raw();
        // SAFETY: `self` holds the domains and queues, so they are live; a queue pair that comes back is ours alone.
        // Without extensions this is ibv_create_qp.
        let create = |attributes: &mut ffi::ibv_qp_init_attr_ex| unsafe {
            match self.driver {
                #[cfg(feature = "mlx5")]
                None if self.memory_keys && operations.is_some() => {
                    super::mlx5::create(context, attributes)
                }
                None => Handle::new(VERB, ffi::ibv_create_qp_ex(context, attributes)),
                Some(driver) => Handle::new(driver.verb(), driver.create(context, attributes)),
            }
        };
        let asked = attributes.cap;
        let mut with_inline = |max_inline_data| {
            attributes.cap = ffi::ibv_qp_cap { max_inline_data, ..asked };
            create(&mut attributes)
        };
        let wanted = asked.max_inline_data;
        let raw = match with_inline(wanted) {
            Err(error) if error.errno() == libc::EINVAL && wanted > 0 => {
                // All other values are in range, so inline data is to blame if creation works without it.
                let without = with_inline(0).map_err(|_| error)?;
                if !self.inline_if_possible {
                    drop(without);
                    let (mut works, mut fails) = (0, wanted);
                    while works + 1 < fails {
                        let middle = works + (fails - works) / 2;
                        match with_inline(middle) {
                            Ok(_) => works = middle,
                            Err(_) => fails = middle,
                        }
                    }
                    let most = works.into();
                    return Err(Error::out_of_range(
                        VERB,
                        "max_inline_data",
                        wanted.into(),
                        0,
                        most,
                    ));
                }
                without
            }
            result => result?,
        };
        self.capacities = attributes.cap;
        self.check_granted(asked)?;
        Ok(raw)
    }

    /// A broken device grants less than asked.
    fn check_granted(&self, asked: ffi::ibv_qp_cap) -> Result<()> {
        let granted = self.capacities;
        macro_rules! check {
            ($($size:ident)+) => {$(
                let what = concat!(stringify!($size), " (the device grants less than was asked)");
                Error::within(VERB, what, asked.$size, 0, granted.$size)?;
            )+};
        }
        check!(max_send_wr max_send_sge max_inline_data);
        if self.kind != QueuePairType::XrcSend && self.driver.is_none() {
            check!(max_recv_wr max_recv_sge);
        }
        Ok(())
    }

    fn finish(
        self,
        raw: Handle<ffi::ibv_qp>,
        operations: SendOperations,
        LookedUp { lid, gids, pkey, messages, settings, answers, is_rxe }: LookedUp,
    ) -> PreparedQueuePair<'res, T> {
        let extended = if operations.is_empty() {
            None
        } else {
            // SAFETY: the queue pair is live.
            NonNull::new(unsafe { ffi::ibv_qp_to_qp_ex(raw.as_ptr()) })
        };
        let (kind, max_sge) = (self.kind, self.capacities.max_send_sge);
        let functions = extended.map_or(0, |extended| {
            // SAFETY: the queue pair is live, and has the operations.
            let functions =
                unsafe { function::of(extended, operations, (kind, self.driver), max_sge) };
            #[cfg(feature = "mlx5")]
            // SAFETY: as above; with memory keys mlx5 has created it.
            let functions =
                functions | unsafe { super::mlx5::functions(extended, self.memory_keys) };
            let one_length = max_sge > 1 && is_rxe;
            functions | if one_length { function::ONE_LENGTH } else { 0 }
        });
        // SAFETY: the queue pair is live.
        let num = unsafe { (*raw.as_ptr()).qp_num };
        let send_psn = settings.send_psn.unwrap_or_else(|| {
            // SAFETY: the queue pair is live.
            unsafe { first_psn(raw.as_ptr(), &gids) }
        });
        let properties = Properties {
            kind: self.kind,
            has_peer: matches!(
                self.kind,
                QueuePairType::ReliableConnected
                    | QueuePairType::UnreliableConnected
                    | QueuePairType::RawPacket
            ),
            capacities: self.capacities,
            messages: messages.inline(self.capacities.max_inline_data),
            settings,
            endpoint: QueuePairEndpoint {
                num,
                lid,
                send_psn: Some(send_psn),
                path_mtu: settings.path_mtu,
                max_dest_rd_atomic: settings.max_dest_rd_atomic,
                transport: 0,
                pkey,
                gids,
                credit_word: None,
            }
            .with_transport(self.kind),
            operations,
            functions,
            driver: self.driver,
        };
        PreparedQueuePair::new(QueuePair::new(raw, extended, properties, self.parents, answers))
    }
}

/// # Safety
///
/// The queue pair is live, and was created for extended operations: others may be shorter than `ibv_qp_ex`.
unsafe fn extended_operations(raw: *mut ffi::ibv_qp) -> SendOperations {
    // SAFETY: the caller vouches for the queue pair.
    match NonNull::new(unsafe { ffi::ibv_qp_to_qp_ex(raw) }) {
        // SAFETY: as above.
        Some(extended) => unsafe { SendOperations::of(extended) },
        None => SendOperations::empty(),
    }
}

fn unsupported() -> Error {
    let reason = "the provider does not have all of the extended operations";
    Error::with_reason(VERB, libc::EOPNOTSUPP, reason)
}

fn is_unsupported(error: Error) -> bool {
    error.kind() == crate::base::ErrorKind::Unsupported
}
