//! The drivers of a hub: which task or thread drives it, when a driver ends, and which one is woken then.
//!
//! To drive a hub is to poll its loop, to give what has ended to all streams, and to do what is due by time. Each driver does so
//! for everybody, and there may be any number of them:
//!
//! | driver | begins | ends |
//! |---|---|---|
//! | a thread that waits in a call | when what it waits for is not there | with the call |
//! | [`Hub::run`](crate::Hub::run) | | when the hub is stopped |
//! | a task in each runtime of tokio | when a task of this runtime waits, or a stream is connected there | with the hub or the runtime |
//! | the hub's own thread, the helper | when a call leaves something owed, or a task waits outside of tokio | a second after nothing is owed |
//!
//! A runtime may end, or never be polled again, and nobody is told of the latter. So no task relies on the driver of another
//! runtime: before a task sleeps, it looks whether its own runtime has a driver, and starts one if not. The end of a driver, for
//! whatever reason, wakes all tasks that wait; those that wait on start another one. A task outside of tokio, in a runtime that has
//! ended, or in one that cannot wait for the hub's descriptor or for a time, is served by the helper.
//!
//! A driver that arms the queue takes the event from those that have not looked at it yet. It polls after that, for all; if it has found
//! as much as it may in one turn, it tells the others, since it may not be polled again.
//!
//! What a stream [owes](crate::conn::Conn::owes) (bytes that were accepted, an end, credits) needs no call of the program, like
//! the kernel's part of TCP. The thread that releases the lock and leaves something owed starts the helper, unless a thread waits
//! in a call. Any driver may turn out not to be polled, so the helper looks every millisecond whether anybody has polled; if
//! not, it drives until somebody does. It holds the hub, so that streams linger though the program has dropped all that it had.
//!
//! In a simulation, where tokio's clock is not the system's, there is no helper: a thread would make each run another one.

use std::time::Instant;

#[cfg(feature = "tokio")]
use ::tokio::runtime;

/// After so many looks at which nothing was owed, the helper ends.
const IDLE_LOOKS: u32 = if cfg!(test) { 2 } else { 1000 };

/// Decides which task or thread drives: without input, output or clock, so that a [test](crate::every_waiter) tries every order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Drivers {
    /// How often anybody has polled.
    pub(crate) turns: u64,
    /// Threads that wait in a call, or for the end of a stream.
    pub(crate) threads: u32,
    /// Threads in [`Hub::run`](crate::Hub::run).
    pub(crate) runs: u32,
    #[cfg(feature = "tokio")]
    runtimes: Vec<Runtime>,
    /// Runtimes among them without a task. The entries stay.
    outsiders: u32,
    pub(crate) has_helper: bool,
    pub(crate) is_simulated: bool,
}

/// `None`: outside of tokio.
#[cfg(feature = "tokio")]
pub(crate) type RuntimeId = Option<runtime::Id>;

/// A runtime of which a task waits for the hub.
#[cfg(feature = "tokio")]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Runtime {
    id: RuntimeId,
    /// A task drives the hub there; otherwise the helper does.
    has_task: bool,
}

#[cfg(feature = "tokio")]
impl Drivers {
    /// The runtime of the calling task.
    pub(crate) fn current_runtime() -> RuntimeId {
        runtime::Handle::try_current().ok().map(|handle| handle.id())
    }

    pub(crate) fn serve(&self, id: RuntimeId) -> bool {
        self.runtimes.iter().any(|runtime| runtime.id == id)
    }

    /// Notes that a runtime is served. Returns whether it was not.
    pub(crate) fn begin(&mut self, id: RuntimeId, has_task: bool) -> bool {
        let is_new = !self.serve(id);
        if is_new {
            self.runtimes.push(Runtime { id, has_task });
            self.outsiders += u32::from(!has_task);
        }
        is_new
    }

    /// The task of a runtime has ended. Returns whether it has served others, which are to be woken and find another driver.
    #[must_use]
    pub(crate) fn end(&mut self, id: RuntimeId) -> bool {
        let before = self.runtimes.len();
        self.runtimes.retain(|runtime| runtime.id != id || !runtime.has_task);
        self.runtimes.len() < before
    }

    /// Whoever drives has polled as much as it may in one turn, and there may be more. Returns whether there are other drivers, which
    /// it tells of that: it has taken the event, and may not be polled again.
    pub(crate) fn passes_on(&self) -> bool {
        self.threads > 0 || self.runtimes.len() + usize::from(self.has_helper) > 1
    }

    pub(crate) fn have_tasks(&self) -> bool {
        self.runtimes.iter().any(|runtime| runtime.has_task)
    }
}

impl Drivers {
    /// Whether tasks wait that the helper is to serve.
    pub(crate) fn have_outsiders(&self) -> bool {
        self.outsiders > 0
    }

    /// Whether the hub is to be driven, though the program may make no further call: so many of its streams owe something.
    pub(crate) fn is_owing(&self, owing: u32, streams: u32) -> bool {
        owing > 0 || streams > 0 && self.have_outsiders()
    }

    /// Whether the helper is to be started, if the hub [owes](Self::is_owing) anything.
    pub(crate) fn lack_helper(&self) -> bool {
        !self.has_helper && !self.is_simulated && self.threads == 0
    }
}

/// The helper's observations of other drivers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Looks {
    pub(crate) turns: Option<u64>,
    pub(crate) idle: u32,
}

/// The helper's action after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    Ends,
    /// Others may drive the hub, or nothing is owed: it looks again soon.
    Pauses,
    /// No driver has polled since the last look.
    Drives,
}

impl Looks {
    /// The helper looks how often anybody has polled, and whether the hub owes anything.
    pub(crate) fn next(&mut self, turns: u64, owes: bool) -> Look {
        let before = self.turns.replace(turns);
        self.idle = if owes { 0 } else { self.idle + 1 };
        if self.idle > IDLE_LOOKS {
            Look::Ends
        } else if self.idle == 0 && before == Some(turns) {
            Look::Drives
        } else {
            Look::Pauses
        }
    }
}

#[cfg(not(feature = "tokio"))]
impl Drivers {
    pub(crate) fn passes_on(&self) -> bool {
        self.threads > 0
    }

    pub(crate) fn have_tasks(&self) -> bool {
        false
    }
}

/// The time, which is tokio's in a simulation of it.
pub(crate) fn now() -> Instant {
    #[cfg(feature = "tokio")]
    return ::tokio::time::Instant::now().into_std();
    #[cfg(not(feature = "tokio"))]
    Instant::now()
}

/// Whether tokio's clock, if the caller has one, is that of the system.
pub(crate) fn is_clock_real() -> bool {
    let before = Instant::now();
    let now = now();
    before <= now && now <= Instant::now()
}
