use std::sync::Arc;

use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut Arc<QueuePair<'static>>) -> Result<()> {
    unsafe { pair.post_inline(b"mine", 1) }
}

fn main() {}
