//! The driver of a device's engine, which hands it packets and keeps its timers: a thread, or a simulated network.

use std::ffi::c_int;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::Shared;
use crate::files::{Epoll, Waker, wait, wait_for};
use crate::link::Time;
use crate::link::neighbours::Inbox;
use crate::link::receive::Receiver;
use crate::link::udp::UdpLink;
use crate::network::{Membership, sleep};
use crate::transport::Engine;
use crate::turns::{PAUSE, Turns};

/// A program counts as polling all the time once it has polled empty queues this often without arming one.
const MANY_POLLS: u32 = 64;

/// It goes on counting so while it polls at least this often in each `POLLED_FOR`, in nanoseconds.
const FEW_POLLS: u32 = 8;
const POLLED_FOR: Time = 1_000_000;

/// How often packets are received before the timers run, though there are more.
const MANY_RECEIVES: u32 = 64;

#[derive(Debug)]
pub(crate) enum Driver {
    Thread(Box<Threaded>),
    Network(Simulated),
}

/// A thread of the device's own, with sockets.
#[derive(Debug)]
pub(crate) struct Threaded {
    /// Taken before the engine's lock, never after it.
    receiver: Mutex<Receiver>,
    /// Those of other processes, which ring them when they have written to a ring.
    bells: Arc<Epoll>,
    waker: Arc<Waker>,
    /// The time until which the thread sleeps; 0 while it is awake. Changed with the lock held.
    sleeps_until: AtomicU64,
    /// Empty polls since the last request for an event; while `polled`, since the thread last looked.
    polls: AtomicU32,
    /// Its `polled` is changed with the engine's lock held.
    inbox: Arc<Inbox>,
    turns: Turns,
    /// How many threads pause, since there is no processor for all who poll.
    pausing: AtomicU32,
    /// Whether one of them waits for packets.
    watched: AtomicBool,
    /// Whether a thread of the program [stands in](Self::stand_in), and whether one has begun to since the device's
    /// thread last looked, and may be expected back.
    stands_in: AtomicBool,
    stood_in: AtomicBool,
    /// The version of the sockets that it waits for.
    attended: AtomicU32,
    /// An acknowledgement may be held back.
    holds: AtomicBool,
    stop: AtomicBool,
}

/// A place in a simulated network.
#[derive(Debug)]
pub(crate) struct Simulated {
    pub(crate) membership: Arc<Membership>,
    /// [`Engine::due`], readable without the lock; `Time::MAX` for none.
    due: AtomicU64,
    turns: Turns,
}

impl Driver {
    pub(crate) fn threaded(link: &UdpLink) -> io::Result<Self> {
        let receiver = Receiver::new(link.sockets(), link.inbox())?;
        Ok(Self::Thread(Box::new(Threaded {
            bells: receiver.bells().clone(),
            receiver: Mutex::new(receiver),
            inbox: link.inbox(),
            waker: link.waker(),
            sleeps_until: AtomicU64::new(0),
            polls: AtomicU32::new(0),
            turns: Turns::new(),
            pausing: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            stands_in: AtomicBool::new(false),
            stood_in: AtomicBool::new(false),
            attended: AtomicU32::new(0),
            holds: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        })))
    }

