//! What a window is made of: arrays, vectors and tuples of requests.

use super::request::WorkRequest;
use crate::memory::{GatherBuffer, PlainList};
use crate::operation::sealed::{Kind, Request};
use crate::operation::{SendQueueRequest, takes_receive};

pub(super) mod sealed {
    use crate::channel::error::TransportError;
    use crate::channel::operation::Limits;
    use crate::channel::window_list::Window;

    /// A window that is being filled, and the first error, with the position of its request.
    #[expect(missing_debug_implementations, reason = "no program has one")]
    pub struct Filling<'a> {
        pub(in crate::channel) limits: &'a Limits,
        pub(in crate::channel) window: Window<'a>,
        pub(in crate::channel) error: Option<(usize, TransportError)>,
    }

    /// # Safety
    ///
    /// `fill` adds no more requests than `count` says.
    pub unsafe trait Requests: Sized {
        type Kept;

        /// Whether the device writes the memory of one.
        const WRITES: bool;
        /// Whether one uses up a receive of the peer.
        const TAKE_RECEIVES: bool;

        fn count(&self) -> usize;

        /// Adds each request in turn, and returns what they keep. Without a window, it adds nothing.
        fn fill(self, filling: Option<&mut Filling<'_>>) -> Self::Kept;
    }
}

use sealed::{Filling, Requests};

#[inline(always)]
fn add<R>(filling: &mut Option<&mut Filling<'_>>, request: R) -> R::Kept
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    let (operation, mut buffer) = request.split();
    if let Some(Filling { limits, window, error }) = filling {
        // SAFETY: there is room for as many as there are (the contract of `Requests`).
        if let Err(reason) = unsafe { window.add::<R>(limits, &operation, &mut buffer) } {
            error.get_or_insert((window.filled(), reason));
        }
    }
    buffer.keep()
}

/// Requests of the send queue that [`Scope::post_window`](crate::Scope::post_window) posts together: an array or a vector
/// of one type, or a tuple of up to four, such as a write and the send that announces it.
///
/// The trait is sealed.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a window of work requests",
    label = "an array, a vector or a tuple of requests of the send queue is needed here",
    note = "for example `[SendWorkRequest::new(slice), ..]`; receives are posted one by one"
)]
pub trait WindowRequests: Requests<Kept = <Self as WindowRequests>::Buffers> {
    /// The buffers, in the form that the requests have: `[B; N]`, `Vec<B>`, `(A, B)` ..
    type Buffers;
}

#[diagnostic::do_not_recommend]
impl<W: Requests> WindowRequests for W {
    type Buffers = <W as Requests>::Kept;
}

// SAFETY: it adds each element.
unsafe impl<R, const N: usize> Requests for [R; N]
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    type Kept = [<R as WorkRequest>::Kept; N];

    const WRITES: bool = <R::Operation as Kind>::WRITES;
    const TAKE_RECEIVES: bool = takes_receive(<R::Operation as Kind>::OPCODE);

    #[inline(always)]
    fn count(&self) -> usize {
        N
    }

    #[inline(always)]
    fn fill(self, mut filling: Option<&mut Filling<'_>>) -> <Self as Requests>::Kept {
        self.map(|request| add(&mut filling, request))
    }
}

// SAFETY: it adds each element.
unsafe impl<R> Requests for Vec<R>
where
    R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
{
    type Kept = Vec<<R as WorkRequest>::Kept>;

    const WRITES: bool = <[R; 1]>::WRITES;
    const TAKE_RECEIVES: bool = <[R; 1]>::TAKE_RECEIVES;

    #[inline(always)]
    fn count(&self) -> usize {
        self.len()
    }

    #[inline(always)]
    fn fill(self, mut filling: Option<&mut Filling<'_>>) -> <Self as Requests>::Kept {
        // In place, where the buffers have room in the memory of the requests.
        self.into_iter().map(|request| add(&mut filling, request)).collect()
    }
}

macro_rules! tuple {
    ($count:literal: $($request:ident $index:tt),+) => {
        // SAFETY: `$count` is the number of elements.
        unsafe impl<$($request),+> Requests for ($($request),+)
        where
            $($request: WorkRequest + SendQueueRequest
                + Request<Buffer: GatherBuffer<List: PlainList>>),+
        {
            type Kept = ($(<$request as WorkRequest>::Kept),+);

            const WRITES: bool = $(<[$request; 1]>::WRITES)||+;
            const TAKE_RECEIVES: bool = $(<[$request; 1]>::TAKE_RECEIVES)||+;

            #[inline(always)]
            fn count(&self) -> usize {
                $count
            }

            #[inline(always)]
            fn fill(self, mut filling: Option<&mut Filling<'_>>) -> <Self as Requests>::Kept {
                ($(add(&mut filling, self.$index)),+)
            }
        }
    };
}

tuple!(2: A 0, B 1);
tuple!(3: A 0, B 1, C 2);
tuple!(4: A 0, B 1, C 2, D 3);
