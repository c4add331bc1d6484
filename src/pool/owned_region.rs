//! A whole region as the buffer of an operation.

use crate::channel::OwnedBuffer;
use crate::error::Result;
use crate::ffi;
use crate::memory::{Element, GatherBuffer, MemoryRegion, ScatterBuffer};

// SAFETY: the region owns its memory, which stays where it is, is registered for local writes until it
// is dropped, and is accessed through the region only.
unsafe impl<T: Element> GatherBuffer for Box<MemoryRegion<'static, T>> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> Result<Self::List> {
        self.slice(..)?.gather()
    }
}

// SAFETY: as above. Any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for Box<MemoryRegion<'static, T>> {
    const PEERS_MAY_WRITE: bool = false;

    fn scatter(&mut self) -> Result<Self::List> {
        self.slice_mut(..)?.scatter()
    }
}

// SAFETY: it borrows nothing, and may be used on any thread.
unsafe impl<T: Element> OwnedBuffer for Box<MemoryRegion<'static, T>> {}