    pub(crate) fn simulated(membership: Arc<Membership>) -> Self {
        let due = AtomicU64::new(Time::MAX);
        Self::Network(Simulated { membership, due, turns: Turns::new() })
    }

    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        match self {
            Self::Thread(_) => None,
            Self::Network(simulated) => Some(&simulated.membership),
        }
    }

    /// When [`Engine::advance`] must be called; of a device on a network.
    pub(crate) fn due(&self) -> Option<Time> {
        match self {
            Self::Thread(_) => None,
            Self::Network(simulated) => {
                Some(simulated.due.load(Ordering::SeqCst)).filter(|&due| due != Time::MAX)
            }
        }
    }

    /// Called before the engine is unlocked. Makes sure that someone does what is due. `drives`: the caller is
    /// the driver of the network.
    pub(crate) fn before_unlock(&self, engine: &Engine, drives: bool) {
        match self {
            Self::Thread(threaded) => threaded.before_unlock(engine),
            Self::Network(simulated) => {
                simulated.due.store(engine.due().unwrap_or(Time::MAX), Ordering::SeqCst);
                if !drives {
                    simulated.membership.network.sleepers().wake();
                }
            }
        }
    }

    /// Called after an empty poll, without the lock: lets something happen.
    pub(crate) fn make_progress(&self, shared: &Shared) {
        match self {
            Self::Thread(threaded) => threaded.make_progress(shared),
            Self::Network(simulated) => {
                let network = &simulated.membership.network;
                if network.is_driven() {
                    return;
                }
                if network.is_manual() || !network.step(Time::MAX) {
                    simulated.turns.give(|| std::thread::sleep(PAUSE));
                }
            }
        }
    }

    /// A thread is about to sleep until one of these files is readable, or the deadline has passed; the last one is
    /// that of the events. Lets something happen until then, or returns earlier.
    pub(crate) fn sleep(&self, shared: &Shared, files: &[c_int], deadline: Option<Instant>) {
        match self {
            Self::Thread(threaded) => threaded.stand_in(shared, files, deadline),
            Self::Network(simulated) => {
                sleep::drive_until(&simulated.membership.network, files, deadline)
            }
        }
    }

    /// A program asks for an event, to sleep until then. Called with the engine's lock held.
    pub(crate) fn before_sleep(&self) {
        if let Self::Thread(threaded) = self {
            threaded.polls.store(0, Ordering::Relaxed);
            if threaded.inbox.polled.swap(false, Ordering::Relaxed) {
                threaded.waker.wake();
            }
        }
    }

    /// What wakes the device's thread.
    #[cfg(test)]
    pub(crate) fn waker(&self) -> &Waker {
        match self {
            Self::Thread(threaded) => &threaded.waker,
            Self::Network(_) => panic!("it has no thread"),
        }
    }

    /// The device is being freed.
    pub(crate) fn stop(&self) {
        match self {
            Self::Thread(threaded) => {
                threaded.stop.store(true, Ordering::Release);
                threaded.waker.wake();
            }
            Self::Network(simulated) => simulated.membership.leave(),
        }
    }
}

impl Threaded {
    /// Wakes the thread if there is something to do before it wakes by itself.
    fn before_unlock(&self, engine: &Engine) {
        let sleeps_until = &self.sleeps_until;
        if engine.due().is_some_and(|due| due < sleeps_until.load(Ordering::Relaxed)) {
            sleeps_until.store(0, Ordering::Relaxed);
            self.waker.wake();
        }
    }

    /// Hands the packets that have arrived to the engine; returns their number.
    fn receive(shared: &Shared, receiver: &mut Receiver) -> usize {
        let mut engine = None;
        receiver.receive(|from, to, packet| {
            let engine = engine.get_or_insert_with(|| shared.lock());
            engine.receive((from.ip(), from.port()), to, packet);
        })
    }

    /// The same, by a thread of the program. `holds`: acknowledgements wait until that posts or polls again. If it does
    /// neither, the device's thread sends them, which must be going to look within `POLLED_FOR`.
    fn receive_for_program(&self, shared: &Shared, receiver: &mut Receiver, holds: bool) -> usize {
        let mut engine = None;
        let count = receiver.poll(|from, to, packet| {
            let engine = engine.get_or_insert_with(|| {
                let mut engine = shared.lock();
                engine.core.holds_answers = holds;
                engine
            });
            engine.receive((from.ip(), from.port()), to, packet);
        });
        if let Some(mut engine) = engine {
            engine.core.holds_answers = false;
            self.holds.store(!engine.core.held.is_empty(), Ordering::Relaxed);
        }
        count
    }

    /// Sends the acknowledgements that were held back.
    fn release_answers(&self, shared: &Shared) {
        if self.holds.swap(false, Ordering::Relaxed) {
            shared.lock().release_answers();
        }
    }

    /// Receives packets on the polling thread, which saves waking the device's thread; if there are none, others get
    /// their turn, since no hardware works in the background.
    fn make_progress(&self, shared: &Shared) {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let received = match self.receiver.try_lock() {
            Ok(mut receiver) => {
                let holds = self.inbox.polled.load(Ordering::Relaxed)
                    || self.stood_in.load(Ordering::Relaxed);
                self.receive_for_program(shared, &mut receiver, holds)
            }
            Err(_) => 0,
        };
        if received == 0 {
            self.release_answers(shared);
            self.turns.give(|| self.pause());
        }
    }

