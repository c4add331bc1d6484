use zerocopy::{FromBytes, Immutable}; //~ ERROR
use zerocopy::{FromBytes, Immutable, IntoBytes}; //~ RIGHT

#[derive(Clone, Copy, FromBytes, Immutable)] //~ ERROR
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)] //~ RIGHT
#[repr(C)]
pub struct Entry(u8, u64); //~ ERROR
pub struct Entry(u8, [u8; 7], u64); //~ RIGHT

pub struct Case<'pd>(pub ibverbs::MemoryRegion<'pd, Entry>);
