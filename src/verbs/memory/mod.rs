//! Registered memory: regions, and the parts of them that requests name.
//!
//! [`Region`] has a table of its kinds. A [`MemoryWindow`] opens a part of a shared or raw region to a peer,
//! and closes it again, without a system call. A [`RemoteMemoryRegion`] describes a region of a peer, in plain
//! numbers that the peer has sent.
//!
//! # The rule that separates them
//!
//! This program never holds a Rust reference to memory that a peer can write at any time. So a region for local
//! access derefs to `[T]`, and a region for peers does not: [`SharedMemorySlice`] copies elements, or accesses
//! integers in place by atomic operations. Any bytes are a valid value of an element's type ([`Element`]),
//! because devices and peers write bytes.
//!
//! # From a region to a request
//!
//! | layer | what names the memory | who keeps it alive |
//! |---|---|---|
//! | posting, `unsafe` | [`GatherBuffer`], [`ScatterBuffer`]: C's elements, slices, and arrays and tuples of them | the caller, until the completion was polled |
#![cfg_attr(
    feature = "channel",
    doc = "| channels, safe | the same, as a [`BorrowedBuffer`] or an [`OwnedBuffer`](crate::channel::OwnedBuffer) | the borrow of the region, or the channel |"
)]
//!
//! A [`MemoryRange`] is a part of a region in an `Arc`, as the buffer of an operation that owns its memory. [`SharedMemory`] is
//! memory of files, of other processes and of other libraries, of which any parts are registered.
//!
//! Files: `options` and `allocation` obtain memory, `registration` registers it; `region` has what all regions
//! share, and `owned_region` to `special_regions` have the kinds.

mod allocation;
mod buffer;
mod device_memory;
mod inline;
#[cfg(feature = "mlx5")]
mod memory_key;
mod options;
mod owned_region;
mod range;
mod raw_region;
mod region;
mod region_buffer;
mod registration;
mod remote_region;
mod remote_struct;
mod scatter_gather;
mod sge_list;
pub(crate) mod shared_copy;
mod shared_memory;
mod shared_region;
mod shared_slice;
mod slice;
mod slice_part;
mod special_regions;
mod window;

pub use allocation::HugePages;
#[cfg(feature = "channel")]
pub(crate) use buffer::keep;
pub use buffer::{BorrowedBuffer, GatherBuffer, KeptLength, ScatterBuffer};
pub use device_memory::{DeviceMemory, DeviceMemoryRegion};
pub(crate) use inline::Gathered;
pub use inline::{Inline, InlineList};
#[cfg(feature = "mlx5")]
pub use memory_key::MemoryKey;
pub use options::{AccessFlags, MemoryAdvice, RegionOptions};
pub use owned_region::{BorrowedMemoryRegion, MemoryRegion, ReadOnlyMemoryRegion};
pub use range::{MemoryRange, RawMemoryRange, SharedMemoryRange};
pub use raw_region::RawMemoryRegion;
pub use region::Region;
pub(crate) use region::{InMemory, Peers};
pub use region_buffer::RegionBuffer;
pub use registration::{PinnedMemory, ReregisterError, ReregisteredState, Reregistration};
pub use remote_region::RemoteMemoryRegion;
pub use remote_struct::{Field, RemoteElement, RemoteRegion};
pub(crate) use scatter_gather::PIECE;
pub use scatter_gather::{
    Element, GatherElement, LocalMemory, LocalMemoryMut, MAX_SGE_LENGTH, ScatterElement,
};
pub use sge_list::ElementList;
pub use shared_memory::SharedMemory;
pub use shared_region::{AtomicElement, SharedMemoryRegion};
pub use shared_slice::SharedMemorySlice;
pub use slice::{MemorySlice, MemorySliceMut};
pub use slice_part::MemorySlicePart;
pub use special_regions::{ImplicitMemoryRegion, NullMemoryRegion};
pub use window::{MemoryWindow, MemoryWindowType};
