//! Events of completion queues, and waiting for them, on the function device.

mod channels;
mod settings;
mod waiting;
mod wake_ups;

use std::time::Duration;

use ibverbs::{WorkCompletion, ffi};

const SOON: Duration = Duration::from_millis(20);
/// Longer than any wait that ends.
const LATE: Duration = Duration::from_secs(60);

fn completion(wr_id: u64) -> ffi::ibv_wc {
    ffi::ibv_wc { wr_id, ..Default::default() }
}

fn ids(completions: &[WorkCompletion]) -> Vec<u64> {
    completions.iter().map(WorkCompletion::wr_id).collect()
}
