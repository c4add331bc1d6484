use ibverbs::MemoryRegion;

pub struct Case<'pd>(pub MemoryRegion<'pd, char>);

fn main() {}
