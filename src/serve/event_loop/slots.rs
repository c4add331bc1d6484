//! Slots: room for one operation of a loop each.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::task::Waker;

use super::ended::{ChannelId, Ended, Failed};
use crate::base::{Error, ffi};
use crate::channel::parts::NO_SLOT;
use crate::verbs::completion::message_len;
use crate::verbs::memory::KeptLength;

pub(super) use crate::channel::parts::ONE;

/// Marks numbers of shared receives, so that they never match one of a queue pair. No slot index has this bit.
pub(super) const SHARED: u64 = 1 << 31;

/// An index has not the bit of [`SHARED`].
pub(super) const MAX_SLOTS: usize = 1 << 30;

#[inline(always)]
pub(super) fn index_of(number: u64) -> u32 {
    (number & !SHARED) as u32
}

/// `next` of a queue that has no slots or is not open.
pub(super) const NEVER_FREE: u32 = 0;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub(super) enum State {
    /// The device has the request. `next_ended` returns it.
    Token,
    /// The device has the request of a future.
    Task,
    /// The device has the request of a dropped future.
    Abandoned,
    /// A receive in flight, whose message any task of the channel takes.
    Message,
    /// A keep-alive in flight: a write without a buffer.
    Probe,
    /// A receive into a list in flight: the table tells the list the length of the message.
    List,
    /// A send whose success has no completion: a later one ends it.
    Unsignaled,
    /// A send whose completion also ends those without one before it.
    Covers,
    /// A receive after the connection failed. It is not posted, and ends after those before it.
    Unposted,
    /// The slot is for credit reads. Their number is in the channel's `Credits`.
    Credits,
    /// The operation is in the list for `next_ended`.
    Ended,
    /// Its future will take it.
    Done,
    /// The operation is in its channel's list of messages.
    Arrived,
    #[default]
    Free,
    /// The queue pair could not be destroyed: the device may use the buffer forever.
    Leaked,
}

impl State {
    pub(super) fn is_in_flight(self) -> bool {
        self as u32 <= Self::Unposted as u32
    }

    /// `next_ended` is still to return it.
    pub(super) fn is_to_return(self) -> bool {
        matches!(
            self,
            Self::Token
                | Self::List
                | Self::Unsignaled
                | Self::Covers
                | Self::Unposted
                | Self::Ended
        )
    }
}

/// The order lets [`Slot::awaits`] be one comparison.
#[repr(C, align(64))]
pub(super) struct Slot<B> {
    /// The number of the latest request.
    pub(super) number: u64,
    pub(super) token: u64,
    pub(super) channel: ChannelId,
    /// Shared receives do not compare it: several queue pairs take them.
    pub(super) queue_pair: u32,
    pub(super) state: State,
    /// The next slot in the ring.
    pub(super) next: u32,
    /// The next slot in a [`List`].
    pub(super) link: u32,
    /// Generations up to this one belong to earlier channels or connections.
    pub(super) begun: u32,
    /// What `List` and `Unposted` return to.
    pub(super) was: State,
    /// Where a receive's buffer keeps its length.
    pub(super) kept: Option<NonNull<KeptLength>>,
    /// Initialised in all states but `Free`, `Probe` and `Credits`.
    pub(super) buffer: MaybeUninit<B>,
}

impl<B> Slot<B> {
    pub(super) fn new(index: u32, state: State) -> Self {
        Self {
            number: index.into(),
            token: 0,
            channel: ChannelId { index: NO_SLOT, generation: 0 },
            queue_pair: 0,
            state,
            next: index,
            link: NO_SLOT,
            begun: 0,
            was: State::Free,
            kept: None,
            buffer: MaybeUninit::uninit(),
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        self.number & SHARED != 0
    }

    /// Returns whether the device has an operation of this queue pair here, for `next_ended`.
    #[inline(always)]
    pub(super) fn awaits(&self, queue_pair: u32) -> bool {
        const { assert!(State::Token as u32 == 0) };
        u64::from(self.queue_pair) | u64::from(self.state as u32) << 32 == u64::from(queue_pair)
    }

    #[inline(always)]
    pub(super) fn receive(&mut self, success: &ffi::ibv_wc) {
        // First, since most operations have none.
        if let Some(kept) = self.kept
            && let Some(len) = message_len(success)
        {
            // SAFETY: it is the length of the slot's buffer, which is still in the slot, and the device is done with
            // it.
            unsafe { KeptLength::receive(kept, len as usize) };
        }
    }

    #[inline(always)]
    pub(super) fn take(&mut self, failed: Failed, completion: &ffi::ibv_wc) -> Ended<B> {
        debug_assert!(self.state.is_in_flight());
        // Copied field by field, so that the compiler keeps what the program reads in registers.
        let completion = ffi::ibv_wc {
            wr_id: completion.wr_id,
            status: completion.status,
            opcode: completion.opcode,
            vendor_err: completion.vendor_err,
            byte_len: completion.byte_len,
            __bindgen_anon_1: completion.__bindgen_anon_1,
            qp_num: completion.qp_num,
            src_qp: completion.src_qp,
            wc_flags: completion.wc_flags,
            pkey_index: completion.pkey_index,
            slid: completion.slid,
            sl: completion.sl,
            dlid_path_bits: completion.dlid_path_bits,
        };
        if failed == Failed::NOT {
            self.receive(&completion);
        }
        self.state = State::Free;
        Ended {
            channel: ChannelId { ..self.channel },
            token: self.token,
            // SAFETY: a slot in flight has its buffer, and the device is done with it. The slot is free from now on, so
            // the buffer is read once.
            buffer: unsafe { self.buffer.assume_init_read() },
            failed,
            completion,
        }
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u32 {
        (self.number >> 32) as u32
    }

    pub(super) fn end_connection(&mut self) {
        self.begun = self.generation();
    }

    /// Returns whether the number is of an earlier connection.
    pub(super) fn is_earlier(&self, number: u64) -> bool {
        let ago = self.begun.wrapping_sub((number >> 32) as u32);
        ago < self.begun.min(1 << 31)
    }
}

/// The ends of a list of slots, or of a line of tasks.
#[derive(Clone, Copy)]
pub(super) struct List {
    pub(super) first: u32,
    /// Of a list of slots: valid unless the list is empty.
    pub(super) last: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NO_SLOT, last: NO_SLOT }
    }
}

impl List {
    pub(super) fn is_empty(self) -> bool {
        self.first == NO_SLOT
    }

    pub(super) fn push<B>(&mut self, slots: &mut [Slot<B>], index: u32) {
        slots[index as usize].link = NO_SLOT;
        if self.is_empty() {
            self.first = index;
        } else {
            slots[self.last as usize].link = index;
        }
        self.last = index;
    }
}

/// The result of an operation that `next_ended` does not take straight from the polled completions, and whom to wake: one
/// cache line.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Outcome {
    pub(super) completion: ffi::ibv_wc,
    pub(super) waker: Option<Waker>,
}

#[cold]
pub(super) fn no_memory() -> Error {
    let reason = "no memory for the loop's table of operations";
    Error::with_reason("ibv_create_qp", libc::ENOMEM, reason)
}
