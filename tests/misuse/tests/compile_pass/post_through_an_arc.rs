use std::sync::Arc;

use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut Arc<QueuePair<'static>>) -> Result<()> {
    unsafe { Arc::get_mut(pair).unwrap().post_inline(b"mine", 1) }
}
