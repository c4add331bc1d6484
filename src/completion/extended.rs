//! What an extended completion queue has in addition: the fields that it reports, and whether it has a poller.

use crate::device::{Context, DeviceAttributes, quirks};
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::Handle;
use crate::sync::{AtomicBool, Ordering};

bitflags::bitflags! {
    /// `enum ibv_create_cq_wc_flags`: the fields of a completion that an
    /// [extended](crate::CompletionQueueBuilder::extended) queue reports in addition to `wr_id`, status,
    /// opcode, vendor error and flags, which it always reports.
    ///
    /// Bits that have no name here are passed on.
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
        /// The fields of a [`WorkCompletion`](crate::WorkCompletion): every device with extended queues
        /// reports them.
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

/// The state that an extended completion queue has in addition.
pub(super) struct Extended {
    pub(super) fields: CompletionFields,
    /// Whether each completion is a poll of its own.
    pub(super) one_by_one: bool,
    pub(super) poller: OnePoller,
}

/// Whether a poller exists. What the provider does for one comes before what it does for the next.
#[derive(Default)]
pub(super) struct OnePoller(AtomicBool);

impl OnePoller {
    /// Returns false if there is one.
    pub(super) fn begin(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    pub(super) fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Extended {
    /// `ibv_create_cq_ex`.
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
        // SAFETY: the context and the channel are live; a queue that comes back is ours alone. An
        // `ibv_cq_ex` begins with an `ibv_cq`, and may be used as one.
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

/// Whether the provider set all functions that are called for these fields. The other functions need
/// not be null: mlx4 leaves them uninitialised.
///
/// # Safety
///
/// `queue` is live.
unsafe fn has_functions(queue: *const ffi::ibv_cq_ex, fields: CompletionFields) -> bool {
    macro_rules! all {
        ($($function:ident $(if $field:ident)?,)+) => {
            // SAFETY: the caller's queue is live; the functions are nullable pointers, and only those
            // are read that the provider had to set.
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
