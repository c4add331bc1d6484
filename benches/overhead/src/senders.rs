//! Threads that post on one channel while one polls.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::event_loop::LoopSender;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Inline, Loop, OperationError, PooledBuffer,
    ProtectionDomain, SendWorkRequest, TransportError, TransportResult,
};

use crate::c;
use crate::loops::{make, next};
use crate::rig::{LENGTH, Rig, WINDOW, context, full};

/// A loop, and a sender of one of its channels.
pub(crate) struct SenderRig {
    of: Loop<'static, PooledBuffer>,
    sender: LoopSender<'static, PooledBuffer>,
    pool: BufferPool,
}

impl SenderRig {
    pub(crate) fn new() -> Self {
        let (mut of, channel, domain) = make(1);
        let sender = of.channel_sender(channel).expect("a sender");
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        Self { of, sender, pool }
    }
}

/// One send after the other, by the sender, on the thread that polls.
#[inline(never)]
pub(crate) fn sends(rig: &mut SenderRig, operations: u64) -> TransportResult<u64> {
    let SenderRig { of, sender, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let mut sum = 0;
    for _ in 0..operations {
        sender.post(SendWorkRequest::new(buffer), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}

/// So deep that 8,192 sends find room in any case.
const DEEP: u32 = 8192;
const BYTES: [u8; LENGTH] = [7; LENGTH];

type Bytes = Loop<'static, ()>;

fn deep() -> (Bytes, ChannelId) {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
    let mut of = Loop::new(&context, 2 * DEEP).expect("a completion queue");
    let builder = of.create_channel(&domain).max_send_wr(DEEP).max_inline_data(LENGTH as u32);
    let prepared = builder.build().expect("a channel");
    let itself = prepared.endpoint();
    let channel = of.add(prepared.handshake(itself).expect("a connection")).expect("room");
    (of, channel)
}

/// Its calls are what `script/bench senders` counts, as those of the next.
#[inline(never)]
#[unsafe(no_mangle)]
fn overhead_send_by_sender(
    sender: &LoopSender<'static, ()>,
    token: u64,
) -> Result<(), OperationError<()>> {
    sender.post(SendWorkRequest::new(Inline(&BYTES)), token)
}

#[inline(never)]
#[unsafe(no_mangle)]
fn overhead_send_on_locked_loop(
    of: &Mutex<Bytes>,
    channel: ChannelId,
    token: u64,
) -> Result<(), OperationError<()>> {
    let mut of = of.lock().unwrap_or_else(PoisonError::into_inner);
    of.post(channel, SendWorkRequest::new(Inline(&BYTES)), token)
}

/// Posts by threads, while this one polls. Returns the sum of the tokens.
fn run(
    threads: u64,
    operations: u64,
    post: impl Fn(u64) -> Result<(), OperationError<()>> + Sync,
    mut poll: impl FnMut() -> TransportResult<Option<u64>>,
) -> TransportResult<u64> {
    thread::scope(|scope| {
        let post = &post;
        let of_thread = |thread| operations * thread / threads..operations * (thread + 1) / threads;
        for thread in 0..threads {
            scope.spawn(move || {
                for token in of_thread(thread) {
                    while let Err(refused) = post(token) {
                        assert!(refused.error.is_queue_full(), "{refused}");
                        thread::yield_now();
                    }
                }
            });
        }
        let (mut sum, mut ended) = (0, 0);
        while ended < operations {
            if let Some(token) = poll()? {
                sum += token;
                ended += 1;
            }
        }
        Ok(sum)
    })
}

/// Runs a layer with this number of threads, and returns the time.
pub(crate) fn contended(layer: &str, threads: u64, operations: u64) -> Result<Duration, String> {
    let (sum, took) = match layer {
        "c" => {
            let mut rig = Rig::deep(DEEP);
            let mut handles = c::Handles::of(&mut rig);
            let begun = Instant::now();
            // SAFETY: the handles belong to the rig, which outlives the run.
            let sum = unsafe { c::c_senders(&mut handles, threads as u32, operations) };
            (sum.cast_unsigned(), begun.elapsed())
        }
        "sender" => {
            let (mut of, channel) = deep();
            let sender = of.channel_sender(channel).map_err(|error| error.to_string())?;
            let begun = Instant::now();
            let post = |token| overhead_send_by_sender(&sender, token);
            let poll = || {
                let Some(ended) = of.next_ended()? else { return Ok(None) };
                ended.result().map(|_| Some(ended.token))
            };
            let sum = run(threads, operations, post, poll).map_err(|error| error.to_string())?;
            (sum, begun.elapsed())
        }
        "locked" => {
            let (of, channel) = deep();
            let of = Mutex::new(of);
            let begun = Instant::now();
            let post = |token| overhead_send_on_locked_loop(&of, channel, token);
            let mut found = Vec::with_capacity(WINDOW);
            // Up to sixteen while it has the lock.
            let poll = || {
                if found.is_empty() {
                    let mut of = of.lock().unwrap_or_else(PoisonError::into_inner);
                    while found.len() < WINDOW
                        && let Some(ended) = of.next_ended()?
                    {
                        ended.result()?;
                        found.push(ended.token);
                    }
                }
                Ok(found.pop())
            };
            let sum = run(threads, operations, post, poll).map_err(|error| error.to_string())?;
            (sum, begun.elapsed())
        }
        _ => return Err(format!("{layer}: c, sender or locked")),
    };
    let expected = operations * (operations - 1) / 2;
    if sum == expected { Ok(took) } else { Err(format!("the completions add up to {sum}")) }
}
