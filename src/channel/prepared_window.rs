//! A list is made once, in C's form, and posted any number of times. Requests before the last complete only if they
//! fail. The upper half of their number names the window: a post writes that half alone.

use std::ffi::c_int;
use std::ops::DerefMut;
use std::{fmt, ptr};

use super::error::{OperationError, TransportError, TransportResult, no_memory};
use super::operation::{Limits, Needs, Target, too_many};
use super::posting::WorkRequest;
use super::slot::{MAX_WINDOW, lower_half};
use crate::base::debug::debug;
use crate::base::error::{Error, Result};
use crate::base::ffi;
use crate::verbs::memory::{Element, GatherBuffer, PlainList};
use crate::verbs::operation::sealed::{Kind, Request};
use crate::verbs::operation::{
    RawRequest, SIGNALED, SendQueueRequest, takes_receive, without_empty,
};
use crate::verbs::queue_pair::MessageLimits;

/// Requests of the send queue that are posted together, with one doorbell and one completion, which is what most devices
/// need the least time for: by [`Scope::post_window`](crate::Scope::post_window), or
/// [`Loop::post_window`](crate::Loop::post_window) if it owns its buffers.
///
/// They are brought into C's form once. When the window has ended it comes back with its buffers, and can be posted again at the
/// cost of a single request: with [other bytes](Self::bytes_mut) in the same buffers, or after some requests were
/// [replaced](Self::set).
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use ibverbs::channel::PreparedWindow;
/// use ibverbs::{Channel, MemoryRegion, SendWorkRequest, TransportResult};
///
/// /// Sends the lines, eight with one doorbell.
/// fn send_lines(
///     channel: &mut Channel<'_>,
///     region: &mut MemoryRegion<'_, u8>,
///     lines: &[[u8; 64]],
/// ) -> TransportResult<()> {
///     let parts = region.slice_mut(..8 * 64)?.chunks(64)?;
///     let mut window = PreparedWindow::new(parts.map(SendWorkRequest::new).collect::<Vec<_>>())?;
///     channel.manual_scope(|scope| {
///         for eight in lines.chunks_exact(8) {
///             for (index, line) in eight.iter().enumerate() {
///                 window.bytes_mut(index).expect("there are eight").copy_from_slice(line);
///             }
///             window = scope.post_window(window)?.wait()?.0;
///         }
///         Ok(())
///     })
/// }
/// ```
pub struct PreparedWindow<C>(Box<Parts<C>>);

struct Parts<C> {
    list: WindowList,
    buffers: C,
}

impl<C> PreparedWindow<C> {
    /// Prepares these requests. A window has 32,767 at most.
    ///
    /// # Errors
    ///
    /// With the buffers, and the [request](WindowError::request) that is wrong, if it is one:
    ///
    ///  - `EINVAL`: there are no requests, or more than a window can have; the peer's memory is too short, or not aligned
    ///    for an atomic; a buffer has more than 33 pieces. What the channel does not have is found out by the post.
    ///  - `ENOMEM`: out of memory.
    pub fn new<W: WindowRequests<Buffers = C>>(requests: W) -> Result<Self, WindowError<C>> {
        let (count, mut only) = (requests.count(), Vec::new());
        let list = WindowList::new(count, W::PIECES);
        let reserved = only.try_reserve_exact(1).map_err(|_| no_memory());
        let list = match list.and_then(|list| reserved.map(|()| list)) {
            Ok(list) => list,
            Err(error) => {
                let buffers = Some(requests.fill(None));
                return Err(WindowError { error: error.into(), request: None, buffers });
            }
        };
        let mut filling = Filling { list, set: 0, error: None };
        let buffers = requests.fill(Some(&mut filling));
        let Filling { list, error, .. } = filling;
        if let Some((request, error)) = error {
            return Err(WindowError { error, request: Some(request), buffers: Some(buffers) });
        }
        only.push(Parts { list, buffers });
        let only = Box::into_raw(only.into_boxed_slice());
        // SAFETY: it is a box of one value, with the layout of that value.
        Ok(Self(unsafe { Box::from_raw(only.cast()) }))
    }

    /// Replaces this request, counted from 0, and returns its buffer.
    ///
    /// # Errors
    ///
    /// With the buffer of the new request. The window is as it was.
    ///
    ///  - `EINVAL`: there are fewer requests; or those of [`new`](Self::new).
    #[inline]
    pub fn set<R>(
        &mut self,
        index: usize,
        request: R,
    ) -> Result<R::Buffer, OperationError<R::Buffer>>
    where
        R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
        C: AsMut<[R::Buffer]>,
    {
        let Parts { list, buffers } = &mut *self.0;
        let (operation, mut buffer) = request.split();
        let Some(place) = buffers.as_mut().get_mut(index) else {
            let error = no_request(index, list.len()).into();
            return Err(OperationError { error, buffer: Some(buffer) });
        };
        // SAFETY: there is a request for each buffer.
        match unsafe { list.set::<R>(index, &operation, &mut buffer) } {
            Ok(()) => Ok(std::mem::replace(place, buffer)),
            Err(error) => Err(OperationError { error, buffer: Some(buffer) }),
        }
    }

