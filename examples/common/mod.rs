//! Code that the examples with two processes share: options, and connecting.

use std::error::Error;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use ibverbs::{
    Channel, ChannelBuilder, PreparedChannel,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};
use lexopt::prelude::*;

pub(crate) type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// The longest time to wait for the peer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The time at which to give up waiting for the peer.
pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

pub(crate) struct Options {
    /// The host of the server; `None` if this is the server.
    pub(crate) server: Option<String>,
    pub(crate) device: Option<String>,
    /// A software device, if the machine has no RDMA device.
    _software: ibverbs_software::RegisteredDevices,
    /// The number of rounds or MiB, depending on the example.
    pub(crate) count: u64,
    tcp_port: u16,
}

impl Options {
    /// Reads the command line: `[-d DEVICE] [-p PORT] [-n COUNT] [HOST]`.
    pub(crate) fn read(count: u64) -> Result<Self> {
        let _software = ibverbs_software::register_if_none()?;
        let mut options = Self { server: None, device: None, _software, count, tcp_port: 18515 };
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Short('d') | Long("ib-dev") => options.device = Some(arguments.value()?.string()?),
                Short('p') | Long("port") => options.tcp_port = arguments.value()?.parse()?,
                Short('n') | Long("count") => options.count = arguments.value()?.parse()?,
                Value(host) if options.server.is_none() => options.server = Some(host.string()?),
                _ => return Err(argument.unexpected().into()),
            }
        }
        Ok(options)
    }

    /// Opens the requested device, or the first one.
    pub(crate) fn open(&self) -> Result<ibverbs::Context<'static>> {
        Ok(self.device.as_deref().map_or_else(ibverbs::open_first, ibverbs::open)?)
    }

    /// Waits for the client, or connects to the server, and exchanges private data with it.
    pub(crate) fn connect<'res>(
        &self,
        prepared: PreparedChannel<'res>,
        ours: &[u8],
    ) -> Result<(Channel<'res>, Vec<u8>)> {
        let Some(host) = &self.server else {
            let listener = TcpListener::bind(("::", self.tcp_port))?;
            return Ok(prepared.accept(&listener, ours, deadline())?);
        };
        Ok(prepared.connect((host.as_str(), self.tcp_port), ours, deadline())?)
    }
}

/// Settings for slow peers, such as Soft-RoCE on a busy machine.
pub(crate) fn patient(builder: ChannelBuilder<'_>) -> ChannelBuilder<'_> {
    builder
        // A message that arrives before its receive is posted is retried soon, and without limit.
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        // The peer has one second for each answer.
        .ack_timeout(AckTimeout::new(18).expect("at most 31"))
}

/// The number at `index` of message `message`: different for each place.
pub(crate) fn pattern(message: u64, index: usize) -> u64 {
    (message << 32 ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
