use std::ptr;

use super::esp_action::EspAction;
use super::matches::HeaderMatch;
use crate::base::{
    Error, Handle, Leak, Parent, Result, c_enum, debug, ffi, object, resource, setters,
};
use crate::verbs::device::{Context, ContextRef};

pub(super) const VERB: &str = "ibv_create_flow";

bitflags::bitflags! {
    /// `enum ibv_flow_flags`: options of a rule that few devices have.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_flow_flags")]
    pub struct RuleFlags: u32 {
        /// Matching packets also go on to rules of lower priority.
        const DONT_TRAP = ffi::ibv_flow_flags::IBV_FLOW_ATTR_FLAGS_DONT_TRAP.0;
        /// The rule is about sent packets.
        const EGRESS = ffi::ibv_flow_flags::IBV_FLOW_ATTR_FLAGS_EGRESS.0;
    }
}

/// `struct ibv_flow_attr`: which packets a flow takes, and what the device does with them.
///
/// Without actions, the flow's queue pair receives them ([`QueuePair::create_flow`](crate::QueuePair::create_flow)).
/// The flow keeps its counters and actions alive.
///
/// ```
/// use ibverbs::flow::{EthernetMatch, Rule, Ipv4Match, PortMatch};
///
/// let rule = Rule::new(1)
///     .matching(EthernetMatch::new().destination([2, 0, 0, 0, 0, 1]))
///     .matching(Ipv4Match::new().source_masked([10, 0, 0, 0].into(), [255, 0, 0, 0].into()))
///     .matching(PortMatch::udp().destination(4791))
///     .priority(3);
/// ```
#[derive(Clone)]
#[doc(alias = "ibv_flow_attr")]
#[must_use = "it is for create_flow"]
pub struct Rule<'res> {
    kind: ffi::ibv_flow_attr_type,
    port: u8,
    priority: u16,
    flags: RuleFlags,
    headers: Vec<u8>,
    header_count: usize,
    tag: Option<u32>,
    drops: bool,
    pub(super) held: Vec<Held<'res>>,
}

#[derive(Clone)]
pub(super) enum Held<'res> {
    Counters(Parent<'res, Counters<'res>>),
    Action(Parent<'res, EspAction<'res>>),
}

impl Leak for Held<'_> {
    fn leak(&self) {
        match self {
            Self::Counters(counters) => counters.leak(),
            Self::Action(action) => action.leak(),
        }
    }
}

impl Held<'_> {
    fn context(&self) -> &Context<'_> {
        match self {
            Self::Counters(counters) => counters.context(),
            Self::Action(action) => action.context(),
        }
    }
}

impl<'res> Rule<'res> {
    fn of_kind(kind: ffi::ibv_flow_attr_type, port: u8) -> Self {
        Self {
            kind,
            port,
            priority: 0,
            flags: RuleFlags::empty(),
            headers: Vec::new(),
            header_count: 0,
            tag: None,
            drops: false,
            held: Vec::new(),
        }
    }

    /// A rule for packets of this port, counted from 1, whose headers [match](Self::matching).
    pub fn new(port: u8) -> Self {
        Self::of_kind(ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_NORMAL, port)
    }

    /// A rule for all packets that no other rule takes.
    pub fn all_default(port: u8) -> Self {
        Self::of_kind(ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_ALL_DEFAULT, port)
    }

    /// A rule for all multicast packets that no other rule takes.
    pub fn multicast_default(port: u8) -> Self {
        Self::of_kind(ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_MC_DEFAULT, port)
    }

    /// A rule for all packets, even those that other rules take.
    pub fn sniffer(port: u8) -> Self {
        Self::of_kind(ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_SNIFFER, port)
    }

    /// Packets must have this header. Add the headers of a rule from the outermost on.
    pub fn matching(mut self, header: impl HeaderMatch) -> Self {
        header.append(&mut self.headers, false);
        self.header_count += 1;
        self
    }

    /// Packets must have this header inside a tunnel.
    pub fn matching_inner(mut self, header: impl HeaderMatch) -> Self {
        header.append(&mut self.headers, true);
        self.header_count += 1;
        self
    }

    setters! { self,
        /// The priority (0 unless set): of the matching rules, the one with the lowest number applies.
        priority(priority: u16) => self.priority = priority;

        /// Options (none unless set).
        flags(flags: RuleFlags) => self.flags = flags;

        /// Completions of matching packets have this number
        /// ([`FLOW_TAG`](crate::completion::CompletionFields::FLOW_TAG)).
        tag(tag: u32) => self.tag = Some(tag);

        /// Drops matching packets.
        drop_packets() => self.drops = true;
    }

