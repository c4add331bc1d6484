//! A hub with those who wait for it and those who drive it, in every order of what can happen to them: peers send, buffers run out
//! and come back, runtimes end or are not polled any more, the hub is stopped. In any order, everybody wakes who has something to
//! wake for.
//!
//! Who serves whom is decided by [`Drivers`] and [`Looks`], and who is woken for a buffer by [`Starved`], as in the hub. The rest is a model of the hub, of tokio and of the files
//! for which they sleep: each step here is what happens there with the lock held, or between two locks. A turn finds one operation at most.
//! An event, and the hub's waker, tell all who sleep; a task or the helper that arms the queue takes what the others of them were
//! told and have not looked at yet, and whoever polls after it has armed is told of what comes then.

use std::collections::{HashSet, VecDeque};
use std::mem;

use ::tokio::runtime::Builder;

use crate::buffers::Starved;
use crate::drivers::{Drivers, Look, Looks, RuntimeId};

/// A waiter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Who {
    Thread,
    /// A task of this runtime.
    Task(usize),
    /// A task of another executor that is polled within the context of this runtime, or of none.
    Foreign(Option<usize>),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Wants {
    Bytes,
    Buffer,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Phase {
    /// The waiter has not begun to wait.
    Out,
    /// A task has found nothing, and no driver.
    Unserved,
    /// A thread has found nothing, and is about to arm the queue; or it has, and is about to look again.
    Begun,
    Armed,
    Asleep,
    Done,
    /// The task has ended with its runtime.
    Gone,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Waiter {
    who: Who,
    wants: Wants,
    phase: Phase,
    /// A task's waker is noted.
    is_noted: bool,
    /// A task was woken, or a thread was told of something, since it has looked.
    is_told: bool,
    has_bytes: bool,
    /// Its stream has failed.
    has_failed: bool,
}

impl Waiter {
    fn new(who: Who, wants: Wants) -> Self {
        Self {
            who,
            wants,
            phase: Phase::Out,
            is_noted: false,
            is_told: false,
            has_bytes: false,
            has_failed: false,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Life {
    Polled,
    StandsStill,
    Ended,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Ended {
    /// A receive of this waiter's stream.
    Bytes(usize),
    /// A send of another stream, whose buffer is free.
    Send,
    /// A receive that gives credits to the stream that owes bytes.
    Credits,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Helper {
    looks: Looks,
    /// The task sleeps for the hub's files, and was told of something or not. `None`: it pauses.
    sleeps: Option<bool>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    drivers: Drivers,
    waiters: Vec<Waiter>,
    lives: [Life; 2],
    /// The driver of each runtime, and whether it was told of something.
    tasks: [Option<bool>; 2],
    helper: Option<Helper>,
    queue: VecDeque<Ended>,
    is_armed: bool,
    /// Operations that have not ended yet.
    coming: Vec<Ended>,
    free: u8,
    /// Buffers of other streams that come back without an operation: of bytes that wait for a credit when the stream is dropped or
    /// fails, of a piece that is read, or of those that are being registered.
    held: u8,
    starved: Starved,
    owing: u32,
    has_accepted: bool,
    has_credits: bool,
    is_stopped: bool,
    // Threads are to be woken when the lock is released.
    wakes_threads: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Event {
    /// A waiter goes on.
    Step(usize),
    /// The driver of a runtime is polled.
    Drive(usize),
    HelperGoesOn,
    /// The device ends an operation.
    Arrives(usize),
    /// A call accepts bytes that cannot be sent yet.
    Accepts,
    StandsStill(usize),
    Ends(usize),
    /// A call gives back a buffer.
    GivesBack,
    /// A waiter's stream fails: its peer is gone.
    Fails(usize),
    Stops,
}

type Ids = [RuntimeId; 2];

impl World {
    fn new(waiters: &[(Who, Wants)]) -> Self {
        let reads = |(index, &(_, wants)): (usize, &(Who, Wants))| match wants {
            Wants::Bytes => Ended::Bytes(index),
            Wants::Buffer => Ended::Send,
        };
        Self {
            drivers: Drivers::default(),
            waiters: waiters.iter().map(|&(who, wants)| Waiter::new(who, wants)).collect(),
            lives: [Life::Polled; 2],
            tasks: [None; 2],
            helper: None,
            queue: VecDeque::new(),
            is_armed: false,
            // Of three that wait for buffers, one at least finds none.
            coming: waiters
                .iter()
                .enumerate()
                .map(reads)
                .take(if waiters.len() > 2 { 1 } else { 2 })
                .chain([Ended::Credits])
                .collect(),
            free: 0,
            held: are_starved(waiters).into(),
            starved: Starved::default(),
            owing: 0,
            has_accepted: false,
            has_credits: false,
            is_stopped: false,
            wakes_threads: false,
        }
    }

    /// An event, or the hub's waker.
    fn tell_all(&mut self) {
        for waiter in &mut self.waiters {
            waiter.is_told |= waiter.who == Who::Thread;
        }
        self.tasks.iter_mut().flatten().for_each(|is_told| *is_told = true);
        if let Some(Helper { sleeps: Some(is_told), .. }) = &mut self.helper {
            *is_told = true;
        }
    }

    /// A task or the helper arms the queue.
    fn arm(&mut self) {
        self.is_armed = true;
        self.tasks.iter_mut().flatten().for_each(|is_told| *is_told = false);
        if let Some(Helper { sleeps: Some(is_told), .. }) = &mut self.helper {
            *is_told = false;
        }
    }

    fn is_owing(&self) -> bool {
        !self.is_stopped && self.drivers.is_owing(self.owing, self.waiters.len() as u32)
    }

    /// The lock is released.
    fn release(&mut self) {
        if !self.starved.is_empty() {
            let called = self.starved.call(self.free.into());
            let is_to_look = self.starved.needs_look();
            self.wakes_threads |= is_to_look || !called.is_empty() && self.drivers.threads > 0;
            called.into_iter().for_each(|index| self.wake_task(index));
        }
        if mem::take(&mut self.wakes_threads) {
            self.tell_all();
        }
        if self.drivers.lack_helper() && self.is_owing() {
            self.drivers.has_helper = true;
            self.helper = Some(Helper { looks: Looks::default(), sleeps: None });
        }
    }

    fn wake_threads(&mut self) {
        self.wakes_threads |= self.drivers.threads > 0;
    }

    fn wake_task(&mut self, index: usize) {
        let waiter = &mut self.waiters[index];
        waiter.is_told |= mem::take(&mut waiter.is_noted);
    }

    fn wake_tasks(&mut self) {
        (0..self.waiters.len()).for_each(|index| self.wake_task(index));
    }

    /// Returns how much it has found.
    fn turn(&mut self) -> usize {
        self.drivers.turns += 1;
        self.starved.pass_over();
        let Some(ended) = self.queue.pop_front() else { return 0 };
        match ended {
            Ended::Bytes(index) => {
                self.waiters[index].has_bytes = true;
                self.wake_task(index);
            }
            Ended::Send => self.free += 1,
            Ended::Credits => self.owing = 0,
        }
        1
    }

    /// Whether somebody has what it waits for.
    fn finds(&mut self, index: usize) -> bool {
        let Waiter { wants, has_bytes, has_failed, .. } = self.waiters[index];
        match wants {
            _ if self.is_stopped || has_failed => true,
            Wants::Bytes => has_bytes,
            Wants::Buffer => {
                let free = self.free.into();
                let may_take = free > 0 && self.starved.may_take(index, || free);
                if may_take {
                    self.free -= 1;
                    self.starved.remove(index);
                } else {
                    self.starved.add(index);
                }
                may_take
            }
        }
    }

    /// A thread looks, and polls in between.
    fn looks(&mut self, index: usize) -> bool {
        loop {
            if self.finds(index) {
                return true;
            }
            if self.turn() == 0 {
                return false;
            }
        }
    }

    /// Whether whoever polls a task polls it.
    fn is_polled(&self, index: usize) -> bool {
        match self.waiters[index].who {
            Who::Task(runtime) => self.lives[runtime] == Life::Polled,
            Who::Thread | Who::Foreign(_) => true,
        }
    }

    fn step(&mut self, index: usize, ids: &Ids) -> bool {
        let Waiter { who, phase, is_told, .. } = self.waiters[index];
        if !self.is_polled(index) {
            return false;
        }
        let (runtime, is_thread) = match who {
            Who::Thread => (None, true),
            Who::Task(runtime) => (Some(runtime), false),
            Who::Foreign(runtime) => (runtime, false),
        };
        let id = runtime.and_then(|runtime| ids[runtime]);
        let next = match phase {
            Phase::Done | Phase::Gone => return false,
            Phase::Asleep if !is_told => return false,
            Phase::Out if is_thread => {
                if self.looks(index) {
                    Phase::Done
                } else {
                    self.drivers.threads += 1;
                    Phase::Begun
                }
            }
            Phase::Begun | Phase::Armed | Phase::Asleep if is_thread => {
                if phase != Phase::Begun && self.looks(index) {
                    // Its guard releases the lock, before it is counted out.
                    self.release();
                    self.drivers.threads -= 1;
                    Phase::Done
                } else if phase == Phase::Armed {
                    Phase::Asleep
                } else {
                    self.waiters[index].is_told = false;
                    self.is_armed = true;
                    Phase::Armed
                }
            }
            Phase::Unserved => {
                let lives = runtime.filter(|&runtime| self.lives[runtime] != Life::Ended);
                if self.drivers.begin(id, lives.is_some())
                    && let Some(runtime) = lives
                {
                    self.tasks[runtime] = Some(true);
                }
                Phase::Asleep
            }
            _ => {
                self.waiters[index].is_told = false;
                if self.finds(index) {
                    Phase::Done
                } else {
                    self.waiters[index].is_noted = true;
                    if self.drivers.serve(id) { Phase::Asleep } else { Phase::Unserved }
                }
            }
        };
        self.waiters[index].phase = next;
        self.release();
        true
    }

    /// A driver arms and polls. Returns whether it has found as much as it may.
    fn serve(&mut self) -> bool {
        self.arm();
        let has_found = self.turn() > 0;
        self.release();
        if has_found && self.drivers.passes_on() {
            self.tell_all();
        }
        has_found
    }

    /// One turn of the driver of a runtime.
    fn drive(&mut self, runtime: usize, ids: &Ids) -> bool {
        if self.lives[runtime] != Life::Polled || self.tasks[runtime] != Some(true) {
            return false;
        }
        if self.is_stopped {
            self.driver_ends(runtime, ids);
            return true;
        }
        if self.serve() {
            self.tasks[runtime] = Some(true);
        }
        true
    }

    fn driver_ends(&mut self, runtime: usize, ids: &Ids) {
        if self.tasks[runtime].take().is_some() && self.drivers.end(ids[runtime]) {
            self.wake_tasks();
        }
        self.release();
    }

    fn helper_goes_on(&mut self) -> bool {
        let Some(Helper { mut looks, sleeps }) = self.helper.clone() else { return false };
        if sleeps == Some(false) {
            return false;
        }
        let look = looks.next(self.drivers.turns, self.is_owing());
        self.helper = None;
        if look == Look::Ends || self.is_stopped {
            self.drivers.has_helper = false;
            self.release();
            return true;
        }
        let mut sleeps = None;
        if look == Look::Drives {
            // The helper hears of what it causes itself, too.
            self.helper = Some(Helper { looks: looks.clone(), sleeps: Some(false) });
            let has_found = self.serve();
            looks.turns = Some(self.drivers.turns);
            let helper = self.helper.take().filter(|_| !has_found);
            sleeps = helper.and_then(|helper| helper.sleeps);
        }
        self.helper = Some(Helper { looks, sleeps });
        self.release();
        true
    }

    /// Lets something happen, if it can.
    fn happens(&mut self, event: Event, ids: &Ids) -> bool {
        match event {
            Event::Step(index) => return self.step(index, ids),
            Event::Drive(runtime) => return self.drive(runtime, ids),
            Event::HelperGoesOn => return self.helper_goes_on(),
            Event::Arrives(at) => {
                if at >= self.coming.len()
                    || self.coming[at] == Ended::Credits && !self.has_accepted
                {
                    return false;
                }
                let ended = self.coming.remove(at);
                self.has_credits |= ended == Ended::Credits;
                self.queue.push_back(ended);
                if mem::take(&mut self.is_armed) {
                    self.tell_all();
                }
            }
            Event::Accepts if !self.has_accepted && !self.is_stopped => {
                self.has_accepted = true;
                self.owing = 1;
                self.release();
            }
            Event::StandsStill(runtime) if self.lives[runtime] == Life::Polled => {
                self.lives[runtime] = Life::StandsStill;
            }
            Event::Ends(runtime) if self.lives[runtime] != Life::Ended => {
                self.lives[runtime] = Life::Ended;
                for waiter in &mut self.waiters {
                    if waiter.who == Who::Task(runtime) && waiter.phase != Phase::Done {
                        waiter.phase = Phase::Gone;
                    }
                }
                self.driver_ends(runtime, ids);
            }
            Event::GivesBack if self.held > 0 => {
                self.held -= 1;
                self.free += 1;
                self.release();
            }
            Event::Fails(index)
                if !self.waiters[index].has_failed
                    && !matches!(self.waiters[index].phase, Phase::Done | Phase::Gone) =>
            {
                self.waiters[index].has_failed = true;
                self.wake_task(index);
                self.wake_threads();
                self.release();
            }
            Event::Stops if !self.is_stopped => {
                self.is_stopped = true;
                self.wake_tasks();
                self.wake_threads();
                self.release();
                self.tell_all();
            }
            _ => return false,
        }
        true
    }

    /// Leaves out what makes no difference.
    fn normalize(&mut self) {
        for waiter in &mut self.waiters {
            if matches!(waiter.phase, Phase::Done | Phase::Gone) {
                let Waiter { who, wants, phase, .. } = *waiter;
                *waiter = Waiter { phase, ..Waiter::new(who, wants) };
            }
            let sleeps = matches!(waiter.phase, Phase::Armed | Phase::Asleep);
            waiter.is_told &= sleeps || waiter.who != Who::Thread;
        }
        for (is_told, life) in self.tasks.iter_mut().zip(self.lives) {
            if let (Some(is_told), Life::StandsStill) = (is_told, life) {
                *is_told = false;
            }
        }
        self.starved.normalize();
        let turns = mem::take(&mut self.drivers.turns);
        if let Some(helper) = &mut self.helper {
            let is_same = helper.looks.turns == Some(turns);
            helper.looks.turns = is_same.then_some(0);
        }
    }

    /// No waiter can go on: each has nothing to wake for.
    fn is_at_rest(&self) {
        let arrived = |ended| !self.coming.contains(&ended);
        for (index, waiter) in self.waiters.iter().enumerate() {
            // A task in the context of a runtime that nobody polls waits for that one, as for a socket of tokio's.
            let waits = waiter.phase == Phase::Out
                || waiter.phase == Phase::Gone
                || !self.is_polled(index)
                || matches!(waiter.who, Who::Foreign(Some(at)) if self.lives[at] == Life::StandsStill);
            let has = match waiter.wants {
                _ if waiter.has_failed => true,
                Wants::Bytes => arrived(Ended::Bytes(index)),
                Wants::Buffer => self.free > 0,
            };
            assert!(
                waits || !(has || self.is_stopped) || waiter.phase == Phase::Done,
                "{index} waits for ever: {self:#?}"
            );
        }
        let is_sent = !self.has_credits || self.owing == 0 || self.is_stopped;
        assert!(is_sent, "bytes stay: {self:#?}");
    }
}

/// Whether all wait for buffers: then these come back in every way, and there is nothing else that is owed.
fn are_starved(waiters: &[(Who, Wants)]) -> bool {
    waiters.iter().all(|&(_, wants)| wants == Wants::Buffer)
}

/// Tries every order, and returns in how many states the world can be.
fn explore(waiters: &[(Who, Wants)], ids: &Ids) -> usize {
    let is_used = |&at: &usize| {
        waiters.iter().any(|&(who, _)| who == Who::Task(at) || who == Who::Foreign(Some(at)))
    };
    let runtimes: Vec<_> = (0..2).filter(is_used).collect();
    let steps = (0..waiters.len()).map(Event::Step).chain([Event::HelperGoesOn]);
    let steps: Vec<_> = steps.chain(runtimes.iter().map(|&at| Event::Drive(at))).collect();
    let fates = runtimes.iter().flat_map(|&at| [Event::StandsStill(at), Event::Ends(at)]);
    let arrives = (0..=waiters.len()).map(Event::Arrives);
    // A stop in every state would double the states of all pairs.
    let is_stopped = waiters.len() == 2 && waiters[0] == (Who::Thread, Wants::Buffer);
    let stops = is_stopped.then_some(Event::Stops);
    let calls = if are_starved(waiters) {
        vec![Event::GivesBack, Event::Fails(0)]
    } else {
        vec![Event::Accepts]
    };
    let others: Vec<_> = arrives.chain(fates).chain(calls).chain(stops).collect();
    let mut left = vec![World::new(waiters)];
    let mut known: HashSet<_> = left.iter().cloned().collect();
    while let Some(world) = left.pop() {
        let mut after = world.clone();
        // Whether the world is another one then. A helper that pauses again and again is at rest, too.
        let mut happens = |&event: &Event| {
            if !after.happens(event, ids) {
                return false;
            }
            let mut after = mem::replace(&mut after, world.clone());
            after.normalize();
            let is_another = after != world;
            if !known.contains(&after) {
                known.insert(after.clone());
                left.push(after);
            }
            is_another
        };
        if steps.iter().filter(|step| happens(step)).count() == 0 {
            world.is_at_rest();
        }
        if !world.is_stopped {
            others.iter().for_each(|event| _ = happens(event));
        }
    }
    known.len()
}

#[test]
fn in_every_order_everybody_wakes_who_has_something_to_wake_for() {
    let runtimes = [(); 2].map(|()| Builder::new_current_thread().build().unwrap());
    let ids = runtimes.each_ref().map(|runtime| Some(runtime.handle().id()));
    let (first, second) = (Who::Foreign(Some(0)), Who::Foreign(Some(1)));
    let (task, outside) = (Who::Task(0), Who::Foreign(None));
    let pairs = [
        (Who::Thread, Who::Thread),
        (Who::Thread, task),
        (Who::Thread, first),
        (Who::Thread, outside),
        (task, Who::Task(1)),
        (task, first),
        (task, second),
        (task, outside),
        (first, outside),
    ];
    let mut count = 0;
    for (one, two) in pairs {
        use Wants::{Buffer, Bytes};
        for wants in [[Bytes, Bytes], [Buffer, Bytes], [Buffer, Buffer]] {
            count += explore(&[(one, wants[0]), (two, wants[1])], &ids);
        }
    }
    let three = [Who::Thread, task, outside];
    count += explore(&three.map(|who| (who, Wants::Buffer)), &ids);
    assert!(count > 100_000, "{count}");
}
