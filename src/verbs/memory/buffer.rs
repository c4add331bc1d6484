use super::scatter_gather::{Element, GatherElement, ScatterElement, private};
use super::slice::{MemorySlice, MemorySliceMut};
use crate::base::{Result, debug, ffi};

use std::ptr::NonNull;

/// Memory that the device reads for a send or a write: one piece, or several that go out as one message.
///
/// | type | what it is |
/// |---|---|
/// | [`MemorySlice`], [`MemorySliceMut`] | a part of a region, borrowed |
/// | [`MemorySlicePart`](crate::memory::MemorySlicePart) | a part of that, which keeps the rest |
/// | [`SharedMemorySlice`](crate::memory::SharedMemorySlice) | a part of a region that peers access too |
/// | [`MemoryRegion`](crate::MemoryRegion), [`SharedMemoryRegion`](crate::SharedMemoryRegion) | all of a region, as `&region` |
/// | [`GatherElement`], [`ScatterElement`] | one C `ibv_sge` |
#[cfg_attr(
    feature = "channel",
    doc = "| every [`OwnedBuffer`](crate::channel::OwnedBuffer) | memory that the value owns, such as a [`PooledBuffer`](crate::PooledBuffer) |"
)]
/// | `&B`, `&mut B` | any of these, lent |
/// | `[B; N]`, `(A, B)` … | several, in this order |
/// | `Vec<B>`, `&[B]`, `&mut [B]` | several, counted at run time |
/// | [`Inline`](crate::Inline), [`InlineList`](crate::memory::InlineList) | any bytes, which the post copies |
/// | `()` | a message without content |
///
/// A program may implement it for memory of its own, such as a
/// [`RawMemoryRegion`](crate::memory::RawMemoryRegion). A receive, a read or an atomic needs [`ScatterBuffer`] too.
#[cfg_attr(
    feature = "channel",
    doc = "A loop or a future needs [`OwnedBuffer`](crate::channel::OwnedBuffer)."
)]
///
/// ```
/// use std::sync::Arc;
/// use ibverbs::memory::{GatherBuffer, RawMemoryRegion, ScatterBuffer};
/// use ibverbs::{AccessFlags, SendWorkRequest, TransportError, ffi};
///
/// /// A part of memory that lives as long as the process, such as an arena of the program's own.
/// struct Message {
///     region: Arc<RawMemoryRegion<'static>>, // registered while a message is there
///     address: *mut u8,
///     len: u32,
/// }
///
/// impl Message {
///     fn element(&self) -> ffi::ibv_sge {
///         ffi::ibv_sge { addr: self.address as u64, length: self.len, lkey: self.region.lkey() }
///     }
/// }
///
/// // SAFETY: the memory is never freed, and each byte belongs to one message, which has no method that writes it. Each
/// // call names the same part.
/// unsafe impl GatherBuffer for Message {
///     type List = [ffi::ibv_sge; 1];
///     type Kept = Self;
///
///     fn gather(&self) -> ibverbs::Result<Self::List> {
///         Ok([self.element()])
///     }
/// }
///
/// // SAFETY: as above. The region is registered with `LOCAL_WRITE`.
/// unsafe impl ScatterBuffer for Message {
///     fn scatter(&mut self) -> ibverbs::Result<Self::List> {
///         Ok([self.element()])
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let domain = Arc::new(ibverbs::ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// # let prepared = domain.create_channel().build()?;
/// # let itself = prepared.endpoint();
/// # let mut channel = prepared.handshake(itself)?;
/// let arena: *mut u8 = Box::leak(Box::new(*b"hello.....")).as_mut_ptr();
/// // SAFETY: the memory is never freed, and nothing else uses it.
/// let region = unsafe { RawMemoryRegion::new(&domain, arena.cast(), 10, AccessFlags::LOCAL_WRITE) }?;
/// let region = Arc::new(region);
/// let message = Message { region: region.clone(), address: arena, len: 5 };
/// let mut room = Message { region, address: arena.wrapping_add(5), len: 5 };
/// channel.scope(|scope| {
///     let receive = scope.post_receive(&mut room)?;
///     scope.post(SendWorkRequest::new(&message))?.wait()?;
///     receive.wait()?;
///     Ok::<_, TransportError>(())
/// })?;
/// // SAFETY: no operation is in flight.
/// assert_eq!(unsafe { std::slice::from_raw_parts(room.address, 5) }, b"hello");
/// # Ok(())
/// # }
/// ```
///
/// # Safety
///
/// While the value lives (it may be moved) and the program does not access it,
///
///  - the memory that [`gather`](Self::gather) names stays valid and registered under its `lkey`, and its
///    addresses are those of this program: providers read short messages themselves;
///  - this program writes that memory only by atomic accesses;
///  - `gather` names the same memory, until the program changes the value; what the value dereferences to
///    ([`DerefMut`](std::ops::DerefMut)) does not change it.
///
/// Memory that the post copies ([`INLINE`](Self::INLINE)) need not be registered, only readable while the value
/// lives.
///
/// `gather` and `scatter` only return the elements. They run while a channel, a loop or a reactor is in use:
/// one that uses the same may wait for ever. If one panics, the value is leaked or dropped.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`",
    note = "bytes that are not registered can be sent as `Inline(bytes)`"
)]
pub unsafe trait GatherBuffer: Sized {
    /// The scatter/gather elements, such as `[ffi::ibv_sge; N]`, or an [`ElementList`](crate::memory::ElementList) if
    /// their number is known at run time only. Empty ones are left out.
    type List: private::List;

