//! Several channels as one, each connected to itself: a message to one of them; a part of a buffer for each, and a part
//! from each, at once. These are the two MultiChannel examples of the crate ibverbs-rs, on a `ChannelSet`.

use std::time::{Duration, Instant};

use ibverbs::channel::ChannelSet;
use ibverbs::{ProtectionDomain, TransportError};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result {
    let _software = ibverbs_software::register_if_none()?; // a device, if the machine has none
    let context = ibverbs::open_first()?;
    let domain = context.alloc_pd()?;
    to_one_of(&domain, &mut set(&domain, 3)?)?;
    to_and_from_each(&domain, &mut set(&domain, 5)?)
}

/// This number of channels.
fn set<'res>(domain: &'res ProtectionDomain<'_>, channels: usize) -> Result<ChannelSet<'res>> {
    let mut set = ChannelSet::default();
    for _ in 0..channels {
        let prepared = domain.create_channel().build()?;
        let itself = prepared.endpoint();
        set.push(prepared.handshake(itself)?);
    }
    Ok(set)
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// Posts a receive and a send on the second channel. The end of the scope waits for both.
fn to_one_of(domain: &ProtectionDomain<'_>, channels: &mut ChannelSet<'_>) -> Result {
    let mut memory = domain.allocate::<u8>(8)?;
    memory[..4].fill(1);
    println!("before: {:?}", &memory[4..]);
    let (message, room) = memory.slice_mut(..)?.split_at(4)?;
    let (_, ended) = channels.scope(Some(deadline()), |scope| {
        let second = scope.peer(1).ok_or(TransportError::UnknownWork)?;
        second.post_receive(room)?;
        second.post_send(message)?;
        Ok::<_, TransportError>(())
    })?;
    ended.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    println!("after: {:?}", &memory[4..]);
    if memory[4..] != [1; 4] {
        return Err("that is not what was sent".into());
    }
    Ok(())
}

/// Sends one byte on each channel, and receives one from each, all at the same time.
fn to_and_from_each(domain: &ProtectionDomain<'_>, channels: &mut ChannelSet<'_>) -> Result {
    let count = channels.len();
    let mut memory = domain.allocate::<u8>(2 * count)?;
    (memory[..count].iter_mut().zip(1..)).for_each(|(byte, number)| *byte = number);
    println!("before: {:?}", &memory[count..]);
    let (mut messages, mut rooms) = memory.slice_mut(..)?.split_at(count)?;
    let (_, ended) = channels.scope(Some(deadline()), |scope| {
        for peer in scope.peers() {
            let (message, room);
            (message, messages) = messages.split_at(1)?;
            (room, rooms) = rooms.split_at(1)?;
            peer.post_receive(room)?;
            peer.post_send(message)?;
        }
        Ok::<_, TransportError>(())
    })?;
    // Each channel has its own result: a failure of one does not concern the others.
    for (channel, ended) in ended.into_iter().enumerate() {
        ended.map_err(|error| format!("channel {channel}: {error}"))?;
    }
    println!("after: {:?}", &memory[count..]);
    if memory[..count] != memory[count..] {
        return Err("that is not what was sent".into());
    }
    Ok(())
}
