//! Threads that post on one channel while one polls.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::event_loop::LoopSender;
use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    ChannelId, CompletionQueue, Inline, Loop, OperationError, ProtectionDomain, SendWorkRequest,
    TransportResult,
};

use crate::c::Handles;
use crate::rig::{LENGTH, Rig, WINDOW, context};

unsafe extern "C" {
    /// Posts by this many threads, while this one polls.
    fn c_senders(handles: *mut Handles, threads: u32, operations: u64) -> i64;
}

/// 8,192 sends find room in any case.
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

/// A rig with room for as many completions, which are what the device counts.
fn deep_rig() -> Rig {
    let context = context();
    let queue = CompletionQueue::new(&context, DEEP).expect("a completion queue");
    Rig::build(&context, queue, None, SendOperations::empty(), false)
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
pub(crate) fn run_layer(layer: &str, threads: u64, operations: u64) -> Result<Duration, String> {
    let (sum, took) = match layer {
        "c" => {
            let mut rig = deep_rig();
            let mut handles = Handles::of(&mut rig);
            let begun = Instant::now();
            // SAFETY: the handles belong to the rig, which outlives the run.
            let sum = unsafe { c_senders(&mut handles, threads as u32, operations) };
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
