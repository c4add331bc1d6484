use std::{fmt, ptr};

use crate::base::{c_enum, debug, ffi, getters};

/// `struct ibv_wc`: the completion of a work request, as [`CompletionQueue::poll`] returns it, in C's layout.
///
/// [`wr_id`](Self::wr_id) identifies the request, and [`result`](Self::result) tells how it ended.
///
/// [`CompletionQueue::poll`]: crate::CompletionQueue::poll
#[derive(Clone, Copy, Default)]
#[doc(alias = "ibv_wc")]
#[repr(transparent)]
pub struct WorkCompletion(ffi::ibv_wc);

impl WorkCompletion {
    getters! { self,
        /// The number that the request was posted under.
        wr_id: u64 => self.0.wr_id;

        /// Whether the request was carried out.
        is_success: bool => self.0.status == ffi::ibv_wc_status::IBV_WC_SUCCESS;

        /// The number of the local queue pair.
        queue_pair_number: u32 => self.0.qp_num;

        /// The C struct.
        as_raw: &ffi::ibv_wc => &self.0;
    }

    /// How the request ended.
    ///
    /// # Errors
    ///
    /// The request failed. So does every later request of the same queue, most of them with [`WorkStatus::Flushed`].
    #[inline]
    pub fn result(&self) -> WorkResult {
        if self.is_success() { Ok(WorkSuccess::from_raw(self.0)) } else { Err(self.error()) }
    }

    #[cold]
    fn error(&self) -> WorkError {
        // SAFETY: it reads through a reference. The volatile read loads the status again: keeping what `is_success`
        // compares would cost an instruction per successful completion.
        let status = unsafe { ptr::read_volatile(&self.0.status) };
        WorkError::new(status.into(), self.0.vendor_err)
    }
}

impl From<ffi::ibv_wc> for WorkCompletion {
    fn from(raw: ffi::ibv_wc) -> Self {
        Self(raw)
    }
}

debug! {
    WorkCompletion, self,
    wr_id: self.wr_id(), queue_pair_number: self.queue_pair_number(), result: self.result()
}

/// How a work request ended.
pub type WorkResult = Result<WorkSuccess, WorkError>;

/// A work request that was carried out.
#[derive(Clone, Copy)]
pub struct WorkSuccess {
    raw: ffi::ibv_wc,
    _tag: Success,
}

#[cfg(feature = "channel")]
#[inline(always)]
pub(crate) fn message_len(success: &ffi::ibv_wc) -> Option<u32> {
    // A write with an immediate has put nothing there.
    (success.opcode == ffi::ibv_wc_opcode::IBV_WC_RECV).then_some(success.byte_len)
}

/// A constant where a success is made. A `Result` keeps its discriminant here, so the compiler removes the match.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Success {
    Success = 0,
}

impl WorkSuccess {
    pub(crate) fn from_raw(raw: ffi::ibv_wc) -> Self {
        Self { raw, _tag: Success::Success }
    }

    /// `None`: no receive, or one that a write with an immediate consumed.
    #[cfg(feature = "channel")]
    #[inline(always)]
    pub(crate) fn message_len(&self) -> Option<u32> {
        message_len(&self.raw)
    }

    /// The immediate data of the message, if any.
    #[inline]
    pub fn immediate(&self) -> Option<u32> {
        // SAFETY: both arms of the union are 32 plain bits.
        self.flag(ffi::ibv_wc_flags::IBV_WC_WITH_IMM)
            .then(|| u32::from_be(unsafe { self.raw.__bindgen_anon_1.imm_data }))
    }

    /// The rkey that the message invalidated, if any.
    ///
    /// On Soft-RoCE, always `None`, although the key is invalidated: it passes on a flag of the kernel (4), which
    /// libibverbs takes for a correct checksum, instead of `IBV_WC_WITH_INV` (8).
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        // SAFETY: both arms of the union are 32 plain bits.
        self.flag(ffi::ibv_wc_flags::IBV_WC_WITH_INV)
            .then_some(unsafe { self.raw.__bindgen_anon_1.invalidated_rkey })
    }

    getters! { self,
        /// The operation.
        #[inline]
        opcode: WorkOpcode => self.raw.opcode.into();

        /// The number of bytes that arrived, for a receive, a read or an atomic.
        ///
        /// Other requests may leave any value here. In UD receives it includes 40 bytes for the global route header. If
        /// peers may write, check the opcode before you use it as a length within the buffer: in a
        /// [`ReceiveWriteWithImmediate`](WorkOpcode::ReceiveWriteWithImmediate) it is the length of the write, which went
        /// elsewhere and may be longer than the receive's memory.
        byte_len: u32 => self.raw.byte_len;

        /// The number of the peer's queue pair; for UD receives only.
        source_queue_pair: u32 => self.raw.src_qp;

        /// Whether the first 40 bytes of a UD receive are a global route header. If not, they are undefined.
        #[inline]
        has_global_route: bool => self.flag(ffi::ibv_wc_flags::IBV_WC_GRH);

        /// The peer's LID; for UD receives on InfiniBand only.
        source_lid: u16 => self.raw.slid;

        /// The service level of the message; for UD receives only.
        service_level: u8 => self.raw.sl;

        /// The index of the P_Key of the message; for UD receives only.
        pkey_index: u16 => self.raw.pkey_index;

        /// The low bits of the local LID that received the message; for UD receives only.
        destination_path_bits: u8 => self.raw.dlid_path_bits;

        /// Bits of `enum ibv_wc_flags`.
        flags: u32 => self.raw.wc_flags;

        /// The C struct.
        as_raw: &ffi::ibv_wc => &self.raw;
    }

    fn flag(&self, flag: ffi::ibv_wc_flags) -> bool {
        self.raw.wc_flags & flag.0 != 0
    }
}

