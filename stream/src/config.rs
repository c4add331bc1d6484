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
    pub(crate) config: Config,
}

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
            max_connections: 64,
        };
        Self { context: context.clone(), config }
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
        /// Default 0: each stream has its own.
        shared_receives: u32;

        /// How often a thread or the hub's task polls in vain before it sleeps. Default 0.
        spin: u32;

        /// A stream on which nothing was heard for so long asks whether the peer is there; if what was sent has not arrived when
        /// as much time has passed again, the stream ends with [`TimedOut`](crate::StreamError::TimedOut). Default 15 s.
        keep_alive: Duration;

        /// How long a stream that was dropped tries to bring what was written to the peer. Default 2 s.
        linger: Duration;

        /// How many streams there can be at a time. They all have their buffers from the beginning. Default 64.
        max_connections: u32;
    }
}

impl Config {
    pub(crate) fn check(&self, context: &Context<'_>) -> io::Result<()> {
        let most = 16_384;
        in_range("chunk", self.chunk as u64, MIN_CHUNK.into(), 1 << 30)?;
        in_range("receives", self.receives.into(), 1, most)?;
        in_range("sends", self.sends.into(), 1, most)?;
        in_range("gather_at", self.gather_at.into(), 1, u64::from(u32::MAX))?;
        in_range("max_connections", self.max_connections.into(), 1, 1 << 20)?;
        in_range("keep_alive", self.keep_alive.as_millis() as u64, 1, 1 << 40)?;
        let attributes = context.query_device()?;
        let room = u64::from(attributes.max_cqe()).saturating_sub(self.shared_receives.into());
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
        if self.shared_receives > 0 { 0 } else { self.receives + CONTROLS }
    }

    pub(crate) fn own_sends(&self) -> u32 {
        self.sends + CONTROLS_IN_FLIGHT
    }

    fn entries(&self) -> u32 {
        self.own_sends() + self.own_receives()
    }

    /// How many completions there can be at a time.
    pub(crate) fn all_entries(&self) -> u32 {
        self.entries() * self.max_connections + self.shared_receives
    }

    /// How many buffers there are.
    pub(crate) fn chunks(&self) -> usize {
        match self.shared_receives {
            // One that is gathered, beside those in flight.
            0 => (self.own_receives() + self.sends + 1) as usize * self.max_connections as usize,
            // As many for what is sent.
            shared => 2 * shared as usize,
        }
    }

    pub(crate) fn settings(&self) -> Settings {
        let &Self { receives, sends, gather_at, .. } = self;
        Settings { receives, sends, gather_at }
    }

    pub(crate) fn hello(&self) -> Hello {
        Hello {
            // They are in range: see `check`.
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
