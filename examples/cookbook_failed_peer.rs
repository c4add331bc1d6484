//! Cookbook: recovering from a failed peer.
//!
//! A sender numbers its messages, and keeps each one until the receiver has confirmed it. When the receiver
//! has failed, the send fails with `RetryExceeded` after the time that the timeouts allow. The sender
//! resets its channel, connects to the receiver's successor, asks for the number of the next message, and
//! continues from there. So every message arrives, and no message is counted twice.

#[path = "common/two_sides.rs"]
mod two_sides;

use std::sync::mpsc::{Receiver, Sender, channel};

use ibverbs::{
    Channel, ChannelBuilder, Context, PreparedChannel, ProtectionDomain, QueuePairEndpoint,
    TransportError, WorkStatus,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries, MinRnrTimer},
};

use two_sides::{Result, both, deadline};

const MESSAGES: u64 = 40;
/// The receiver fails after this number of messages.
const FAILS_AFTER: u64 = 15;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

/// The greeting of a receiver that starts: how to reach it, and which message it wants next. Two machines
/// would send it over TCP.
struct Hello {
    endpoint: QueuePairEndpoint,
    next: u64,
}

pub(crate) fn run(sender: &Context<'_>, receiver: &Context<'_>) -> Result {
    let (sender, receiver) = (sender.alloc_pd()?, receiver.alloc_pd()?);
    let (hello, heard) = channel();
    let (answer, answered) = channel();
    let receiver = &receiver;
    both(
        move || {
            // The contents of `received` survive the failure, as a file would.
            let mut received = Vec::new();
            receive(receiver, &hello, &answered, &mut received, FAILS_AFTER)?;
            receive(receiver, &hello, &answered, &mut received, MESSAGES)?;
            // The acknowledgement of the last message may still be on its way. The sender hangs up when it
            // has arrived. Without it, the sender would assume that this receiver has failed, too.
            if answered.recv().is_ok() {
                return Err("the sender connects once more".into());
            }
            if !received.iter().copied().eq(0..MESSAGES) {
                return Err(format!("what arrived is {received:?}").into());
            }
            println!("{MESSAGES} messages arrived once each, in spite of a failure");
            Ok(())
        },
        move || send(&sender, &heard, answer),
    )
}

fn builder<'d>(domain: &'d ProtectionDomain<'d>) -> ChannelBuilder<'d> {
    domain
        .create_channel()
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        // The sender gives up on a peer that does not answer twice for 0.5 s. (The device may take up to
        // four times as long.)
        .ack_timeout(AckTimeout::new(17).expect("at most 31"))
        .max_ack_retries(MaxAckRetries::new(1).expect("at most 7"))
}

/// One run of the receiver: until it has `until` messages.
fn receive(
    domain: &ProtectionDomain<'_>,
    hello: &Sender<Hello>,
    answered: &Receiver<QueuePairEndpoint>,
    received: &mut Vec<u64>,
    until: u64,
) -> Result {
    let prepared = builder(domain).build()?;
    hello.send(Hello { endpoint: prepared.endpoint(), next: received.len() as u64 })?;
    let mut channel = prepared.handshake(answered.recv()?)?;
    let mut message = domain.allocate::<u64>(1)?;
    while (received.len() as u64) < until {
        channel.until(deadline()).receive(&mut message.slice_mut(..)?)?;
        received.push(message[0]);
    }
    Ok(()) // Dropping the channel destroys the queue pair: from now on nobody answers.
}

fn send(
    domain: &ProtectionDomain<'_>,
    heard: &Receiver<Hello>,
    answer: Sender<QueuePairEndpoint>,
) -> Result {
    let mut message = domain.allocate::<u64>(1)?;
    let mut prepared = builder(domain).build()?;
    loop {
        let (mut channel, next) = connect(prepared, heard, &answer)?;
        // This program can regenerate all messages; another program would have to keep those from `next`
        // on.
        let sent = (next..MESSAGES).try_for_each(|number| {
            message[0] = number;
            channel.until(deadline()).send(message.slice(..)?).map(drop)
        });
        match sent {
            // The last message was acknowledged: the receiver has it.
            Ok(()) => return Ok(()),
            Err(TransportError::Work(error)) if error.status() == WorkStatus::RetryExceeded => {
                println!("the receiver is gone: {error}");
                // The channel is in the error state, and nothing is in flight. Reset it, to use it again.
                prepared = channel.reset()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Connects to the current receiver, and returns which message it wants next.
fn connect<'res>(
    prepared: PreparedChannel<'res>,
    heard: &Receiver<Hello>,
    answer: &Sender<QueuePairEndpoint>,
) -> Result<(Channel<'res>, u64)> {
    let Hello { endpoint, next } = heard.recv()?;
    answer.send(prepared.endpoint())?;
    Ok((prepared.handshake(endpoint)?, next))
}
