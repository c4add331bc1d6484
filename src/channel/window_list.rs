//! Windows in C's form: requests of the send queue that are posted by one call, of which only the last has a completion.
//!
//! A list is prepared once: each request is linked to the next, and has room for its pieces. A window fills in the rest.
//!
//! The requests before the last complete only if they fail. Their number is that of the last one, which is the slot's,
//! with a mark and their position: see [`number_of`].

use std::ffi::c_int;
use std::ptr;

use super::error::{TransportResult, no_memory};
use super::generation::{MAX_WINDOW, NOT_LAST_AND_POSITION, POSITION, member, number_of};
use super::operation::{Limits, Operation, Target};
use super::request::WorkRequest;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{GatherBuffer, PlainList};
use crate::operation::sealed::{Kind, Request};
use crate::operation::{SIGNALED, SendQueueRequest, without_empty};

/// See the [module](self).
#[derive(Default)]
pub(super) struct WindowList {
    requests: Vec<ffi::ibv_send_wr>,
    pieces: Vec<ffi::ibv_sge>,
}

// SAFETY: its pointers are to its own vectors.
unsafe impl Send for WindowList {}

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
    /// Makes room for that many requests. Allocates only if there was no window as long.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are none, or more than a window can have.
    ///  - `ENOMEM`: out of memory.
    #[inline]
    pub(super) fn reserve(&mut self, requests: usize, limits: &Limits) -> Result<()> {
        if requests == 0 || requests > self.requests.len() {
            return self.grow(requests, limits.max_send_sge.max(1) as usize);
        }
        Ok(())
    }

    /// The same, for a list that several channels use.
    #[inline]
    pub(super) fn reserve_shared(&mut self, requests: usize, limits: &Limits) -> Result<()> {
        let (len, pieces_each) = (self.requests.len(), limits.max_send_sge.max(1) as usize);
        if requests == 0 || requests > len || pieces_each * len > self.pieces.len() {
            let present = self.pieces.len().checked_div(len).unwrap_or(1);
            return self.grow(requests, pieces_each.max(present));
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self, requests: usize, pieces_each: usize) -> Result<()> {
        if !(1..=MAX_WINDOW).contains(&requests) {
            let what = "the number of requests of a window";
            let (count, most) = (requests as u64, MAX_WINDOW as u64);
            return Err(Error::out_of_range("ibv_post_send", what, count, 1, most));
        }
        // No more than a window can have: a list that is longer would be found long enough.
        let len = requests.next_power_of_two().min(MAX_WINDOW).max(self.requests.len());
        let pieces = len.checked_mul(pieces_each).ok_or_else(no_memory)?;
        let more = (len - self.requests.len(), pieces.saturating_sub(self.pieces.len()));
        let reserved = self.requests.try_reserve_exact(more.0);
        if reserved.and_then(|()| self.pieces.try_reserve_exact(more.1)).is_err() {
            // What has moved is linked no more.
            self.requests.clear();
            return Err(no_memory());
        }
        self.requests.resize(len, ffi::ibv_send_wr::default());
        self.pieces.resize(pieces, ffi::ibv_sge::default());
        let (first, piece) = (self.requests.as_mut_ptr(), self.pieces.as_mut_ptr());
        for index in 0..len {
            // SAFETY: there are as many requests and pieces.
            unsafe {
                (*first.add(index)).sg_list = piece.add(index * pieces_each);
                // The last one of all is always the last one of its window.
                (*first.add(index)).next = first.add((index + 1) % len);
            }
        }
        Ok(())
    }

    /// Begins a window, which completes by this number.
    #[inline]
    pub(super) fn begin(&mut self, last: u64) -> Window<'_> {
        let request = self.requests.as_mut_ptr();
        Window { list: self, request, number: number_of(last, 0) }
    }
}

/// A window that is being filled.
pub(super) struct Window<'a> {
    list: &'a mut WindowList,
    /// The next request, and its number if it is not the last.
    request: *mut ffi::ibv_send_wr,
    number: u64,
}

