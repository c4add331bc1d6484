use std::marker::PhantomData;
use std::{fmt, mem, ptr};

use super::prepared_request::{Prepared, RawRequest};
use crate::base::{Error, Result, debug, ffi};
use crate::verbs::queue_pair::{MessageLimits, Rc};

/// Requests that are posted with one call: [`SendList`] or [`ReceiveList`].
///
/// The caller owns the entries, in an array or a vector. Making a list links them in place, once. Posting it costs what
/// a linked list costs in C, and may be repeated, under the same numbers or others.
///
/// ```
/// use ibverbs::operation::SendList;
/// use ibverbs::{Rc, SendWorkRequest, operation::PreparedRequest};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// # let queue = context.create_cq(16)?;
/// let region = domain.allocate::<u8>(1024)?;
/// # let prepared = domain.create_qp(&queue, &queue, Rc)
/// #     .max_send_wr(16).build()?;
/// # let remote = prepared.endpoint();
/// let mut queue_pair = prepared.handshake(remote)?;
///
/// let (head, body) = ([region.gather_element(..16)?], [region.gather_element(16..)?]);
/// let mut entries = [
///     PreparedRequest::new(SendWorkRequest::new(&head).unsignaled(), 0)?,
///     PreparedRequest::new(SendWorkRequest::new(&body), 0)?,
/// ];
/// let mut list = SendList::new(&mut entries)?;
/// list.set_wr_ids(7);
/// // SAFETY: the region is not written until the completion of 8 was polled, and dropped after the
/// // queue pair.
/// unsafe { queue_pair.post_list(&mut list)? };
/// # Ok(())
/// # }
/// ```
pub struct WorkRequestList<'list, R, T> {
    /// All entries. The first `len` are linked.
    first: *mut Prepared<'list, R, T>,
    capacity: usize,
    len: usize,
    pub(super) needs_peer: bool,
    /// A message is longer than every port can send.
    pub(super) has_long: bool,
    entries: PhantomData<&'list mut R>,
}

/// Requests of the send queue for [`QueuePair::post_list`](crate::QueuePair::post_list).
pub type SendList<'list, T = Rc> = WorkRequestList<'list, ffi::ibv_send_wr, T>;
/// Receives for [`QueuePair::post_receive_list`](crate::QueuePair::post_receive_list).
pub type ReceiveList<'list> = WorkRequestList<'list, ffi::ibv_recv_wr, ()>;

// SAFETY: it borrows its entries exclusively, and they are `Send`.
unsafe impl<R: RawRequest, T> Send for WorkRequestList<'_, R, T> {}
// SAFETY: a shared list exposes only numbers.
unsafe impl<R: RawRequest, T> Sync for WorkRequestList<'_, R, T> {}

