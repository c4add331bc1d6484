//! Uses every part of the crate, so that the linker needs all that they call: for the step "features".

use ibverbs::rdmacm::Listener;
use ibverbs::{Channel, Loop, PooledBuffer, QueuePair, Rc, Reactor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Ok(context) = ibverbs::open_first() else {
        println!("no device");
        return Ok(());
    };
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(16)?;
    let pair = QueuePair::builder(&domain, &queue, &queue, Rc).build()?;
    let channel = Channel::builder(&domain).build()?;
    let server: Loop<'_, PooledBuffer> = Loop::new(&context, 16)?;
    let reactor = Reactor::new(ibverbs::open_first()?, 16)?;
    drop((pair, channel, server, reactor));
    println!("listener: {}", Listener::bind("0.0.0.0:0".parse()?).is_ok());
    println!("all rooms work on {}", context.name());
    Ok(())
}
