//! The registered buffers of a hub, which grow with what its streams need.
//!
//! A stream takes a buffer for what it sends, and keeps it until the peer's device has the message. Peers that do not read, or
//! do not acknowledge, keep buffers; so there are as many as all streams can keep, and no stream waits for another's. Registering
//! is slow, so nobody registers with the hub's lock held: [`Buffers::take`] notes that there was none, and the thread that holds
//! the lock registers more after it has released it.

use std::io;
use std::sync::Arc;

use ibverbs::{AccessFlags, BufferPool, ChannelId, PooledBuffer, ProtectionDomain};

use crate::config::Config;
use crate::drivers::Drivers;

pub(crate) struct Buffers {
    pools: Vec<BufferPool>,
    /// Bytes of a buffer.
    chunk: usize,
    /// The buffers that are registered.
    count: usize,
    /// The most that all streams can hold.
    most: usize,
    /// The number of buffers that a caller has not found.
    wanted: usize,
    /// Buffers that the program has.
    pub(crate) lent: usize,
    pub(crate) starved: Starved<ChannelId>,
}

impl Buffers {
    pub(crate) fn new(config: &Config) -> Self {
        let most = config.most_buffers();
        let (pools, starved) = (Vec::new(), Starved::default());
        Self { pools, chunk: config.chunk, count: 0, most, wanted: 0, lent: 0, starved }
    }

    #[cold]
    pub(crate) fn has_free(&self) -> bool {
        self.pools.iter().any(|pool| pool.available() > 0)
    }

    pub(crate) fn take(&mut self) -> Option<PooledBuffer> {
        let found = self.free();
        self.want_unless(found.is_some());
        found
    }

    /// Whether this stream would find a buffer. If not, it is told when there is one.
    #[cfg(feature = "tokio")]
    pub(crate) fn can_take(&mut self, id: ChannelId) -> bool {
        let found = self.has_free();
        self.want_unless(found);
        if !found {
            self.starved.add(id);
        }
        found
    }

    fn want_unless(&mut self, found: bool) {
        if !found && self.count < self.most + self.lent {
            self.wanted = self.wanted.max(1);
        }
    }

    fn free(&self) -> Option<PooledBuffer> {
        self.pools.iter().rev().find_map(BufferPool::take)
    }

    /// One for the program, which no stream lacks then: there are more than the streams need. If there is none, it is wanted.
    pub(crate) fn lend(&mut self, needed: usize) -> Option<PooledBuffer> {
        let found = if self.has(needed + 1) { self.free() } else { None };
        match found {
            Some(_) => self.lent += 1,
            None => self.wanted = self.wanted.max(1),
        }
        found
    }

    /// Returns whether this number of buffers is registered, without those that the program has. If not, the rest is wanted.
    pub(crate) fn has(&mut self, number: usize) -> bool {
        let missing = (number + self.lent).saturating_sub(self.count);
        self.wanted = self.wanted.max(missing);
        missing == 0
    }

    pub(crate) fn are_wanted(&self) -> bool {
        self.wanted > 0
    }

    /// The buffers to register, if any are wanted: call this without the lock, and [add](Self::add) the result.
    pub(crate) fn growth(&mut self) -> Option<Growth> {
        let least = std::mem::take(&mut self.wanted);
        // Doubling keeps the number of pools small.
        let number = least.max(self.count.min(self.most.saturating_sub(self.count)));
        (least > 0).then_some(Growth { chunk: self.chunk, number, least })
    }

    /// Adds what was registered. A failure ends the growth for streams that send: they wait for buffers that come back.
    pub(crate) fn add(&mut self, grown: io::Result<BufferPool>) -> io::Result<()> {
        match grown {
            Ok(pool) => {
                self.count += pool.chunks();
                self.pools.push(pool);
                Ok(())
            }
            Err(error) => {
                self.most = self.count.saturating_sub(self.lent);
                Err(error)
            }
        }
    }
}

/// The streams whose writers have found no buffer.
///
/// Buffers get free in many ways: a message has arrived, a stream fails or is dropped, a piece was read, more are registered. All
/// of them happen with the hub's lock held. So the release of the lock looks for a free buffer, and [wakes](Self::fed) these streams.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Starved<I>(Vec<I>);

impl<I> Default for Starved<I> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<I: PartialEq> Starved<I> {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn add(&mut self, id: I) {
        if !self.0.contains(&id) {
            self.0.push(id);
        }
    }

    /// Call this when there is a buffer. Returns the streams whose tasks are to be woken, all of them since the first may not want
    /// the buffer any more, and whether sleeping threads are to be woken, as no completion need have told them.
    pub(crate) fn fed(&mut self, drivers: &Drivers) -> (Vec<I>, bool) {
        (std::mem::take(&mut self.0), drivers.threads > 0)
    }
}

/// Buffers to be registered.
pub(crate) struct Growth {
    chunk: usize,
    number: usize,
    least: usize,
}

impl Growth {
    /// `ibv_reg_mr`: registers as many as is sensible, or else as many as are needed.
    pub(crate) fn register(
        self,
        domain: &Arc<ProtectionDomain<'static>>,
    ) -> io::Result<BufferPool> {
        let Self { chunk, number, least } = self;
        let register = |number| BufferPool::new(domain, chunk, number, AccessFlags::empty());
        let registered = register(number).or_else(|error| match number > least {
            true => register(least),
            false => Err(error),
        });
        registered.map_err(|error| {
            let kind = io::Error::from(error).kind();
            let reason = format!(
                "{least} more buffers of {chunk} bytes cannot be registered ({error}): raise RLIMIT_MEMLOCK (ulimit -l), or set a \
                 smaller chunk, fewer receives, or shared_receives"
            );
            io::Error::new(kind, reason)
        })
    }
}
