//! A whole region as the buffer of an operation.

use crate::channel::OwnedBuffer;
use crate::channel::owned_buffer_sealed::Sealed;
use crate::error::Result;
use crate::ffi;
use crate::memory::{Element, MemoryRegion, ScatterBuffer};

impl<T: Element> Sealed for Box<MemoryRegion<'static, T>> {}

// SAFETY: the region owns its memory, which stays where it is, is registered for local writes until it
// is dropped, and is accessed through the region only. Any bytes are a valid `Element`.
unsafe impl<T: Element> OwnedBuffer for Box<MemoryRegion<'static, T>> {
    const PEERS_MAY_WRITE: bool = false;

    fn element(&mut self) -> Result<ffi::ibv_sge> {
        let [element] = self.slice_mut(..)?.scatter()?;
        Ok(element)
    }
}
