use zerocopy::{Immutable, IntoBytes}; //~ ERROR
use zerocopy::{FromBytes, Immutable, IntoBytes}; //~ RIGHT

#[derive(Clone, Copy, Immutable, IntoBytes)] //~ ERROR
#[repr(u8)] //~ ERROR
pub enum Choice { //~ ERROR
    No = 0, //~ ERROR
    Yes = 1, //~ ERROR
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)] //~ RIGHT
#[repr(transparent)] //~ RIGHT
pub struct Choice(u8); //~ RIGHT
//~ RIGHT
impl Choice { //~ RIGHT
    pub const NO: Self = Self(0); //~ RIGHT
    pub const YES: Self = Self(1); //~ RIGHT
}

pub struct Case<'pd>(pub ibverbs::SharedMemoryRegion<'pd, Choice>);
