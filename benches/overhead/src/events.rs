//! The verbs layer, waiting for events.

use ibverbs::{Result, WorkCompletion};

use crate::rig::{LENGTH, Rig};

/// Does as the contender in C: arm, post, take the event, poll until the queue is empty.
#[inline(never)]
pub(crate) fn w8(rig: &mut Rig, operations: u64) -> Result<u64> {
    let Rig { queue_pair, queue, region, channel, .. } = rig;
    let channel = channel.as_deref().expect("a rig with events");
    let mut completions = [WorkCompletion::default()];
    let mut sum = 0;
    for wr_id in 0..operations {
        queue.arm()?;
        // SAFETY: the region lives on, and nobody writes it.
        unsafe { queue_pair.post_send(region, ..LENGTH, wr_id)? };
        channel.wait()?;
        while let [completion] = queue.poll(&mut completions)? {
            completion.result().expect("success");
            sum += completion.wr_id();
        }
    }
    Ok(sum)
}
