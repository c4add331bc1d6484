//! The settings of a hub.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::Context;

use crate::conn::{CONTROLS_IN_FLIGHT, Settings};
use crate::wire::{CONTROLS, HEADER, Hello, MIN_CHUNK};

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) chunk: usize,
    pub(crate) receives: u32,
    pub(crate) sends: u32,
    pub(crate) gather_at: u32,
    pub(crate) shared_receives: u32,
    pub(crate) spin: u32,
    pub(crate) keep_alive: Duration,
    pub(crate) linger: Duration,
    pub(crate) max_connections: u32,
}

/// Builds a [`Hub`](crate::Hub): see [`Hub::builder`](crate::Hub::builder).
#[derive(Clone, Debug)]
#[must_use]
pub struct HubBuilder {
    pub(crate) context: Arc<Context<'static>>,
    config: Config,
    max_connections: Option<u32>,
}

/// The streams of a hub that was not told how many, if its device has room for them.
const CONNECTIONS: u32 = 1024;

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)+) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $name: $type) -> Self {
            self.config.$name = $name;
            self
        }
    )+};
}

impl HubBuilder {
    pub(crate) fn new(context: &Arc<Context<'static>>) -> Self {
        let config = Config {
            chunk: 16 << 10,
            receives: 8,
            sends: 3,
            gather_at: 1,
            shared_receives: 0,
            spin: 0,
            keep_alive: Duration::from_secs(15),
            linger: Duration::from_secs(2),
            max_connections: CONNECTIONS,
        };
        Self { context: context.clone(), config, max_connections: None }
    }

    /// The most streams at a time, with those that are being connected or that linger. 1 to 1,048,576. Default 1024, or fewer if
    /// the device's completion queues are too short for that. Buffers are registered as streams come, so a larger number costs a
    /// longer completion queue.
    pub fn max_connections(mut self, max_connections: u32) -> Self {
        self.max_connections = Some(max_connections);
        self
    }

    /// The settings, if the device has room for them.
    pub(crate) fn checked(&self) -> io::Result<Config> {
        let mut config = self.config.clone();
        let entries = self.context.query_device()?.max_cqe();
        match self.max_connections {
            Some(number) => config.max_connections = number,
            None => {
                let room = u64::from(entries).saturating_sub(config.shared_receives.into());
                let most = room / u64::from(config.entries()).max(1);
                config.max_connections = most.clamp(1, CONNECTIONS.into()) as u32;
            }
        }
        config.check(entries)?;
        Ok(config)
    }

    setters! {
        /// Bytes of a buffer, and of the longest message; 4 of these are its header. 64 to 1 GiB, default 16 KiB.
        chunk: usize;

        /// How many messages of a peer can be unread. 1 to 16,384, default 8.
        receives: u32;

        /// How many messages to a peer can be in flight. 1 to 16,384, default 3.
        sends: u32;

        /// While at least this many messages are in flight, writes are gathered until one of them has arrived. Default 1.
        gather_at: u32;

        /// The number of receives that all streams share, instead of some for each: for thousands of streams of which few receive
        /// at a time. Then a stream has no buffer while it is idle, and [`receives`](Self::receives) should be small (2 to 8).
        /// Choose at least as many as messages arrive before the hub looks: the device refuses a message that finds no receive, and
        /// the peer's device sends it again after a pause (IBTA's RNR NAK), so that nothing is lost but time.
        /// Default 0: each stream has its own.
        shared_receives: u32;

        /// How often a thread or the hub's task polls in vain before it sleeps. Default 0.
        spin: u32;

        /// A stream on which nothing was heard for so long has the device ask the peer's whether it is there. The peer's program
        /// takes no part in that, and may compute for as long as it likes. If the peer's device does not answer, or what was sent
        /// has not arrived when as much time has passed again, the stream ends with
        /// [`TimedOut`](crate::StreamError::TimedOut). Default 15 s.
        keep_alive: Duration;

        /// How long a stream tries to bring what was written to the peer, after it was dropped, or shut down for writing. A
        /// thread that drops a stream waits for that long at most; it waits for one such period in all, and for 10 ms each, when
        /// it drops several whose peers do not read. Default 2 s.
        linger: Duration;
    }
}

impl Config {
    fn check(&self, entries: u32) -> io::Result<()> {
        let most = 16_384;
        in_range("chunk", self.chunk as u64, MIN_CHUNK.into(), 1 << 30)?;
        in_range("receives", self.receives.into(), 1, most)?;
        in_range("sends", self.sends.into(), 1, most)?;
        in_range("gather_at", self.gather_at.into(), 1, u64::from(u32::MAX))?;
        in_range("max_connections", self.max_connections.into(), 1, 1 << 20)?;
        let keep_alive = u64::try_from(self.keep_alive.as_millis()).unwrap_or(u64::MAX);
        in_range("keep_alive (ms)", keep_alive, 1, 1 << 40)?;
        let room = u64::from(entries).saturating_sub(self.shared_receives.into());
        let each = u64::from(self.entries());
        if u64::from(self.max_connections) * each > room {
            let reason = format!(
                "max_connections is {}, and the device has room for {}: each takes {each} completions of {room} (fewer with \
                 fewer sends and receives, or with shared_receives)",
                self.max_connections,
                room / each
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Ok(())
    }

    /// How many receives a stream has of its own.
    pub(crate) fn own_receives(&self) -> u32 {
        if self.shared_receives > 0 { 0 } else { self.receives.saturating_add(CONTROLS) }
    }

    pub(crate) fn own_sends(&self) -> u32 {
        self.sends.saturating_add(CONTROLS_IN_FLIGHT)
    }

    fn entries(&self) -> u32 {
        self.own_sends().saturating_add(self.own_receives())
    }

    /// How many completions there can be at a time.
    pub(crate) fn all_entries(&self) -> u32 {
        self.entries() * self.max_connections + self.shared_receives
    }

    /// The buffers that so many streams need when they begin: one for what each gathers, beside those in flight. With shared
    /// receives, streams take more when they send.
    pub(crate) fn buffers_of(&self, streams: u32) -> usize {
        match self.shared_receives as usize {
            0 => (self.own_receives() + self.sends + 1) as usize * streams as usize,
            shared => 2 * shared,
        }
    }

    /// The buffers that all streams can hold at a time.
    pub(crate) fn most_buffers(&self) -> usize {
        let each = (self.own_receives() + self.sends + 1) as usize;
        each * self.max_connections as usize + self.shared_receives as usize
    }

    /// `linger`, as far as a time can be told by a clock.
    pub(crate) fn lingers(&self) -> Duration {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
        self.linger.min(YEAR)
    }

    pub(crate) fn settings(&self) -> Settings {
        let &Self { receives, sends, gather_at, .. } = self;
        Settings { receives, sends, gather_at }
    }

    pub(crate) fn hello(&self) -> Hello {
        Hello {
            // `check` has seen that they are in range.
            chunk: self.chunk as u32,
            receives: self.receives as u16,
            keep_alive: u32::try_from(self.keep_alive.as_secs()).unwrap_or(u32::MAX),
            shares: self.shared_receives > 0,
        }
    }
}

fn in_range(what: &str, value: u64, least: u64, most: u64) -> io::Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let reason = format!("{what} is {value}, and must be within {least}..={most}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
}

/// The length of the buffers of messages without data.
pub(crate) const SMALL: usize = HEADER;
