//! Posts before a channel is connected.

use std::collections::VecDeque;
use std::fmt;

use ibverbs::channel::{OwnedBuffer, WorkRequest};
use ibverbs::{ChannelId, Loop, OperationError, TransportError};

/// Keeps what a program posts on a channel of a [`Loop`] until the channel is connected, and then while its queue is full: up to
/// a number of posts, and in their order.
///
/// A post is a buffer and a function that makes the request of it: if it cannot be posted, the buffer comes back.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::sync::Arc;
///
/// use ibverbs::{AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, SendWorkRequest};
/// use ibverbs_transfer::Outbox;
///
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let pool = BufferPool::new(&domain, 64, 16, AccessFlags::empty())?;
/// let mut event_loop = Loop::<PooledBuffer>::new(domain.context_parent(), 64)?;
/// let channel = event_loop.add_prepared(event_loop.create_channel(&domain).build()?)?;
/// let mut outbox = Outbox::new(channel, 8);
/// let hello = pool.take_from(b"hello")?.ok_or("all buffers are in use")?;
/// outbox.post(&mut event_loop, hello, SendWorkRequest::new, 1)?; // kept
/// # let peer = event_loop.endpoint(channel).unwrap();
/// # event_loop.post(channel, ibverbs::ReceiveWorkRequest::new(pool.take().unwrap()), 2)?;
/// let unposted = match event_loop.handshake(channel, peer) {
///     Ok(()) => outbox.connected(&mut event_loop), // posted
///     Err(error) => outbox.end(error.into()),
/// };
/// assert!(unposted.is_empty());
/// while outbox.kept() > 0 || event_loop.in_flight(channel) > 0 {
///     let ended = event_loop.wait_ended()?;
///     println!("{}: {:?}", ended.token, ended.result());
///     outbox.flush(&mut event_loop); // there is room now
/// }
/// # Ok(())
/// # }
/// ```
pub struct Outbox<B> {
    channel: ChannelId,
    most: usize,
    kept: VecDeque<Kept<B>>,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Connecting,
    Connected,
    Ended(TransportError),
}

struct Kept<B> {
    buffer: B,
    token: u64,
    post: Post<B>,
}

type Post<B> =
    Box<dyn Fn(&mut Loop<'_, B>, ChannelId, B, u64) -> Result<(), OperationError<B>> + Send>;

/// A post that the device has not seen, or, without the buffer, that it may have.
#[derive(Debug)]
pub struct Unposted<B> {
    /// Why.
    pub error: OutboxError,
    /// The token of the post.
    pub token: u64,
    /// Its buffer. `None`: the loop keeps it, and returns it with the token.
    pub buffer: Option<B>,
}

/// Why something was not posted.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum OutboxError {
    /// The outbox keeps as many posts as it may.
    Full {
        /// The number that [`Outbox::new`] got.
        most: usize,
    },
    /// The channel was not connected, for this reason: that of [`Outbox::end`].
    Ended(TransportError),
    /// The loop has refused it.
    Refused(TransportError),
}

impl fmt::Display for OutboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { most } => write!(f, "the outbox keeps {most} posts, which is its limit"),
            Self::Ended(reason) => write!(f, "the channel was not connected: {reason}"),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for OutboxError {}

impl<B> fmt::Display for Unposted<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B: fmt::Debug> std::error::Error for Unposted<B> {}

impl<B: OwnedBuffer> Outbox<B> {
    /// An outbox for a channel that is not connected yet, which keeps this number of posts at most.
    pub fn new(channel: ChannelId, most: usize) -> Self {
        Self { channel, most, kept: VecDeque::new(), state: State::Connecting }
    }

    /// Posts the request that `request` makes of the buffer, or keeps it: until the channel is [connected](Self::connected),
    /// and behind others that are kept. `request` may be called again, if the queue was full.
    ///
    /// # Errors
    ///
    /// See [`OutboxError`]. A full queue is none while there is room in the outbox.
    pub fn post<R: WorkRequest<Kept = B>>(
        &mut self,
        event_loop: &mut Loop<'_, B>,
        buffer: B,
        request: impl Fn(B) -> R + Send + 'static,
        token: u64,
    ) -> Result<(), Unposted<B>> {
        let unposted = |error, buffer| Err(Unposted { error, token, buffer });
        if let State::Ended(reason) = self.state {
            return unposted(OutboxError::Ended(reason), Some(buffer));
        }
        let mut buffer = buffer;
        if matches!(self.state, State::Connected) && self.kept.is_empty() {
            match event_loop.post(self.channel, request(buffer), token) {
                Ok(()) => return Ok(()),
                Err(OperationError { error: TransportError::QueueFull, buffer: Some(back) }) => {
                    buffer = back;
                }
                Err(refused) => {
                    return unposted(OutboxError::Refused(refused.error), refused.buffer);
                }
            }
        }
        if self.kept.len() >= self.most {
            return unposted(OutboxError::Full { most: self.most }, Some(buffer));
        }
        let post: Post<B> = Box::new(move |event_loop, channel, buffer, token| {
            event_loop.post(channel, request(buffer), token)
        });
        self.kept.push_back(Kept { buffer, token, post });
        Ok(())
    }

    /// The channel is connected: posts what is kept, as far as there is room. Returns what the loop has refused.
    pub fn connected(&mut self, event_loop: &mut Loop<'_, B>) -> Vec<Unposted<B>> {
        if matches!(self.state, State::Connecting) {
            self.state = State::Connected;
        }
        self.flush(event_loop)
    }

    /// Posts what is kept, as far as there is room: call it when an operation of the channel has ended. Returns what the loop
    /// has refused for another reason.
    pub fn flush(&mut self, event_loop: &mut Loop<'_, B>) -> Vec<Unposted<B>> {
        let mut unposted = Vec::new();
        if !matches!(self.state, State::Connected) {
            return unposted;
        }
        while let Some(Kept { buffer, token, post }) = self.kept.pop_front() {
            match post(event_loop, self.channel, buffer, token) {
                Ok(()) => {}
                Err(OperationError { error: TransportError::QueueFull, buffer: Some(buffer) }) => {
                    self.kept.push_front(Kept { buffer, token, post });
                    break;
                }
                Err(OperationError { error, buffer }) => {
                    unposted.push(Unposted { error: OutboxError::Refused(error), token, buffer });
                }
            }
        }
        unposted
    }

    /// Connecting has failed or was cancelled, or the channel is to be removed. Returns what was kept, in its order; later posts
    /// are refused for the same reason.
    pub fn end(&mut self, reason: TransportError) -> Vec<Unposted<B>> {
        self.state = State::Ended(reason);
        let error = OutboxError::Ended(reason);
        let unposted = |Kept { buffer, token, .. }| Unposted { error, token, buffer: Some(buffer) };
        self.kept.drain(..).map(unposted).collect()
    }

    /// The number of posts that are kept.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }
}

impl<B> fmt::Debug for Outbox<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { channel, most, kept, state } = self;
        let mut fields = f.debug_struct("Outbox");
        fields.field("channel", channel).field("state", state).field("kept", &kept.len());
        fields.field("most", most).finish()
    }
}