    /// What an operation in flight keeps and gives back: `Self`, or `()` for [`Inline`](crate::Inline).
    type Kept: private::Kept<Self> + GatherBuffer;

    /// Whether the post copies the memory, which then need not be registered.
    const INLINE: bool = false;

    /// Whether it, or one of its pieces, keeps a length. If not, [`received`](Self::received) is not called.
    const KEEPS_LENGTH: bool = false;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a piece is longer than 4 GiB - 1 bytes.
    fn gather(&self) -> Result<Self::List>;

    /// Whether this program can read the memory. If not, [`inline`](crate::WriteWorkRequest::inline) has no effect: no
    /// post copies it.
    #[inline(always)]
    fn is_in_reach(&self) -> bool {
        true
    }

    /// The length that the buffer keeps, if it [keeps one](Self::KEEPS_LENGTH). A receive sets it when the
    /// message has come.
    ///
    /// It stays in place while the value lives, even if the value is moved. Nothing accesses it during an
    /// operation.
    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        None
    }

    /// A message of `bytes` bytes was received into the buffer: sets the length that it keeps. Returns how many
    /// of them go to the next piece.
    #[inline(always)]
    fn received(&mut self, bytes: usize) -> usize {
        match self.kept_length() {
            // SAFETY: the buffer exists, and is borrowed exclusively.
            Some(kept) => unsafe { KeptLength::receive(kept, bytes) },
            None => bytes.saturating_sub(bytes_of(self)),
        }
    }
}

/// Memory that the device writes for a receive, a read or an atomic: one piece, or several that are filled in
/// order.
///
/// Implemented for [`MemorySliceMut`], [`MemorySlicePart`](crate::memory::MemorySlicePart),
/// [`SharedMemorySlice`](crate::memory::SharedMemorySlice), [`ScatterElement`], every buffer that owns its memory,
/// `&mut` to any of them, and arrays, tuples, vectors and `&mut` slices of them.
///
/// # Safety
///
/// The conditions of [`GatherBuffer`], for the memory that [`scatter`](Self::scatter) names. It is registered
/// for [`LOCAL_WRITE`](crate::AccessFlags::LOCAL_WRITE): providers write short messages themselves. While the
/// conditions hold, this program accesses that memory through no references but this value and references to
/// its atomic form. Any bytes are valid there.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "needed: `region.slice_mut(..)?` of a `MemoryRegion`, or `region.slice(..)?` of a `SharedMemoryRegion`"
)]
pub unsafe trait ScatterBuffer: GatherBuffer {
    /// Whether the type lets peers write the memory. If not, no read fills it on iWARP.
    const PEERS_MAY_WRITE: bool = true;

