use zerocopy::{FromBytes, Immutable, IntoBytes};

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub struct Entry(u8, [u8; 7], u64);

pub struct Case<'pd>(pub ibverbs::MemoryRegion<'pd, Entry>);
