//! A device's engine with its lock, and its driver, which hands it packets and keeps its timers: a thread, or a simulated
//! network.

#[cfg(test)]
mod held_answers;
mod plan;

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::device::forks;

use self::plan::{Action, FEW_POLLS, Seen, State};
use crate::backoff::{Backoff, PAUSE};
use crate::faults::verbs::Failures;
use crate::files::{Epoll, WakeFd, Waker, wait, wait_for};
use crate::link::receive::{DATAGRAMS, Receiver};
use crate::link::udp::UdpLink;
use crate::link::{Link as _, Time};
use crate::network::{Member, Membership, sleep};
use crate::transport::{Engine, events};

/// A program that polls this often in vain without going to sleep lets others run from then on.
const LOOKS: u32 = 64;

/// Polls in vain before the thread also pauses, if there are not enough processors.
const SPINS: u32 = 1024;

/// How often packets are received before the timers run, though there are more.
const MANY_RECEIVES: u32 = 64;

/// How often a helper that finds packets each time receives them before it looks at its files.
const LOOKS_AT_FILES: u32 = 8;

/// As many files of completion queues are remembered. Those of the others are named again for each sleep.
const MOST_NAMED: usize = 64;

/// After so many packets there may be more that were not read.
const MANY_PACKETS: usize = 64;

/// The most loops that wait for the wake-up descriptor. The kernel counts the paths from a file through nested epoll instances, and
/// refuses the `epoll_ctl` that would make more than 50 paths of length four with `EINVAL`. Two of these instances are the loop's;
/// the program may have two more.
const MOST_LOOPS: u32 = 48;

/// Bits of `visits`: a helper sleeps now; since the device's thread last looked, one has begun to, and may be expected back; a loop
/// has received since then.
const HELPS: u32 = 1;
const HELPED: u32 = 2;
const LOOPED: u32 = 4;

/// The engine of a device, and what drives it.
#[derive(Debug)]
pub(crate) struct Shared {
    engine: Mutex<Engine>,
    driver: Driver,
    failures: Failures,
    /// The process that created it, and [`forks`] then. A child of `fork` lacks the thread, and the lock may be held
    /// forever there.
    process: u32,
    forks: u32,
}

/// The engine, locked. Unlocking sends the queued packets, and wakes the driver if there is something for
/// it to do before it wakes by itself.
pub(crate) struct Locked<'a> {
    engine: MutexGuard<'a, Engine>,
    shared: &'a Shared,
    /// The driver of the network has locked it.
    drives: bool,
}

impl Shared {
    pub(crate) fn new(engine: Engine, driver: Driver) -> Arc<Self> {
        let process = std::process::id();
        let failures = Failures::default();
        Arc::new(Self { engine: Mutex::new(engine), driver, failures, process, forks: forks() })
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { engine, shared: self, drives: false }
    }

    /// For the driver of the network.
    fn lock_to_drive(&self) -> Locked<'_> {
        let mut locked = self.lock();
        locked.drives = true;
        locked
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    pub(crate) fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Whether this process created the device, rather than its parent before a fork, which may have the same number in another
    /// PID namespace.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id() && self.is_unforked()
    }

    /// Makes no system call; a child that was made without the C library's `fork` counts as well.
    pub(crate) fn is_unforked(&self) -> bool {
        self.forks == forks()
    }

    /// Called after an empty poll of a completion queue, without the lock: lets something happen.
    pub(crate) fn make_progress(&self, queue: u32) {
        self.driver.make_progress(self, queue);
    }
}

impl Member for Shared {
    fn due(&self, without_connections: bool) -> Option<Time> {
        let Driver::Network(simulated) = &self.driver else { return None };
        let mut due = simulated.due.load(Ordering::SeqCst);
        if !without_connections {
            due = due.min(simulated.connections_due.load(Ordering::SeqCst));
        }
        (due != Time::MAX).then_some(due)
    }

    fn waits_for_program(&self) -> bool {
        match &self.driver {
            Driver::Thread(_) => false,
            Driver::Network(simulated) => simulated.decides.load(Ordering::SeqCst),
        }
    }

