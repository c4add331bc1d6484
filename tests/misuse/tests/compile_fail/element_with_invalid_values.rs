use zerocopy::{Immutable, IntoBytes};

#[derive(Clone, Copy, Immutable, IntoBytes)]
#[repr(u8)]
pub enum Choice {
    No = 0,
    Yes = 1,
}

pub struct Case<'pd>(pub ibverbs::SharedMemoryRegion<'pd, Choice>);

fn main() {}