impl<'list, R: RawRequest, T> WorkRequestList<'list, R, T> {
    /// Links the entries, in their order.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are none.
    #[inline]
    pub fn new<'wr: 'list>(entries: &'list mut [Prepared<'wr, R, T>]) -> Result<Self> {
        let capacity = entries.len();
        let needs_peer = entries.iter().any(|entry| entry.needs_peer);
        let has_long = entries.iter().any(|entry| entry.length != 0);
        let first = entries.as_mut_ptr().cast::<Prepared<'list, R, T>>();
        let mut list = Self { first, capacity, len: 0, needs_peer, has_long, entries: PhantomData };
        for index in 0..capacity {
            // SAFETY: both pointers are within the borrowed slice, or one past its end.
            unsafe {
                (*first.add(index)).raw.set_next(first.add(index + 1).cast());
                (*first.add(index)).bad = ptr::null_mut();
            }
        }
        list.truncate(capacity)?;
        Ok(list)
    }

    /// Limits the following posts to the first `len` entries. It can be made longer again.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0, or more than there are entries.
    #[inline]
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len == 0 || len > self.capacity {
            return Err(no_length(R::VERB, len, self.capacity));
        }
        // SAFETY: all indices are within the slice that the list borrows exclusively.
        unsafe {
            if self.len != 0 && self.len < self.capacity {
                (*self.first.add(self.len - 1)).raw.set_next(self.first.add(self.len).cast());
            }
            (*self.first.add(len - 1)).raw.set_next(ptr::null_mut());
        }
        self.len = len;
        Ok(())
    }

    /// The number of requests that it posts.
    #[expect(clippy::len_without_is_empty, reason = "a list is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Numbers the requests from `first` on.
    #[inline]
    pub fn set_wr_ids(&mut self, first: u64) {
        // SAFETY: the list borrows its entries exclusively, and has at least `len`.
        let entries = unsafe { std::slice::from_raw_parts_mut(self.first, self.len) };
        // Eight at a time, which costs next to nothing.
        let (eights, rest) = entries.as_chunks_mut::<8>();
        // A compiler that knows the low bits of the first number makes the others by `or`, which some processors do in
        // two instructions, and an addition in one.
        let mut wr_id = std::hint::black_box(first);
        for eight in eights {
            for (offset, entry) in (0..).zip(eight) {
                entry.raw.set_wr_id(wr_id.wrapping_add(offset));
            }
            wr_id = wr_id.wrapping_add(8);
        }
        for (offset, entry) in (0..).zip(rest) {
            entry.raw.set_wr_id(wr_id.wrapping_add(offset));
        }
    }

    /// Numbers the request at `index` (0 unless set).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the list is not that long.
    #[inline]
    pub fn set_wr_id(&mut self, index: usize, wr_id: u64) -> Result<()> {
        if index >= self.len {
            return Err(no_index(R::VERB, index, self.len));
        }
        // SAFETY: as above.
        unsafe { (*self.first.add(index)).raw.set_wr_id(wr_id) };
        Ok(())
    }

    /// The longest of those that not every port can send, else 0.
    #[cold]
    pub(super) fn longest(&self) -> u64 {
        // SAFETY: as above.
        let entries = unsafe { std::slice::from_raw_parts(self.first, self.len) };
        entries.iter().map(|entry| entry.length.into()).max().unwrap_or(0)
    }

    /// In debug builds only.
    ///
    /// # Safety
    ///
    /// The elements of the requests are live.
    #[inline(always)]
    pub(super) unsafe fn check_domain(&self, limits: &MessageLimits) -> Result<(), ListError> {
        if cfg!(debug_assertions) {
            // SAFETY: as above.
            let entries = unsafe { std::slice::from_raw_parts(self.first, self.len) };
            for entry in entries {
                // SAFETY: the caller vouches for it.
                let checked = unsafe { entry.raw.check_domain(limits) };
                checked.map_err(|error| ListError::new(error, 0, self.len))?;
            }
        }
        Ok(())
    }

    #[inline]
    pub(super) fn as_raw(&mut self) -> (*mut R, *mut *mut R) {
        // SAFETY: a list has at least one entry, which it borrows.
        unsafe { (&raw mut (*self.first).raw, &raw mut (*self.first).bad) }
    }

    #[inline]
    pub(super) fn failed(&mut self) -> (usize, &R) {
        // SAFETY: the list borrows at least that many entries.
        let posted = unsafe { position(self.first, self.len) };
        // SAFETY: the position is one of the list.
        (posted, unsafe { &(*self.first.add(posted.min(self.len - 1))).raw })
    }
}

#[cold]
fn no_length(verb: &'static str, len: usize, capacity: usize) -> Error {
    Error::out_of_range(verb, "the length of the list", len as u64, 1, capacity as u64)
}

#[cold]
fn no_index(verb: &'static str, index: usize, len: usize) -> Error {
    Error::out_of_range(verb, "the index", index as u64, 0, len as u64 - 1)
}

/// # Safety
///
/// `first` is the first of at least one entry.
#[cold]
unsafe fn position<R, T>(first: *mut Prepared<'_, R, T>, len: usize) -> usize {
    // SAFETY: the caller vouches for it.
    let bad = unsafe { mem::replace(&mut (*first).bad, ptr::null_mut()) };
    let offset = (bad as usize).wrapping_sub(first as usize);
    let index = offset / size_of::<Prepared<'_, R, T>>();
    match index {
        _ if index < len => index,
        // rxe and siw store nothing if they queued all but could not notify the kernel.
        _ if bad.is_null() => len,
        // The provider points elsewhere: nothing counts as posted.
        _ => 0,
    }
}

debug! { impl[R, T] WorkRequestList<'_, R, T>, self, len: self.len, .. }

/// A list that was not posted to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListError {
    /// Why the first request that was not posted was refused.
    pub error: Error,
    /// The number of requests that were posted, from the beginning of the list. They are carried out.
    ///
    /// On Soft-RoCE and Soft-iWARP it may be the whole list: all requests are queued, but the kernel could not be
    /// notified (see [`QueuePair::post`](crate::QueuePair::post)).
    pub posted: usize,
    len: usize,
}

