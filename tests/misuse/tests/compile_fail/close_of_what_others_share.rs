use std::sync::Arc;

use ibverbs::Context;

pub fn case(context: Arc<Context<'static>>) -> bool {
    context.close().is_ok()
}

fn main() {}
