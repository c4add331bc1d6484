//! Windows in C's form: requests of the send queue that are posted by one call, of which only the last has a completion.
//!
//! A list is made once, and then posted any number of times. The requests before the last complete only if they fail. Half
//! of their number says which window they are of: a post writes that half alone.

use std::ffi::c_int;
use std::ptr;

use super::error::{TransportResult, no_memory};
use super::generation::{MAX_WINDOW, lower_half};
use super::operation::{Limits, Needs, Target, too_many};
use super::request::WorkRequest;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{GatherBuffer, PlainList};
use crate::operation::sealed::{Kind, Request};
use crate::operation::{SIGNALED, SendQueueRequest, takes_receive, without_empty};
use crate::queue_pair::MessageLimits;

/// How many requests get their numbers at a time.
const EIGHT: usize = 8;

/// See the [module](self).
pub(super) struct WindowList {
    /// A multiple of [`EIGHT`]. The first `len` are linked.
    requests: Vec<ffi::ibv_send_wr>,
    /// As many for each of those.
    #[expect(dead_code, reason = "the requests point to them")]
    pieces: Vec<ffi::ibv_sge>,
    len: usize,
    pieces_each: usize,
    needs: Needs,
    /// Whether the device writes the memory of one.
    pub(super) writes: bool,
    /// Whether one uses up a receive of the peer.
    pub(super) takes_receives: bool,
}

// SAFETY: its pointers are to its own vectors, and to memory that may be used on any thread that has the buffers.
unsafe impl Send for WindowList {}
// SAFETY: a shared reference gives access to numbers only.
unsafe impl Sync for WindowList {}

/// A list that the verb has not posted, or not as a whole.
pub(super) struct NotPosted {
    /// What the verb has returned.
    pub(super) returned: c_int,
    /// How many requests were posted: all of them if the provider does not say which one it has refused.
    pub(super) posted: usize,
}

impl NotPosted {
    pub(super) fn error(&self) -> Error {
        const VERB: &str = "ibv_post_send";
        if self.returned == 0 {
            // siw, after a part of a list.
            let reason = "the provider does not say why: the queue is full, or the device does not have this operation";
            return Error::with_reason(VERB, libc::ENOMEM, reason);
        }
        ffi::failed(VERB, self.returned)
    }
}

impl WindowList {
    /// A list of `len` requests, which are to be [set](Self::set), with at most `pieces_each` pieces each.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are none, or more than a window can have.
    ///  - `ENOMEM`: out of memory.
    pub(super) fn new(len: usize, pieces_each: usize) -> Result<Self> {
        if !(1..=MAX_WINDOW).contains(&len) {
            let what = "the number of requests of a window";
            let (count, most) = (len as u64, MAX_WINDOW as u64);
            return Err(Error::out_of_range("ibv_post_send", what, count, 1, most));
        }
        let mut requests = room(len.next_multiple_of(EIGHT), ffi::ibv_send_wr::default())?;
        let mut pieces = room(len.saturating_mul(pieces_each), ffi::ibv_sge::default())?;
        let (first, piece) = (requests.as_mut_ptr(), pieces.as_mut_ptr());
        for index in 0..len {
            // SAFETY: there are as many requests and pieces.
            unsafe {
                let request = first.add(index);
                (*request).wr_id = lower_half(index).into();
                (*request).sg_list = piece.add(index * pieces_each);
                if index + 1 < len {
                    (*request).next = request.add(1);
                }
            }
        }
        let (needs, writes, takes_receives) = Default::default();
        Ok(Self { requests, pieces, len, pieces_each, needs, writes, takes_receives })
    }

    /// How many requests it has.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Sets a request, unless it is wrong.
    ///
    /// # Safety
    ///
    /// The list has as many requests.
    ///
    /// # Errors
    ///
    /// Those of the request's buffer, and
    ///
    ///  - `EINVAL`: what it says is not possible, on whatever channel; or it has more pieces than each request has room for.
    #[inline(always)]
    pub(super) unsafe fn set<R>(
        &mut self,
        index: usize,
        operation: &R::Operation,
        buffer: &mut R::Buffer,
    ) -> TransportResult<()>
    where
        R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
    {
        let mut pieces = R::list(buffer).map_err(|error| {
            MessageLimits::UNKNOWN.explain(<R::Operation as Kind>::OPCODE, error)
        })?;
        let pieces = pieces.as_mut();
        // Every request has room for one.
        if pieces.len() > 1 && pieces.len() > self.pieces_each {
            return Err(too_many("ibv_post_send", pieces.len(), self.pieces_each as u32).into());
        }
        self.needs.add(operation, pieces)?;
        self.writes |= <R::Operation as Kind>::WRITES;
        self.takes_receives |= const { takes_receive(<R::Operation as Kind>::OPCODE) };
        let signaled = if index + 1 == self.len { SIGNALED } else { 0 };
        // SAFETY: the caller vouches for the request, and there is room for its pieces.
        unsafe {
            let request = self.requests.as_mut_ptr().add(index);
            (*request).opcode = <R::Operation as Kind>::OPCODE;
            (*request).send_flags = operation.flags() & !SIGNALED | signaled;
            operation.fill(request);
            if let [one] = pieces {
                (*request).num_sge = c_int::from(one.length != 0);
                *(*request).sg_list = *one;
            } else {
                let count = without_empty(pieces);
                (*request).num_sge = count as c_int;
                ptr::copy_nonoverlapping(pieces.as_ptr(), (*request).sg_list, count);
            }
        }
        Ok(())
    }

    /// Finds out whether a channel with these limits has what the requests need.
    #[inline(always)]
    pub(super) fn check(&self, limits: &Limits) -> TransportResult<()> {
        self.needs.check(limits)
    }

    /// Posts the window, which completes by the number `last`. The others have numbers with this upper half.
    ///
    /// # Safety
    ///
    /// The target is live. The memory of all requests, which were set, is valid, as for
    /// [`Operation::post`](super::operation::Operation::post).
    #[inline(always)]
    pub(super) unsafe fn post(
        &mut self,
        target: Target,
        last: u64,
        upper: u32,
    ) -> std::result::Result<(), NotPosted> {
        const UPPER: usize = if cfg!(target_endian = "little") { 1 } else { 0 };
        let first = self.requests.as_mut_ptr();
        let mut refused = ptr::null_mut();
        // SAFETY: the list has `len` requests, and room for a multiple of eight; the caller vouches for the rest.
        unsafe {
            let (mut request, end) = (first, first.add(self.len));
            while request < end {
                for at in 0..EIGHT {
                    (&raw mut (*request.add(at)).wr_id).cast::<u32>().add(UPPER).write(upper);
                }
                request = request.add(EIGHT);
            }
            (*end.sub(1)).wr_id = last;
            let returned = target.post_send(first, &mut refused);
            // If siw has posted a part of a list and refuses the rest, it returns 0, but names the first request that
            // it has refused.
            if returned == 0 && refused.is_null() {
                return Ok(());
            }
            Err(self.not_posted(returned, refused))
        }
    }

    #[cold]
    #[inline(never)]
    fn not_posted(&self, returned: c_int, refused: *const ffi::ibv_send_wr) -> NotPosted {
        let offset = (refused as usize).wrapping_sub(self.requests.as_ptr() as usize);
        // What is no request of the list says nothing.
        let posted = (offset / size_of::<ffi::ibv_send_wr>()).min(self.len);
        NotPosted { returned, posted }
    }
}

/// As many of these.
fn room<T: Clone>(len: usize, one: T) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| no_memory())?;
    list.resize(len, one);
    Ok(list)
}
