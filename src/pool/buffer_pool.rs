//! Chunks of one registered region.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use super::free_chunks::FreeChunks;
use super::waiting::Waiting;
use crate::channel::OwnedBuffer;
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::fields::getters;
use crate::memory::{AccessFlags, GatherBuffer, RegionOptions, ScatterBuffer, SharedMemoryRegion};
use crate::parent::Parent;

/// Chunks begin at multiples of this, so that two of them share no cache line.
const ALIGNMENT: usize = 64;

/// Equal chunks of one registered region, to be taken and given back on any thread.
///
/// A clone is the same pool. The region is deregistered when the pool and all its buffers are dropped.
/// Taking and giving back is lock-free: a bit for each chunk says whether it is free.
///
/// ```
/// use std::sync::Arc;
///
/// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let domain = Arc::new(ProtectionDomain::new(context)?);
/// let pool = BufferPool::new(&domain, 4096, 1024, AccessFlags::empty())?;
/// let mut buffer = pool.take().expect("1024 buffers");
/// buffer[..5].copy_from_slice(b"hello");
/// buffer.set_len(5)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BufferPool {
    pool: Arc<Pool>,
}

struct Pool {
    region: SharedMemoryRegion<'static, u8>,
    chunks: Box<[UnsafeCell<Chunk>]>,
    /// The bytes of a chunk.
    chunk_len: u32,
    free: FreeChunks,
    waiting: Waiting,
}

// SAFETY: a chunk is accessed by the buffer that has it alone, and everything else may be shared.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// What a buffer needs of its chunk and pool.
struct Chunk {
    /// As it is posted: its address and key, and the length that the buffer has now.
    piece: ffi::ibv_sge,
    capacity: u32,
    index: u32,
    /// That of the pool's `Arc`. Every buffer has a reference of its own.
    pool: *const Pool,
}

/// A chunk of a [`BufferPool`]: an [`OwnedBuffer`]. It goes back to the pool when it is dropped.
///
/// It dereferences to its bytes, which are what the latest user of the chunk left there. The length is
/// that of the chunk, until it is [set](Self::set_len).
pub struct PooledBuffer {
    /// One word, since a buffer moves into and out of each operation.
    chunk: NonNull<Chunk>,
}

// SAFETY: the chunk is the buffer's alone, and its pool may be shared.
unsafe impl Send for PooledBuffer {}
// SAFETY: as above.
unsafe impl Sync for PooledBuffer {}

impl BufferPool {
    /// `ibv_reg_mr`: allocates and registers memory for `chunks` chunks of `chunk_len` bytes, as `options`
    /// say, such as [huge pages](RegionOptions::huge_pages).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there would be no chunks, or empty ones, or longer ones than 4 GiB - 1; or the options
    ///    let peers access the memory, or give it [another address](RegionOptions::iova).
    ///  - Those of [`SharedMemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(
        domain: impl Into<Parent<'static, ProtectionDomain<'static>>>,
        chunk_len: usize,
        chunks: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let most = u64::from(u32::MAX);
        if chunk_len == 0 || chunk_len as u64 > most {
            let what = "the length of a chunk";
            return Err(Error::out_of_range(VERB, what, chunk_len as u64, 1, most));
        }
        if chunks == 0 || chunks as u64 > most {
            let what = "the number of chunks";
            return Err(Error::out_of_range(VERB, what, chunks as u64, 1, most));
        }
        // Shorter than 2^33, so neither overflows.
        let stride = chunk_len.next_multiple_of(ALIGNMENT);
        let Some(len) = stride.checked_mul(chunks) else {
            return Err(Error::invalid(VERB, "the chunks are more than memory can hold"));
        };
        let region = SharedMemoryRegion::new(domain, len, options)?;
        let local = AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING;
        let reason = "peers must not access the buffers of a pool";
        Error::invalid_if(!(region.access() - local).is_empty(), VERB, reason)?;
        let [first] = region.slice(..chunk_len)?.scatter()?;
        let mut all = Vec::new();
        let (Some(free), Ok(())) = (FreeChunks::new(chunks), all.try_reserve_exact(chunks)) else {
            return Err(Error::with_reason(VERB, libc::ENOMEM, "no memory for the pool"));
        };
        let chunk_len = chunk_len as u32;
        all.extend((0..chunks).map(|index| {
            let piece = ffi::ibv_sge { addr: first.addr + (index * stride) as u64, ..first };
            let (capacity, index) = (chunk_len, index as u32);
            UnsafeCell::new(Chunk { piece, capacity, index, pool: ptr::null() })
        }));
        let (chunks, waiting) = (all.into(), Waiting::default());
        let pool = Arc::into_raw(Arc::new(Pool { region, chunks, chunk_len, free, waiting }));
        // SAFETY: the pointer is that of a new `Arc`, and only this accesses what is there.
        let pool = unsafe {
            for chunk in &(*pool).chunks {
                (*chunk.get()).pool = pool;
            }
            Arc::from_raw(pool)
        };
        Ok(Self { pool })
    }

    /// A buffer, or `None` if all are in use.
    pub fn take(&self) -> Option<PooledBuffer> {
        let index = self.pool.free.take()?;
        let chunk = self.pool.chunks[index as usize].get();
        // SAFETY: the pointer is of an element, and no buffer has the chunk: it was free until now. The pool's pointer is
        // that of its `Arc`, which is alive.
        unsafe {
            (*chunk).piece.length = (*chunk).capacity;
            Arc::increment_strong_count((*chunk).pool);
            Some(PooledBuffer { chunk: NonNull::new_unchecked(chunk) })
        }
    }

    /// A buffer, when one is free: for a task of an async program. Tasks get theirs in the order in which they began to
    /// wait, unless one that comes later finds a chunk before it. The future may be dropped at any time. It is woken by the
    /// drop of a buffer, so do not wait for a chunk that the task itself holds, or that only a message would free that does
    /// not come.
    pub async fn wait(&self) -> PooledBuffer {
        let buffer = self.pool.waiting.wait(|| self.take()).await;
        // Who was woken for another one may never come.
        self.pool.waiting.wake_one_if(|| self.available() > 0);
        buffer
    }

    getters! { self,
        /// The number of chunks.
        chunks: usize => self.pool.chunks.len();

        /// The number of bytes of a chunk.
        chunk_len: usize => self.pool.chunk_len as usize;

        /// The number of chunks that are free at this moment.
        available: usize => self.pool.free.count();
    }
}