debug! {
    WorkSuccess, self,
    opcode: self.opcode(), byte_len: self.byte_len(), immediate: self.immediate(), ..
}

c_enum! {
    /// `enum ibv_wc_opcode`: the operation of a completed work request.
    #[doc(alias = "ibv_wc_opcode")]
    pub enum WorkOpcode: ibv_wc_opcode(u32) {
        /// A send.
        Send = IBV_WC_SEND,
        /// An RDMA write.
        Write = IBV_WC_RDMA_WRITE,
        /// An RDMA read.
        Read = IBV_WC_RDMA_READ,
        /// A compare-and-swap.
        CompareSwap = IBV_WC_COMP_SWAP,
        /// A fetch-and-add.
        FetchAdd = IBV_WC_FETCH_ADD,
        /// Binding a memory window.
        BindMemoryWindow = IBV_WC_BIND_MW,
        /// Invalidating a local key.
        LocalInvalidate = IBV_WC_LOCAL_INV,
        /// TCP segmentation offload.
        Tso = IBV_WC_TSO,
        /// A flush.
        Flush = IBV_WC_FLUSH,
        /// An atomic write.
        AtomicWrite = IBV_WC_ATOMIC_WRITE,
        /// A receive.
        Receive = IBV_WC_RECV,
        /// A receive that was completed by an RDMA write with immediate.
        ReceiveWriteWithImmediate = IBV_WC_RECV_RDMA_WITH_IMM,
        /// Tag matching: a tag was added.
        TagAdd = IBV_WC_TM_ADD,
        /// Tag matching: a tag was deleted.
        TagDelete = IBV_WC_TM_DEL,
        /// Tag matching: the counters are in step.
        TagSync = IBV_WC_TM_SYNC,
        /// Tag matching: a message with a tag arrived.
        TagReceive = IBV_WC_TM_RECV,
        /// Tag matching: a message without a tag arrived.
        TagNoTag = IBV_WC_TM_NO_TAG,
        /// An operation of the provider's own.
        Driver1 = IBV_WC_DRIVER1,
        /// An operation of the provider's own.
        Driver2 = IBV_WC_DRIVER2,
        /// An operation of the provider's own.
        Driver3 = IBV_WC_DRIVER3,
    }
}

