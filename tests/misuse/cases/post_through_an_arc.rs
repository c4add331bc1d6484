use std::sync::Arc;

use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut Arc<QueuePair<'static>>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"mine")), 1) } //~ ERROR
    unsafe { Arc::get_mut(pair).unwrap().post(SendWorkRequest::new(Inline(b"mine")), 1) } //~ RIGHT
}