    /// Counts matching packets.
    pub fn count(mut self, counters: impl Into<Parent<'res, Counters<'res>>>) -> Self {
        self.held.push(Held::Counters(counters.into()));
        self
    }

    /// Applies the action to matching packets.
    pub fn action(mut self, action: impl Into<Parent<'res, EspAction<'res>>>) -> Self {
        self.held.push(Held::Action(action.into()));
        self
    }

    pub(super) fn to_raw(&self, context: &Context<'_>) -> Result<RawRule> {
        let ports = context.query_device()?.phys_port_cnt();
        Error::within(VERB, "the port", self.port, 1, ports)?;
        let normal = self.kind == ffi::ibv_flow_attr_type::IBV_FLOW_ATTR_NORMAL;
        let reason = "a default rule and a sniffer match no headers";
        Error::invalid_if(!normal && self.header_count > 0, VERB, reason)?;
        let reason = "the counters or the action of the rule belong to another context";
        self.held.iter().try_for_each(|held| context.check_same(held.context(), VERB, reason))?;
        let count = self.header_count
            + self.held.len()
            + usize::from(self.tag.is_some())
            + usize::from(self.drops);
        let Ok(num_of_specs) = u8::try_from(count) else {
            let what = "the number of headers and actions";
            return Err(Error::out_of_range(VERB, what, count as u64, 0, u8::MAX.into()));
        };
        let mut specs = self.headers.clone();
        let header = |kind: ffi::ibv_flow_spec_type, size: usize| {
            let mut bytes = vec![0; size];
            bytes[..4].copy_from_slice(&kind.0.to_ne_bytes());
            bytes[4..6].copy_from_slice(&(size as u16).to_ne_bytes());
            bytes
        };
        for held in &self.held {
            let (kind, size, at, pointer) = match held {
                Held::Counters(counters) => (
                    ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_ACTION_COUNT,
                    size_of::<ffi::ibv_flow_spec_counter_action>(),
                    std::mem::offset_of!(ffi::ibv_flow_spec_counter_action, counters),
                    counters.as_raw() as usize,
                ),
                Held::Action(action) => (
                    ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_ACTION_HANDLE,
                    size_of::<ffi::ibv_flow_spec_action_handle>(),
                    std::mem::offset_of!(ffi::ibv_flow_spec_action_handle, action),
                    action.as_raw() as usize,
                ),
            };
            let mut bytes = header(kind, size);
            bytes[at..at + size_of::<usize>()].copy_from_slice(&pointer.to_ne_bytes());
            specs.extend(bytes);
        }
        if self.drops {
            let size = size_of::<ffi::ibv_flow_spec_action_drop>();
            specs.extend(header(ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_ACTION_DROP, size));
        }
        // Last, since its length would misalign the pointers of later ones.
        if let Some(tag) = self.tag {
            let size = size_of::<ffi::ibv_flow_spec_action_tag>();
            let mut bytes = header(ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_ACTION_TAG, size);
            let at = std::mem::offset_of!(ffi::ibv_flow_spec_action_tag, tag_id);
            bytes[at..at + 4].copy_from_slice(&tag.to_ne_bytes());
            specs.extend(bytes);
        }
        // 255 specifications of at most 88 bytes fit.
        let size = (size_of::<ffi::ibv_flow_attr>() + specs.len()) as u16;
        let attributes = ffi::ibv_flow_attr {
            comp_mask: 0,
            type_: self.kind,
            size,
            priority: self.priority,
            num_of_specs,
            port: self.port,
            flags: self.flags.bits(),
        };
        Ok(RawRule::new(attributes, &specs))
    }
}

pub(super) struct RawRule {
    words: Vec<u64>,
}

impl RawRule {
    /// Aligns the specifications after the struct's 20 bytes to 8.
    const START: usize =
        size_of::<ffi::ibv_flow_attr>().next_multiple_of(8) - size_of::<ffi::ibv_flow_attr>();

