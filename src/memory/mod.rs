//! Registered memory: the regions, the parts of them that requests name, and the rules for both.
//!
//! # Which region is for what
//!
//! | region | memory | who accesses it |
//! |---|---|---|
//! | [`MemoryRegion`] | allocated here, owned | this program and its own device |
//! | [`SharedMemoryRegion`] | allocated here, owned | peers too: RDMA reads, writes and atomics |
//! | [`BorrowedMemoryRegion`] | a `&mut [T]` of the caller | this program and its own device |
//! | [`ReadOnlyMemoryRegion`] | a `&[T]` of the caller | its own device, to read it only |
//! | [`RawMemoryRegion`] | owned by something else: mapped files, GPUs, dma-bufs, other processes | whatever its access flags say; making one is `unsafe` |
//! | [`DeviceMemoryRegion`] | on the device itself ([`DeviceMemory`]) | peers and the device, without the bus |
//! | [`ImplicitMemoryRegion`] | the whole address space, paged on demand | this program and its own device |
//! | [`NullMemoryRegion`] | none: writes are discarded, reads return zeros | this program's requests |
//!
//! A [`MemoryWindow`] opens a part of a shared or raw region to a peer, and closes it again, without a
//! system call. A [`RemoteMemoryRegion`] describes a region of a peer, which has sent the description:
//! plain numbers.
//!
//! # The rule that separates them
//!
//! This program never holds a Rust reference to memory that a peer can write at any time. So a region
//! for local access derefs to `[T]`, and a region for peers does not: [`SharedMemorySlice`] copies
//! elements (`shared_copy`), or accesses integers in place by atomic operations (`atomic_element`). Any
//! bytes are a valid value of an element's type ([`Element`]), because devices and peers write bytes.
//!
//! # From a region to a request
//!
//! | layer | what names the memory | who keeps it alive |
//! |---|---|---|
//! | posting, `unsafe` | [`GatherBuffer`], [`ScatterBuffer`]: C's elements, slices, and arrays and tuples of them | the caller, until the completion was polled |
//! | channels, safe | the same, as a [`BorrowedBuffer`] or an [`OwnedBuffer`](crate::OwnedBuffer) | the borrow of the region, or the channel |
//!
//! Files: `options`, `allocation` and `huge_pages` obtain memory, `registration` registers it,
//! `owned_buffer` ties the two together; `accessors` and `byte_region` hold what several regions share.

mod access;
mod accessors;
mod advice;
mod allocation;
mod atomic_element;
mod borrowed_region;
mod buffer;
mod byte_region;
mod device_memory;
mod disjoint;
mod huge_pages;
mod implicit_region;
mod inline;
mod null_region;
mod options;
mod owned_buffer;
mod raw_region;
mod region;
mod region_buffer;
mod registration;
mod remote_region;
mod remote_struct;
mod scatter_gather;
pub(crate) mod shared_copy;
mod shared_region;
mod shared_slice;
mod slice;
mod slice_part;
mod window;

pub use access::AccessFlags;
pub use advice::MemoryAdvice;
pub use atomic_element::AtomicElement;
pub use borrowed_region::{BorrowedMemoryRegion, ReadOnlyMemoryRegion};
#[cfg(feature = "channel")]
pub(crate) use buffer::PlainList;
pub(crate) use buffer::kept_whole;
pub use buffer::{BorrowedBuffer, GatherBuffer, ScatterBuffer};
pub use device_memory::{DeviceMemory, DeviceMemoryRegion};
pub use huge_pages::HugePages;
pub use implicit_region::ImplicitMemoryRegion;
pub(crate) use inline::Gathered;
pub use inline::{Inline, InlineList};
pub use null_region::NullMemoryRegion;
pub use options::RegionOptions;
pub use raw_region::RawMemoryRegion;
pub use region::MemoryRegion;
pub use region_buffer::RegionBuffer;
pub use registration::{ReregisterError, ReregisteredState, Reregistration};
pub use remote_region::RemoteMemoryRegion;
pub use remote_struct::{Field, RemoteElement, RemoteRegion};
pub use scatter_gather::{
    Element, GatherElement, LocalMemory, LocalMemoryMut, MAX_SGE_LENGTH, ScatterElement,
};
pub(crate) use scatter_gather::{private, resolve, sge};
pub use shared_region::SharedMemoryRegion;
pub use shared_slice::SharedMemorySlice;
pub use slice::{MemorySlice, MemorySliceMut};
pub use slice_part::MemorySlicePart;
pub use window::{MemoryWindow, MemoryWindowType};