c_enum! {
    /// `enum ibv_wc_status`: why a work request failed.
    #[doc(alias = "ibv_wc_status")]
    pub enum WorkStatus: ibv_wc_status(u32) {
        /// The request did not fail.
        Success = IBV_WC_SUCCESS,
        /// A message did not fit into the receive, or was longer than the device can send.
        LocalLength = IBV_WC_LOC_LEN_ERR,
        /// The request or the queue pair is inconsistent.
        LocalQueuePairOperation = IBV_WC_LOC_QP_OP_ERR,
        /// An EE context is inconsistent.
        LocalEecOperation = IBV_WC_LOC_EEC_OP_ERR,
        /// A local key does not cover the memory, or does not allow the access.
        LocalProtection = IBV_WC_LOC_PROT_ERR,
        /// The queue pair was in the error state, or entered it, before the request was carried out.
        Flushed = IBV_WC_WR_FLUSH_ERR,
        /// A memory window could not be bound.
        MemoryWindowBind = IBV_WC_MW_BIND_ERR,
        /// The peer's answer was not what the protocol expects.
        BadResponse = IBV_WC_BAD_RESP_ERR,
        /// A write with immediate was received into memory that may not be written.
        LocalAccess = IBV_WC_LOC_ACCESS_ERR,
        /// The peer found the message invalid.
        RemoteInvalidRequest = IBV_WC_REM_INV_REQ_ERR,
        /// The peer's rkey does not cover the memory, or does not allow the access.
        RemoteAccess = IBV_WC_REM_ACCESS_ERR,
        /// The peer could not carry out the request.
        RemoteOperation = IBV_WC_REM_OP_ERR,
        /// The peer did not answer in time, although the packet was sent again `retry_cnt` times.
        RetryExceeded = IBV_WC_RETRY_EXC_ERR,
        /// The peer had no receive posted, although the message was sent again `rnr_retry` times.
        RnrRetryExceeded = IBV_WC_RNR_RETRY_EXC_ERR,
        /// A reliable datagram domain was violated.
        LocalRddViolation = IBV_WC_LOC_RDD_VIOL_ERR,
        /// The peer rejected a reliable datagram read.
        RemoteInvalidReadRequest = IBV_WC_REM_INV_RD_REQ_ERR,
        /// The peer aborted.
        RemoteAborted = IBV_WC_REM_ABORT_ERR,
        /// No EE context has this number.
        InvalidEecNumber = IBV_WC_INV_EECN_ERR,
        /// An EE context is in the wrong state.
        InvalidEecState = IBV_WC_INV_EEC_STATE_ERR,
        /// The device failed.
        Fatal = IBV_WC_FATAL_ERR,
        /// The peer answered too late.
        ResponseTimeout = IBV_WC_RESP_TIMEOUT_ERR,
        /// Something else.
        General = IBV_WC_GENERAL_ERR,
        /// Tag matching failed.
        TagMatching = IBV_WC_TM_ERR,
        /// Tag matching: a rendezvous is to be completed by software.
        TagRendezvousIncomplete = IBV_WC_TM_RNDV_INCOMPLETE,
    }
}

/// A work request that failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WorkError {
    status: WorkStatus,
    vendor_error: u32,
}

/// Where the cause of a [`WorkError`] lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum WorkErrorClass {
    /// In what this program posted.
    Local,
    /// In the peer: what it allows, has posted, or has done.
    Remote,
    /// In reaching the peer: the peer or the network is gone, or too slow.
    Transport,
    /// In an earlier failure that stopped the queue pair before this request.
    Flushed,
    /// In the device.
    Device,
}

impl WorkError {
    pub(super) fn new(status: WorkStatus, vendor_error: u32) -> Self {
        Self { status, vendor_error }
    }

    /// Why it failed.
    pub fn status(&self) -> WorkStatus {
        self.status
    }

    /// The vendor's number for the cause.
    pub fn vendor_error(&self) -> u32 {
        self.vendor_error
    }

    /// Where the cause lies.
    pub fn class(&self) -> WorkErrorClass {
        match self.status {
            WorkStatus::Flushed => WorkErrorClass::Flushed,
            WorkStatus::RemoteInvalidRequest
            | WorkStatus::RemoteAccess
            | WorkStatus::RemoteOperation
            | WorkStatus::RemoteInvalidReadRequest
            | WorkStatus::RemoteAborted
            | WorkStatus::BadResponse
            | WorkStatus::RnrRetryExceeded => WorkErrorClass::Remote,
            WorkStatus::RetryExceeded | WorkStatus::ResponseTimeout => WorkErrorClass::Transport,
            WorkStatus::Fatal | WorkStatus::General | WorkStatus::Unknown(_) => {
                WorkErrorClass::Device
            }
            _ => WorkErrorClass::Local,
        }
    }

    /// The usual cause, or where to look for it.
    pub fn hint(&self) -> &'static str {
        match self.status {
            WorkStatus::LocalLength => "the message is longer than the receive that it came to",
            WorkStatus::LocalQueuePairOperation => {
                "the request does not fit the queue pair (its type, state, depth or inline size); of a \
                 receive, the message may be longer than its memory (Soft-RoCE says it this way)"
            }
            WorkStatus::LocalProtection => {
                "the memory is not registered in this protection domain, or not for this access"
            }
            WorkStatus::Flushed => {
                "look at the completion that failed before this one; if none did, the queue pair was moved to ERR, by this \
                 program or the device: see its events (a network interface's MTU that was lowered does it)"
            }
            WorkStatus::LocalAccess => "the memory of the receive may not be written",
            WorkStatus::RemoteInvalidRequest => {
                "the peer's queue pair does not allow the operation (`access` or `allow_remote_rw` of its builder), or its \
                 receive is too short"
            }
            WorkStatus::RemoteAccess => {
                "the rkey or the address is wrong, or the peer's region does not allow the access (the AccessFlags that it \
                 was registered with)"
            }
            WorkStatus::RemoteOperation => "the peer's receive is too short, or its device failed",
            WorkStatus::RetryExceeded => {
                "the peer is gone, was never connected, its queue pair has failed (then its own error says why: both \
                 sides must post receives before they send), or the endpoint or path is wrong"
            }
            WorkStatus::ResponseTimeout => {
                "the peer does not answer: it is gone, or the endpoint or path is wrong"
            }
            WorkStatus::RnrRetryExceeded => "the peer posts receives too late, or none at all",
            WorkStatus::MemoryWindowBind => {
                "the region does not allow windows, or not the access that was asked for"
            }
            WorkStatus::BadResponse => "the peer's device or the network misbehaved",
            WorkStatus::Fatal => "the device must be closed",
            _ => "see the vendor's documentation for the vendor error",
        }
    }
}

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, vendor_error } = self;
        write!(f, "the work request failed: {status:?} (vendor error {vendor_error:#x}); ")?;
        f.write_str(self.hint())
    }
}