impl ListError {
    #[cold]
    pub(super) fn new(error: Error, posted: usize, len: usize) -> Self {
        Self { error, posted, len }
    }
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { error, posted, len } = self;
        match len {
            // The request has no list.
            0 => error.fmt(f),
            _ if posted < len => {
                write!(f, "request {} of {len} was refused, counted from 1: {error}", posted + 1)
            }
            _ => write!(
                f,
                "all {len} requests were queued, but the device could not be notified: {error}"
            ),
        }
    }
}

/// Without a source, since the text says everything.
impl std::error::Error for ListError {}

impl From<ListError> for std::io::Error {
    fn from(error: ListError) -> Self {
        error.error.into()
    }
}

impl From<ListError> for Error {
    fn from(error: ListError) -> Self {
        error.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::operation::{LocalInvalidateWorkRequest, PreparedRequest, SendWorkRequest};

    fn send() -> PreparedRequest<'static> {
        PreparedRequest::new(SendWorkRequest::new(()), 0).unwrap()
    }

    fn chain(list: &mut SendList<'_>) -> Vec<(u64, u32)> {
        let mut found = Vec::new();
        let mut next = list.as_raw().0;
        while !next.is_null() {
            // SAFETY: the list links entries that it borrows.
            let request = unsafe { &*next };
            found.push((request.wr_id, request.opcode.0));
            next = request.next;
        }
        found
    }

    #[test]
    fn entries_are_linked_in_their_order() {
        let mut entries: [PreparedRequest<'_>; 3] = [
            send(),
            PreparedRequest::new(LocalInvalidateWorkRequest::new(1), 0).unwrap(),
            PreparedRequest::new(SendWorkRequest::new(()).immediate(1), 0).unwrap(),
        ];
        let mut list = SendList::new(&mut entries).unwrap();
        list.set_wr_ids(5);
        assert_eq!(chain(&mut list), [(5, 2), (6, 7), (7, 3)]);
        list.truncate(1).unwrap();
        list.set_wr_id(0, 9).unwrap();
        assert_eq!(chain(&mut list), [(9, 2)]);
        assert!(list.set_wr_id(1, 0).is_err());
        list.truncate(3).unwrap();
        assert_eq!(chain(&mut list), [(9, 2), (6, 7), (7, 3)]);
        list.truncate(2).unwrap();
        assert_eq!((chain(&mut list).len(), list.len()), (2, 2));
        assert!(list.truncate(0).is_err() && list.truncate(4).is_err());
        let error = SendList::<Rc>::new(&mut []).unwrap_err();
        assert!(error.to_string().contains("there are none"), "{error}");
    }

    #[test]
    fn a_list_made_again_is_whole_again() {
        let mut entries: [PreparedRequest<'_>; 3] = std::array::from_fn(|_| send());
        let mut list = SendList::new(&mut entries).unwrap();
        list.truncate(1).unwrap();
        entries.swap(0, 2);
        let mut moved = Box::new(entries);
        let mut list = SendList::new(&mut moved[..]).unwrap();
        assert_eq!(chain(&mut list).len(), 3);
    }

    #[test]
    fn a_failure_says_where() {
        let mut entries: [PreparedRequest<'_>; 3] = std::array::from_fn(|_| send());
        let mut list = SendList::new(&mut entries).unwrap();
        let (first, bad) = list.as_raw();
        // SAFETY: the list links entries that it borrows.
        let last = unsafe { (*(*first).next).next };
        for (stopped, posted) in [
            (last, 2),
            (first, 0),
            (ptr::null_mut(), 3),
            (last.cast::<PreparedRequest<'_>>().wrapping_add(1).cast(), 0),
            (first.wrapping_sub(1), 0),
        ] {
            // SAFETY: that is what a provider does.
            unsafe { *bad = stopped };
            assert_eq!(list.failed().0, posted);
            assert_eq!(list.failed().0, 3, "it is cleared");
        }
        let error = Error::new("ibv_post_send", libc::ENOMEM);
        for (posted, len, text) in [
            (0, 3, "request 1 of 3 was refused, counted from 1: ibv_post_send"),
            (2, 3, "request 3 of 3 was refused"),
            (
                3,
                3,
                "all 3 requests were queued, but the device could not be notified: ibv_post_send",
            ),
            (0, 0, "ibv_post_send"),
        ] {
            let error = ListError::new(error, posted, len);
            assert!(error.to_string().starts_with(text), "{error}");
            assert_eq!(Error::from(error).raw_os_error(), Some(libc::ENOMEM));
        }
    }
}
