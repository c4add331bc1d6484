//! Room for the operations of a loop, one by one.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::task::Waker;

use super::ended::{ChannelId, Ended, Failed};
use crate::channel::slot::NO_SLOT;
use crate::completion::message_len;
use crate::error::Error;
use crate::ffi;
use crate::memory::KeptLength;

/// The distance between the numbers of two generations.
pub(in crate::channel) const ONE: u64 = 1 << 32;

/// A bit of the numbers of shared receives. No slot has an index with it, so a completion of theirs is not taken for one
/// of a queue pair.
pub(super) const SHARED: u64 = 1 << 31;

/// The most slots: an index has neither this bit of the numbers of requests in windows, nor that of shared receives.
pub(super) const MAX_SLOTS: usize = 1 << 30;

/// The slot of a request with this number.
#[inline(always)]
pub(super) fn index_of(number: u64) -> u32 {
    (number & !SHARED) as u32
}

/// A slot that belongs to no channel and is never free: the next slot of a queue that has none, or that may not be
/// posted to yet.
pub(super) const NEVER_FREE: u32 = 0;

/// The state of a slot and its operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub(super) enum State {
    /// The device has the request, and `next_ended` returns it.
    Token,
    /// A request of the window before the last one has failed. The slot keeps that completion until the last one has ended.
    FailedWindow,
    /// The device has a part of a window, without the last request.
    PartOfWindow,
    /// The device has the request of a future.
    Task,
    /// As above, but the future was dropped.
    Abandoned,
    /// The device has a receive. Any task of the channel takes its message.
    Message,
    /// The device has a write without a buffer. Only its failure matters.
    Probe,
    /// A receive that was posted after the connection had failed. The device does not get it: it ends when those before it
    /// have ended.
    Unposted,
    /// The reads of the peer's credits, one after the other: the channel's `Credits` have their number.
    Credits,
    /// It has ended, and is in the list that `next_ended` returns.
    Ended,
    /// It has ended, and its future will take it.
    Done,
    /// It has ended, and is in the list of its channel's messages.
    Arrived,
    #[default]
    Free,
    /// The queue pair could not be destroyed: the device may use the buffer for ever.
    Leaked,
}

impl State {
    /// Whether the device may have the request.
    pub(super) fn is_in_flight(self) -> bool {
        self as u32 <= Self::Unposted as u32
    }
}

/// Room for one operation: a cache line, with a small buffer. In this order, so that [`Slot::awaits`] is one comparison.
#[repr(C, align(64))]
pub(super) struct Slot<B> {
    /// The number of the request, or the last one.
    pub(super) number: u64,
    pub(super) token: u64,
    pub(super) channel: ChannelId,
    /// The number of its queue pair; for shared receives, which any of several queue pairs may take, it is not
    /// compared.
    pub(super) queue_pair: u32,
    pub(super) state: State,
    /// The next slot in the ring of its queue.
    pub(super) next: u32,
    /// The next slot in a list of operations that have ended.
    pub(super) link: u32,
    /// Generations up to this one belong to earlier channels or connections.
    pub(super) begun: u32,
    /// For a receive: the address of its buffer's length, if it keeps one.
    pub(super) kept: Option<NonNull<KeptLength>>,
    /// It is there in all states but `Free`, `Probe` and `Credits`.
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
            kept: None,
            buffer: MaybeUninit::uninit(),
        }
    }

    /// Whether its receives are shared ones.
    pub(super) fn is_shared(&self) -> bool {
        self.number & SHARED != 0
    }

    /// Whether its operation is one that `next_ended` returns, of this queue pair.
    #[inline(always)]
    pub(super) fn awaits(&self, queue_pair: u32) -> bool {
        const { assert!(State::Token as u32 == 0) };
        u64::from(self.queue_pair) | u64::from(self.state as u32) << 32 == u64::from(queue_pair)
    }

    /// Tells the buffer of the operation, which was in flight and has succeeded, how long its message is.
    #[inline(always)]
    pub(super) fn receive(&mut self, success: &ffi::ibv_wc) {
        // First, since most operations have none.
        if let Some(kept) = self.kept
            && let Some(len) = message_len(success)
        {
            // SAFETY: it is that of the slot's buffer, which is still there, and the device is done with it.
            unsafe { KeptLength::receive(kept, len as usize) };
        }
    }

    /// Takes the operation, which was in flight and has ended so.
    #[inline(always)]
    pub(super) fn take(&mut self, failed: Failed, completion: &ffi::ibv_wc) -> Ended<B> {
        debug_assert!(self.state.is_in_flight());
        // Field by field: the compiler then keeps what the program reads, in registers.
        let &ffi::ibv_wc {
            wr_id,
            status,
            opcode,
            vendor_err,
            byte_len,
            __bindgen_anon_1,
            qp_num,
            src_qp,
            wc_flags,
            pkey_index,
            slid,
            sl,
            dlid_path_bits,
        } = completion;
        let completion = ffi::ibv_wc {
            wr_id,
            status,
            opcode,
            vendor_err,
            byte_len,
            __bindgen_anon_1,
            qp_num,
            src_qp,
            wc_flags,
            pkey_index,
            slid,
            sl,
            dlid_path_bits,
        };
        if failed == Failed::NOT {
            self.receive(&completion);
        }
        self.state = State::Free;
        Ended {
            channel: ChannelId { ..self.channel },
            token: self.token,
            // SAFETY: a slot in flight has its buffer, and the device is done with it. The slot is free now.
            buffer: unsafe { self.buffer.assume_init_read() },
            failed,
            completion,
        }
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u32 {
        (self.number >> 32) as u32
    }

    /// Marks all its numbers as those of an earlier channel.
    pub(super) fn end_connection(&mut self) {
        self.begun = self.generation();
    }

    /// Whether a request with this number was posted before the present connection.
    pub(super) fn is_earlier(&self, number: u64) -> bool {
        let ago = self.begun.wrapping_sub((number >> 32) as u32);
        ago < self.begun.min(1 << 31)
    }
}

