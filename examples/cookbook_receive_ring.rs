//! Cookbook: a ring of receives.
//!
//! A receiver keeps many receives posted. They complete in the order in which they were posted, so the
//! receiver waits for the oldest, uses the message in place, and posts the buffer again. The sender never
//! waits for a receive as long as the receiver keeps up on average.

#[path = "common/two_sides.rs"]
mod two_sides;

use std::collections::VecDeque;

use ibverbs::{Channel, Context, ProtectionDomain};

use two_sides::{Result, both, connect, deadline};

const MESSAGES: u64 = 500;
/// Receives that are posted at any time.
const RING: usize = 16;
/// Room for a message, in bytes.
const ROOM: usize = 256;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(sender: &Context<'_>, receiver: &Context<'_>) -> Result {
    let (sender, receiver) = (sender.alloc_pd()?, receiver.alloc_pd()?);
    let (mut out, mut incoming) = connect(
        sender.create_channel(),
        // The receive queue has room for each buffer of the ring.
        receiver.create_channel().max_recv_wr(RING as u32),
    )?;
    both(|| receive(&receiver, &mut incoming), || send(&sender, &mut out))
}

fn receive(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>) -> Result {
    // One region holds the ring: registering is expensive, splitting it costs nothing.
    let mut region = domain.allocate::<u8>(RING * ROOM)?;
    let buffers = region.slice_mut(..)?.chunks(ROOM)?;
    channel.manual_scope(|scope| {
        let mut ring = VecDeque::with_capacity(RING);
        for buffer in buffers {
            ring.push_back(scope.post_receive(buffer)?);
        }
        for expected in 0..MESSAGES {
            let oldest = ring.pop_front().expect("each is posted again");
            let (buffer, completion) = oldest.wait_until(deadline())?;
            let text = std::str::from_utf8(&buffer[..completion.byte_len() as usize])?;
            if text != format!("message {expected}") {
                return Err(format!("instead of message {expected} came: {text}").into());
            }
            // The last buffers are not posted again: no message would fill them.
            if expected + (RING as u64) < MESSAGES {
                ring.push_back(scope.post_receive(buffer)?);
            }
        }
        println!("{MESSAGES} messages came in order");
        Ok(())
    })
}

fn send(domain: &ProtectionDomain<'_>, channel: &mut Channel<'_>) -> Result {
    let mut buffer = domain.allocate::<u8>(ROOM)?;
    for number in 0..MESSAGES {
        let text = format!("message {number}");
        buffer[..text.len()].copy_from_slice(text.as_bytes());
        channel.until(deadline()).send(buffer.slice(..text.len())?)?;
    }
    Ok(())
}
