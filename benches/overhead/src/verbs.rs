//! The verbs layer, by region and range.

use ibverbs::{Result, WorkCompletion};

use crate::rig::{LENGTH, Rig, WINDOW};

/// Waits for `count` completions and adds up their numbers.
macro_rules! complete {
    ($queue:expr, $completions:expr, $count:expr, $sum:ident) => {{
        let mut left = $count;
        while left > 0 {
            let done = $queue.poll(&mut $completions)?;
            for completion in done {
                completion.result().expect("success");
                $sum += completion.wr_id();
            }
            left -= done.len();
        }
    }};
}

/// Waits for one completion and adds its number.
macro_rules! complete_one {
    ($queue:expr, $completions:expr, $sum:ident) => {{
        let completion = loop {
            if let [completion] = $queue.poll(&mut $completions)? {
                break completion;
            }
        };
        completion.result().expect("success");
        $sum += completion.wr_id();
    }};
}

pub(crate) use {complete, complete_one};

#[inline(never)]
pub(crate) fn w1(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let mut completions = [WorkCompletion::default()];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: the region lives on, and nobody writes it.
        unsafe { queue_pair.post_send(region, ..LENGTH, wr_id)? };
        complete_one!(queue, completions, sum);
    }
    Ok(sum)
}

#[inline(never)]
pub(crate) fn w2(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let mut completions = [WorkCompletion::default(); 2];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: the region lives on, and nobody else accesses it; the lean device does not write.
        unsafe {
            queue_pair.post_receive(region, ..LENGTH, wr_id)?;
            queue_pair.post_send(region, ..LENGTH, wr_id)?;
        }
        complete!(queue, completions, 2, sum);
    }
    Ok(sum)
}

#[inline(never)]
pub(crate) fn w3(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, .. } = rig;
    let mut completions = [WorkCompletion::default(); WINDOW];
    let mut sum = 0;
    let mut wr_id = 0;
    while wr_id < operations {
        for _ in 0..WINDOW {
            // SAFETY: as in `w1`.
            unsafe { queue_pair.post_send(region, ..LENGTH, wr_id)? };
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
    let mut completions = [WorkCompletion::default()];
    let mut sum = 0;
    for wr_id in 0..operations {
        // SAFETY: as in `w1`.
        unsafe { queue_pair.post_write(region, ..LENGTH, remote, wr_id)? };
        complete_one!(queue, completions, sum);
    }
    Ok(sum)
}
