use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, &'static u8>);

fn main() {}
