//! A window that is prepared: the list of its requests, and their buffers.

use std::fmt;
use std::ops::DerefMut;

use super::error::{TransportError, no_memory};
use super::operation_error::OperationError;
use super::request::WorkRequest;
use super::window_list::WindowList;
use super::window_requests::WindowRequests;
use super::window_requests::sealed::Filling;
use crate::debug::debug;
use crate::error::Error;
use crate::memory::{Element, GatherBuffer, PlainList};
use crate::operation::SendQueueRequest;
use crate::operation::sealed::Request;

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
    /// Those of the list's requests, one for each.
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
        // SAFETY: it is a box of one value, whose memory has the layout of that value.
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
        // Memory only, never the buffer itself, whose address and length are in the list.
        self.0.buffers.as_mut().get_mut(request).map(|buffer| &mut **buffer)
    }

    #[inline(always)]
    pub(super) fn list(&mut self) -> &mut WindowList {
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
