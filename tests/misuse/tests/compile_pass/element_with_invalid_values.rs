use zerocopy::{FromBytes, Immutable, IntoBytes};

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(transparent)]
pub struct Choice(u8);

impl Choice {
    pub const NO: Self = Self(0);
    pub const YES: Self = Self(1);
}

pub struct Case<'pd>(pub ibverbs::SharedMemoryRegion<'pd, Choice>);