    /// The buffers.
    pub fn buffers(&self) -> &C {
        &self.0.buffers
    }

    /// Takes the buffers out.
    pub fn into_buffers(self) -> C {
        self.0.buffers
    }

    /// The memory of the buffer of this request, counted from 0; `None` if there are fewer. Of an array, or a vector, of buffers
    /// such as a [`PooledBuffer`](crate::PooledBuffer) or a [`MemorySliceMut`](crate::MemorySliceMut).
    #[inline]
    pub fn bytes_mut<'a, B, T: Element>(&'a mut self, request: usize) -> Option<&'a mut [T]>
    where
        C: AsMut<[B]>,
        B: GatherBuffer + DerefMut<Target = [T]> + 'a,
    {
        // Memory only, never the buffer itself: the list has its address and length.
        self.0.buffers.as_mut().get_mut(request).map(|buffer| &mut **buffer)
    }

    #[inline(always)]
    pub(crate) fn list(&mut self) -> &mut WindowList {
        &mut self.0.list
    }
}

/// Why a window failed, with the window, or the buffers of one that is to be [prepared](PreparedWindow::new).
pub struct WindowError<B> {
    /// The reason.
    pub error: TransportError,
    /// The request that failed or was refused, counted from 0, if it was one.
    pub request: Option<usize>,
    /// The window, unless it is still in flight: in a scope, since only the wait has failed, and its buffers stay borrowed
    /// until the scope has ended; in a [`Loop`](crate::Loop), since a part of it was posted, and it ends like others.
    pub buffers: Option<B>,
}

impl<B> fmt::Debug for WindowError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B> fmt::Display for WindowError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(request) = self.request {
            write!(f, "request {} of the window, counted from 1: ", request + 1)?;
        }
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for WindowError<B> {}

impl<B> From<TransportError> for WindowError<B> {
    /// Without buffers.
    fn from(error: TransportError) -> Self {
        Self { error, request: None, buffers: None }
    }
}

impl<B> From<WindowError<B>> for std::io::Error {
    /// Drops the buffers.
    fn from(error: WindowError<B>) -> Self {
        error.error.into()
    }
}

impl<B> From<WindowError<B>> for TransportError {
    /// Drops the buffers.
    fn from(error: WindowError<B>) -> Self {
        error.error
    }
}

#[cold]
fn no_request(index: usize, len: usize) -> Error {
    Error::out_of_range("ibv_post_send", "the index", index as u64, 0, len as u64 - 1)
}

debug! { impl[C] PreparedWindow<C>, self, requests: self.0.list.len(), .. }

/// A post numbers the requests in groups of this.
const EIGHT: usize = 8;

pub(crate) struct WindowList {
    /// A multiple of [`EIGHT`]. The first `len` are linked.
    requests: Vec<ffi::ibv_send_wr>,
    /// `pieces_each` for each request.
    #[expect(dead_code, reason = "the requests point to them")]
    pieces: Vec<ffi::ibv_sge>,
    len: usize,
    pieces_each: usize,
    needs: Needs,
    /// The device writes the memory of at least one.
    pub(super) writes: bool,
    /// At least one uses up a receive of the peer.
    pub(crate) takes_receives: bool,
}

// SAFETY: its pointers are to its own vectors, and to memory that any thread with the buffers may use.
unsafe impl Send for WindowList {}
// SAFETY: a shared reference gives access to numbers only.
unsafe impl Sync for WindowList {}

pub(crate) struct NotPosted {
    pub(crate) returned: c_int,
    /// All of them if the provider does not name the refused one.
    pub(crate) posted: usize,
}

impl NotPosted {
    pub(crate) fn error(&self) -> Error {
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
    /// # Errors
    ///
    ///  - `EINVAL`: `len` is 0, or more than a window can have.
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

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Safety
    ///
    /// `index` is less than the length.
    ///
    /// # Errors
    ///
    /// Those of the request's buffer, and
    ///
    ///  - `EINVAL`: no channel can do it, or it has more than `pieces_each` pieces.
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
        if pieces.len() > 1 && pieces.len() > self.pieces_each {
            return Err(too_many("ibv_post_send", pieces.len(), self.pieces_each as u32).into());
        }
        self.needs.add(operation, pieces)?;
        self.writes |= <R::Operation as Kind>::WRITES;
        self.takes_receives |= const { takes_receive(<R::Operation as Kind>::OPCODE) };
        let signaled = if index + 1 == self.len { SIGNALED } else { 0 };
        // SAFETY: the caller vouches for the index, and there is room for the pieces.
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

    #[inline(always)]
    pub(crate) fn check(&self, limits: &Limits) -> TransportResult<()> {
        if cfg!(debug_assertions) {
            for request in &self.requests[..self.len] {
                // SAFETY: its list is in `pieces`.
                unsafe { request.check_domain(&limits.messages)? };
            }
        }
        self.needs.check(limits)
    }

    /// `upper` is for all numbers but the last.
    ///
    /// # Safety
    ///
    /// The target is live, all requests were set, and their memory is valid, as for
    /// [`Operation::post`](super::operation::Operation::post).
    #[inline(always)]
    pub(crate) unsafe fn post(
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
            // If siw posts a part of a list, it returns 0, and names the first request that it has refused.
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
        // A pointer to anything else names no request.
        let posted = (offset / size_of::<ffi::ibv_send_wr>()).min(self.len);
        NotPosted { returned, posted }
    }
}

fn room<T: Clone>(len: usize, one: T) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len).map_err(|_| no_memory())?;
    list.resize(len, one);
    Ok(list)
}

