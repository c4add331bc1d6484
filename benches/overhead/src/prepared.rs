//! The verbs layer, with requests that are prepared once.

use ibverbs::operation::{PreparedReceive, SendList};
use ibverbs::{
    MemoryRegion, ReceiveWorkRequest, Result, SendWorkRequest, WorkCompletion, WriteWorkRequest,
    memory::GatherElement, operation::PreparedRequest,
};

use crate::rig::{LENGTH, Rig, WINDOW, WINDOW_OPERATIONS};
use crate::verbs::{complete, complete_one};

#[inline(never)]
pub(crate) fn w1(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let elements = [region.gather_element(..LENGTH)?];
    let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
    let mut completions = [WorkCompletion::default()];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: the region lives on, and nobody writes it.
        unsafe { queue_pair.post_prepared(&mut request, wr_id)? };
        complete_one!(queue, completions, sum);
    }
    Ok(sum)
}

#[inline(never)]
pub(crate) fn w2(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let (there, mut here) = region.slice_mut(..)?.split_at(LENGTH)?;
    let elements = [there.gather_element()?];
    let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
    let mut elements = [here.scatter_element()?];
    let mut receive = PreparedReceive::new(ReceiveWorkRequest::new(&mut elements))?;
    let mut completions = [WorkCompletion::default(); 2];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: the region lives on, and nobody else accesses it.
        unsafe {
            queue_pair.post_prepared(&mut receive, wr_id)?;
            queue_pair.post_prepared(&mut request, wr_id)?;
        }
        complete!(queue, completions, 2, sum);
    }
    Ok(sum)
}

#[inline(never)]
pub(crate) fn w3(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let elements = [region.gather_element(..LENGTH)?];
    let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
    let mut completions = [WorkCompletion::default(); WINDOW];
    let mut sum = 0;
    let mut wr_id = 0;
    while wr_id < operations {
        for _ in 0..WINDOW {
            // SAFETY: as in `w1`.
            unsafe { queue_pair.post_prepared(&mut request, wr_id)? };
            wr_id += 1;
        }
        complete!(queue, completions, WINDOW, sum);
    }
    Ok(sum)
}

#[inline(never)]
pub(crate) fn w4(rig: &mut Rig, operations: u64) -> Result<u64> {
    let remote = rig.remote();
    let Rig { queue_pair, queue, region, .. } = rig;
    let elements = [region.gather_element(..LENGTH)?];
    let mut request = PreparedRequest::new(WriteWorkRequest::new(&elements, remote), 0)?;
    let mut completions = [WorkCompletion::default()];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: as in `w1`.
        unsafe { queue_pair.post_prepared(&mut request, wr_id)? };
        complete_one!(queue, completions, sum);
    }
    Ok(sum)
}

/// The messages of a window.
fn elements<'a>(region: &'a MemoryRegion<'static, u8>) -> [GatherElement<'a>; WINDOW] {
    std::array::from_fn(|index| {
        let start = index * LENGTH;
        region.gather_element(start..start + LENGTH).expect("it is within the region")
    })
}

/// A list that is linked once.
#[inline(never)]
pub(crate) fn w5(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let elements = elements(region).map(|element| [element]);
    let mut entries = elements.each_ref().map(|element| {
        PreparedRequest::new(SendWorkRequest::new(element), 0).expect("it is short")
    });
    let mut list = SendList::new(&mut entries)?;
    let mut completions = [WorkCompletion::default(); WINDOW];
    let mut sum = 0;
    let mut start = 0;
    while start < operations {
        list.set_wr_ids(start);
        // SAFETY: as in `w1`.
        unsafe { queue_pair.post_list(&mut list) }.map_err(|error| error.error)?;
        complete!(queue, completions, WINDOW, sum);
        start += WINDOW_OPERATIONS;
    }
    Ok(sum)
}

/// The extended interface.
#[inline(never)]
pub(crate) fn w5_extended(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let elements = elements(region);
    let mut completions = [WorkCompletion::default(); WINDOW];
    let mut sum = 0;
    let mut start = 0;
    while start < operations {
        // SAFETY: as in `w1`.
        unsafe {
            queue_pair.batch(|batch| {
                for (wr_id, element) in (start..).zip(&elements) {
                    batch.add(SendWorkRequest::new(element), wr_id)?;
                }
                Ok::<_, ibverbs::Error>(())
            })?;
        }
        complete!(queue, completions, WINDOW, sum);
        start += WINDOW_OPERATIONS;
    }
    Ok(sum)
}
