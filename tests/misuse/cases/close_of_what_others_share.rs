use std::sync::Arc;

use ibverbs::Context;

pub fn case(context: Arc<Context<'static>>) -> bool {
    context.close().is_ok() //~ ERROR
    Arc::into_inner(context).is_some_and(|context| context.close().is_ok()) //~ RIGHT
}