/// Writes the text of `Display`: a `main` that returns an error prints its `Debug` form.
impl fmt::Debug for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for WorkError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(change: impl FnOnce(&mut ffi::ibv_wc)) -> WorkCompletion {
        let mut raw = ffi::ibv_wc::default();
        change(&mut raw);
        raw.into()
    }

    #[test]
    fn immediate_and_invalidation_need_their_flags() {
        let plain = completion(|wc| wc.__bindgen_anon_1.imm_data = 7).result().unwrap();
        assert_eq!((plain.immediate(), plain.invalidated_rkey()), (None, None));
        let immediate = completion(|wc| {
            wc.wc_flags = ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0;
            wc.__bindgen_anon_1.imm_data = 0x0102_0304_u32.to_be();
        });
        assert_eq!(immediate.result().unwrap().immediate(), Some(0x0102_0304));
        let invalidated = completion(|wc| {
            wc.wc_flags = ffi::ibv_wc_flags::IBV_WC_WITH_INV.0;
            wc.__bindgen_anon_1.invalidated_rkey = 99;
        });
        assert_eq!(invalidated.result().unwrap().invalidated_rkey(), Some(99));
    }

    #[test]
    fn failures_are_typed_and_unknown_ones_are_kept() {
        let flushed = completion(|wc| (wc.status.0, wc.vendor_err) = (5, 0x17));
        let error = flushed.result().unwrap_err();
        assert_eq!((error.status(), error.class()), (WorkStatus::Flushed, WorkErrorClass::Flushed));
        assert_eq!(error.vendor_error(), 0x17);
        let odd = completion(|wc| wc.status.0 = 4711).result().unwrap_err();
        assert_eq!(odd.status(), WorkStatus::Unknown(4711));
        assert!(odd.to_string().contains("Unknown(4711)"));
        let odd = completion(|wc| wc.opcode.0 = 99).result().unwrap();
        assert_eq!(odd.opcode(), WorkOpcode::Unknown(99));
    }

    #[test]
    fn each_field_is_its_own() {
        let completion = completion(|wc| {
            (wc.wr_id, wc.byte_len, wc.qp_num, wc.src_qp) = (1, 2, 3, 4);
            (wc.pkey_index, wc.slid, wc.sl, wc.dlid_path_bits) = (5, 6, 7, 8);
            wc.wc_flags = ffi::ibv_wc_flags::IBV_WC_GRH.0;
        });
        assert_eq!((completion.wr_id(), completion.queue_pair_number()), (1, 3));
        let success = completion.result().unwrap();
        assert_eq!((success.byte_len(), success.source_queue_pair()), (2, 4));
        assert_eq!((success.pkey_index(), success.source_lid()), (5, 6));
        assert_eq!((success.service_level(), success.destination_path_bits()), (7, 8));
        assert!(success.has_global_route());
        assert_eq!(success.flags(), ffi::ibv_wc_flags::IBV_WC_GRH.0);
    }

    #[test]
    fn statuses_have_hints_of_their_own() {
        let unknown = WorkError::new(WorkStatus::Unknown(99), 0).hint();
        let mut hints: Vec<_> = (1..=21)
            .map(|status| completion(|wc| wc.status = ffi::ibv_wc_status(status)))
            .map(|completion| completion.result().unwrap_err().hint())
            .filter(|&hint| hint != unknown)
            .collect();
        let all = hints.len();
        hints.sort_unstable();
        hints.dedup();
        assert_eq!((all, hints.len()), (14, 14));
    }

    /// Soft-RoCE reports a receive that is too short for its message with this status.
    #[test]
    fn the_hint_of_a_bad_request_is_right_for_a_receive_too() {
        let status = ffi::ibv_wc_status::IBV_WC_LOC_QP_OP_ERR;
        let error = completion(|wc| wc.status = status).result().unwrap_err();
        let text = "of a receive, the message may be longer than its memory";
        assert!(error.to_string().contains(text), "{error}");
    }

    #[test]
    fn it_is_the_c_struct() {
        assert_eq!(size_of::<WorkCompletion>(), size_of::<ffi::ibv_wc>());
    }
}
