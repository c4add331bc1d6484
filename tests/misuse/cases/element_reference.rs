use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, &'static u8>); //~ ERROR
pub struct Case<'pd>(pub MemoryRegion<'pd, usize>); //~ RIGHT
