use std::marker::PhantomData;
use std::ptr::NonNull;

use super::work_completion::{WorkError, WorkOpcode, WorkStatus, WorkSuccess};
use crate::base::{
    Error, Handle, Result, debug, ffi,
    sync::{AtomicBool, Ordering},
};
use crate::verbs::device::{Context, DeviceAttributes, quirks};

/// The current completion of an extended queue.
///
/// Fields that the queue was not [made to report](crate::CompletionQueueBuilder::extended) are `None`.
pub struct ExtendedCompletion<'b> {
    raw: NonNull<ffi::ibv_cq_ex>,
    fields: CompletionFields,
    lent: PhantomData<&'b mut ()>,
}

macro_rules! field_getters {
    ($($(#[$meta:meta])* $name:ident: $type:ty = $function:ident if $field:ident;)+) => {
        $(
            $(#[$meta])*
            #[inline]
            pub fn $name(&self) -> Option<$type> {
                self.fields.contains(CompletionFields::$field).then(|| {
                    // SAFETY: the poll is open at a completion, and creating the queue checked this field's function.
                    unsafe { (*self.raw.as_ptr()).$function.unwrap_unchecked()(self.raw.as_ptr()) }
                })
            }
        )+
    };
}

impl ExtendedCompletion<'_> {
    /// # Safety
    ///
    /// While the value is used, the queue's poll is open at a completion, and the provider has the functions for
    /// `fields`.
    pub(super) unsafe fn new(raw: NonNull<ffi::ibv_cq_ex>, fields: CompletionFields) -> Self {
        Self { raw, fields, lent: PhantomData }
    }

    /// The number that the request was posted under.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        // SAFETY: the queue is live, and the poll is open at a completion.
        unsafe { (*self.raw.as_ptr()).wr_id }
    }

    /// Whether the request was carried out.
    #[inline]
    pub fn is_success(&self) -> bool {
        // SAFETY: as in `wr_id`.
        unsafe { (*self.raw.as_ptr()).status == ffi::ibv_wc_status::IBV_WC_SUCCESS }
    }

    /// How the request ended.
    ///
    /// # Errors
    ///
    /// The request failed. So does every later request of the same queue, most of them with [`WorkStatus::Flushed`].
    #[inline]
    pub fn result(&self) -> Result<ExtendedSuccess<'_>, WorkError> {
        if self.is_success() {
            Ok(ExtendedSuccess { raw: self.raw, fields: self.fields, lent: PhantomData })
        } else {
            Err(self.error())
        }
    }

    #[doc(alias = "ibv_wc_read_vendor_err")]
    #[cold]
    fn error(&self) -> WorkError {
        // SAFETY: as in `wr_id`. Creating the queue checked the function.
        let (status, vendor_error) = unsafe {
            let queue = self.raw.as_ptr();
            ((*queue).status, (*queue).read_vendor_err.unwrap_unchecked()(queue))
        };
        WorkError::new(WorkStatus::from(status), vendor_error)
    }

    field_getters! {
        /// `ibv_wc_read_qp_num`: the number of the local queue pair.
        #[doc(alias = "ibv_wc_read_qp_num")]
        queue_pair_number: u32 = read_qp_num if QUEUE_PAIR_NUMBER;
        /// `ibv_wc_read_completion_ts`: the time of completion, in ticks of the device's clock: see
        /// [`Context::query_raw_clock`](crate::Context::query_raw_clock).
        #[doc(alias = "ibv_wc_read_completion_ts")]
        timestamp: u64 = read_completion_ts if TIMESTAMP;
        /// `ibv_wc_read_completion_wallclock_ns`: the time of completion, in nanoseconds of the
        /// system's clock.
        #[doc(alias = "ibv_wc_read_completion_wallclock_ns")]
        wallclock_ns: u64 = read_completion_wallclock_ns if WALLCLOCK;
    }
}

debug! { ExtendedCompletion<'_>, self, wr_id: self.wr_id(), result: self.result(), .. }

/// A request that was carried out: the current completion of an extended queue.
///
/// Fields that the queue was not [made to report](crate::CompletionQueueBuilder::extended) are `None`.
pub struct ExtendedSuccess<'b> {
    raw: NonNull<ffi::ibv_cq_ex>,
    fields: CompletionFields,
    lent: PhantomData<&'b ()>,
}

