use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

use super::explain::{explain_receive, explain_request};
use crate::base::{Error, QueuePairType, Result, debug, err_from_call, ffi};
use crate::verbs::memory::{GatherBuffer, GatherElement, ScatterBuffer, ScatterElement};
use crate::verbs::operation::encode::encode_at;
use crate::verbs::operation::sealed::{Kind, Request};
use crate::verbs::operation::{
    INLINE, Posts, ReceiveWorkRequest, SendQueueRequest, check, check_receive, total,
};
use crate::verbs::queue_pair::{
    ALWAYS_SENT, MessageLimits, QueuePair, Rc, ReceiveQueue, Transport, WorkRequestOpcode,
};

/// A request of either queue in C's form.
pub trait RawRequest: Default {
    const VERB: &'static str;

    fn set_next(&mut self, next: *mut Self);
    fn is_last(&self) -> bool;
    fn set_wr_id(&mut self, wr_id: u64);

    /// # Safety
    ///
    /// The queue pair is live, and the caller keeps the contract of posting.
    unsafe fn post(&mut self, queue_pair: *mut ffi::ibv_qp) -> c_int;

    /// # Safety
    ///
    /// Its list is live.
    unsafe fn registered(&self) -> &[ffi::ibv_sge];

    /// # Safety
    ///
    /// Its list is live.
    #[inline(always)]
    unsafe fn check_domain(&self, limits: &MessageLimits) -> Result<()> {
        // SAFETY: the caller vouches for it.
        limits.check_domain(Self::VERB, unsafe { self.registered() })
    }

    fn explain(&self, queue_pair: &QueuePair<'_, QueuePairType>, returned: c_int) -> Error;
}

macro_rules! raw_request {
    (
        $raw:ident, $verb:ident, |$inline:ident| $is_inline:expr,
        |$request:ident, $queue_pair:ident, $returned:ident| $explain:expr
    ) => {
        impl RawRequest for ffi::$raw {
            const VERB: &'static str = stringify!($verb);

            fn set_next(&mut self, next: *mut Self) {
                self.next = next;
            }

            #[inline]
            fn is_last(&self) -> bool {
                self.next.is_null()
            }

            fn set_wr_id(&mut self, wr_id: u64) {
                self.wr_id = wr_id;
            }

            #[inline(always)]
            unsafe fn post(&mut self, queue_pair: *mut ffi::ibv_qp) -> c_int {
                // Left uninitialised: only a list needs to know where the verb stopped.
                let mut bad = MaybeUninit::uninit();
                // SAFETY: the caller vouches for the queue pair and the request; `bad` is writable.
                unsafe { ffi::$verb(queue_pair, self, bad.as_mut_ptr()) }
            }

            #[inline(always)]
            unsafe fn registered(&self) -> &[ffi::ibv_sge] {
                let $inline = self;
                if self.num_sge == 0 || $is_inline {
                    return &[];
                }
                // SAFETY: the caller vouches for the list.
                unsafe { std::slice::from_raw_parts(self.sg_list, self.num_sge as usize) }
            }

            #[cold]
            fn explain(
                &self,
                $queue_pair: &QueuePair<'_, QueuePairType>,
                $returned: c_int,
            ) -> Error {
                let $request = self;
                $explain
            }
        }
    };
}

raw_request!(
    ibv_send_wr,
    ibv_post_send,
    |request| request.send_flags & INLINE != 0,
    |request, queue_pair, returned| explain_request(queue_pair, request, returned)
);
raw_request!(ibv_recv_wr, ibv_post_recv, |_request| false, |request, queue_pair, returned| {
    explain_receive(queue_pair, request.num_sge as usize, returned)
});

/// A buffer that is itself a list of C's elements, to which a prepared request can point: a reference to elements, or
/// `()`. Sealed.
#[diagnostic::on_unimplemented(
    message = "a prepared request needs a reference to elements, and `{Self}` is none",
    label = "for example `&elements`, of `let elements = [region.gather_element(..)?]`"
)]
pub trait ElementSlice: GatherBuffer + Elements {}

mod elements {
    use crate::base::ffi;

    pub trait Elements {
        /// Written only through an exclusive reference, and while no request writes them.
        fn raw(&self) -> *const [ffi::ibv_sge];
    }
}

use elements::Elements;

macro_rules! element_slice {
    ($([$($generics:tt)*] $type:ty, $element:ident, |$this:ident| $elements:expr;)+) => {$(
        impl<$($generics)*> ElementSlice for $type {}

        impl<$($generics)*> Elements for $type {
            #[inline]
            fn raw(&self) -> *const [ffi::ibv_sge] {
                let $this: &[$element<'_>] = {
                    let $this = self;
                    $elements
                };
                $element::raw_list($this)
            }
        }
    )+};
}

