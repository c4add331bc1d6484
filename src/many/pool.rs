//! Chunks of one registered region.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::Arc;

use super::free_chunks::FreeChunks;
use super::waiting::Waiting;
use crate::channel::OwnedBuffer;
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{
    AccessFlags, GatherBuffer, RegionOptions, ScatterBuffer, SharedMemoryRegion, kept_whole,
    private,
};
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
    /// The element of the first chunk.
    first: ffi::ibv_sge,
    /// The bytes of a chunk.
    chunk_len: usize,
    /// The bytes from the beginning of one chunk to that of the next.
    stride: usize,
    chunks: usize,
    free: FreeChunks,
    waiting: Waiting,
}

/// A chunk of a [`BufferPool`]: an [`OwnedBuffer`]. It goes back to the pool when it is dropped.
///
/// It dereferences to its bytes, which are what the latest user of the chunk left there. The length is
/// that of the chunk, until it is [set](Self::set_len).
pub struct PooledBuffer {
    /// Taken when this is dropped.
    pool: ManuallyDrop<Arc<Pool>>,
    index: u32,
    len: u32,
}

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
        if !(region.access() - local).is_empty() {
            return Err(Error::invalid(VERB, "peers must not access the buffers of a pool"));
        }
        let Some(free) = FreeChunks::new(chunks) else {
            return Err(Error::with_reason(VERB, libc::ENOMEM, "no memory for the pool"));
        };
        let [first] = region.slice(..chunk_len)?.scatter()?;
        let waiting = Waiting::default();
        Ok(Self {
            pool: Arc::new(Pool { region, first, chunk_len, stride, chunks, free, waiting }),
        })
    }

    /// A buffer, or `None` if all are in use.
    pub fn take(&self) -> Option<PooledBuffer> {
        let index = self.pool.free.take()?;
        let len = self.pool.chunk_len as u32;
        Some(PooledBuffer { pool: ManuallyDrop::new(self.pool.clone()), index, len })
    }

    /// A buffer, when one is free: for a task of an async program. Tasks get theirs in the order in which they began to
    /// wait, unless one that comes later finds a chunk before it. The future may be dropped at any time. It is woken by the
    /// drop of a buffer, so do not wait for a chunk that the task itself holds, or that only a message would free that does
    /// not come.
    pub async fn wait(&self) -> PooledBuffer {
        self.pool.waiting.wait(|| self.take()).await
    }

    /// The number of chunks.
    pub fn chunks(&self) -> usize {
        self.pool.chunks
    }

    /// The number of bytes of a chunk.
    pub fn chunk_len(&self) -> usize {
        self.pool.chunk_len
    }

    /// The number of chunks that are free at this moment.
    pub fn available(&self) -> usize {
        self.pool.free.count()
    }
}

debug! {
    BufferPool, self,
    chunk_len: self.chunk_len(), chunks: self.chunks(), available: self.available(), ..
}

impl Drop for PooledBuffer {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: it is taken once, here.
        give_back(unsafe { ManuallyDrop::take(&mut self.pool) }, self.index);
    }
}

/// Gives a chunk back. A function of the buffer's fields: one that got the buffer's address would keep the buffer in
/// memory.
#[inline(never)]
fn give_back(pool: Arc<Pool>, index: u32) {
    pool.free.give_back(index);
    pool.waiting.wake_one();
}

impl PooledBuffer {
    /// The number of bytes of the chunk: the most that [`set_len`](Self::set_len) takes.
    pub fn capacity(&self) -> usize {
        self.pool.chunk_len
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
        self.len = len as u32;
        Ok(())
    }

    /// The offset of the chunk in the region.
    #[inline]
    fn offset(&self) -> usize {
        self.index as usize * self.pool.stride
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: the chunk is a part of the region.
        unsafe { self.pool.region.as_slice().as_ptr().add(self.offset()) }
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the chunk is a part of the region, which lives as long as the pool, and is initialised.
        // It is ours alone: its bit was 1 when it was taken and is 0 until this is dropped, peers have no
        // access, and the device has none while the buffer is not in an operation, which would own it.
        unsafe { slice::from_raw_parts(self.data(), self.len as usize) }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.data(), self.len as usize) }
    }
}

impl private::Sealed for PooledBuffer {}

// SAFETY: the memory is registered for local writes for as long as the pool exists, which this keeps
// alive. Only this value accesses it, as at `deref`.
unsafe impl GatherBuffer for PooledBuffer {
    type List = [ffi::ibv_sge; 1];

    kept_whole!();

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        let first = self.pool.first;
        let addr = first.addr + self.offset() as u64;
        Ok([ffi::ibv_sge { addr, length: self.len, ..first }])
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

debug! { PooledBuffer, self, len: self.len, capacity: self.capacity(), .. }
