use std::fmt;
use std::time::Instant;

use super::Channel;
use super::error::{TransportError, TransportResult};
use super::scope::Scope;
use super::scoped_work::ScopedPendingWork;
use super::stop::ScopeExit;
use crate::base::panics;
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{BorrowedBuffer, GatherBuffer, ScatterBuffer};

/// Channels to any number of peers, to which one thread sends at once and from which it receives at once.
///
/// [`broadcast`](Self::broadcast), [`scatter`](Self::scatter) and [`gather`](Self::gather) exchange one
/// message with each peer. A [`scope`](Self::scope) has the operations of all channels. Each peer has a
/// result of its own: **a peer that fails fails alone**. Its channel is then in the error state, and the
/// others go on. [`remove`](Self::remove) it, or reset it and [`push`](Self::push) it again.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs peers
/// use std::time::{Duration, Instant};
/// use ibverbs::channel::ChannelSet;
/// use ibverbs::{Channel, ProtectionDomain};
///
/// # fn add(domain: &ProtectionDomain<'_>, peers: Vec<Channel<'_>>) -> Result<(), Box<dyn std::error::Error>> {
/// let mut peers = ChannelSet::new(peers);
/// let count = peers.len();
/// let mut numbers = domain.allocate::<u64>(count)?;
/// let mut sums = domain.allocate::<u64>(count)?;
/// let deadline = Instant::now() + Duration::from_secs(10);
/// // A number for each, and an answer from each.
/// let parts = (0..count).map(|peer| numbers.slice(peer..=peer)).collect::<Result<Vec<_>, _>>()?;
/// for (peer, sent) in peers.scatter(parts, deadline).into_iter().enumerate() {
///     if let Err(error) = sent {
///         println!("peer {peer} does not get its number: {error}");
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct ChannelSet<'res> {
    channels: Vec<Channel<'res>>,
}

/// The result of one operation with each peer, in the order of the peers.
pub type PeerResults<T> = Vec<TransportResult<T>>;

/// Posts to the channels of a [`ChannelSet`]: a [`Scope`] for each peer.
pub struct SetScope<'scope, 'env: 'scope> {
    scopes: Vec<Scope<'scope, 'env>>,
}

impl<'scope, 'env> SetScope<'scope, 'env> {
    /// The scope of a peer. `None`: there are fewer peers.
    pub fn peer(&self, index: usize) -> Option<&Scope<'scope, 'env>> {
        self.scopes.get(index)
    }

    /// The scopes of all peers, in their order.
    pub fn peers(&self) -> &[Scope<'scope, 'env>] {
        &self.scopes
    }
}

impl fmt::Debug for SetScope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.scopes).finish()
    }
}

impl<'res> ChannelSet<'res> {
    /// A set of these channels, in this order.
    pub fn new(channels: impl IntoIterator<Item = Channel<'res>>) -> Self {
        Self { channels: channels.into_iter().collect() }
    }

    /// The number of peers.
    pub fn len(&self) -> usize {
        self.channels.len()
    }

    /// Whether there are no peers.
    pub fn is_empty(&self) -> bool {
        self.channels.is_empty()
    }

    /// Adds a peer, as the last one.
    pub fn push(&mut self, channel: Channel<'res>) {
        self.channels.push(channel);
    }

