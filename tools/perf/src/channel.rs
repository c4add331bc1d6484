//! The loops of the verbs layer on the channel layer, without a line of unsafe code.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ibverbs::channel::ScopedPendingWork;
use ibverbs::{
    Channel, CompareSwapWorkRequest, FetchAddWorkRequest, RemoteMemoryRegion, Scope,
    memory::SharedMemorySlice,
};

use crate::plan::{Operation, Plan};
use crate::progress::Progress;
use crate::report::Samples;
use crate::rig::{Memory, Result};
use crate::verbs::{see, wrong_length};
use crate::wire::PATIENCE;

/// The deadline is renewed after this many messages.
const STRETCH: u64 = 64;

/// One side of a test.
pub(crate) struct Safe<'a> {
    pub(crate) channel: Box<Channel<'a>>,
    pub(crate) memory: Memory<'a>,
    /// The peer's memory that one-sided operations work on.
    pub(crate) remote: RemoteMemoryRegion,
    pub(crate) plan: &'a Plan,
}

type Pending<'scope, 'a> = ScopedPendingWork<'scope, SharedMemorySlice<'a, u8>>;

/// Posts the operation under test.
fn post<'scope, 'a: 'scope>(
    scope: &'scope Scope<'scope, '_>,
    operation: Operation,
    source: SharedMemorySlice<'a, u8>,
    target: SharedMemorySlice<'a, u8>,
    remote: RemoteMemoryRegion,
) -> ibverbs::TransportResult<Pending<'scope, 'a>> {
    match operation {
        Operation::Send => scope.post_send(source),
        Operation::Write => scope.post_write(source, remote),
        Operation::Read => scope.post_read(target, remote),
        Operation::FetchAdd => scope.post(FetchAddWorkRequest::new(target, remote, 1)),
        Operation::CompareSwap => scope.post(CompareSwapWorkRequest::new(target, remote, 0, 1)),
    }
}

impl Safe<'_> {
    /// Plays ping-pong as the verbs layer does. Calls `ready` as soon as messages may arrive.
    pub(crate) fn ping_pong(
        &mut self,
        size: u32,
        iterations: u64,
        first: bool,
        mut ready: impl FnMut() -> Result<()>,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        let (plan, remote, operation) = (self.plan, self.remote, self.plan.operation);
        let size = size as usize;
        let (source, target) = (self.memory.source.slice(..size)?, self.memory.target);
        let by_memory = operation == Operation::Write;
        let (ours, theirs) = (source.atomic(size - 1)?, target.atomic(size - 1)?);
        self.channel.manual_scope(|scope| {
            let mut coming = if by_memory { None } else { Some(scope.post_receive(target)?) };
            ready()?;
            let start = samples.begin();
            let mut before = start;
            for iteration in 0..iterations {
                let mark = (iteration % 255) as u8 + 1;
                let deadline = before + PATIENCE;
                for send in [first, !first] {
                    if send {
                        if by_memory {
                            ours.store(mark, Ordering::Release);
                        }
                        post(scope, operation, source, target, remote)?.wait_until(deadline)?;
                    } else if let Some(receive) = coming.take() {
                        let (target, completion) = receive.wait_until(deadline)?;
                        if completion.byte_len() as usize != size {
                            return Err(wrong_length(completion.byte_len(), size));
                        }
                        if iteration + 1 < iterations {
                            coming = Some(scope.post_receive(target)?);
                        }
                    } else {
                        see(theirs, mark, plan)?;
                    }
                }
                before = samples.mark();
                progress.at(iteration);
            }
            samples.end();
            Ok(before - start)
        })
    }

    /// Does one blocking operation after the other.
    pub(crate) fn one_by_one(
        &mut self,
        size: u32,
        iterations: u64,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        let (remote, mut target) = (self.remote, self.memory.target.slice(..size as usize)?);
        let start = samples.begin();
        let mut before = start;
        for iteration in 0..iterations {
            let deadline = before + PATIENCE;
            let channel = &mut self.channel;
            match self.plan.operation {
                Operation::FetchAdd => {
                    channel.until(deadline).run(FetchAddWorkRequest::new(
                        &mut target,
                        remote,
                        1,
                    ))?;
                }
                Operation::CompareSwap => {
                    channel.until(deadline).run(CompareSwapWorkRequest::new(
                        &mut target,
                        remote,
                        0,
                        1,
                    ))?;
                }
                _ => {
                    channel.until(deadline).read(&mut target, remote)?;
                }
            }
            before = samples.mark();
            progress.at(iteration);
        }
        samples.end();
        Ok(before - start)
    }

    /// Posts as the verbs layer does: waits for the oldest operation in flight before it posts the next.
    pub(crate) fn flood(
        &mut self,
        size: u32,
        iterations: u64,
        progress: &Progress,
    ) -> Result<Duration> {
        let (plan, remote) = (self.plan, self.remote);
        let source = self.memory.source.slice(..size as usize)?;
        let target = self.memory.target.slice(..size as usize)?;
        let depth = plan.send_depth as usize;
        self.channel.manual_scope(|scope| {
            let mut flying = VecDeque::with_capacity(depth);
            let start = Instant::now();
            let mut deadline = start + PATIENCE;
            for message in 0..iterations {
                if message.is_multiple_of(STRETCH) {
                    deadline = Instant::now() + PATIENCE;
                    progress.at(message);
                }
                if flying.len() == depth {
                    next(&mut flying)?.wait_until(deadline)?;
                }
                flying.push_back(post(scope, plan.operation, source, target, remote)?);
            }
            while !flying.is_empty() {
                next(&mut flying)?.wait_until(deadline)?;
            }
            Ok(start.elapsed())
        })
    }

    /// Receives what the peer floods. Calls `ready` when the first receives are posted.
    pub(crate) fn drain(
        &mut self,
        size: u32,
        iterations: u64,
        mut ready: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        let (size, target) = (size as usize, self.memory.target);
        let window = iterations.min(self.plan.receive_depth.into());
        self.channel.manual_scope(|scope| {
            let mut coming = VecDeque::with_capacity(window as usize);
            for _ in 0..window {
                coming.push_back(scope.post_receive(target)?);
            }
            ready()?;
            let mut deadline = Instant::now() + PATIENCE;
            for message in 0..iterations {
                if message.is_multiple_of(STRETCH) {
                    deadline = Instant::now() + PATIENCE;
                }
                let (target, completion) = next(&mut coming)?.wait_until(deadline)?;
                if completion.byte_len() as usize != size {
                    return Err(wrong_length(completion.byte_len(), size));
                }
                if message + window < iterations {
                    coming.push_back(scope.post_receive(target)?);
                }
            }
            Ok(iterations)
        })
    }
}

/// The oldest operation in flight.
fn next<'scope, 'a>(flying: &mut VecDeque<Pending<'scope, 'a>>) -> Result<Pending<'scope, 'a>> {
    flying.pop_front().ok_or_else(|| "nothing is in flight".into())
}
