use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, u8>);
