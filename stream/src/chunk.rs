//! Pooled buffers as those of messages.

use ibverbs::PooledBuffer;

use crate::conn::Chunk;

impl Chunk for PooledBuffer {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn set_len(&mut self, len: usize) {
        let set = PooledBuffer::set_len(self, len);
        debug_assert!(set.is_ok(), "within its capacity");
    }

    fn capacity(&self) -> usize {
        PooledBuffer::capacity(self)
    }
}