debug! {
    BufferPool, self,
    chunk_len: self.chunk_len(), chunks: self.chunks(), available: self.available(), ..
}

impl Drop for PooledBuffer {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: nothing uses the buffer after this.
        unsafe { give_back(self.chunk) }
    }
}

/// Gives a chunk back. A function of the buffer's field: one that got the buffer's address would keep the buffer in
/// memory.
///
/// # Safety
///
/// It is the chunk of a buffer, which nothing uses any more.
#[inline(never)]
unsafe fn give_back(chunk: NonNull<Chunk>) {
    // SAFETY: the chunk is the caller's, and lives as long as its pool, of which the buffer has a reference.
    let (pool, index) = unsafe { (Arc::from_raw((*chunk.as_ptr()).pool), chunk.as_ref().index) };
    pool.free.give_back(index);
    pool.waiting.wake_one();
}

impl PooledBuffer {
    #[inline(always)]
    fn chunk(&self) -> &Chunk {
        // SAFETY: the chunk is this buffer's alone, and lives as long as its pool, of which the buffer has a reference.
        unsafe { self.chunk.as_ref() }
    }

    /// The number of bytes of the chunk: the most that [`set_len`](Self::set_len) takes.
    pub fn capacity(&self) -> usize {
        self.chunk().capacity as usize
    }

    /// Sets the length: of what is sent, or the most that is received. The bytes stay as they are.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: that is more than the [capacity](Self::capacity).
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity() {
            let what = "the length of a pooled buffer";
            let (len, most) = (len as u64, self.capacity() as u64);
            return Err(Error::out_of_range("ibv_sge", what, len, 0, most));
        }
        // SAFETY: as at `chunk`, and the borrow is exclusive.
        unsafe { self.chunk.as_mut() }.piece.length = len as u32;
        Ok(())
    }

    fn data(&self) -> *mut u8 {
        let Chunk { piece, pool, .. } = self.chunk();
        // SAFETY: the pool is alive, as at `chunk`.
        let region = unsafe { &(**pool).region };
        // The region has no iova of its own.
        region.as_slice().as_ptr().with_addr(piece.addr as usize)
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the chunk is a part of the region, which lives as long as the pool, and is initialised.
        // It is ours alone: its bit was 1 when it was taken and is 0 until this is dropped, peers have no
        // access, and the device has none while the buffer is not in an operation, which would own it.
        unsafe { slice::from_raw_parts(self.data(), self.chunk().piece.length as usize) }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.data(), self.chunk().piece.length as usize) }
    }
}

// SAFETY: the memory is registered for local writes for as long as the pool exists, which this keeps
// alive. Only this value accesses it, as at `deref`.
unsafe impl GatherBuffer for PooledBuffer {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        Ok([self.chunk().piece])
    }
}

// SAFETY: as above. Any bytes are a valid `u8`.
unsafe impl ScatterBuffer for PooledBuffer {
    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        self.gather()
    }
}

// SAFETY: it borrows nothing, and may be used on any thread. The chunk goes back to the pool when it is dropped.
unsafe impl OwnedBuffer for PooledBuffer {}

debug! { PooledBuffer, self, len: self.chunk().piece.length, capacity: self.capacity(), .. }
