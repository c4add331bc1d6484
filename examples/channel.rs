//! Two processes that send a message back and forth, one after the other: start `channel` on one machine
//! and `channel HOST` on another.
//!
//! The client generates a message, the server reverses it, and the client checks every byte.

#[path = "common/broken_pipe.rs"]
mod broken_pipe;
mod common;

use common::{Options, Result, deadline, pattern};
use ibverbs::{Channel, MemoryRegion};

/// Numbers in a message.
const LENGTH: usize = 512;

fn main() -> Result<()> {
    broken_pipe::end_quietly();
    let options = Options::read(200)?;
    let context = options.open()?;
    let domain = context.alloc_pd()?;
    let mut region = domain.allocate::<u64>(LENGTH)?;

    let prepared = common::patient(Channel::builder(&domain)).build()?;
    let (mut channel, told) = options.connect(prepared, &options.count.to_be_bytes())?;

    match options.server {
        None => {
            for _ in 0..u64::from_be_bytes(told[..].try_into()?) {
                serve(&mut channel, &mut region)?;
            }
        }
        Some(_) => {
            for round in 0..options.count {
                ask(&mut channel, &mut region, round)?;
            }
            println!("{} messages came back as they should", options.count);
            // Our device may not have acknowledged the last message to the peer's device yet.
            channel.wait_until_peer_is_gone(deadline())?;
        }
    }
    println!("closed: {:?}", channel.close()?);
    Ok(())
}

fn serve(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u64>) -> Result<()> {
    let received = channel.until(deadline()).receive(&mut region.slice_mut(..)?)?;
    let length = received.byte_len() as usize / size_of::<u64>();
    region[..length].reverse();
    channel.until(deadline()).send(region.slice(..length)?)?;
    Ok(())
}

fn ask(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u64>, round: u64) -> Result<()> {
    let length = 1 + round as usize % LENGTH;
    for (index, number) in region[..length].iter_mut().enumerate() {
        *number = pattern(round, index);
    }
    channel.until(deadline()).send(region.slice(..length)?)?;
    region.fill(0);
    let received = channel.until(deadline()).receive(&mut region.slice_mut(..)?)?;
    let whole = received.byte_len() as usize == length * size_of::<u64>();
    let right = (0..length).all(|index| region[length - 1 - index] == pattern(round, index));
    if whole && right { Ok(()) } else { Err(format!("message {round} is not right").into()) }
}