    fn advance(&self, without_connections: bool) {
        let mut engine = self.lock_to_drive();
        engine.advance();
        if !without_connections {
            engine.advance_connections();
        }
    }

    fn receive(&self, from: (IpAddr, u16), to: IpAddr, packet: &[u8]) {
        self.lock_to_drive().receive(from, to, packet);
    }

    fn reached_nobody(&self, group: IpAddr) {
        self.lock_to_drive().reached_nobody(group);
    }
}

impl Deref for Locked<'_> {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.engine.settle();
        self.shared.driver.before_unlock(&self.engine, self.drives);
    }
}

#[derive(Debug)]
pub(crate) enum Driver {
    Thread(Box<Threaded>),
    Network(Simulated),
}

/// A thread of the device's own, with sockets.
///
/// A packet of this machine writes to `wake_fd` if someone has asked for it ([`Receiver::may_sleep`]). The thread that
/// waits for it receives: a helper, which is a thread of the program that sleeps until a completion queue has something
/// ([`help`](Self::help)), or a loop of the program that waits for it beside its own files ([attaches](Self::attach)). While they come again and
/// again, the device's thread only looks, from time to time, whether they still do.
#[derive(Debug)]
pub(crate) struct Threaded {
    /// Taken before the engine's lock, never after it.
    receiver: Mutex<Receiver>,
    /// Readable when there is a packet of this machine.
    wake_fd: Arc<WakeFd>,
    /// What the helper waits for: `wake_fd`, the sockets, and its own files.
    waits: Arc<Epoll>,
    /// Files of completion queues that are in `waits` and have not been readable since they were named, with their queues' serial
    /// numbers. Only the helper uses it.
    named: Mutex<Vec<(u64, c_int)>>,
    waker: Arc<Waker>,
    /// The time until which the thread sleeps; 0 while it is awake. Changed with the lock held.
    sleeps_until: AtomicU64,
    /// Empty polls since the last request for an event; in [`State::Polled`], since the thread last looked.
    polls: AtomicU32,
    /// The [`State`], which says who receives packets. Changed with the engine's lock held, but for a program that stops polling.
    state: AtomicU64,
    /// Empty polls in a row since the program last found something, or went to sleep.
    in_vain: AtomicU32,
    backoff: Backoff,
    /// How many threads pause, since there is no processor for all that poll.
    pausing: AtomicU32,
    /// Whether one of them waits for packets.
    watched: AtomicBool,
    /// [`HELPS`], [`HELPED`] and [`LOOPED`].
    visits: AtomicU32,
    /// Event loops of the program on `wake_fd`.
    loops: AtomicU32,
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
    /// A copy of [`Engine::connections_due`].
    connections_due: AtomicU64,
    /// A program is to decide about a connection.
    decides: AtomicBool,
    backoff: Backoff,
}

impl Driver {
    pub(crate) fn threaded(link: &UdpLink) -> io::Result<Self> {
        let mut receiver = Receiver::new(link.sockets(), link.inbox())?;
        link.direct_access()
            .into_iter()
            .for_each(|direct_access| receiver.set_direct_access(direct_access));
        Ok(Self::Thread(Box::new(Threaded {
            wake_fd: receiver.wake_fd().clone(),
            waits: receiver.waits().clone(),
            named: Mutex::default(),
            receiver: Mutex::new(receiver),
            waker: link.waker(),
            sleeps_until: AtomicU64::new(0),
            polls: AtomicU32::new(0),
            state: AtomicU64::new(State::Asleep.pack()),
            in_vain: AtomicU32::new(0),
            backoff: Backoff::new(),
            pausing: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            visits: AtomicU32::new(0),
            loops: AtomicU32::new(0),
            holds: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        })))
    }