element_slice! {
    ['l] &'l [GatherElement<'_>], GatherElement, |this| this;
    ['l, const N: usize] &'l [GatherElement<'_>; N], GatherElement, |this| this.as_slice();
    ['l] &'l GatherElement<'_>, GatherElement, |this| std::slice::from_ref(*this);
    ['l] &'l mut [ScatterElement<'_>], ScatterElement, |this| this;
    ['l, const N: usize] &'l mut [ScatterElement<'_>; N], ScatterElement, |this| this.as_slice();
    ['l] &'l mut ScatterElement<'_>, ScatterElement, |this| std::slice::from_ref(&**this);
    [] (), GatherElement, |_this| &[];
}

/// A request in C's form: see [`PreparedRequest`] and [`PreparedReceive`].
#[repr(C)]
#[must_use = "it is to be posted"]
pub struct Prepared<'wr, R, T> {
    pub(super) raw: R,
    /// In the first entry of a list: where the verb stopped, or null. Here it is not cleared on each call.
    pub(super) bad: *mut R,
    /// The queue pair must have a fixed peer. Checked only for [`QueuePairType`]; other types ensure it.
    pub(super) needs_peer: bool,
    /// 0 if every port can send it.
    pub(super) length: u32,
    borrows: PhantomData<(&'wr (), T)>,
}

/// `struct ibv_send_wr`: a request of the send queue in C's form, which borrows its elements for `'wr`.
///
/// It is checked and written once, and posted any number of times at the cost of C: by
/// [`post_prepared`](crate::QueuePair::post_prepared), or in a [`SendList`](crate::operation::SendList).
///
/// ```
/// use ibverbs::{Rc, SendWorkRequest, operation::PreparedRequest};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// let (header, body) = (domain.allocate::<u64>(2)?, domain.allocate::<u8>(1024)?);
/// # let queue = context.create_cq(16)?;
/// let prepared = domain
///     .create_qp(&queue, &queue, Rc)
///     .max_send_sge(2) // a message can then have two elements
///     .build()?;
/// # let remote = prepared.endpoint();
/// let mut queue_pair = prepared.handshake(remote)?;
///
/// let elements = [header.gather_element(..)?, body.gather_element(..100)?];
/// let request = SendWorkRequest::new(&elements).immediate(3).solicited();
/// let mut request = PreparedRequest::new(request, queue_pair.max_inline_data())?;
/// // SAFETY: the regions are not written until the completion of 7 was polled, and dropped after
/// // the queue pair.
/// unsafe { queue_pair.post_prepared(&mut request, 7)? };
/// # Ok(())
/// # }
/// ```
///
/// It is for queue pairs of one [transport](crate::queue_pair::Transport), for which its operation and destination were
/// checked.
#[doc(alias = "ibv_send_wr")]
pub type PreparedRequest<'wr, T = Rc> = Prepared<'wr, ffi::ibv_send_wr, T>;

/// `struct ibv_recv_wr`: a receive in C's form, as [`PreparedRequest`].
#[doc(alias = "ibv_recv_wr")]
pub type PreparedReceive<'wr> = Prepared<'wr, ffi::ibv_recv_wr, ()>;

// SAFETY: it borrows elements, which are plain numbers, and objects that any thread may use.
unsafe impl<R: RawRequest, T> Send for Prepared<'_, R, T> {}
// SAFETY: as above, and a shared request is only read.
unsafe impl<R: RawRequest, T> Sync for Prepared<'_, R, T> {}

impl<'wr, R, T> Prepared<'wr, R, T> {
    #[inline]
    fn from_raw(raw: R, needs_peer: bool, length: u32) -> Self {
        Self { raw, bad: ptr::null_mut(), needs_peer, length, borrows: PhantomData }
    }

    /// The C struct. Its link to the next request has a meaning only within a list.
    pub fn as_raw(&self) -> &R {
        &self.raw
    }
}

impl<'wr, T: Transport> PreparedRequest<'wr, T> {
    /// Checks the request and brings it into C's form.
    ///
    /// `max_inline_data` is that of the queue pair ([`QueuePair::max_inline_data`]), and only used for an
    /// [inline](crate::SendWorkRequest::inline) request.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are more elements than C's `int` can count, or more bytes than
    ///    [`MAX_MESSAGE_LENGTH`](crate::operation::MAX_MESSAGE_LENGTH); the peer's memory is too short, or not aligned
    ///    for an atomic; there is more inline data than fits; a destination's number has more than 24 bits.
    #[inline]
    pub fn new<Q>(request: Q, max_inline_data: u32) -> Result<Self>
    where
        Q: Posts<T> + SendQueueRequest + 'wr,
        <Q as Request>::Buffer: ElementSlice,
    {
        let (kind, buffer) = request.split();
        let list = buffer.raw();
        // SAFETY: the elements are borrowed for `'wr`, and nothing writes them.
        let elements = unsafe { &*list };
        check(&MessageLimits::new(max_inline_data, 0), &kind, elements)?;
        let length = if kind.flags() & INLINE == 0 { total(elements) } else { 0 };
        // `check` has compared it with a lower limit.
        let length = if length > ALWAYS_SENT { length as u32 } else { 0 };
        let num_sge = count("ibv_post_send", elements.len())?;
        let mut raw = ffi::ibv_send_wr::default();
        // SAFETY: it is a request.
        unsafe { encode_at(&raw mut raw, &kind, 0, &mut []) };
        (raw.sg_list, raw.num_sge) = (list.cast_mut().cast(), num_sge);
        Ok(Self::from_raw(raw, <Q::Operation as Kind>::NEEDS_PEER, length))
    }
}

impl<'wr> PreparedReceive<'wr> {
    /// Checks the receive and brings it into C's form.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are more elements than C's `int` can count, or several of more than
    ///    [`MAX_MESSAGE_LENGTH`](crate::operation::MAX_MESSAGE_LENGTH) bytes.
    #[inline]
    pub fn new<D>(request: ReceiveWorkRequest<D>) -> Result<Self>
    where
        D: ElementSlice + ScatterBuffer + 'wr,
    {
        let (_, buffer) = request.split();
        let list = buffer.raw();
        // SAFETY: the elements are borrowed for `'wr`, and nothing writes them.
        let elements = unsafe { &*list };
        check_receive(&MessageLimits::UNKNOWN, elements)?;
        let num_sge = count("ibv_post_recv", elements.len())?;
        let sg_list = list.cast_mut().cast();
        Ok(Self::from_raw(ffi::ibv_recv_wr { sg_list, num_sge, ..Default::default() }, false, 0))
    }
}

#[inline]
fn count(verb: &'static str, elements: usize) -> Result<c_int> {
    c_int::try_from(elements).map_err(|_| {
        let (what, most) = ("the number of elements", c_int::MAX as u64);
        Error::out_of_range(verb, what, elements as u64, 0, most)
    })
}

/// A prepared request that queue pairs of transport `T` post.
pub trait PostedBy<T>: RawRequest {
    /// The parameter of [`Prepared`].
    type For;
}

impl<T: Transport> PostedBy<T> for ffi::ibv_send_wr {
    type For = T;
}

impl<T: ReceiveQueue> PostedBy<T> for ffi::ibv_recv_wr {
    type For = ();
}

/// Queue pairs of this transport take requests that were prepared for `F`: only for itself. The compiler infers `F`
/// because it is the trait's parameter, not the implementing type.
#[diagnostic::on_unimplemented(
    message = "the request was prepared for `{F}`, and the queue pair's transport is `{Self}`",
    label = "of another transport than the queue pair",
    note = "`PreparedRequest::new(request)` of a request that is posted to this queue pair takes its transport"
)]
pub trait TakesPrepared<F> {}

impl<T> TakesPrepared<T> for T {}

impl<R: RawRequest, F> Prepared<'_, R, F> {
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// `raw` is that of the queue pair, the caller keeps the contract of posting, and the request was never in a list.
    #[inline(always)]
    pub(super) unsafe fn post<T: Transport>(
        &mut self,
        queue_pair: &QueuePair<'_, T>,
        raw: *mut ffi::ibv_qp,
        wr_id: u64,
    ) -> Result<()> {
        debug_assert!(self.raw.is_last(), "the request was in a list, which links it to another");
        if self.needs_peer {
            T::need_peer(queue_pair.has_peer())?;
        }
        // SAFETY: the caller vouches for the elements.
        unsafe { self.raw.check_domain(queue_pair.message_limits())? };
        if self.length != 0 {
            // SAFETY: the caller's promise.
            return unsafe { self.post_long(queue_pair, raw, wr_id) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.post_unchecked(queue_pair, raw, wr_id) }
    }

    /// # Safety
    ///
    /// That of [`post`](Self::post).
    #[cold]
    #[inline(never)]
    unsafe fn post_long<T: Transport>(
        &mut self,
        queue_pair: &QueuePair<'_, T>,
        raw: *mut ffi::ibv_qp,
        wr_id: u64,
    ) -> Result<()> {
        queue_pair.message_limits().check_message(self.length.into())?;
        // SAFETY: the caller's promise.
        unsafe { self.post_unchecked(queue_pair, raw, wr_id) }
    }

    /// # Safety
    ///
    /// That of [`post`](Self::post).
    #[inline(always)]
    unsafe fn post_unchecked<T: Transport>(
        &mut self,
        queue_pair: &QueuePair<'_, T>,
        raw: *mut ffi::ibv_qp,
        wr_id: u64,
    ) -> Result<()> {
        self.raw.set_wr_id(wr_id);
        // SAFETY: the caller vouches for the queue pair and the memory.
        let returned = unsafe { self.raw.post(raw) };
        if returned == 0 {
            Ok(())
        } else {
            err_from_call(self.raw.explain(queue_pair.erased(), returned))
        }
    }
}

impl PreparedReceive<'_> {
    pub(super) fn collect<'wr>(
        receives: impl IntoIterator<Item = (u64, PreparedReceive<'wr>)>,
    ) -> Vec<PreparedReceive<'wr>> {
        let numbered = |(wr_id, mut receive): (u64, PreparedReceive<'wr>)| {
            receive.raw.wr_id = wr_id;
            receive
        };
        receives.into_iter().map(numbered).collect()
    }
}

debug! {
    impl[T] PreparedRequest<'_, T>, self,
    opcode: WorkRequestOpcode::from(self.raw.opcode), elements: self.raw.num_sge, ..
}

debug! { PreparedReceive<'_>, self, elements: self.raw.num_sge, .. }
