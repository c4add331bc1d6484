//! Paths to peers.

use std::hash::{Hash, Hasher};

use super::endpoint::QueuePairEndpoint;
use super::global_route_header::GlobalRouteHeader;
use crate::base::{Detail, Error, Handle, Result, debug, ffi, object, resource, setters};
use crate::verbs::completion::ReceivedDatagram;
use crate::verbs::device::{
    Context, EndpointGids, Gid, GidEntry, GidType, LinkLayer, PortAttributes,
};
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::settings::{FlowLabel, ServiceLevel, StaticRate};

/// `struct ibv_ah_attr`: the path to a peer, for a connection or an [`AddressHandle`](crate::AddressHandle).
///
/// [`to_peer`](Self::to_peer) makes the path to a peer's [`QueuePairEndpoint`], [`reply_to`](Self::reply_to) the path
/// back to the sender of a datagram. [`new`](Self::new) names the peer's port; RoCE needs [`global`](Self::global) too.
/// Everything else has a default.
///
/// ```
/// use ibverbs::queue_pair::AddressVector;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// # let peer = domain.create_channel().build()?.endpoint();
/// let path = AddressVector::to_peer(&context, 1, &peer)?; // through our port 1
/// let handle = domain.create_ah(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "ibv_ah_attr")]
#[doc(alias = "ibv_global_route")]
#[must_use]
pub struct AddressVector {
    lid: u16,
    port: u8,
    service_level: ServiceLevel,
    source_path_bits: u8,
    static_rate: StaticRate,
    route: Option<GlobalRoute>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GlobalRoute {
    gid: Gid,
    source_gid_index: u8,
    flow_label: FlowLabel,
    traffic_class: u8,
    hop_limit: u8,
}

/// In two writes, not one for each field: each send of a datagram looks for the address handle of its path.
impl Hash for AddressVector {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let &Self { lid, port, source_path_bits, route, .. } = self;
        let gid = route.map_or(Gid::ZERO, |route| route.gid);
        let index = route.map_or(0, |route| route.source_gid_index);
        let [low, high] = lid.to_ne_bytes();
        state.write_u128(u128::from_ne_bytes(gid.to_bytes()));
        state.write_u64(u64::from_ne_bytes([low, high, port, source_path_bits, index, 0, 0, 0]));
    }
}

impl AddressVector {
    /// The default hop limit.
    pub const DEFAULT_HOP_LIMIT: u8 = 64;

    /// The path to the port `lid` of the same InfiniBand subnet, through our port `port`, without global route header.
    pub fn new(port: u8, lid: u16) -> Self {
        Self {
            lid,
            port,
            service_level: ServiceLevel::default(),
            source_path_bits: 0,
            static_rate: StaticRate::Max,
            route: None,
        }
    }

    /// The path to a peer's queue pair, through our port `port`. If the port needs a global route header, as on RoCE,
    /// it takes the best matching pair of our GIDs and the peer's.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such port, or the endpoint is of the other link layer.
    ///  - `ENODATA`: a port on RoCE has no GID.
    ///  - `EADDRNOTAVAIL`: no GID of ours fits one of the peer's. The error names both.
    pub fn to_peer(context: &Context<'_>, port: u8, peer: &QueuePairEndpoint) -> Result<Self> {
        let attributes = context.query_port(port)?;
        let gids = context.endpoint_gids(&attributes, port)?;
        Self::to_endpoint("ibv_create_ah", context, &attributes, (port, None), &gids, peer, false)
    }

    /// Makes the vector from our GID at `gid_index`, if given. `global` adds a global route header on any port.
    pub(super) fn to_endpoint(
        verb: &'static str,
        context: &Context<'_>,
        attributes: &PortAttributes,
        (port, gid_index): (u8, Option<u8>),
        ours: &EndpointGids,
        peer: &QueuePairEndpoint,
        global: bool,
    ) -> Result<Self> {
        peer.check(verb, attributes.link_layer())?;
        let path = Self::new(port, peer.lid);
        if !global && !attributes.grh_required() {
            return Ok(path);
        }
        let (ours, theirs) = QueuePairEndpoint::choose_gids(verb, ours, peer)?;
        let index = match gid_index {
            Some(index) => index,
            None if attributes.link_layer() == LinkLayer::InfiniBand => 0,
            None => context.index_of_gid(port, &ours)?,
        };
        Ok(path.global(theirs.gid, index))
    }