    pub(crate) fn simulated(membership: Arc<Membership>) -> Self {
        let never = || AtomicU64::new(Time::MAX);
        Self::Network(Simulated {
            membership,
            due: never(),
            connections_due: never(),
            decides: AtomicBool::new(false),
            backoff: Backoff::new(),
        })
    }

    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        match self {
            Self::Thread(_) => None,
            Self::Network(simulated) => Some(&simulated.membership),
        }
    }

    /// Called before the engine is unlocked. Makes sure that someone does what is due. `drives`: the caller is
    /// the driver of the network.
    pub(crate) fn before_unlock(&self, engine: &Engine, drives: bool) {
        match self {
            Self::Thread(threaded) => threaded.before_unlock(engine),
            Self::Network(simulated) => {
                simulated.due.store(engine.due().unwrap_or(Time::MAX), Ordering::SeqCst);
                let connections = engine.connections_due().unwrap_or(Time::MAX);
                simulated.connections_due.store(connections, Ordering::SeqCst);
                simulated.decides.store(engine.connections.waits_for_program(), Ordering::SeqCst);
                if !drives {
                    simulated.membership.network.sleepers().wake();
                }
            }
        }
    }

    /// Called after an empty poll of a completion queue, without the lock: lets something happen.
    pub(crate) fn make_progress(&self, shared: &Shared, queue: u32) {
        match self {
            Self::Thread(threaded) => threaded.make_progress(shared, queue),
            Self::Network(simulated) => {
                let network = &simulated.membership.network;
                if network.is_driven() {
                    return;
                }
                if network.is_manual() || !network.step(Time::MAX) {
                    simulated.backoff.give(|| std::thread::sleep(PAUSE));
                }
            }
        }
    }

    /// A thread is about to sleep until one of these files is readable, or the deadline has passed; the last one is
    /// that of the events. Lets something happen until then, or returns earlier.
    pub(crate) fn sleep(&self, shared: &Shared, files: &[c_int], deadline: Option<Instant>) {
        match self {
            Self::Thread(threaded) => {
                threaded.help(shared, files, deadline, None);
            }
            Self::Network(simulated) => {
                sleep::drive_until(&simulated.membership.network, files, deadline)
            }
        }
    }

    /// Sleeps for a thread that has armed this completion queue, and polls it afterwards. Returns true if the queue may have a
    /// completion for which it has raised no event: then it is still armed.
    ///
    /// Another queue may get the queue's number later, but never its serial number. The kernel's set of files keeps those that were
    /// named for a serial number: the caller keeps them open as long as the queue lives.
    pub(crate) fn sleep_for(
        &self,
        shared: &Shared,
        (queue, serial): (u32, u64),
        files: &[c_int],
        deadline: Option<Instant>,
    ) -> bool {
        let Self::Thread(threaded) = self else { return false };
        if !shared.lock().begin_sleep(queue) {
            return true;
        }
        threaded.help(shared, files, deadline, Some((queue, serial))).unwrap_or_else(|| {
            let mut files: Vec<_> = files.iter().copied().map(wait_for).collect();
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            wait(&mut files, left);
            shared.lock().end_sleep(queue);
            false
        })
    }

    /// Attaches an event loop of the program, which waits for the returned file and its completion queue's, and polls when either is
    /// readable. `None` if [many](MOST_LOOPS) loops do so already, or the file can be in no more sets: the device's thread wakes the others.
    pub(crate) fn attach(&self, is_attached: &AtomicBool) -> Option<c_int> {
        let Self::Thread(threaded) = self else { return None };
        if !threaded.wake_fd.can_be_nested() {
            return None;
        }
        let one_more = |loops| (loops < MOST_LOOPS).then_some(loops + 1);
        if !is_attached.swap(true, Ordering::Relaxed)
            && threaded.loops.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err()
        {
            is_attached.store(false, Ordering::Relaxed);
            return None;
        }
        Some(threaded.wake_fd.fd())
    }

    /// A loop is gone, or this epoll instance of it is to be without `wake_fd`. Returns whether it was attached.
    pub(crate) fn detach(&self, is_attached: &AtomicBool, set: Option<c_int>) -> bool {
        let Self::Thread(threaded) = self else { return false };
        let was_attached = is_attached.swap(false, Ordering::Relaxed);
        if was_attached {
            set.inspect(|&set| threaded.wake_fd.leave(set));
            threaded.loops.fetch_sub(1, Ordering::Relaxed);
        }
        was_attached
    }

    /// A loop that is attached will poll this completion queue once more, and then sleep.
    pub(crate) fn rest(&self, shared: &Shared, queue: u32) {
        if let Self::Thread(threaded) = self {
            threaded.rest(shared, queue);
        }
    }

    /// A program asks for an event, to sleep until then. Called with the engine's lock held.
    pub(crate) fn before_sleep(&self) {
        if let Self::Thread(threaded) = self {
            threaded.count_no_polls();
            if threaded.is_polled_no_more() {
                threaded.waker.wake();
            }
        }
    }

    /// Whether a thread of the program sleeps, and receives.
    #[cfg(test)]
    pub(crate) fn is_helped(&self) -> bool {
        matches!(self, Self::Thread(threaded) if threaded.visits.load(Ordering::Relaxed) & HELPS != 0)
    }

    /// The eventfd that wakes the device's thread.
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
        let due = engine.due().into_iter().chain(engine.connections_due()).min();
        if due.is_some_and(|due| due < sleeps_until.load(Ordering::Relaxed)) {
            sleeps_until.store(0, Ordering::Relaxed);
            self.waker.wake();
        }
    }

    /// Hands the packets that have arrived to the engine; returns their number.
    fn receive(shared: &Shared, receiver: &mut Receiver) -> usize {
        let mut engine = None;
        receiver.receive(|from, to, packet| {
            let engine = engine.get_or_insert_with(|| shared.lock());
            engine.receive_from(from, to, packet);
        })
    }

    /// Receives on a thread of the program. `holds`: acknowledgements wait until that posts or polls again. If it does
    /// neither, the device's thread sends them, which must be going to look within `leaves_for`. `queue`: the thread polls
    /// this completion queue next, and whether it has slept for it. Returns the number of packets, and whether that queue may have
    /// completions without an event.
    fn receive_for_program(
        &self,
        shared: &Shared,
        receiver: &mut Receiver,
        holds: bool,
        queue: Option<(u32, bool)>,
    ) -> (usize, bool) {
        let (mut engine, mut has_missed) = (None, false);
        let count = receiver.poll(|from, to, packet| {
            let engine = engine.get_or_insert_with(|| {
                let mut engine = shared.lock();
                engine.core.holds_answers = holds;
                engine.core.polling = queue;
                engine
            });
            engine.receive_from(from, to, packet);
        });
        if let Some(mut engine) = engine {
            has_missed = queue.is_some_and(|(queue, _)| engine.has_missed(queue));
            engine.core.holds_answers = false;
            engine.core.polling = None;
            self.holds.store(!engine.core.held.is_empty(), Ordering::Relaxed);
            if self.loops.load(Ordering::Relaxed) > 0 {
                self.visits.fetch_or(LOOPED, Ordering::Relaxed);
                self.look_soon(engine.core.now());
            }
        }
        if count >= MANY_PACKETS && self.loops.load(Ordering::Relaxed) > 0 {
            // More packets may be there already: no neighbour writes to the eventfd for those.
            self.wake_fd.wake();
        }
        if receiver.has_gone() {
            self.waker.wake();
        }
        (count, has_missed)
    }

    /// Sees to it that the device's thread looks within [`leaves_for`](State::leaves_for). Called with the engine's lock held.
    fn look_soon(&self, now: Time) {
        let latest = now + self.state().leaves_for();
        if self.sleeps_until.load(Ordering::Relaxed) > latest {
            self.sleeps_until.store(0, Ordering::Relaxed);
            self.waker.wake();
        }
    }

    /// Sends the acknowledgements that were held back.
    fn release_answers(&self, shared: &Shared) {
        if self.holds.swap(false, Ordering::Relaxed) {
            shared.lock().release_answers();
        }
    }

    /// The program is about to sleep: its polls before tell nothing.
    fn count_no_polls(&self) {
        self.polls.store(0, Ordering::Relaxed);
        self.in_vain.store(0, Ordering::Relaxed);
    }

    /// Receives packets on the polling thread, which saves waking the device's thread. A program that polls a few times
    /// before it sleeps gives the processor away by sleeping. One that goes on polling in vain lets others run, since no
    /// hardware works in the background.
    fn make_progress(&self, shared: &Shared, queue: u32) {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.receive_at_poll(shared, queue) > 0 {
            self.in_vain.store(0, Ordering::Relaxed);
            return;
        }
        let in_vain = self.in_vain.fetch_add(1, Ordering::Relaxed);
        // A program that polls until there is nothing then answers: what is held back after that leaves with the answer, or at
        // the next poll or sleep.
        if in_vain > 0 {
            self.release_answers(shared);
        }
        match in_vain {
            ..LOOKS => {}
            LOOKS..SPINS => self.backoff.give(std::thread::yield_now),
            _ => {
                let mut paused = false;
                self.backoff.give(|| {
                    self.pause();
                    paused = true;
                });
                // This may have consumed a wake-up that was for others.
                if paused && self.receive_at_poll(shared, queue) > 0 {
                    self.in_vain.store(LOOKS, Ordering::Relaxed);
                }
            }
        }
    }

    fn receive_at_poll(&self, shared: &Shared, queue: u32) -> usize {
        let Ok(mut receiver) = self.receiver.try_lock() else { return 0 };
        let holds = self.state() == State::Polled
            || self.visits.load(Ordering::Relaxed) & (HELPED | LOOPED) != 0
            || self.loops.load(Ordering::Relaxed) > 0;
        self.receive_for_program(shared, &mut receiver, holds, Some((queue, false))).0
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

    /// Sleeps until a packet arrives, but not for longer than `PAUSE`: no sender rings while a program polls. The caller
    /// receives afterwards.
    fn watch(&self) {
        let found =
            self.receiver.try_lock().map(|mut receiver| (receiver.sources(), receiver.may_sleep()));
        match found {
            Ok((_, false)) => {}
            Ok((sources, true)) => {
                let mut files: Vec<_> = sources.sockets().chain(self.wake_file()).collect();
                if wait(&mut files, Some(PAUSE)) {
                    self.receiver().expect_datagrams();
                }
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }

    /// A thread that sleeps until there is an event helps the device's own meanwhile: it receives what other
    /// devices and machines send. So a message wakes one thread, not two. For any thread but the first, this returns `None`
    /// at once. `queue`: the thread polls this completion queue afterwards. If this returns true, it has received a
    /// completion of that queue, which was armed, and has raised no event.
    ///
    /// If it comes back within `leaves_for`, again and again, nobody is woken for these packets in between either, unless
    /// a completion queue is armed when it leaves whose program does not receive: then others wait for events.
    fn help(
        &self,
        shared: &Shared,
        files: &[c_int],
        deadline: Option<Instant>,
        queue: Option<(u32, u64)>,
    ) -> Option<bool> {
        if self.visits.fetch_or(HELPS, Ordering::Acquire) & HELPS != 0 {
            return None;
        }
        let (queue, serial) = queue.unzip();
        let _place = Place { threaded: self, shared, queue };
        self.visits.fetch_or(HELPED, Ordering::Relaxed);
        self.count_no_polls();
        let is_own = |token| files.iter().any(|&fd| fd as u64 == token);
        let (mut busy, mut are_named) = (0_u32, false);
        loop {
            self.release_answers(shared);
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let is_idle = self.receiver().may_wait();
            // Packets that are here already are received first: mostly the thread then returns.
            busy = if is_idle { 0 } else { busy + 1 };
            let looks = is_idle || busy.is_multiple_of(LOOKS_AT_FILES);
            // A set does not take every file: the caller waits for such.
            if looks
                && !std::mem::replace(&mut are_named, true)
                && self.name(files, serial).is_err()
            {
                return Some(false);
            }
            let timeout = if is_idle { left } else { Some(Duration::ZERO) };
            let ready = looks.then(|| self.waits.wait(timeout));
            let mut ready = ready.into_iter().flatten();
            if ready.clone().any(|token| token < DATAGRAMS) {
                self.named().retain(|&(_, fd)| ready.clone().all(|token| token != fd as u64));
            }
            let is_woken = ready.clone().any(is_own);
            if !is_idle || ready.clone().any(|token| !is_own(token)) {
                let mut receiver = self.receiver();
                if ready.any(|token| token == DATAGRAMS) {
                    receiver.expect_datagrams();
                } else if looks {
                    receiver.expect_no_datagrams();
                }
                let before = events::written();
                let asked = queue.map(|queue| (queue, true));
                let (_, has_missed) = self.receive_for_program(shared, &mut receiver, true, asked);
                drop(receiver);
                // The program returns before the acknowledgement leaves, which its answer takes along.
                if has_missed {
                    return Some(true);
                }
                if events::written() != before {
                    busy = LOOKS_AT_FILES - 1;
                }
            }
            let is_over = left.is_some_and(|left| left.is_zero());
            if is_over || is_woken {
                return Some(false);
            }
        }
    }

    fn named(&self) -> MutexGuard<'_, Vec<(u64, c_int)>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the helper's files too, until they are readable; those of a completion queue stay named.
    fn name(&self, files: &[c_int], serial: Option<u64>) -> io::Result<()> {
        let mut named = self.named();
        for &fd in files {
            let file = serial.map(|serial| (serial, fd));
            if file.is_some_and(|file| named.contains(&file)) {
                continue;
            }
            self.waits.add_once(fd)?;
            // Those of queues that are gone are not missed.
            if named.len() >= MOST_NAMED {
                named.clear();
            }
            named.extend(file);
        }
        Ok(())
    }

    /// See [`Driver::rest`].
    fn rest(&self, shared: &Shared, queue: u32) {
        self.count_no_polls();
        // The device's thread looks within `plan::POLLED_FOR`.
        self.is_polled_no_more();
        self.release_answers(shared);
        let mut receiver = self.receiver();
        if !receiver.may_sleep() {
            self.receive_for_program(shared, &mut receiver, true, Some((queue, false)));
        }
    }

    /// To wait for `wake_fd`.
    fn wake_file(&self) -> [libc::pollfd; 1] {
        [wait_for(self.wake_fd.fd())]
    }

    /// Receives what has arrived, for as long as a timer is due: an answer that is here is not overdue. Returns whether there
    /// was anything.
    fn receive_before_timers(&self, shared: &Shared) -> bool {
        for receives in 0..MANY_RECEIVES {
            if !shared.lock().is_timer_due() || Self::receive(shared, &mut self.receiver()) == 0 {
                return receives > 0;
            }
        }
        true
    }

    fn state(&self) -> State {
        State::unpack(self.state.load(Ordering::Relaxed))
    }

    /// A program that has polled all the time is about to sleep. Returns whether there was one.
    fn is_polled_no_more(&self) -> bool {
        let [polled, asleep] = [State::Polled, State::Asleep].map(State::pack);
        let relaxed = Ordering::Relaxed;
        self.state.compare_exchange(polled, asleep, relaxed, relaxed).is_ok()
    }

    /// Runs what is due, and decides what the device's thread does until it looks again.
    fn plan(
        &self,
        shared: &Shared,
        visits: u32,
        mut waited: bool,
        slept_until: Time,
    ) -> (Action, Time) {
        let gone = self.receiver().take_gone();
        let mut engine = shared.lock();
        gone.into_iter().for_each(|peer| engine.lose_peer(peer));
        waited |= !engine.core.held.is_empty() || !engine.core.runnable.is_empty();
        engine.release_answers();
        engine.advance();
        engine.advance_connections();
        engine.settle();
        let now = engine.core.now();
        let due = engine.due().into_iter().chain(engine.connections_due()).min();
        let action = plan::next(
            self.state(),
            Seen {
                now,
                slept_until,
                due: due.unwrap_or(Time::MAX),
                polls: self.polls.load(Ordering::Relaxed),
                helps: self.visits.load(Ordering::Relaxed) & HELPS != 0,
                helped: visits & (HELPED | LOOPED) != 0,
                waited,
            },
        );
        if action.counts_again {
            self.polls.store(0, Ordering::Relaxed);
        }
        self.state.store(action.state.pack(), Ordering::Relaxed);
        self.sleeps_until.store(action.sleeps_until, Ordering::Relaxed);
        (action, now)
    }

    /// Receives packets and keeps the timers, so that a peer's requests are served while the program does
    /// something else.
    fn run(&self, shared: &Shared) {
        let (mut files, mut ready) = (Vec::new(), Vec::new());
        let mut last = Action::first();
        // A loop of the program was woken too.
        let mut is_left = false;
        while !self.stop.load(Ordering::Acquire) {
            // A helper of a moment ago, or a loop that has received, will soon be back.
            let visits =
                self.visits.fetch_and(HELPS, Ordering::Relaxed) | if is_left { LOOPED } else { 0 };
            let recently = visits & (HELPED | LOOPED) != 0;
            let received = {
                let mut receiver = self.receiver();
                receiver.attend(&ready);
                if recently && ready.is_empty() { 0 } else { Self::receive(shared, &mut receiver) }
            };
            let mut waited = received > 0;
            if received > 0 || recently {
                waited |= self.receive_before_timers(shared);
            }
            let now;
            (last, now) = self.plan(shared, visits, waited, last.sleeps_until);
            let timeout =
                (last.sleeps_until != Time::MAX).then(|| last.sleeps_until.saturating_sub(now));
            let (sources, are_watched, is_idle) = {
                let mut receiver = self.receiver();
                // Packets that came while others received woke no thread.
                let is_idle = !last.listens || receiver.may_sleep();
                (receiver.sources(), receiver.are_watched(), is_idle)
            };
            let timeout = if is_idle { timeout } else { Some(0) };
            files.clear();
            files.push(wait_for(self.waker.fd()));
            if last.listens {
                files.extend(self.wake_file());
            }
            let first = files.len();
            files.extend(sources.listeners());
            // A loop does not wait for sockets.
            let is_helped = (visits | self.visits.load(Ordering::Relaxed)) & (HELPS | HELPED) != 0
                && are_watched;
            if last.state != State::Polled && (last.listens || !is_helped) {
                files.extend(sources.sockets());
            }
            wait(&mut files, timeout.map(Duration::from_nanos));
            self.sleeps_until.store(0, Ordering::Relaxed);
            if files[0].revents != 0 {
                self.waker.clear();
            }
            ready.clear();
            ready
                .extend(files[first..].iter().filter(|file| file.revents != 0).map(|file| file.fd));
            is_left = last.listens
                && files[1].revents != 0
                && self.loops.load(Ordering::Relaxed) > 0
                && shared.lock().core.armed == 0;
        }
    }

    fn receiver(&self) -> MutexGuard<'_, Receiver> {
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a helper.
struct Place<'a> {
    threaded: &'a Threaded,
    shared: &'a Shared,
    /// The queue that it sleeps for.
    queue: Option<u32>,
}

impl Drop for Place<'_> {
    /// Makes sure that the device's thread looks soon, or at once if others wait for events.
    fn drop(&mut self) {
        let Threaded { visits, sleeps_until, waker, .. } = self.threaded;
        // The thread looks, and says how long it sleeps, with this lock held.
        let mut engine = self.shared.lock();
        if let Some(queue) = self.queue {
            engine.end_sleep(queue);
        }
        visits.fetch_and(!HELPS, Ordering::Release);
        if engine.core.armed > 0 {
            visits.fetch_and(!HELPED, Ordering::Relaxed);
            if sleeps_until.load(Ordering::Relaxed) != 0 {
                sleeps_until.store(0, Ordering::Relaxed);
                waker.wake();
            }
        } else {
            self.threaded.look_soon(engine.core.now());
        }
    }
}

/// The work of a device's own thread.
pub(crate) fn run(shared: &Shared) {
    if let Driver::Thread(threaded) = shared.driver() {
        threaded.run(shared);
    }
}
