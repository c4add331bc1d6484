use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, char>); //~ ERROR
pub struct Case<'pd>(pub MemoryRegion<'pd, u32>); //~ RIGHT
