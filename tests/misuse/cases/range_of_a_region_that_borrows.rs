use std::sync::Arc;

use ibverbs::memory::{RawMemoryRange, RawMemoryRegion};

pub fn case(region: RawMemoryRegion<'_>) -> RawMemoryRange { //~ ERROR
pub fn case(region: RawMemoryRegion<'static>) -> RawMemoryRange { //~ RIGHT
    RawMemoryRange::new(Arc::new(region), ..).unwrap()
}