    fn new(attributes: ffi::ibv_flow_attr, specs: &[u8]) -> Self {
        let length = Self::START + size_of::<ffi::ibv_flow_attr>() + specs.len();
        let mut this = Self { words: vec![0; length.div_ceil(8)] };
        let to = this.as_mut_ptr();
        // SAFETY: the words have room for both, one after the other, and are aligned for the struct.
        unsafe {
            to.write(attributes);
            to.add(1).cast::<u8>().copy_from_nonoverlapping(specs.as_ptr(), specs.len());
        }
        this
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut ffi::ibv_flow_attr {
        const { assert!(Self::START % align_of::<ffi::ibv_flow_attr>() == 0) };
        // SAFETY: `words` has more bytes than `START`.
        unsafe { self.words.as_mut_ptr().cast::<u8>().add(Self::START).cast() }
    }
}

debug! {
    Rule<'_>, self,
    port: self.port, priority: self.priority, flags: self.flags, headers: self.header_count,
    tag: self.tag, drops: self.drops, ..
}

object!(ibv_counters, ibv_destroy_counters);

const ATTACH: &str = "ibv_attach_counters_point_flow";
const READ: &str = "ibv_read_counters";

c_enum! {
    /// `enum ibv_counter_description`: what a counter counts.
    #[doc(alias = "ibv_counter_description")]
    pub enum Counter: ibv_counter_description(u32) {
        /// Packets.
        Packets = IBV_COUNTER_PACKETS,
        /// Bytes.
        Bytes = IBV_COUNTER_BYTES,
    }
}

/// `struct ibv_counters`: counters of the packets of flows.
///
/// On mlx5, attach the counters before you create a flow that [counts](crate::flow::Rule::count) with them.
///
/// ```no_run
/// # // not on Soft-RoCE alone: it has no flows
/// use ibverbs::flow::{Counter, Counters, Rule};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let counters = Counters::new(&context)?;
/// counters.attach(Counter::Packets, 0)?;
/// counters.attach(Counter::Bytes, 1)?;
/// let rule = Rule::sniffer(1).count(&counters);
/// let mut values = [0; 2];
/// counters.read(&mut values)?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_counters")]
pub struct Counters<'ctx> {
    raw: Handle<ffi::ibv_counters>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_destroy_counters`: destroys the counters and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The counters are then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with their context.
    ///
    ///  - `EBUSY`: a flow still uses them.
    #[doc(alias = "ibv_destroy_counters")]
    Counters<'ctx>: raw of ibv_counters, context
}

impl<'ctx> Counters<'ctx> {
    /// `ibv_create_counters`: creates an empty set.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no flow counters.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_create_counters")]
    pub fn new(context: impl Into<ContextRef<'ctx>>) -> Result<Self> {
        let context = context.into();
        let mut attributes = ffi::ibv_counters_init_attr::default();
        // SAFETY: the context is live; counters that come back are ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_create_counters(context.as_raw(), &mut attributes);
            Handle::new("ibv_create_counters", raw)
        }?;
        Ok(Self { raw, context })
    }

    /// `ibv_attach_counters_point_flow`: adds a counter for flows created later, whose value is [read](Self::read) at
    /// `index`.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not count that.
    ///  - `EBUSY`: a flow already uses the set.
    ///  - `EINVAL`: the device has no such index.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach(&self, counter: Counter, index: u32) -> Result<()> {
        // SAFETY: a null flow refers to nothing.
        unsafe { self.attach_raw(counter, index, ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// `flow` is null, or live for as long as the counters are attached to it.
    pub(super) unsafe fn attach_raw(
        &self,
        counter: Counter,
        index: u32,
        flow: *mut ffi::ibv_flow,
    ) -> Result<()> {
        let mut attributes =
            ffi::ibv_counter_attach_attr { counter_desc: counter.into(), index, comp_mask: 0 };
        // SAFETY: the counters are live, and the caller vouches for the flow.
        let returned =
            unsafe { ffi::ibv_attach_counters_point_flow(self.as_raw(), &mut attributes, flow) };
        ffi::status(ATTACH, returned)
    }

    /// `ibv_read_counters`: reads the counters at the first indices into `values`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `values` is empty or longer than the device's counters, or no flow uses the set yet.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_read_counters")]
    pub fn read(&self, values: &mut [u64]) -> Result<()> {
        self.read_with(values, 0)
    }

    /// `ibv_read_counters`: as [`read`](Self::read), but accepts values that the driver has cached.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn read_cached(&self, values: &mut [u64]) -> Result<()> {
        self.read_with(values, ffi::ibv_read_counters_flags::IBV_READ_COUNTERS_ATTR_PREFER_CACHED.0)
    }

    fn read_with(&self, values: &mut [u64], flags: u32) -> Result<()> {
        Error::within(READ, "the number of values", values.len() as u64, 1, u32::MAX)?;
        let count = values.len() as u32;
        // SAFETY: the counters are live, and the values are writable.
        let returned =
            unsafe { ffi::ibv_read_counters(self.as_raw(), values.as_mut_ptr(), count, flags) };
        ffi::status(READ, returned)
    }

    /// The context that they were created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { Counters<'_>, self, device: self.context.name(), .. }