    /// One thread sleeps until a packet arrives, which it then receives for all, but not for longer than `PAUSE`. The
    /// others sleep for `PAUSE`, or up to a hundred times as long if they are many. If all woke for each packet, nobody
    /// would get to work.
    #[cold]
    fn pause(&self) {
        let others = self.pausing.fetch_add(1, Ordering::Relaxed);
        if self.watched.swap(true, Ordering::Acquire) {
            std::thread::sleep(PAUSE * (1 + others / 8).min(100));
        } else {
            self.watch();
            self.watched.store(false, Ordering::Release);
        }
        self.pausing.fetch_sub(1, Ordering::Relaxed);
        // The program attends to the packets no less than if it had polled.
        self.polls.fetch_add(FEW_POLLS, Ordering::Relaxed);
    }

    /// Sleeps until a packet arrives, but not for longer than `PAUSE`: the inbox wakes nobody who polls.
    fn watch(&self) {
        let found =
            self.receiver.try_lock().map(|mut receiver| (receiver.sources(), receiver.may_sleep()));
        match found {
            Ok((_, false)) => {}
            Ok((sources, true)) => {
                let mut files: Vec<_> = sources.sockets().chain(self.bell_files()).collect();
                if wait(&mut files, Some(PAUSE)) {
                    let mut receiver = self.receiver();
                    let rings = files.last().is_some_and(|bells| bells.revents != 0);
                    receiver.attend(&if rings { self.rung() } else { Vec::new() });
                    receiver.expect_datagrams();
                    drop(receiver);
                    // This may have heard a bell that was for the thread.
                    fence(Ordering::SeqCst);
                    if !self.inbox.polled.load(Ordering::Relaxed) {
                        self.waker.wake();
                    }
                }
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }

    /// A thread that sleeps until there is an event stands in for the device's own meanwhile: it receives what other
    /// processes and machines send. So a message wakes one thread, not two. For any thread but the first, this returns at
    /// once.
    ///
    /// If it comes back within `POLLED_FOR`, again and again, nobody is woken for these packets in between either, unless
    /// a completion queue is armed when it leaves: then others wait for events.
    fn stand_in(&self, shared: &Shared, files: &[c_int], deadline: Option<Instant>) {
        if self.stands_in.swap(true, Ordering::Acquire) {
            return;
        }
        let _place = Place { threaded: self, shared };
        self.stood_in.store(true, Ordering::Relaxed);
        let sources = self.receiver().sources();
        self.attended.store(sources.version(), Ordering::Relaxed);
        let own = files.len();
        let others = sources.sockets().chain(self.bell_files());
        let mut files: Vec<_> = files.iter().copied().map(wait_for).chain(others).collect();
        let bells = files.len() - 1;
        loop {
            self.release_answers(shared);
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let is_idle = self.receiver().may_sleep();
            wait(&mut files, if is_idle { left } else { Some(Duration::ZERO) });
            if !is_idle || files[own..].iter().any(|file| file.revents != 0) {
                let rung = if files[bells].revents != 0 { self.rung() } else { Vec::new() };
                let mut receiver = self.receiver();
                receiver.attend(&rung);
                receiver.expect_datagrams();
                self.receive_for_program(shared, &mut receiver, true);
                // For an event, the program returns before the acknowledgement leaves, which its answer takes along.
                wait(&mut files[..own], Some(Duration::ZERO));
            }
            let is_over = left.is_some_and(|left| left.is_zero());
            if is_over || files[..own].iter().any(|file| file.revents != 0) {
                return;
            }
        }
    }

    /// To wait for all bells.
    fn bell_files(&self) -> [libc::pollfd; 1] {
        [wait_for(self.bells.fd())]
    }

    /// The bells that ring.
    fn rung(&self) -> Vec<c_int> {
        let mut rung = Vec::new();
        self.bells.ready(|fd| rung.push(fd));
        rung
    }

    /// Attends to these files, and receives; returns the number of packets.
    fn attend(&self, shared: &Shared, ready: &[c_int]) -> usize {
        let mut receiver = self.receiver();
        receiver.attend(ready);
        Self::receive(shared, &mut receiver)
    }

    /// Receives what has arrived, for as long as a timer is due: an answer that is here is not overdue.
    fn receive_before_timers(&self, shared: &Shared) {
        for _ in 0..MANY_RECEIVES {
            if !shared.lock().is_timer_due() || Self::receive(shared, &mut self.receiver()) == 0 {
                return;
            }
        }
    }

    /// Decides whether the program's polls are enough to receive the packets. Called with the engine's lock held.
    fn look_at_polls(&self) -> bool {
        let polls = self.polls.load(Ordering::Relaxed);
        let was = self.inbox.polled.load(Ordering::Relaxed);
        let polled = polls >= if was { FEW_POLLS } else { MANY_POLLS };
        if was || polled {
            self.polls.store(0, Ordering::Relaxed);
        }
        self.inbox.polled.store(polled, Ordering::Relaxed);
        polled
    }

    /// Receives packets and keeps the timers, so that a peer's requests are served while the program does
    /// something else.
    fn run(&self, shared: &Shared) {
        let mut sleeps_until: Time = 0;
        let (mut files, mut ready) = (Vec::new(), Vec::new());
        while !self.stop.load(Ordering::Acquire) {
            if self.attend(shared, &ready) > 0 {
                self.receive_before_timers(shared);
            }
            let (polled, attended, stands_in);
            let timeout = {
                let mut engine = shared.lock();
                engine.release_answers();
                engine.advance();
                engine.settle();
                let now = engine.core.now();
                polled = self.look_at_polls();
                // Who has stood in a moment ago will soon do so again.
                let stood_in = self.stood_in.swap(false, Ordering::Relaxed);
                stands_in = self.stands_in.load(Ordering::Relaxed);
                attended = polled || stood_in || stands_in;
                let look_again = if polled || stood_in { now + POLLED_FOR } else { Time::MAX };
                let due = engine.due().unwrap_or(Time::MAX).min(look_again);
                // A wake-up that was due anyway is kept: then the next request need not wake the thread.
                sleeps_until = if sleeps_until > now { due.min(sleeps_until) } else { due };
                self.sleeps_until.store(sleeps_until, Ordering::Relaxed);
                (sleeps_until != Time::MAX).then(|| sleeps_until.saturating_sub(now))
            };
            let (sources, may_sleep, has_rings) = {
                let mut receiver = self.receiver();
                // What came before `polled` was cleared, or while others attended to the rings, has woken nobody. And this
                // thread, or one that polls, may have heard a bell for who stands in, and who sleeps on.
                let is_idle = if stands_in || !attended {
                    receiver.may_sleep()
                } else {
                    receiver.may_sleep_without_bells()
                };
                (receiver.sources(), polled || is_idle, receiver.has_rings())
            };
            let timeout = if may_sleep { timeout } else { Some(0) };
            files.clear();
            files.push(wait_for(self.waker.fd()));
            files.extend(sources.doors());
            let others_receive =
                polled || attended && sources.version() == self.attended.load(Ordering::Relaxed);
            if !others_receive {
                files.extend(sources.sockets());
            }
            if !attended {
                files.extend(self.bell_files());
            }
            wait(&mut files, timeout.map(Duration::from_nanos));
            self.sleeps_until.store(0, Ordering::Relaxed);
            if files[0].revents != 0 {
                self.waker.clear();
            }
            ready.clear();
            ready.extend(files.iter().filter(|file| file.revents != 0).map(|file| file.fd));
            if has_rings {
                self.bells.ready(|fd| ready.push(fd));
            }
        }
    }

    fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a thread that stands in.
struct Place<'a> {
    threaded: &'a Threaded,
    shared: &'a Shared,
}

impl Drop for Place<'_> {
    /// Makes sure that the device's thread looks soon, or at once if others wait for events.
    fn drop(&mut self) {
        let Threaded { stands_in, stood_in, sleeps_until, waker, .. } = self.threaded;
        // The thread looks, and says how long it sleeps, with this lock held.
        let engine = self.shared.lock();
        stands_in.store(false, Ordering::Release);
        let mut latest = engine.core.now();
        if engine.core.armed > 0 {
            stood_in.store(false, Ordering::Relaxed);
        } else {
            latest += POLLED_FOR;
        }
        if sleeps_until.load(Ordering::Relaxed) > latest {
            sleeps_until.store(0, Ordering::Relaxed);
            waker.wake();
        }
    }
}

/// The work of a device's own thread.
pub(crate) fn run(shared: &Shared) {
    if let Driver::Thread(threaded) = shared.driver() {
        threaded.run(shared);
    }
}