    /// `ibv_init_ah_from_wc`: the path back to the sender of a datagram that came through our port `port`. C's verb
    /// cannot answer a datagram to a multicast group; this method takes our GID most like the sender's.
    ///
    /// `received` is the completion of the receive, a [`WorkSuccess`](crate::completion::WorkSuccess) or an
    /// [`ExtendedSuccess`](crate::completion::ExtendedSuccess). `header` is the first 40 bytes of its buffer, used only
    /// if the completion's `has_global_route` says so.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the extended queue does not report `SOURCE_LID`, `SERVICE_LEVEL` and `DESTINATION_PATH_BITS`.
    ///  - `ENOENT`: the datagram was sent to none of our GIDs, or `header` is not a global route header.
    #[doc(alias = "ibv_init_ah_from_wc")]
    #[doc(alias = "ibv_create_ah_from_wc")]
    pub fn reply_to(
        context: &Context<'_>,
        port: u8,
        received: &impl ReceivedDatagram,
        header: &GlobalRouteHeader,
    ) -> Result<Self> {
        const VERB: &str = "ibv_init_ah_from_wc";
        let completion = received.sender(VERB)?;
        let gids = if is_global(&completion) { context.gid_table()? } else { Vec::new() };
        Self::reply_from(&gids, port, &completion, header)
    }

    /// [Replies](Self::reply_to) from one of `gids`.
    pub(crate) fn reply_from(
        gids: &[GidEntry],
        port: u8,
        completion: &ffi::ibv_wc,
        header: &GlobalRouteHeader,
    ) -> Result<Self> {
        let level = ServiceLevel::new(completion.sl)?;
        let path = Self::new(port, completion.slid)
            .service_level(level)
            .source_path_bits(completion.dlid_path_bits);
        if !is_global(completion) {
            return Ok(path);
        }
        let route = || {
            let (from, to) = (header.source()?, header.destination()?);
            let mut of_port = gids.iter().filter(|entry| entry.port == port);
            let fits =
                |entry: &&GidEntry| (entry.gid_type == GidType::RoceV2) == header.is_roce_v2();
            let index = if to.is_multicast() {
                gid_like(of_port.filter(fits), from)?
            } else {
                of_port.find(|entry| entry.gid == to && fits(entry))?.index.try_into().ok()?
            };
            let path = path.global(from, index).traffic_class(header.traffic_class()?);
            Some(path.hop_limit(header.hop_limit()?))
        };
        let reason = "none of our GIDs is the one that the datagram was sent to";
        route().ok_or(Error::with_reason("ibv_init_ah_from_wc", libc::ENOENT, reason))
    }

    /// Adds a global route header to each packet, to `gid` from our GID at `source_gid_index`. RoCE needs it.
    pub fn global(mut self, gid: Gid, source_gid_index: u8) -> Self {
        self.route = Some(GlobalRoute {
            gid,
            source_gid_index,
            flow_label: FlowLabel::default(),
            traffic_class: 0,
            hop_limit: Self::DEFAULT_HOP_LIMIT,
        });
        self
    }

    setters! { self,
        /// The service level.
        service_level(level: ServiceLevel) => self.service_level = level;

        /// The low bits of our LID, where the port has several
        /// ([`PortAttributes::lmc`](crate::device::PortAttributes::lmc)).
        source_path_bits(bits: u8) => self.source_path_bits = bits;

        /// The rate limit.
        static_rate(rate: StaticRate) => self.static_rate = rate;

        /// The traffic class; its upper six bits are the DSCP on RoCE v2. No effect without global route header.
        traffic_class(class: u8) => if let Some(route) = &mut self.route { route.traffic_class = class };

        /// The flow label. No effect without global route header.
        flow_label(label: FlowLabel) => if let Some(route) = &mut self.route { route.flow_label = label };

        /// How many routers a packet may pass. No effect without global route header.
        hop_limit(limit: u8) => if let Some(route) = &mut self.route { route.hop_limit = limit };
    }

    /// The kernel refuses a path without the global route that the port needs, or without a GID of that index.
    pub(super) fn check_route(
        &self,
        verb: &'static str,
        context: &Context<'_>,
        port: &PortAttributes,
    ) -> Result<()> {
        let Some(index) = self.source_gid_index() else {
            if port.link_layer() == LinkLayer::Ethernet || port.grh_required() {
                let reason = "ah_attr has no global route, which this port needs: \
                              AddressVector::global adds one";
                return Err(Error::invalid(verb, reason));
            }
            return Ok(());
        };
        context.query_gid(self.port, index.into()).map(drop).map_err(|_| {
            Error::with(
                verb,
                libc::EINVAL,
                Detail::GidIndex { index: index.into(), port: self.port },
            )
        })
    }