/// A list through the slots of operations that have ended.
#[derive(Clone, Copy)]
pub(super) struct List {
    pub(super) first: u32,
    /// Unless there is none.
    last: u32,
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

/// What a slot keeps beside the operation, for whoever asks for its result.
pub(super) struct Outcome {
    /// The completion of an operation that has ended, or of the first request of a window that failed.
    pub(super) completion: ffi::ibv_wc,
    pub(super) run: Run,
    /// The number of requests that were posted, of a window that was posted in part.
    pub(super) posted: u32,
    /// The state that a slot returns to: of a failed window, of a window posted in part, or of a receive that was not
    /// posted.
    pub(super) was: State,
    /// The channel that the message of a shared receive came on.
    pub(super) channel: Option<ChannelId>,
    /// The waker of the task that waits for the operation.
    pub(super) waker: Option<Waker>,
}

impl Outcome {
    pub(super) fn new(slot: u32) -> Self {
        let (completion, posted, was, channel, waker) = Default::default();
        let run = Run { generation: 0, places: 1, next: slot };
        Self { completion, run, posted, was, channel, waker }
    }
}

/// The window that a slot had last.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// The slot's generation when it had the window.
    pub(super) generation: u32,
    /// The number of the window's places, from the slot on: never 0.
    pub(super) places: u32,
    /// The slot behind these places in the ring.
    pub(super) next: u32,
}

impl Run {
    /// The value of a slot that has had no window. It has one place, so nothing is wrong when the slot's generation
    /// comes to this one again.
    pub(super) fn none<B>(slot: &Slot<B>) -> Self {
        Self { generation: slot.generation(), places: 1, next: slot.next }
    }
}

impl<B> Slot<B> {
    /// Whether `run` is the window that the slot has, or had last.
    #[inline(always)]
    pub(super) fn is_of(&self, run: Run) -> bool {
        // The places behind a slot of an earlier connection may be anyone's.
        run.generation == self.generation() && run.generation != self.begun
    }

    /// The number of places of its operation, or of the last one that it had.
    pub(super) fn places(&self, run: Run) -> u32 {
        if self.is_of(run) { run.places } else { 1 }
    }
}

#[cold]
pub(super) fn no_memory() -> Error {
    let reason = "no memory for the loop's table of operations";
    Error::with_reason("ibv_create_qp", libc::ENOMEM, reason)
}