/// `struct ibv_wc_tm_info`: the tag matching data of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_wc_tm_info")]
pub struct TagMatch {
    /// The tag.
    pub tag: u64,
    /// The application's data in addition to the tag.
    pub private_data: u32,
}

impl ExtendedSuccess<'_> {
    /// `ibv_wc_read_opcode`: the operation.
    #[doc(alias = "ibv_wc_read_opcode")]
    #[inline]
    pub fn opcode(&self) -> WorkOpcode {
        // SAFETY: the poll is open at a completion, and creating the queue checked the function.
        unsafe { (*self.raw.as_ptr()).read_opcode.unwrap_unchecked()(self.raw.as_ptr()) }.into()
    }

    /// `ibv_wc_read_wc_flags`: bits of `enum ibv_wc_flags`.
    #[doc(alias = "ibv_wc_read_wc_flags")]
    #[inline]
    pub fn flags(&self) -> u32 {
        // SAFETY: as in `opcode`.
        unsafe { (*self.raw.as_ptr()).read_wc_flags.unwrap_unchecked()(self.raw.as_ptr()) }
    }

    #[inline]
    fn flag(&self, flag: ffi::ibv_wc_flags) -> bool {
        self.flags() & flag.0 != 0
    }

    /// `ibv_wc_read_imm_data`: the immediate data of the message, if any.
    #[doc(alias = "ibv_wc_read_imm_data")]
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        self.flag(ffi::ibv_wc_flags::IBV_WC_WITH_IMM)
            .then(|| self.immediate_or_key().map(u32::from_be))
            .flatten()
    }

    /// `ibv_wc_read_invalidated_rkey`: the rkey that the message invalidated, if any. See
    /// [`WorkSuccess::invalidated_rkey`](crate::completion::WorkSuccess::invalidated_rkey) for Soft-RoCE.
    #[doc(alias = "ibv_wc_read_invalidated_rkey")]
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        self.flag(ffi::ibv_wc_flags::IBV_WC_WITH_INV).then(|| self.immediate_or_key()).flatten()
    }

    /// Whether the first 40 bytes of a UD receive are a global route header. If not, they are undefined.
    #[inline]
    pub fn has_global_route(&self) -> bool {
        self.flag(ffi::ibv_wc_flags::IBV_WC_GRH)
    }

    field_getters! {
        /// `ibv_wc_read_byte_len`: the number of bytes that arrived, for a receive, a read or an atomic. Other requests
        /// may leave any value here. In UD receives it includes 40 bytes for the global route header.
        #[doc(alias = "ibv_wc_read_byte_len")]
        byte_len: u32 = read_byte_len if BYTE_LEN;
        /// `ibv_wc_read_src_qp`: the number of the peer's queue pair; for UD receives only.
        #[doc(alias = "ibv_wc_read_src_qp")]
        source_queue_pair: u32 = read_src_qp if SOURCE_QUEUE_PAIR;
        /// `ibv_wc_read_slid`: the peer's LID; for UD receives on InfiniBand only.
        #[doc(alias = "ibv_wc_read_slid")]
        source_lid: u32 = read_slid if SOURCE_LID;
        /// `ibv_wc_read_sl`: the service level of the message; for UD receives only.
        #[doc(alias = "ibv_wc_read_sl")]
        service_level: u8 = read_sl if SERVICE_LEVEL;
        /// `ibv_wc_read_dlid_path_bits`: the low bits of the local LID that received the message; for UD receives only.
        #[doc(alias = "ibv_wc_read_dlid_path_bits")]
        destination_path_bits: u8 = read_dlid_path_bits if DESTINATION_PATH_BITS;
        /// `ibv_wc_read_cvlan`: the VLAN tag of the packet; for raw packets only.
        #[doc(alias = "ibv_wc_read_cvlan")]
        vlan: u16 = read_cvlan if VLAN;
        /// `ibv_wc_read_flow_tag`: the tag of the flow rule that steered the packet here; for raw
        /// packets only.
        #[doc(alias = "ibv_wc_read_flow_tag")]
        flow_tag: u32 = read_flow_tag if FLOW_TAG;
    }

    /// `ibv_wc_read_tm_info`: the message's tag; for queues with tag matching only.
    #[doc(alias = "ibv_wc_read_tm_info")]
    #[inline]
    pub fn tag_matching(&self) -> Option<TagMatch> {
        self.fields.contains(CompletionFields::TAG_MATCHING).then(|| {
            let mut info = ffi::ibv_wc_tm_info::default();
            // SAFETY: as in `opcode`; `info` is writable.
            unsafe {
                (*self.raw.as_ptr()).read_tm_info.unwrap_unchecked()(self.raw.as_ptr(), &mut info);
            }
            TagMatch { tag: info.tag, private_data: info.priv_ }
        })
    }

    #[inline]
    fn immediate_or_key(&self) -> Option<u32> {
        self.fields.contains(CompletionFields::IMMEDIATE).then(|| {
            // SAFETY: as in `opcode`.
            unsafe { (*self.raw.as_ptr()).read_imm_data.unwrap_unchecked()(self.raw.as_ptr()) }
        })
    }
}

