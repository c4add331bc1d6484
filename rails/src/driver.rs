//! Rails of an asynchronous program: handles for its tasks, and the driver that has the rails.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use futures_channel::{mpsc, oneshot};
use futures_core::Stream;
use slotmap::{DefaultKey, SlotMap};

use crate::control::ControlStream;
use crate::error::{RailsError, Result};
use crate::event::{self, Event, PeerId, TransferId};
use crate::panics::caught;
use crate::rails::Rails;
use crate::transfer::Transfer;

/// Nothing fulfils it: a call of [`RailsDriver::run_on_tokio`] does not compile, and the message names the feature.
#[cfg(not(feature = "tokio"))]
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `tokio` of `ibverbs-rails`",
    label = "add `tokio` to the features of `ibverbs-rails` in Cargo.toml"
)]
pub trait FeatureTokio {}

/// [`Rails`] for the tasks of an asynchronous program, on any runtime. Clones are handles to the same rails.
///
/// The rails themselves belong to a [`RailsDriver`], which one task runs. What a handle asks for is done there, so no
/// lock is held over it.
///
/// With feature `tokio`, spawn [`RailsDriver::run_on_tokio`]. Elsewhere, [`run`](RailsDriver::run) does the same with the
/// runtime's own way to wait for a descriptor.
///
#[cfg_attr(feature = "tokio", doc = "```")]
#[cfg_attr(not(feature = "tokio"), doc = "```ignore")]
/// # use std::time::{Duration, Instant};
/// use ibverbs_rails::{AsyncRails, Rails};
///
/// # let rail = ibverbs_software::Device::builder().name("rail0").build().unwrap();
/// # rail.register();
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
/// # runtime.block_on(async {
/// let (rails, driver) = AsyncRails::new(Rails::builder().device("rail0").build()?);
/// tokio::spawn(driver.run_on_tokio());
/// # let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
/// # let address = listener.local_addr()?;
/// # std::thread::spawn(move || {
/// #     let mut rails = Rails::builder().device("rail0").build().unwrap();
/// #     let deadline = Instant::now() + Duration::from_secs(60);
/// #     let peer = rails.accept(&listener, deadline).unwrap();
/// #     rails.send(peer, *b"hello").unwrap();
/// #     let _ = rails.receive(peer, deadline);
/// # });
/// let stream = tokio::net::TcpStream::connect(address).await?.into_std()?;
/// let peer = rails.connect_over(stream).await?;
/// rails.send(peer, *b"hello").await?;
/// println!("{:?}", rails.receive(peer).await?);
/// # Ok::<(), ibverbs_rails::RailsError>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct AsyncRails {
    calls: mpsc::UnboundedSender<Call>,
    shared: Arc<Mutex<Shared>>,
}

/// Has the [`Rails`] of [`AsyncRails`], and does what its handles ask for.
#[must_use = "it does nothing unless it is run"]
#[derive(Debug)]
pub struct RailsDriver {
    rails: Rails,
    calls: Calls,
    answers: Answers,
    shared: Ends,
}

/// The answers and events that tasks wait for.
#[derive(Default, Debug)]
struct Answers {
    ends: HashMap<TransferId, oneshot::Sender<Result<()>>>,
    connections: HashMap<PeerId, oneshot::Sender<Result<PeerId>>>,
}

/// How many calls of handles come before the rails' next turn.
const CALLS_PER_TURN: usize = 256;

/// A call that a handle asks the driver to make.
type Call = Box<dyn FnOnce(&mut Rails, &mut Answers) + Send>;

/// The driver's end of the calls. Those that it has not made are dropped one by one: that is code of the program's.
#[derive(Debug)]
struct Calls(mpsc::UnboundedReceiver<Call>);

impl Drop for Calls {
    fn drop(&mut self) {
        self.0.close();
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(call)) = Pin::new(&mut self.0).poll_next(&mut cx) {
            caught(|| drop(call));
        }
    }
}

/// The events that no answer is for.
#[derive(Default, Debug)]
struct Shared {
    events: VecDeque<Event>,
    peers: HashSet<PeerId>,
    waiting: SlotMap<DefaultKey, Waker>,
    has_ended: bool,
}

/// The driver's, which says so when it ends.
#[derive(Debug)]
struct Ends(Arc<Mutex<Shared>>);

impl Drop for Ends {
    fn drop(&mut self) {
        let mut shared = lock(&self.0);
        shared.has_ended = true;
        let waiting: Vec<_> = shared.waiting.drain().map(|(_, waker)| waker).collect();
        drop(shared);
        wake_all(waiting);
    }
}