    /// The scatter/gather elements.
    ///
    /// # Errors
    ///
    /// Those of [`gather`](GatherBuffer::gather).
    fn scatter(&mut self) -> Result<Self::List>;

    /// The elements for a receive. A buffer that [keeps a length](GatherBuffer::kept_length) offers all of its
    /// capacity.
    ///
    /// # Errors
    ///
    /// Those of [`scatter`](Self::scatter).
    #[inline(always)]
    fn begin_receive(&mut self) -> Result<Self::List> {
        self.scatter()
    }
}

fn bytes_of<B: GatherBuffer>(buffer: &B) -> usize {
    let lengths = |mut list: B::List| list.as_mut().iter().map(|piece| piece.length as usize).sum();
    buffer.gather().map_or(0, lengths)
}

/// A buffer that can be lent to a `Scope`: its memory outlives the value.
///
/// # Safety
///
/// What [`GatherBuffer`] and [`ScatterBuffer`] promise while the value lives holds for the lifetime of the
/// type, even if the value is dropped or forgotten. So the type borrows its memory, and dropping it does not
/// touch that memory.
#[diagnostic::on_unimplemented(
    message = "`{Self}` owns its memory, so it cannot be lent to a scope",
    note = "lend it, `&buffer` or `&mut buffer`; or post it on a `Loop`"
)]
pub unsafe trait BorrowedBuffer {}

#[inline(always)]
pub(crate) fn keep<B: GatherBuffer>(buffer: B) -> B::Kept {
    private::Kept::keep(buffer)
}

pub(super) type One = [ffi::ibv_sge; 1];

impl<T> private::Sealed for MemorySlice<'_, T> {}
impl<T> private::Sealed for MemorySliceMut<'_, T> {}

// SAFETY: the slice borrows a region that is registered until it is dropped. An `Element` has no interior
// mutability, so nothing writes the memory meanwhile.
unsafe impl<T: Element> GatherBuffer for MemorySlice<'_, T> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: as above; the borrow is exclusive, so only this value gives access to the memory.
unsafe impl<T: Element> GatherBuffer for MemorySliceMut<'_, T> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.gather_element()?.as_raw()])
    }
}

// SAFETY: the slice borrows the region exclusively for its lifetime; any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for MemorySliceMut<'_, T> {
    const PEERS_MAY_WRITE: bool = false;

    #[inline]
    fn scatter(&mut self) -> Result<One> {
        Ok([*self.scatter_element()?.as_raw()])
    }
}

// SAFETY: the borrow of the region lasts for the lifetime of the type, and dropping a slice does nothing.
unsafe impl<T> BorrowedBuffer for MemorySlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T> BorrowedBuffer for MemorySliceMut<'_, T> {}

// SAFETY: the element borrows registered memory, which this program writes by atomic accesses only: that of a
// region or slice, or memory for which the caller of an `unsafe` function vouches, as for its address.
unsafe impl GatherBuffer for GatherElement<'_> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: as above.
unsafe impl GatherBuffer for ScatterElement<'_> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: the element borrows memory that nothing else refers to, or that is accessed atomically only. Any bytes
// are valid there.
unsafe impl ScatterBuffer for ScatterElement<'_> {
    #[inline]
    fn scatter(&mut self) -> Result<One> {
        Ok([*self.as_raw()])
    }
}