debug! {
    ExtendedSuccess<'_>, self,
    opcode: self.opcode(), byte_len: self.byte_len(), immediate: self.immediate(), ..
}

/// The completion of a UD receive, for [`AddressVector::reply_to`](crate::queue_pair::AddressVector::reply_to). Sealed:
/// a [`WorkSuccess`], or an [`ExtendedSuccess`] of a queue that reports the sender.
pub trait ReceivedDatagram: sealed::Sender {}

impl ReceivedDatagram for WorkSuccess {}
impl ReceivedDatagram for ExtendedSuccess<'_> {}

mod sealed {
    use super::*;

    pub trait Sender {
        /// Fails with `verb` if the queue does not report what `ibv_init_ah_from_wc` reads.
        fn sender(&self, verb: &'static str) -> Result<ffi::ibv_wc>;
    }

    impl Sender for WorkSuccess {
        fn sender(&self, _verb: &'static str) -> Result<ffi::ibv_wc> {
            Ok(*self.as_raw())
        }
    }

    impl Sender for ExtendedSuccess<'_> {
        fn sender(&self, verb: &'static str) -> Result<ffi::ibv_wc> {
            let (Some(lid), Some(sl), Some(dlid_path_bits)) =
                (self.source_lid(), self.service_level(), self.destination_path_bits())
            else {
                let reason = "build the queue with the completion fields SOURCE_LID, SERVICE_LEVEL and \
                              DESTINATION_PATH_BITS";
                return Err(Error::invalid(verb, reason));
            };
            let flags = self.flags();
            // InfiniBand's LIDs have 16 bits.
            Ok(ffi::ibv_wc {
                wc_flags: flags,
                slid: lid as u16,
                sl,
                dlid_path_bits,
                ..Default::default()
            })
        }
    }
}

bitflags::bitflags! {
    /// `enum ibv_create_cq_wc_flags`: the fields that an [extended](crate::CompletionQueueBuilder::extended) queue
    /// reports in addition to `wr_id`, status, opcode, vendor error and flags.
    ///
    /// Bits without a name here are passed on.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_create_cq_wc_flags")]
    pub struct CompletionFields: u64 {
        /// [`ExtendedSuccess::byte_len`](crate::completion::ExtendedSuccess::byte_len).
        const BYTE_LEN = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_BYTE_LEN);
        /// [`ExtendedSuccess::immediate`](crate::completion::ExtendedSuccess::immediate) and
        /// [`ExtendedSuccess::invalidated_rkey`](crate::completion::ExtendedSuccess::invalidated_rkey).
        const IMMEDIATE = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_IMM);
        /// [`ExtendedCompletion::queue_pair_number`](crate::completion::ExtendedCompletion::queue_pair_number).
        const QUEUE_PAIR_NUMBER = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM);
        /// [`ExtendedSuccess::source_queue_pair`](crate::completion::ExtendedSuccess::source_queue_pair).
        const SOURCE_QUEUE_PAIR = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SRC_QP);
        /// [`ExtendedSuccess::source_lid`](crate::completion::ExtendedSuccess::source_lid).
        const SOURCE_LID = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SLID);
        /// [`ExtendedSuccess::service_level`](crate::completion::ExtendedSuccess::service_level).
        const SERVICE_LEVEL = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SL);
        /// [`ExtendedSuccess::destination_path_bits`](crate::completion::ExtendedSuccess::destination_path_bits).
        const DESTINATION_PATH_BITS =
            field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_DLID_PATH_BITS);
        /// [`ExtendedCompletion::timestamp`](crate::completion::ExtendedCompletion::timestamp).
        const TIMESTAMP = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP);
        /// [`ExtendedCompletion::wallclock_ns`](crate::completion::ExtendedCompletion::wallclock_ns).
        const WALLCLOCK =
            field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
        /// [`ExtendedSuccess::vlan`](crate::completion::ExtendedSuccess::vlan).
        const VLAN = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_CVLAN);
        /// [`ExtendedSuccess::flow_tag`](crate::completion::ExtendedSuccess::flow_tag).
        const FLOW_TAG = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_FLOW_TAG);
        /// [`ExtendedSuccess::tag_matching`](crate::completion::ExtendedSuccess::tag_matching).
        const TAG_MATCHING = field(ffi::ibv_create_cq_wc_flags::IBV_WC_EX_WITH_TM_INFO);
        /// The fields of a [`WorkCompletion`](crate::WorkCompletion), which every extended queue can report.
        const STANDARD = Self::BYTE_LEN.bits()
            | Self::IMMEDIATE.bits()
            | Self::QUEUE_PAIR_NUMBER.bits()
            | Self::SOURCE_QUEUE_PAIR.bits()
            | Self::SOURCE_LID.bits()
            | Self::SERVICE_LEVEL.bits()
            | Self::DESTINATION_PATH_BITS.bits();
        const _ = !0;
    }
}

