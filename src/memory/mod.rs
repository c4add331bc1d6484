//! memory

mod access;
mod advice;
mod allocation;
mod atomic_element;
mod borrowed_region;
mod buffer;
mod byte_region;
mod device_memory;
mod implicit_region;
mod null_region;
mod options;
mod owned_buffer;
mod raw_region;
mod region;
mod registration;
mod remote_region;
mod scatter_gather;
pub(crate) mod shared_copy;
mod shared_region;
mod shared_slice;
mod slice_part;
mod window;

pub use access::AccessFlags;
pub use advice::MemoryAdvice;
pub use allocation::HugePages;
pub use atomic_element::AtomicElement;
pub use borrowed_region::{BorrowedMemoryRegion, ReadOnlyMemoryRegion};
pub use buffer::{GatherBuffer, ScatterBuffer};
pub use device_memory::{DeviceMemory, DeviceMemoryRegion};
pub use implicit_region::ImplicitMemoryRegion;
pub use null_region::NullMemoryRegion;
pub use options::RegionOptions;
pub use raw_region::RawMemoryRegion;
pub use region::MemoryRegion;
pub use registration::{ReregisterError, ReregisteredState, Reregistration};
pub use remote_region::RemoteMemoryRegion;
pub use scatter_gather::{
    Element, GatherElement, LocalMemory, MAX_SGE_LENGTH, MemorySlice, MemorySliceMut,
    ScatterElement,
};
pub(crate) use scatter_gather::{private, resolve, sge};
pub use shared_region::SharedMemoryRegion;
pub use shared_slice::SharedMemorySlice;
pub use slice_part::MemorySlicePart;
pub use window::{MemoryWindow, MemoryWindowType};