impl AsyncRails {
    /// A handle, and the driver that is to be [run](RailsDriver::run).
    pub fn new(rails: Rails) -> (Self, RailsDriver) {
        let (sender, calls) = mpsc::unbounded();
        let shared = Arc::<Mutex<Shared>>::default();
        let handle = Self { calls: sender, shared: shared.clone() };
        let (calls, answers, shared) = (Calls(calls), Answers::default(), Ends(shared));
        let mut driver = RailsDriver { rails, calls, answers, shared };
        driver.give_events(true);
        (handle, driver)
    }

    /// Does something with the rails, such as to [allocate](Rails::allocate) memory. The driver waits for it.
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the driver has ended.
    ///
    /// # Panics
    ///
    /// If `call` does. The driver, and the other tasks, go on.
    pub async fn with<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Rails) -> T + Send + 'static,
    ) -> Result<T> {
        let answered = self.ask(|rails, _, sender| {
            // If the caller is gone, the answer, or the payload of a panic, is dropped with the sender.
            answer(sender, catch_unwind(AssertUnwindSafe(|| call(rails))));
        });
        answered.await.map(|answer| answer.unwrap_or_else(|payload| resume_unwind(payload)))
    }

    /// [`Rails::remove`].
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the driver has ended.
    pub async fn remove(&self, peer: PeerId) -> Result<()> {
        self.ask(move |rails, _, sender| {
            rails.remove(peer);
            answer(sender, ());
        })
        .await
    }

    /// [`Rails::post`] and the transfer's end. Dropping the future does not end the transfer, which is posted when the
    /// future is first polled.
    ///
    /// # Errors
    ///
    ///  - Those of [`Rails::post`] and [`Rails::wait`].
    ///  - [`Control`](RailsError::Control): the driver has ended.
    pub async fn transfer(&self, peer: PeerId, transfer: Transfer) -> Result<()> {
        self.ask(move |rails, answers, sender| answers.end(rails.post(peer, transfer), sender))
            .await?
    }

    /// [`Rails::send`] and the message's end. Messages are sent in the order in which the futures are first polled;
    /// dropping one then does not call its message back.
    ///
    /// # Errors
    ///
    ///  - Those of [`Rails::send`] and [`Rails::wait`].
    ///  - [`Control`](RailsError::Control): the driver has ended.
    pub async fn send(&self, peer: PeerId, message: impl Into<Vec<u8>>) -> Result<()> {
        let message = message.into();
        self.ask(move |rails, answers, sender| answers.end(rails.send(peer, message), sender))
            .await?
    }

    /// [`Rails::connect_over`], and the connection's result. Dropping the future ends the attempt.
    ///
    /// # Errors
    ///
    ///  - Those of [`Rails::connect`].
    ///  - [`Control`](RailsError::Control): the driver has ended.
    pub async fn connect_over(&self, stream: impl ControlStream + 'static) -> Result<PeerId> {
        self.attempt(|rails| rails.connect_over(stream)).await
    }

    /// [`Rails::accept_over`], and the connection's result. Dropping the future ends the attempt.
    ///
    /// # Errors
    ///
    ///  - Those of [`Rails::accept`].
    ///  - [`Control`](RailsError::Control): the driver has ended.
    pub async fn accept_over(&self, stream: impl ControlStream + 'static) -> Result<PeerId> {
        self.attempt(|rails| rails.accept_over(stream)).await
    }

    /// The next event that no other future of these handles waits for: not those of the transfers, messages and
    /// connections that they began. Dropping the future loses no event.
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the driver has ended, and no event is left.
    pub async fn next_event(&self) -> Result<Event> {
        self.event(None, |_| true).await?.ok_or_else(ended)
    }

    /// The next message of a peer. Dropping the future loses none.
    ///
    /// # Errors
    ///
    ///  - [`UnknownPeer`](RailsError::UnknownPeer): the peer is gone, and no message of it is left. Its
    ///    [`Disconnected`](Event::Disconnected) stays to be asked for.
    ///  - [`Control`](RailsError::Control): the driver has ended, and no message is left.
    pub async fn receive(&self, peer: PeerId) -> Result<Vec<u8>> {
        let is_it = |event: &Event| matches!(event, Event::Message { peer: of, .. } if *of == peer);
        match self.event(Some(peer), is_it).await? {
            Some(Event::Message { bytes, .. }) => Ok(bytes),
            _ => Err(RailsError::UnknownPeer),
        }
    }

    /// The next such event; `None` if it is of a peer's that is gone.
    async fn event(
        &self,
        of: Option<PeerId>,
        is_it: impl Fn(&Event) -> bool,
    ) -> Result<Option<Event>> {
        let mut place = Place { shared: &self.shared, key: DefaultKey::default() };
        let event = poll_fn(|cx| {
            // Code of the program's, like the drop of it: not while the lock is held.
            let waker = cx.waker().clone();
            let mut shared = lock(&self.shared);
            if let Some(place) = shared.events.iter().position(&is_it) {
                return Poll::Ready(Ok(shared.events.remove(place)));
            }
            if shared.has_ended {
                return Poll::Ready(Err(ended()));
            }
            if of.is_some_and(|peer| !shared.peers.contains(&peer)) {
                return Poll::Ready(Ok(None));
            }
            // A waker of before is dropped without the lock.
            let before = shared.waiting.remove(place.key);
            place.key = shared.waiting.insert(waker);
            drop(shared);
            drop(before);
            Poll::Pending
        });
        let event = event.await?;
        // If the driver has ended, the peer is gone.
        let _ = match event {
            Some(Event::Message { peer, .. }) => self.tell(move |rails| rails.message_taken(peer)),
            Some(Event::Notified { peer, .. }) => {
                self.tell(move |rails| rails.notification_taken(peer))
            }
            _ => Ok(()),
        };
        Ok(event)
    }

    /// Begins a connection, and waits for its result.
    async fn attempt(
        &self,
        begin: impl FnOnce(&mut Rails) -> Result<PeerId> + Send + 'static,
    ) -> Result<PeerId> {
        let mut attempt = Attempt { rails: self, peer: Arc::default(), is_over: false };
        let begun = attempt.peer.clone();
        let connected = self
            .ask(move |rails, answers, sender| {
                let peer = begin(rails);
                if let Ok(peer) = peer {
                    // Each slot is set once, so this cannot fail.
                    let _ = begun.set(peer);
                }
                answers.connection(peer, sender);
            })
            .await;
        attempt.is_over = true;
        connected?
    }

    fn tell(&self, call: impl FnOnce(&mut Rails) + Send + 'static) -> Result<()> {
        let call: Call = Box::new(move |rails, _| call(rails));
        self.calls.unbounded_send(call).map_err(|_| ended())
    }

    async fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Rails, &mut Answers, oneshot::Sender<T>) + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        let call =
            Box::new(|rails: &mut Rails, answers: &mut Answers| call(rails, answers, sender));
        self.calls.unbounded_send(call).map_err(|_| ended())?;
        receiver.await.map_err(|_| ended())
    }
}