const fn field(field: ffi::ibv_create_cq_wc_flags) -> u64 {
    field.0 as u64
}

pub(super) struct Extended {
    pub(super) fields: CompletionFields,
    /// Each completion is a poll of its own.
    pub(super) one_by_one: bool,
    pub(super) poller: OnePoller,
}

/// What the provider did for one poller is visible to the next.
#[derive(Default)]
pub(super) struct OnePoller(AtomicBool);

impl OnePoller {
    pub(super) fn begin(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    pub(super) fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Extended {
    pub(super) fn create(
        context: &Context<'_>,
        attributes: &mut ffi::ibv_cq_init_attr_ex,
        device: &DeviceAttributes,
    ) -> Result<(Handle<ffi::ibv_cq>, Self)> {
        const VERB: &str = "ibv_create_cq_ex";
        let unsupported = Error::with_reason(
            VERB,
            libc::EOPNOTSUPP,
            "the device has no extended completion queues, or not with these fields or flags",
        );
        let fields = CompletionFields::from_bits_retain(attributes.wc_flags);
        // SAFETY: the context and the channel are live; a queue that comes back is ours alone. An `ibv_cq_ex` begins
        // with an `ibv_cq`.
        let raw = unsafe {
            let raw = ffi::ibv_create_cq_ex(context.as_raw(), attributes);
            Handle::new(VERB, raw.cast::<ffi::ibv_cq>())
        }
        .map_err(|error| match error.errno() {
            libc::EOPNOTSUPP | libc::ENOSYS => unsupported,
            _ => error,
        })?;
        // SAFETY: the queue is live, and an extended one.
        if !unsafe { has_functions(raw.as_ptr().cast(), fields) } {
            return Err(unsupported);
        }
        let one_by_one = quirks::is_rxe(device);
        Ok((raw, Self { fields, one_by_one, poller: OnePoller::default() }))
    }
}

/// mlx4 leaves functions uninitialised that these fields do not need.
///
/// # Safety
///
/// `queue` is live.
unsafe fn has_functions(queue: *const ffi::ibv_cq_ex, fields: CompletionFields) -> bool {
    macro_rules! all {
        ($($function:ident $(if $field:ident)?,)+) => {
            // SAFETY: the caller's queue is live. Only functions that the provider had to set are read.
            unsafe {
                $(($(!fields.contains(CompletionFields::$field) ||)? (*queue).$function.is_some()))&&+
            }
        };
    }
    all! {
        start_poll,
        next_poll,
        end_poll,
        read_opcode,
        read_vendor_err,
        read_wc_flags,
        read_byte_len if BYTE_LEN,
        read_imm_data if IMMEDIATE,
        read_qp_num if QUEUE_PAIR_NUMBER,
        read_src_qp if SOURCE_QUEUE_PAIR,
        read_slid if SOURCE_LID,
        read_sl if SERVICE_LEVEL,
        read_dlid_path_bits if DESTINATION_PATH_BITS,
        read_completion_ts if TIMESTAMP,
        read_completion_wallclock_ns if WALLCLOCK,
        read_cvlan if VLAN,
        read_flow_tag if FLOW_TAG,
        read_tm_info if TAG_MATCHING,
    }
}