pub(super) mod sealed {
    use crate::channel::error::TransportError;
    use crate::channel::prepared_window::WindowList;

    /// A list whose first requests are set, and the first error, with the position of its request.
    #[expect(missing_debug_implementations, reason = "no program has one")]
    pub struct Filling {
        pub(in crate::channel) list: WindowList,
        pub(in crate::channel) set: usize,
        pub(in crate::channel) error: Option<(usize, TransportError)>,
    }

    /// # Safety
    ///
    /// `fill` sets as many requests as `count` says.
    pub unsafe trait Requests: Sized {
        type All;

        const PIECES: usize;

        fn count(&self) -> usize;

        /// Without a list, it sets nothing.
        fn fill(self, filling: Option<&mut Filling>) -> Self::All;
    }
}

use sealed::{Filling, Requests};

fn add<R>(filling: &mut Option<&mut Filling>, request: R) -> R::Buffer
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    let (operation, mut buffer) = request.split();
    if let Some(Filling { list, set, error }) = filling {
        // SAFETY: `Requests` promises as many.
        if let Err(reason) = unsafe { list.set::<R>(*set, &operation, &mut buffer) } {
            error.get_or_insert((*set, reason));
        }
        *set += 1;
    }
    buffer
}

/// The list is an array.
const fn pieces<R: Request>() -> usize {
    size_of::<<R::Buffer as GatherBuffer>::List>() / size_of::<ffi::ibv_sge>()
}

/// Requests of the send queue that are posted together, as a [`PreparedWindow`](crate::channel::PreparedWindow): an array or a vector
/// of one type, or a tuple of up to four, such as a write and the send that announces it.
///
/// The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a window of work requests",
    label = "an array, a vector or a tuple of requests of the send queue is needed here",
    note = "for example `[SendWorkRequest::new(slice), ..]`; receives are posted one by one"
)]
pub trait WindowRequests: Requests<All = <Self as WindowRequests>::Buffers> {
    /// The buffers, in the form that the requests have: `[B; N]`, `Vec<B>`, `(A, B)` ..
    type Buffers;
}

#[diagnostic::do_not_recommend]
impl<W: Requests> WindowRequests for W {
    type Buffers = W::All;
}

// SAFETY: it sets each element.
unsafe impl<R, const N: usize> Requests for [R; N]
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    type All = [R::Buffer; N];

    const PIECES: usize = pieces::<R>();

    fn count(&self) -> usize {
        N
    }

    fn fill(self, mut filling: Option<&mut Filling>) -> [R::Buffer; N] {
        self.map(|request| add(&mut filling, request))
    }
}

// SAFETY: it sets each element.
unsafe impl<R> Requests for Vec<R>
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    type All = Vec<R::Buffer>;

    const PIECES: usize = pieces::<R>();

    fn count(&self) -> usize {
        self.len()
    }

    fn fill(self, mut filling: Option<&mut Filling>) -> Vec<R::Buffer> {
        // In place, if the buffers fit into the memory of the requests.
        self.into_iter().map(|request| add(&mut filling, request)).collect()
    }
}

const fn most(counts: &[usize]) -> usize {
    let (mut most, mut at) = (0, 0);
    while at < counts.len() {
        most = if counts[at] > most { counts[at] } else { most };
        at += 1;
    }
    most
}

macro_rules! tuple {
    ($count:literal: $($request:ident $index:tt),+) => {
        // SAFETY: `$count` is the number of elements.
        unsafe impl<$($request),+> Requests for ($($request),+)
        where
            $($request: WorkRequest + SendQueueRequest
                + Request<Buffer: GatherBuffer<List: PlainList>>),+
        {
            type All = ($($request::Buffer),+);

            const PIECES: usize = most(&[$(pieces::<$request>()),+]);

            fn count(&self) -> usize {
                $count
            }

            fn fill(self, mut filling: Option<&mut Filling>) -> Self::All {
                ($(add(&mut filling, self.$index)),+)
            }
        }
    };
}

tuple!(2: A 0, B 1);
tuple!(3: A 0, B 1, C 2);
tuple!(4: A 0, B 1, C 2, D 3);
