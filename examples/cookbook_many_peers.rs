//! Cookbook: many peers at once.
//!
//! A coordinator gives a part of the work to each worker, gets a result from each, and tells all of them the
//! total. With a channel set, the messages to all workers are in flight together, and a worker that fails
//! does not end the work of the others.

#[path = "common/two_sides.rs"]
mod two_sides;

use ibverbs::channel::ChannelSet;
use ibverbs::{Channel, Context, ProtectionDomain};

use two_sides::{Result, both, connect, deadline};

const WORKERS: usize = 4;
/// Numbers for each worker.
const PART: usize = 64;
const ROUNDS: u64 = 10;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(coordinator: &Context<'_>, workers: &Context<'_>) -> Result {
    let (ours, theirs) = (coordinator.alloc_pd()?, workers.alloc_pd()?);
    let (mut to_workers, mut to_coordinator) = (ChannelSet::default(), Vec::new());
    for _ in 0..WORKERS {
        let (one, other) = connect(ours.create_channel(), theirs.create_channel())?;
        to_workers.push(one);
        to_coordinator.push(other);
    }
    both(
        || {
            std::thread::scope(|threads| {
                let workers = to_coordinator.into_iter().map(|mut channel| {
                    let domain = &theirs;
                    threads.spawn(move || work(domain, &mut channel))
                });
                let workers: Vec<_> = workers.collect();
                workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a panic")?)
            })
        },
        || coordinate(&ours, &mut to_workers),
    )
}

/// The coordinator: scatters numbers, gathers sums, and broadcasts the total.
fn coordinate(domain: &ProtectionDomain<'_>, workers: &mut ChannelSet<'_>) -> Result {
    let mut numbers = domain.allocate::<u64>(WORKERS * PART)?;
    let mut sums = domain.allocate::<u64>(WORKERS)?;
    let mut total = domain.allocate::<u64>(1)?;
    for round in 0..ROUNDS {
        numbers.iter_mut().zip(round..).for_each(|(number, value)| *number = value);
        // The receives for the results come first: a fast worker may answer before the slowest has its part.
        let parts = (0..WORKERS).map(|worker| numbers.slice(worker * PART..(worker + 1) * PART));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let mut rooms = Vec::new();
        let mut rest = sums.slice_mut(..)?;
        for _ in 1..WORKERS {
            let (room, others) = rest.split_at(1)?;
            rooms.push(room);
            rest = others;
        }
        rooms.push(rest);
        let (_, answered) = workers.scope(Some(deadline()), |scope| {
            for ((worker, room), part) in scope.peers().iter().zip(rooms).zip(parts) {
                worker.post_receive(room)?;
                worker.post_send(part)?;
            }
            Ok::<_, ibverbs::TransportError>(())
        })?;
        answered.into_iter().collect::<Result<(), _>>()?;
        total[0] = sums.iter().sum();
        if total[0] != numbers.iter().sum::<u64>() {
            return Err(format!("round {round}: {} is not the total", total[0]).into());
        }
        let told = workers.broadcast(total.slice(..)?, deadline());
        told.into_iter().collect::<Result<Vec<_>, _>>()?;
    }
    println!("{WORKERS} workers have added numbers in {ROUNDS} rounds");
    Ok(())
}

/// A worker: gets its part, answers with the sum, and learns the total.
fn work(domain: &ProtectionDomain<'_>, coordinator: &mut Channel<'_>) -> Result {
    let mut part = domain.allocate::<u64>(PART)?;
    let mut sum = domain.allocate::<u64>(1)?;
    let mut total = domain.allocate::<u64>(1)?;
    for _ in 0..ROUNDS {
        coordinator.until(deadline()).receive(&mut part.slice_mut(..)?)?;
        sum[0] = part.iter().sum();
        coordinator.manual_scope(|scope| -> Result {
            let answer = scope.post_receive(total.slice_mut(..)?)?;
            scope.post_send(sum.slice(..)?)?.wait_until(deadline())?;
            answer.wait_until(deadline())?;
            Ok(())
        })?;
        if total[0] < sum[0] {
            return Err("the total is less than a part of it".into());
        }
    }
    Ok(())
}