/// A task's place among those that wait for an event.
struct Place<'a> {
    shared: &'a Mutex<Shared>,
    key: DefaultKey,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let waker = lock(self.shared).waiting.remove(self.key);
        // The lock is not held any more.
        drop(waker);
    }
}

/// A task that waits for a connection. If it is dropped before it has the result, the driver removes the peer, whose name the
/// program never got.
struct Attempt<'a> {
    rails: &'a AsyncRails,
    peer: Arc<OnceLock<PeerId>>,
    is_over: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let peer = self.peer.clone();
        // After the call that begins it.
        let call: Call = Box::new(move |rails, answers| {
            if let Some(&peer) = peer.get() {
                answers.connections.remove(&peer);
                rails.remove(peer);
            }
        });
        // If the driver has ended, so have its peers.
        let _ = self.rails.calls.unbounded_send(call);
    }
}

impl Answers {
    fn end(&mut self, posted: Result<TransferId>, sender: oneshot::Sender<Result<()>>) {
        match posted {
            Ok(id) => drop(self.ends.insert(id, sender)),
            Err(error) => answer(sender, Err(error)),
        }
    }

    fn connection(&mut self, peer: Result<PeerId>, sender: oneshot::Sender<Result<PeerId>>) {
        match peer {
            Ok(peer) => drop(self.connections.insert(peer, sender)),
            Err(error) => answer(sender, Err(error)),
        }
    }

    /// Gives an event to the task that waits for it, or returns it.
    fn give(&mut self, event: Event) -> Option<Event> {
        match event {
            Event::Ended { transfer, result, peer } => match self.ends.remove(&transfer) {
                Some(sender) => answer(sender, result),
                None => return Some(Event::Ended { transfer, peer, result }),
            },
            // If the task is gone, it has the peer removed.
            Event::Connected(peer) => match self.connections.remove(&peer) {
                Some(sender) => answer(sender, Ok(peer)),
                None => return Some(event),
            },
            Event::Disconnected { peer, error } => match self.connections.remove(&peer) {
                Some(sender) => answer(sender, Err(error)),
                None => return Some(Event::Disconnected { peer, error }),
            },
            event => return Some(event),
        }
        None
    }
}

impl Drop for Answers {
    /// Dropping a sender wakes its task.
    fn drop(&mut self) {
        self.ends.drain().for_each(|(_, sender)| caught(|| drop(sender)));
        self.connections.drain().for_each(|(_, sender)| caught(|| drop(sender)));
    }
}