    #[cold]
    pub(super) fn explain_unreachable(&self, context: &Context<'_>, error: Error) -> Error {
        let unreachable = [libc::ETIMEDOUT, libc::ENETUNREACH, libc::EHOSTUNREACH];
        match self.route {
            Some(route) if unreachable.contains(&error.errno()) => {
                let index = route.source_gid_index;
                let ours = context.query_gid(self.port, index.into());
                let ours = ours.map_or(Gid::ZERO, |entry| entry.gid).into();
                let path = Detail::Path { ours, index, theirs: route.gid.into() };
                Error::with(error.verb(), error.errno(), path)
            }
            _ => error,
        }
    }

    /// The peer's LID.
    pub fn lid(&self) -> u16 {
        self.lid
    }

    /// Our port.
    pub fn port(&self) -> u8 {
        self.port
    }

    /// The peer's GID, with a global route header.
    pub fn gid(&self) -> Option<Gid> {
        self.route.map(|route| route.gid)
    }

    /// The index of our GID, with a global route header.
    pub fn source_gid_index(&self) -> Option<u8> {
        self.route.map(|route| route.source_gid_index)
    }

    /// The C struct.
    pub fn to_raw(&self) -> ffi::ibv_ah_attr {
        let mut raw = ffi::ibv_ah_attr {
            dlid: self.lid,
            sl: self.service_level.value(),
            src_path_bits: self.source_path_bits,
            // All rates fit into 8 bits; 255 is not a rate.
            static_rate: u8::try_from(ffi::ibv_rate::from(self.static_rate).0).unwrap_or(u8::MAX),
            port_num: self.port,
            ..Default::default()
        };
        if let Some(route) = self.route {
            raw.is_global = 1;
            raw.grh = ffi::ibv_global_route {
                dgid: route.gid.into(),
                flow_label: route.flow_label.value(),
                sgid_index: route.source_gid_index,
                hop_limit: route.hop_limit,
                traffic_class: route.traffic_class,
            };
        }
        raw
    }
}

impl From<ffi::ibv_ah_attr> for AddressVector {
    fn from(raw: ffi::ibv_ah_attr) -> Self {
        let route = GlobalRoute {
            gid: raw.grh.dgid.into(),
            source_gid_index: raw.grh.sgid_index,
            flow_label: FlowLabel::new(raw.grh.flow_label & FlowLabel::MAX.value())
                .unwrap_or_default(),
            traffic_class: raw.grh.traffic_class,
            hop_limit: raw.grh.hop_limit,
        };
        Self {
            lid: raw.dlid,
            port: raw.port_num,
            service_level: ServiceLevel::new(raw.sl & ServiceLevel::MAX.value())
                .unwrap_or_default(),
            source_path_bits: raw.src_path_bits,
            static_rate: ffi::ibv_rate(raw.static_rate.into()).into(),
            route: (raw.is_global != 0).then_some(route),
        }
    }
}

object!(ibv_ah, ibv_destroy_ah);

const VERB: &str = "ibv_create_ah";

fn is_global(completion: &ffi::ibv_wc) -> bool {
    completion.wc_flags & ffi::ibv_wc_flags::IBV_WC_GRH.0 != 0
}

/// Our first GID of the same family; preferably both are link-local or neither.
pub(crate) fn gid_like<'g>(
    ours: impl Iterator<Item = &'g GidEntry> + Clone,
    gid: Gid,
) -> Option<u8> {
    let is_v4 = |gid: Gid| gid.to_ipv4().is_some();
    let mut of_family = ours.filter(|entry| is_v4(entry.gid) == is_v4(gid));
    let mut alike = of_family.clone();
    let best = alike.find(|entry| entry.gid.is_link_local() == gid.is_link_local());
    best.or_else(|| of_family.next())?.index.try_into().ok()
}

/// `struct ibv_ah`: the path to a peer, made ready for datagrams.
///
/// A UD queue pair sends through it to any queue pair of that peer, named by number and Q_Key: see
/// [`SendWorkRequest::to`](crate::SendWorkRequest::to) and [Datagrams](crate::_guide::verbs#datagrams).
#[doc(alias = "ibv_ah")]
pub struct AddressHandle<'pd> {
    raw: Handle<ffi::ibv_ah>,
    domain: DomainRef<'pd>,
}

