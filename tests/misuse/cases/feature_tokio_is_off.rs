use std::sync::Arc;

use ibverbs::{Context, Reactor};

fn drive(context: &Arc<Context<'static>>) -> ibverbs::Result<()> {
    let reactor = Reactor::new(context, 64)?;
    let _ = reactor.spawn_on_tokio(); //~ ERROR
    let _ = reactor.turn(); //~ RIGHT
    Ok(())
}