impl RailsDriver {
    /// The file that is readable when there is something to do. Only wait for it.
    ///
    /// # Errors
    ///
    /// The process has too many files open.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.rails.as_fd().try_clone_to_owned()
    }

    /// Does what the handles ask for, and what the rails have to do, until all handles are dropped. Then it returns the
    /// rails, with the events that no handle has taken.
    ///
    /// `poll_readable` waits for the [descriptor](Self::descriptor) as the runtime does it. It returns [`Poll::Ready`] if the
    /// descriptor may have become readable since the last call. If not, it wakes the task when that happens.
    ///
    /// If it is dropped, the peers are gone, and all futures of the handles end.
    ///
    /// # Errors
    ///
    /// Those of [`Rails::arm`] and `poll_readable`.
    pub async fn run<F>(mut self, mut poll_readable: F) -> Result<Rails>
    where
        F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>>,
    {
        let mut is_armed = false;
        poll_fn(|cx| self.poll_run(cx, &mut is_armed, &mut poll_readable)).await?;
        self.give_events(false);
        self.rails.events = mem::take(&mut lock(&self.shared.0).events);
        Ok(self.rails)
    }

    /// Runs the driver on tokio: see [`run`](Self::run). To be spawned as a task, on a runtime of either kind.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime whose I/O is enabled ([`enable_io`](tokio::runtime::Builder::enable_io)).
    #[cfg(feature = "tokio")]
    pub async fn run_on_tokio(self) -> Result<Rails> {
        // Its successor is unsafe, and asks for what an `OwnedFd` keeps.
        #[allow(deprecated)]
        let file = tokio::io::unix::AsyncFd::new(self.descriptor()?)?;
        self.run(move |cx| file.poll_read_ready(cx).map_ok(|mut ready| ready.clear_ready())).await
    }

    #[cfg(not(feature = "tokio"))]
    #[doc(hidden)]
    pub fn run_on_tokio<'driver>(&'driver self)
    where
        &'driver Self: FeatureTokio,
    {
    }

    fn poll_run<F>(
        &mut self,
        cx: &mut Context<'_>,
        is_armed: &mut bool,
        poll_readable: &mut F,
    ) -> Poll<Result<()>>
    where
        F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>>,
    {
        loop {
            let (progress, peers) = (self.rails.progress, self.rails.changes);
            let mut is_called = false;
            // Tasks that ask without a pause do not keep the rails waiting.
            for _ in 0..CALLS_PER_TURN {
                let Poll::Ready(call) = Pin::new(&mut self.calls.0).poll_next(cx) else { break };
                // Without a handle there is no future that waits.
                let Some(call) = call else { return Poll::Ready(Ok(())) };
                call(&mut self.rails, &mut self.answers);
                is_called = true;
            }
            self.rails.turn(Instant::now());
            self.give_events(peers != self.rails.changes);
            if is_called || self.rails.progress != progress {
                *is_armed = false;
                break;
            }
            if *is_armed {
                ready!(poll_readable(cx))?;
                *is_armed = false;
                break;
            }
            // The next turn closes the pairs of a device that is gone.
            if let Err(error @ RailsError::Control(_)) = self.rails.arm() {
                return Poll::Ready(Err(error));
            }
            *is_armed = true;
        }
        // Other tasks run first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Gives each event to whom it is for.
    fn give_events(&mut self, has_other_peers: bool) {
        if self.rails.events.is_empty() && !has_other_peers {
            return;
        }
        let others: Vec<_> =
            self.rails.events.drain(..).filter_map(|event| self.answers.give(event)).collect();
        if others.is_empty() && !has_other_peers {
            return;
        }
        let mut shared = lock(&self.shared.0);
        others.into_iter().for_each(|event| event::push(&mut shared.events, event));
        if has_other_peers {
            shared.peers = self.rails.peers.keys().collect();
        }
        let waiting: Vec<_> = shared.waiting.drain().map(|(_, waker)| waker).collect();
        drop(shared);
        wake_all(waiting);
    }
}

fn wake_all(waiting: Vec<Waker>) {
    waiting.into_iter().for_each(|waker| caught(|| waker.wake()));
}

/// Gives a task its answer, which wakes it.
fn answer<T>(sender: oneshot::Sender<T>, answer: T) {
    caught(|| drop(sender.send(answer)));
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic leaves nothing half done, so a poisoned lock is as good as another.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> RailsError {
    RailsError::Control(io::Error::new(ErrorKind::BrokenPipe, "the driver of the rails has ended"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its peer is removed, so the program never gets the end of it.
    #[test]
    fn nobody_is_told_of_a_connection_whose_task_is_gone() {
        let mut answers = Answers::default();
        let (sender, receiver) = oneshot::channel();
        answers.connection(Ok(PeerId::default()), sender);
        drop(receiver);
        assert!(answers.give(Event::Connected(PeerId::default())).is_none());
        assert!(answers.give(Event::Connected(PeerId::default())).is_some(), "it has no task");
    }
}