    /// Takes a peer out. Those after it move up by one. `None`: there are fewer peers.
    pub fn remove(&mut self, index: usize) -> Option<Channel<'res>> {
        (index < self.channels.len()).then(|| self.channels.remove(index))
    }

    /// The channels, for operations with a single peer.
    pub fn channels(&mut self) -> &mut [Channel<'res>] {
        &mut self.channels
    }

    /// The channels alone.
    pub fn into_channels(self) -> Vec<Channel<'res>> {
        self.channels
    }

    /// `ibv_post_send`: sends the same message to all peers at once, and waits until each has it, or
    /// `deadline` has passed.
    ///
    /// Each result is that of [`ChannelUntil::send`](crate::channel::ChannelUntil::send). A channel whose deadline has passed was stopped,
    /// alone.
    pub fn broadcast<B: GatherBuffer<Kept = B> + BorrowedBuffer + Clone>(
        &mut self,
        message: B,
        deadline: Instant,
    ) -> PeerResults<WorkSuccess> {
        let copies = vec![message; self.len()];
        self.scatter(copies, deadline)
    }

    /// `ibv_post_send`: sends the first part to the first peer, the second to the second and so on, all at
    /// once, and waits until each has its part, or `deadline` has passed. There are as many results as
    /// parts or peers, whichever are fewer.
    ///
    /// Each result is that of [`ChannelUntil::send`](crate::channel::ChannelUntil::send). A channel whose deadline has passed was stopped,
    /// alone, unless it had no credit.
    pub fn scatter<B: GatherBuffer<Kept = B> + BorrowedBuffer>(
        &mut self,
        parts: impl IntoIterator<Item = B>,
        deadline: Instant,
    ) -> PeerResults<WorkSuccess> {
        let parts = parts.into_iter().map(Some).collect();
        self.each(parts, deadline, |scope| scope.poll_credit(), |scope, part| scope.post_send(part))
    }

    /// `ibv_post_recv`: receives a message from the first peer into the first room, from the second into
    /// the second and so on, all at once, and waits until each has come, or `deadline` has passed. There
    /// are as many results as rooms or peers, whichever are fewer.
    ///
    /// Each result is that of [`ChannelUntil::receive`](crate::channel::ChannelUntil::receive). A channel whose deadline has passed was
    /// stopped, alone.
    pub fn gather<B: ScatterBuffer<Kept = B> + BorrowedBuffer>(
        &mut self,
        rooms: impl IntoIterator<Item = B>,
        deadline: Instant,
    ) -> PeerResults<WorkSuccess> {
        let rooms = rooms.into_iter().map(Some).collect();
        self.each(rooms, deadline, |_| Ok(true), |scope, room| scope.post_receive(room))
    }

    /// Posts to each peer as soon as it is ready, and waits for all.
    fn each<'env, B: GatherBuffer + 'env>(
        &mut self,
        mut left: Vec<Option<B>>,
        deadline: Instant,
        is_ready: impl for<'scope> Fn(&Scope<'scope, 'env>) -> TransportResult<bool>,
        post: impl for<'scope> Fn(
            &Scope<'scope, 'env>,
            B,
        ) -> TransportResult<ScopedPendingWork<'scope, B>>,
    ) -> PeerResults<WorkSuccess> {
        let mut run = |scope: &SetScope<'_, 'env>| {
            let mut posted: Vec<_> = scope.peers().iter().zip(&left).map(|_| None).collect();
            let mut in_time = true;
            while posted.iter().any(Option::is_none) {
                for ((peer, buffer), posted) in scope.peers().iter().zip(&mut left).zip(&mut posted)
                {
                    if posted.is_some() {
                        continue;
                    }
                    match is_ready(peer) {
                        Ok(true) => *posted = buffer.take().map(|buffer| post(peer, buffer)),
                        Ok(false) if in_time => {}
                        Ok(false) => *posted = Some(Err(TransportError::NoCredit)),
                        Err(error) => *posted = Some(Err(error)),
                    }
                }
                in_time = Instant::now() < deadline;
            }
            let wait =
                |work: ScopedPendingWork<'_, B>| work.wait_until(deadline).map(|done| done.1);
            posted.into_iter().flatten().map(|work| work.and_then(wait)).collect()
        };
        self.scope(Some(deadline), |scope| Ok::<_, std::convert::Infallible>(run(scope)))
            .map_or_else(|never| match never {}, |(results, _)| results)
    }

    /// Calls `f` with a scope on which it can post operations to all peers, in flight together: as
    /// [`Channel::scope`] for each channel.
    ///
    /// When `f` returns `Ok`, the operations that it has not waited for are polled to completion, until
    /// `deadline` if there is one. Returns what `f` has returned and, for each peer, whether these
    /// operations succeeded. When `f` returns an error or panics, the channels that have operations in
    /// flight are stopped. Either way no operation of the scope is in flight when this returns.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # use ibverbs::channel::ChannelSet;
    /// # use ibverbs::{MemoryRegion, TransportError};
    /// # fn ask(peers: &mut ChannelSet<'_>, question: &MemoryRegion<'_, u8>, answers: &mut MemoryRegion<'_, u8>) -> Result<(), Box<dyn std::error::Error>> {
    /// let (first, second) = answers.slice_mut(..)?.split_at(64)?;
    /// let (_, ended) = peers.scope(None, |scope| {
    ///     for (peer, room) in scope.peers().iter().zip([first, second]) {
    ///         peer.post_receive(room)?;
    ///         peer.post_send(question.slice(..)?)?;
    ///     }
    ///     Ok::<_, TransportError>(())
    /// })?;
    /// println!("{} peers have answered", ended.iter().filter(|ended| ended.is_ok()).count());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// What `f` returned.
    ///
    /// # Panics
    ///
    /// If `f` does.
    pub fn scope<'env, T, E, F>(
        &mut self,
        deadline: Option<Instant>,
        f: F,
    ) -> Result<(T, PeerResults<()>), E>
    where
        F: for<'scope> FnOnce(&'scope SetScope<'scope, 'env>) -> Result<T, E>,
    {
        let mut ended = Vec::with_capacity(self.channels.len());
        let scope = SetScope {
            scopes: self.channels.iter().map(|channel| Scope::begin(channel.core())).collect(),
        };
        // The operations end below even if `f` panics.
        let result = panics::catch(|| f(&scope));
        let succeeded = matches!(result, Ok(Ok(_)));
        for channel in &self.channels {
            // This does not allocate: there is room.
            let exit = if succeeded { ScopeExit::Wait(deadline) } else { ScopeExit::Stop };
            ended.push(channel.core().end_scope(exit));
        }
        match result {
            Err(panic) => panic.resume(),
            Ok(result) => Ok((result?, ended)),
        }
    }
}

impl<'res> FromIterator<Channel<'res>> for ChannelSet<'res> {
    fn from_iter<I: IntoIterator<Item = Channel<'res>>>(channels: I) -> Self {
        Self::new(channels)
    }
}

impl fmt::Debug for ChannelSet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.channels).finish()
    }
}
