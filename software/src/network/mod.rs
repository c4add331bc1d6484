//! A simulated network between devices of one process, in virtual time.

mod builder;
mod clock;
mod conditions;
mod link;
mod member;
mod settings;
mod simulation;
pub(crate) mod sleep;
mod sleepers;
mod state;
mod trace;

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use self::builder::NetworkBuilder;
#[cfg(any(test, feature = "tokio"))]
pub(crate) use self::clock::{LAST, START, nanoseconds};
pub use self::conditions::Conditions;
pub(crate) use self::link::NetworkLink;
pub(crate) use self::member::Member;
pub(crate) use self::simulation::{Membership, Simulation};
pub use self::sleep::BackgroundDriver;
pub use self::trace::{PacketFate, Trace, TracedPacket};

/// A simulated network between devices of this process, in virtual time.
///
/// It decides from a seed which packets it loses, duplicates, reorders, delays or corrupts. Nothing sleeps: the
/// clock of its devices is virtual, and jumps to the next moment at which something happens. A second of
/// retries takes microseconds.
///
/// ```
/// use std::time::Duration;
/// use ibverbs_software::{Device, Network};
///
/// let network = Network::builder().seed(7).loss(0.01).delay(Duration::from_micros(5)).build();
/// let one = network.device()?;
/// let other = Device::builder().network(&network).max_sge(4).build()?;
/// assert_eq!(one.address().to_string(), "10.0.0.1");
/// let (one, other) = (one.open()?, other.open()?);
/// # let _ = (one, other);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # When time passes
///
/// Verbs take no time. The network does something, and virtual time advances, only in these calls:
///
/// - [`advance`](Self::advance) and [`run_until_idle`](Self::run_until_idle);
/// - a poll of an empty completion queue: it lets one thing happen, which is the next delivery of a packet or
///   the next timer of a device, and advances the clock to that moment (not with
///   [`NetworkBuilder::manual`]);
/// - each call of `ibverbs` that sleeps until there is an event, such as `CompletionQueue::wait` and
///   `AsyncEvents::wait`: it lets things happen until its event is there (not with `manual`).
///
/// If nothing is under way and no timer runs, time stands still. A deadline that the program gives to
/// `ibverbs` is one of real time, so a wait for what never comes lasts until then.
///
/// A program that waits for the file of a completion channel by itself (`epoll`, tokio) calls none of these
/// functions: [`drive_in_background`](Self::drive_in_background) starts a thread that does. On tokio, `simulate` (feature
/// `tokio`) lets them happen in an order that the seed decides.
///
/// # What is the same in each run
///
/// A program that uses the devices from one thread, and makes the same calls with the same seed, gets the same
/// packets at the same virtual times, and the same completions and events, whatever the host does. Each pair of
/// addresses has random numbers of its own, so further devices do not change the packets between two. The bytes are
/// the same as far as the program's own are, but for memory addresses, which the operating system randomises and READ, WRITE
/// and atomic requests contain: [`TracedPacket`]'s `==` ignores them, and its `Display` leaves them out.
///
/// With several threads, the host decides in which order they call, and so how the random numbers are used. What
/// holds: each packet is treated by the network's [`Conditions`], each device works as always, and time goes
/// forward only. While one thread polls an empty queue, time flies for all: a thread that posts its receive
/// later than a peer's retries last in virtual time comes too late. So connect both sides before you
/// post, post receives first, and leave `rnr_retry` at 7, which is for ever.
///
/// # Clones
///
/// A clone is another handle of the same network. Devices keep it alive.
#[derive(Clone, Debug)]
pub struct Network(pub(crate) Arc<Simulation>);

impl Network {
    /// The virtual time since the network was made.
    pub fn now(&self) -> Duration {
        clock::duration(self.0.now())
    }

    /// Lets `time` pass: everything that is due by then happens, each at its moment. All time together is at most 292 years.
    pub fn advance(&self, time: Duration) {
        let until = self.0.after(time);
        while self.0.step(until) {}
        self.0.set_time(until);
    }

    /// Lets everything happen that is under way, in at most this much virtual time. Returns whether the
    /// network is idle: there is no packet under way, and no timer runs.
    ///
    /// A queue pair that retries for ever, such as one whose peer posts no receive and whose `rnr_retry`
    /// is 7, keeps the network busy for ever; hence the limit.
    pub fn run_until_idle(&self, limit: Duration) -> bool {
        let until = self.0.after(limit);
        while self.0.step(until) {}
        self.0.is_idle()
    }

    /// Starts a thread that lets things happen, for programs that wait for files by themselves. It stops when
    /// the returned handle is dropped. The order of events then depends on the host.
    ///
    /// # Errors
    ///
    /// The system is out of files or threads.
    pub fn drive_in_background(&self) -> io::Result<BackgroundDriver> {
        BackgroundDriver::start(self.0.clone())
    }

    /// Changes how the network treats packets that are sent from now on.
    pub fn set_conditions(&self, conditions: Conditions) {
        self.0.state().conditions = conditions;
    }

    /// How the network treats packets.
    pub fn conditions(&self) -> Conditions {
        self.0.state().conditions
    }

    /// Ends every partition.
    pub fn heal_all(&self) {
        self.0.state().cut.clear();
    }

    /// The packets that were sent so far: as many of the last ones as
    /// [`NetworkBuilder::trace_bytes`] has room for.
    pub fn trace(&self) -> Trace {
        self.0.state().trace.clone()
    }

    /// Sends a packet of a trace again, from its old source to its old destination: a late packet, perhaps of
    /// an earlier connection. The network's conditions do not apply to it, but its delay does.
    pub fn replay(&self, packet: &TracedPacket) {
        self.0.replay(packet);
    }
}