resource! {
    /// `ibv_destroy_ah`: destroys the handle and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The handle is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its domain.
    #[doc(alias = "ibv_destroy_ah")]
    AddressHandle<'pd>: raw of ibv_ah, domain
}

impl<'pd> AddressHandle<'pd> {
    /// `ibv_create_ah`: creates the handle, for queue pairs of the same domain.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a part of the path is wrong for this device, or lacks the [global route](AddressVector::global)
    ///    that RoCE needs.
    ///  - `ETIMEDOUT`, `ENETUNREACH`, `EHOSTUNREACH`: as of [`QueuePair::modify`](crate::QueuePair::modify). The error
    ///    names both GIDs.
    ///  - `ENOMEM`: the device has no address handle left, or the machine no memory.
    #[doc(alias = "ibv_create_ah")]
    pub fn new(domain: impl Into<DomainRef<'pd>>, path: &AddressVector) -> Result<Self> {
        let domain = domain.into();
        let mut attributes = path.to_raw();
        // mlx5 sometimes fails without an errno value.
        ffi::set_errno(0);
        // SAFETY: the domain is live; a handle that comes back is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_create_ah(domain.as_raw(), &mut attributes)) };
        let raw = raw.map_err(|error| explain(domain.context(), path, error))?;
        Ok(Self { raw, domain })
    }

    /// Takes over a handle that other code created, such as a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live address handle that nothing else destroys.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_ah,
        domain: impl Into<DomainRef<'pd>>,
    ) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).pd } != domain.as_raw();
        Error::invalid_if(is_foreign, VERB, "not an address handle of this domain")?;
        // SAFETY: the caller hands over a live handle.
        Ok(Self { raw: unsafe { Handle::new(VERB, raw) }?, domain })
    }

    /// The domain that it was created in.
    pub fn protection_domain(&self) -> &ProtectionDomain<'pd> {
        &self.domain
    }
}

#[cold]
fn explain(context: &Context<'_>, path: &AddressVector, error: Error) -> Error {
    let Ok(device) = context.query_device() else { return error };
    let (port, ports) = (path.port(), device.phys_port_cnt());
    if port == 0 || port > ports {
        return Error::out_of_range(VERB, "port number", port.into(), 1, ports.into());
    }
    // A failure without an errno value has become `EIO`.
    if !matches!(error.errno(), libc::EINVAL | libc::EIO) {
        return path.explain_unreachable(context, error);
    }
    let Ok(attributes) = context.query_port(port) else { return error };
    path.check_route(VERB, context, &attributes).err().unwrap_or(error)
}

impl ProtectionDomain<'_> {
    /// `ibv_create_ah`: creates an address handle that borrows this domain. To own or share it, call
    /// [`AddressHandle::new`].
    ///
    /// # Errors
    ///
    /// Those of [`AddressHandle::new`].
    #[doc(alias = "ibv_create_ah")]
    pub fn create_ah(&self, path: &AddressVector) -> Result<AddressHandle<'_>> {
        AddressHandle::new(self, path)
    }
}

debug! { AddressHandle<'_>, self, device: self.domain.context().name(), .. }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_struct_holds_every_setting() {
        let path = AddressVector::new(2, 17)
            .global("2001:db8::1".parse().unwrap(), 3)
            .service_level(ServiceLevel::new(5).unwrap())
            .source_path_bits(1)
            .static_rate(StaticRate::Gbps100)
            .traffic_class(106)
            .flow_label(FlowLabel::new(0xabcde).unwrap())
            .hop_limit(9);
        let raw = path.to_raw();
        assert_eq!((raw.dlid, raw.port_num, raw.sl, raw.src_path_bits), (17, 2, 5, 1));
        assert_eq!((raw.static_rate, raw.is_global), (16, 1));
        assert_eq!((raw.grh.sgid_index, raw.grh.hop_limit), (3, 9));
        assert_eq!((raw.grh.traffic_class, raw.grh.flow_label), (106, 0xabcde));
        assert_eq!(AddressVector::from(raw), path);
    }

    #[test]
    fn a_rate_that_does_not_fit_is_none() {
        let rate = |n| AddressVector::new(1, 4).static_rate(StaticRate::Unknown(n)).to_raw();
        assert_eq!((rate(200).static_rate, rate(256 + 2).static_rate), (200, u8::MAX));
    }

    #[test]
    fn a_local_path_has_no_route() {
        let path = AddressVector::new(1, 4).traffic_class(7).hop_limit(3);
        assert_eq!((path.to_raw().is_global, path.gid()), (0, None));
        assert_eq!(AddressVector::from(path.to_raw()), path);
    }
}