// SAFETY: an element is plain numbers; it borrows the memory for its lifetime.
unsafe impl BorrowedBuffer for GatherElement<'_> {}
// SAFETY: as above.
unsafe impl BorrowedBuffer for ScatterElement<'_> {}

// SAFETY: there is no memory.
unsafe impl GatherBuffer for () {
    type List = [ffi::ibv_sge; 0];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        Ok([])
    }
}

// SAFETY: there is no memory.
unsafe impl ScatterBuffer for () {
    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        Ok([])
    }
}

// SAFETY: there is no memory.
unsafe impl BorrowedBuffer for () {}

// SAFETY: while the reference lives, the buffer lives, and no other reference changes it or its memory.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &B {
    type List = B::List;
    type Kept = Self;

    const INLINE: bool = B::INLINE;

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
    }

    #[inline(always)]
    fn is_in_reach(&self) -> bool {
        (**self).is_in_reach()
    }
}

// SAFETY: as above.
#[diagnostic::do_not_recommend]
unsafe impl<B: GatherBuffer> GatherBuffer for &mut B {
    type List = B::List;
    type Kept = Self;

    const INLINE: bool = B::INLINE;
    const KEEPS_LENGTH: bool = B::KEEPS_LENGTH;

    #[inline(always)]
    fn gather(&self) -> Result<B::List> {
        (**self).gather()
    }

    #[inline(always)]
    fn is_in_reach(&self) -> bool {
        (**self).is_in_reach()
    }

    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        (**self).kept_length()
    }

    #[inline(always)]
    fn received(&mut self, bytes: usize) -> usize {
        (**self).received(bytes)
    }
}

// SAFETY: as above; and nothing else accesses the buffer, which is borrowed exclusively.
#[diagnostic::do_not_recommend]
unsafe impl<B: ScatterBuffer> ScatterBuffer for &mut B {
    const PEERS_MAY_WRITE: bool = B::PEERS_MAY_WRITE;

    #[inline(always)]
    fn scatter(&mut self) -> Result<B::List> {
        (**self).scatter()
    }

    #[inline(always)]
    fn begin_receive(&mut self) -> Result<B::List> {
        (**self).begin_receive()
    }
}

// SAFETY: the buffer is borrowed for the lifetime of the type: until then it is neither dropped nor changed.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &B {}
// SAFETY: as above.
unsafe impl<B: GatherBuffer> BorrowedBuffer for &mut B {}

/// How many bytes of a buffer are in use: a send takes them, and a receive sets the number when it has ended.
///
/// A `PooledBuffer` keeps one, and so may a buffer of the program's own: see
/// [`GatherBuffer::kept_length`](crate::memory::GatherBuffer::kept_length).
pub struct KeptLength {
    len: u32,
    capacity: u32,
}

impl KeptLength {
    /// The length of an empty buffer with room for `capacity` bytes.
    pub const fn new(capacity: u32) -> Self {
        Self { len: 0, capacity }
    }

    /// The number of bytes in use.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        self.len
    }

    /// The most that it can be.
    #[inline(always)]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Sets it, to at most the capacity.
    #[inline(always)]
    pub fn set(&mut self, len: u32) {
        self.len = len;
        if len > self.capacity {
            self.fill();
        }
    }

    /// A branch not taken costs less than `min`.
    #[cold]
    #[inline(never)]
    fn fill(&mut self) {
        self.len = self.capacity;
    }

    /// Returns how many of the `bytes` received go to the next piece.
    ///
    /// # Safety
    ///
    /// The buffer that keeps `this` still exists, and nothing else accesses it.
    #[inline(always)]
    pub(crate) unsafe fn receive(this: NonNull<Self>, bytes: usize) -> usize {
        // SAFETY: the caller vouches for it.
        let kept = unsafe { &mut *this.as_ptr() };
        kept.set(u32::try_from(bytes).unwrap_or(u32::MAX));
        bytes - kept.len as usize
    }
}

debug! { KeptLength, self, len: self.len, capacity: self.capacity }