impl Window<'_> {
    /// How many requests were added.
    pub(super) fn filled(&self) -> usize {
        member(self.number).map_or(0, |(_, position)| position)
    }

    /// Adds a request, unless it is wrong.
    ///
    /// # Safety
    ///
    /// There is [room](WindowList::reserve) for it.
    ///
    /// # Errors
    ///
    /// Those of [`Operation::check`], and of the request's buffer.
    #[inline(always)]
    pub(super) unsafe fn add<R>(
        &mut self,
        limits: &Limits,
        operation: &R::Operation,
        buffer: &mut R::Buffer,
    ) -> TransportResult<()>
    where
        R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
    {
        let mut list = R::list(buffer)?;
        let list = list.as_mut();
        operation.check(limits, list)?;
        let count = match list {
            [one] => usize::from(one.length != 0),
            _ => without_empty(list),
        };
        // SAFETY: the list has the request, with room for the pieces that `check` allows.
        unsafe {
            let request = self.request;
            (*request).wr_id = self.number;
            (*request).num_sge = count as c_int;
            (*request).opcode = <R::Operation as Kind>::OPCODE;
            (*request).send_flags = operation.flags() & !SIGNALED;
            operation.fill(request);
            let piece = (*request).sg_list;
            if let [one] = list {
                *piece = *one;
            } else {
                for (index, one) in list.iter().take(count).enumerate() {
                    *piece.add(index) = *one;
                }
            }
            self.request = request.add(1);
        }
        self.number += 1 << POSITION;
        Ok(())
    }

    /// As [`add`](Self::add), with a number of its own.
    ///
    /// # Safety
    ///
    /// As for `add`.
    ///
    /// # Errors
    ///
    /// As for `add`.
    #[inline(always)]
    pub(super) unsafe fn add_numbered<R>(
        &mut self,
        number: u64,
        limits: &Limits,
        operation: &R::Operation,
        buffer: &mut R::Buffer,
    ) -> TransportResult<()>
    where
        R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
    {
        // SAFETY: the caller vouches for it; the request in front of the next one is the one that was added.
        unsafe {
            self.add::<R>(limits, operation, buffer)?;
            (*self.request.sub(1)).wr_id = number;
        }
        Ok(())
    }

    /// Posts the window.
    ///
    /// # Safety
    ///
    /// It has a request. The target is live. The memory of all requests is valid, as for [`Operation::post`].
    #[inline(always)]
    pub(super) unsafe fn post(self, target: Target) -> Result<(), NotPosted> {
        // SAFETY: the caller vouches for it.
        unsafe {
            (*self.request.sub(1)).wr_id &= !NOT_LAST_AND_POSITION;
            self.post_numbered(target)
        }
    }

    /// Posts the window, whose requests have numbers of their own.
    ///
    /// # Safety
    ///
    /// As for [`post`](Self::post).
    #[inline(always)]
    pub(super) unsafe fn post_numbered(self, target: Target) -> Result<(), NotPosted> {
        let mut refused = ptr::null_mut();
        // SAFETY: the list has the requests that were added; the caller vouches for the rest.
        unsafe {
            let first = self.list.requests.as_mut_ptr();
            let last = self.request.sub(1);
            let next = (*last).next;
            (*last).next = ptr::null_mut();
            (*last).send_flags |= SIGNALED;
            let returned = target.post_send(first, &mut refused);
            (*last).next = next;
            // If siw has posted a part of a list and refuses the rest, it returns 0, but names the first request that
            // it has refused.
            if returned == 0 && refused.is_null() {
                return Ok(());
            }
            let offset = (refused as usize).wrapping_sub(first as usize);
            // What is no request of the list says nothing.
            let posted = (offset / size_of::<ffi::ibv_send_wr>()).min(self.filled());
            Err(NotPosted { returned, posted })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_send_sge: u32) -> Limits {
        let (reliable, private_reads) = (true, true);
        Limits { max_send_sge, max_recv_sge: 1, max_inline_data: 0, reliable, private_reads }
    }

    /// Checks that there are so many requests, each with as many pieces of its own, and each of which leads to the next.
    #[track_caller]
    fn check(list: &WindowList, len: usize, pieces_each: usize) {
        let (requests, pieces) = (&list.requests[..], &list.pieces[..]);
        assert_eq!((requests.len(), pieces.len()), (len, len * pieces_each));
        // Miri's time for a reference grows with the number of those before it.
        let step = if cfg!(miri) { (len / 8).max(1) } else { 1 };
        for index in (0..len).step_by(step).chain([len - 1]) {
            assert_eq!(
                requests[index].sg_list.cast_const(),
                &raw const pieces[index * pieces_each]
            );
            assert_eq!(requests[index].next.cast_const(), &raw const requests[(index + 1) % len]);
        }
    }

    #[test]
    fn a_list_grows_and_is_linked_anew() {
        let mut list = WindowList::default();
        for (requests, len) in [(1, 1), (3, 4), (2, 4), (5, 8), (MAX_WINDOW, MAX_WINDOW)] {
            list.reserve(requests, &limits(3)).unwrap();
            check(&list, len, 3);
        }
        for requests in [0, MAX_WINDOW + 1] {
            assert_eq!(list.reserve(requests, &limits(3)).unwrap_err().errno(), libc::EINVAL);
            check(&list, MAX_WINDOW, 3);
        }
    }

    #[test]
    fn a_shared_list_has_the_most_pieces_that_a_channel_can_have() {
        let mut list = WindowList::default();
        for (requests, max_send_sge, len, pieces_each) in [
            (4, 0, 4, 1),
            (4, 2, 4, 2),
            (1, 5, 4, 5),
            (4, 1, 4, 5),
            (5, 1, 8, 5),
            (MAX_WINDOW, 1, MAX_WINDOW, 5),
            (1, 6, MAX_WINDOW, 6),
        ] {
            list.reserve_shared(requests, &limits(max_send_sge)).unwrap();
            check(&list, len, pieces_each);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends the program where memory is exhausted")]
    fn a_list_for_which_there_is_no_memory_is_made_anew() {
        let mut list = WindowList::default();
        list.reserve(2, &limits(1)).unwrap();
        let failed = list.reserve(MAX_WINDOW, &limits(u32::MAX));
        assert_eq!(failed.unwrap_err().errno(), libc::ENOMEM);
        list.reserve_shared(1, &limits(2)).unwrap();
        check(&list, 1, 2);
    }
}
