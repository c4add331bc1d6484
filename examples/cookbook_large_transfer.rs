//! Cookbook: a large transfer with flow control.
//!
//! The receiver lends out a few slots of memory. The sender writes pieces into them, several at a time,
//! each with an immediate value, which completes a receive at the other side. So the receiver knows that a
//! piece has arrived. When it has used the piece, it sends a credit, an empty message, and only then may
//! the sender write to that slot again. So neither side needs memory for the whole transfer.

#[path = "common/two_sides.rs"]
mod two_sides;

use std::collections::VecDeque;

use ibverbs::{
    AccessFlags, Channel, Context, ProtectionDomain, RemoteMemoryRegion, SharedMemoryRegion,
    WriteWorkRequest,
};

use two_sides::{Result, both, connect, deadline};

/// Numbers in total, numbers in a piece, and pieces that the receiver has room for.
const NUMBERS: usize = 1 << 19;
const PIECE: usize = 1 << 13;
const SLOTS: usize = 4;
const PIECES: usize = NUMBERS / PIECE;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(sender: &Context<'_>, receiver: &Context<'_>) -> Result {
    let (sender, receiver) = (sender.alloc_pd()?, receiver.alloc_pd()?);
    let depth = SLOTS as u32;
    let (mut out, mut incoming) = connect(
        sender.create_channel().max_recv_wr(depth),
        receiver.create_channel().max_recv_wr(depth),
    )?;
    // The sender learns where the slots are when it connects.
    let slots = receiver.allocate_shared::<u64>(SLOTS * PIECE, AccessFlags::REMOTE_WRITE)?;
    let remote = slots.remote();
    both(|| receive(&receiver, &slots, &mut incoming), || send(&sender, remote, &mut out))
}

fn send(
    domain: &ProtectionDomain<'_>,
    slots: RemoteMemoryRegion,
    channel: &mut Channel<'_>,
) -> Result {
    let mut data = domain.allocate::<u64>(NUMBERS)?;
    for (index, number) in data.iter_mut().enumerate() {
        *number = index as u64;
    }
    // The buffers for credits, which are empty messages.
    let mut empty = domain.allocate::<u8>(SLOTS)?;
    let bytes = (PIECE * size_of::<u64>()) as u64;
    channel.manual_scope(|scope| {
        let mut credits = VecDeque::with_capacity(SLOTS);
        for buffer in empty.slice_mut(..)?.chunks(1)? {
            credits.push_back(scope.post_receive(buffer)?);
        }
        let mut writes = VecDeque::with_capacity(SLOTS);
        for index in 0..PIECES {
            let piece = data.slice(index * PIECE..(index + 1) * PIECE)?;
            if index >= SLOTS {
                // The slot is free when its credit has arrived; then its write is complete, too.
                let credit = credits.pop_front().expect("one for each slot");
                let (buffer, _) = credit.wait_until(deadline())?;
                credits.push_back(scope.post_receive(buffer)?);
                let write: ibverbs::channel::ScopedPendingWork<'_, _> =
                    writes.pop_front().expect("one for each slot");
                write.wait_until(deadline())?;
            }
            let slot = slots.sub_region((index % SLOTS) as u64 * bytes, bytes)?;
            writes
                .push_back(scope.post(WriteWorkRequest::new(piece, slot).immediate(index as u32))?);
        }
        for write in writes {
            write.wait_until(deadline())?;
        }
        // The last credits: the receiver has used everything.
        for credit in credits {
            credit.wait_until(deadline())?;
        }
        Ok(())
    })
}

fn receive(
    domain: &ProtectionDomain<'_>,
    slots: &SharedMemoryRegion<'_, u64>,
    channel: &mut Channel<'_>,
) -> Result {
    // A write with immediate consumes a receive, but does not use its buffer.
    let mut empty = domain.allocate::<u8>(SLOTS)?;
    let credit = domain.allocate::<u8>(1)?;
    let mut piece = vec![0; PIECE];
    channel.manual_scope(|scope| {
        let mut receives = VecDeque::with_capacity(SLOTS);
        for buffer in empty.slice_mut(..)?.chunks(1)? {
            receives.push_back(scope.post_receive(buffer)?);
        }
        for index in 0..PIECES {
            let receive = receives.pop_front().expect("each is posted again");
            let (buffer, completion) = receive.wait_until(deadline())?;
            if completion.immediate() != Some(index as u32) {
                return Err(format!("piece {index}: the immediate value is another").into());
            }
            slots.read(index % SLOTS * PIECE, &mut piece)?;
            let first = (index * PIECE) as u64;
            if !piece.iter().copied().eq(first..first + PIECE as u64) {
                return Err(format!("piece {index} is not what was sent").into());
            }
            if index + SLOTS < PIECES {
                // Post this before sending the credit, so that the next piece finds it.
                receives.push_back(scope.post_receive(buffer)?);
            }
            scope.post_send(credit.slice(..0)?)?.wait_until(deadline())?;
        }
        println!("{PIECES} pieces of {} bytes came through {SLOTS} slots", 8 * PIECE);
        Ok(())
    })
}
