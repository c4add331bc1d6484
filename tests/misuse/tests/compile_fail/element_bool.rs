use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, bool>);

fn main() {}
