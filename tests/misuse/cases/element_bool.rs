use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, bool>); //~ ERROR
pub struct Case<'pd>(pub MemoryRegion<'pd, u8>); //~ RIGHT
