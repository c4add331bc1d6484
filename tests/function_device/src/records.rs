//! The calls that the device recorded, and its live objects.

use crate::{FunctionDevice, c_name, raw};
use ibverbs::ffi;
use std::ffi::CStr;
use std::fmt;

/// The kinds of objects that the device counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Context,
    /// Parent domains too.
    ProtectionDomain,
    MemoryRegion,
    MemoryWindow,
    CompletionQueue,
    QueuePair,
    SharedReceiveQueue,
    AddressHandle,
    DeviceMemory,
    ThreadDomain,
    XrcDomain,
    WorkQueue,
    IndirectionTable,
    Flow,
    FlowAction,
    FlowCounters,
    DmaHandle,
    CompletionCounter,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 18] = [
        Kind::Context,
        Kind::ProtectionDomain,
        Kind::MemoryRegion,
        Kind::MemoryWindow,
        Kind::CompletionQueue,
        Kind::QueuePair,
        Kind::SharedReceiveQueue,
        Kind::AddressHandle,
        Kind::DeviceMemory,
        Kind::ThreadDomain,
        Kind::XrcDomain,
        Kind::WorkQueue,
        Kind::IndirectionTable,
        Kind::Flow,
        Kind::FlowAction,
        Kind::FlowCounters,
        Kind::DmaHandle,
        Kind::CompletionCounter,
    ];

    fn to_raw(self) -> u32 {
        match self {
            Kind::Context => raw::DEVICE_OBJECT_CONTEXT,
            Kind::ProtectionDomain => raw::DEVICE_OBJECT_PD,
            Kind::MemoryRegion => raw::DEVICE_OBJECT_MR,
            Kind::MemoryWindow => raw::DEVICE_OBJECT_MW,
            Kind::CompletionQueue => raw::DEVICE_OBJECT_CQ,
            Kind::QueuePair => raw::DEVICE_OBJECT_QP,
            Kind::SharedReceiveQueue => raw::DEVICE_OBJECT_SRQ,
            Kind::AddressHandle => raw::DEVICE_OBJECT_AH,
            Kind::DeviceMemory => raw::DEVICE_OBJECT_DM,
            Kind::ThreadDomain => raw::DEVICE_OBJECT_TD,
            Kind::XrcDomain => raw::DEVICE_OBJECT_XRCD,
            Kind::WorkQueue => raw::DEVICE_OBJECT_WQ,
            Kind::IndirectionTable => raw::DEVICE_OBJECT_TABLE,
            Kind::Flow => raw::DEVICE_OBJECT_FLOW,
            Kind::FlowAction => raw::DEVICE_OBJECT_ACTION,
            Kind::FlowCounters => raw::DEVICE_OBJECT_COUNTERS,
            Kind::DmaHandle => raw::DEVICE_OBJECT_DMAH,
            Kind::CompletionCounter => raw::DEVICE_OBJECT_COMP_CNTR,
        }
    }
}

/// A posted work request, as the device copied it.
#[derive(Clone)]
pub struct Posted {
    /// The queue pair or the work queue; 0 for a shared receive queue.
    pub qp_num: u32,
    /// Whether it is a receive, and not a send of some kind.
    pub receive: bool,
    /// The caller's number.
    pub wr_id: u64,
    /// The scatter or gather list, as addresses, lengths and local keys.
    pub list: Vec<(u64, u32, u32)>,
    /// The bytes, if they were sent inline.
    pub inline: Vec<u8>,
    /// The request of a send: opcode, flags, immediate, remote address .. Its pointers to lists are null.
    pub send: ffi::ibv_send_wr,
}

impl fmt::Debug for Posted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted")
            .field("qp_num", &self.qp_num)
            .field("receive", &self.receive)
            .field("wr_id", &self.wr_id)
            .field("list", &self.list)
            .field("inline", &self.inline)
            .field("opcode", &self.send.opcode)
            .field("send_flags", &self.send.send_flags)
            .finish_non_exhaustive()
    }
}

impl FunctionDevice {
    /// How many objects of a kind are alive.
    pub fn live(&self, kind: Kind) -> u32 {
        // SAFETY: the handle is valid.
        unsafe { raw::device_live(self.as_raw(), kind.to_raw()) }
    }

    /// Asserts that nothing is left, and that no rule was broken.
    ///
    /// # Panics
    ///
    /// When an object is alive or a violation was counted.
    #[track_caller]
    pub fn assert_clean(&self) {
        for kind in Kind::ALL {
            assert_eq!(self.live(kind), 0, "live {kind:?}");
        }
        let (count, text) = self.violations();
        assert_eq!(count, 0, "{text}");
    }

    /// How many calls of a verb came in, failed ones too. The fast verbs of a lean device are not
    /// counted.
    pub fn calls(&self, verb: &str) -> u64 {
        // SAFETY: the handle is valid, the name is NUL-terminated.
        unsafe { raw::device_calls(self.as_raw(), c_name(verb).as_ptr()) }
    }

    /// The arguments of the latest call of a control verb; what the verb does not take is zero.
    /// Only the latest 64 calls of all verbs are kept.
    pub fn last_call(&self, verb: &str) -> Option<raw::device_call> {
        self.call_before(verb, 0)
    }

    /// The call of the verb that came in before the latest `back` ones.
    pub fn call_before(&self, verb: &str, back: u32) -> Option<raw::device_call> {
        let mut call = raw::device_call::default();
        // SAFETY: the handle is valid, the name is NUL-terminated, the call is copied out.
        unsafe { raw::device_call_at(self.as_raw(), c_name(verb).as_ptr(), back, &mut call) }
            .then_some(call)
    }

    /// The latest posted work request but `back`, on a model; the latest 64 are kept.
    pub fn posted(&self, back: u32) -> Option<Posted> {
        let mut posted = Box::new(raw::device_posted::default());
        // SAFETY: the handle is valid, the request is copied out.
        if !unsafe { raw::device_posted_at(self.as_raw(), back, &mut *posted) } {
            return None;
        }
        Some(Posted {
            qp_num: posted.qp_num,
            receive: posted.receive,
            wr_id: posted.wr_id,
            list: posted.sge[..posted.num_sge as usize]
                .iter()
                .map(|sge| (sge.addr, sge.length, sge.lkey))
                .collect(),
            inline: posted.inline_data[..posted.inline_length as usize].to_vec(),
            send: posted.send,
        })
    }

    /// How often the program has done what no correct program does (deregister a region under an
    /// outstanding request, post within a batch, call `next_poll` without `start_poll` ..), and the
    /// latest case in words.
    pub fn violations(&self) -> (u32, String) {
        let mut text = [0; 200];
        // SAFETY: the handle is valid; the text is written within its size, NUL-terminated.
        let count =
            unsafe { raw::device_violations(self.as_raw(), text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).expect("NUL-terminated");
        (count, text.to_string_lossy().into_owned())
    }
}
