//! What a window is made of: arrays, vectors and tuples of requests.

use super::request::WorkRequest;
use crate::ffi;
use crate::memory::{GatherBuffer, PlainList};
use crate::operation::SendQueueRequest;
use crate::operation::sealed::Request;

pub(super) mod sealed {
    use crate::channel::error::TransportError;
    use crate::channel::window_list::WindowList;

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

        /// Sets each request in turn, and returns their buffers. Without a list, it sets nothing.
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
        // SAFETY: there are as many requests (the contract of `Requests`).
        if let Err(reason) = unsafe { list.set::<R>(*set, &operation, &mut buffer) } {
            error.get_or_insert((*set, reason));
        }
        *set += 1;
    }
    buffer
}

/// How many pieces a request has: its list is an array.
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
        // In place, where the buffers have room in the memory of the requests.
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
