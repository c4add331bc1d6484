use zerocopy::{FromBytes, Immutable};

#[derive(Clone, Copy, FromBytes, Immutable)]
#[repr(C)]
pub struct Entry(u8, u64);

pub struct Case<'pd>(pub ibverbs::MemoryRegion<'pd, Entry>);

fn main() {}
