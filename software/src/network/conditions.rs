//! How a network treats packets.

use std::io;
use std::time::Duration;

/// How a [`Network`](crate::Network) treats each packet. Probabilities are from 0 to 1: no device can be made on a network
/// with another one. For packets, a smaller number counts as 0, a larger one as 1, and NaN as 0.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Conditions {
    /// The probability that a packet is lost.
    pub loss: f64,
    /// The probability that a packet arrives twice.
    pub duplicate: f64,
    /// The probability that a packet is held back, for up to eight times the delay (at least ten microseconds),
    /// so that later ones overtake it.
    pub reorder: f64,
    /// The probability that one bit of a packet changes. The receiver finds it by the invariant CRC.
    pub corrupt: f64,
    /// The time that a packet takes.
    pub delay: Duration,
    /// A random time up to this is added to the delay of each packet.
    pub jitter: Duration,
    /// The bytes per second that each device can send; `None`: no limit.
    pub bandwidth: Option<u64>,
}

impl Conditions {
    /// Nothing is lost; the delay is one microsecond.
    pub const PERFECT: Self = Self {
        loss: 0.0,
        duplicate: 0.0,
        reorder: 0.0,
        corrupt: 0.0,
        delay: Duration::from_micros(1),
        jitter: Duration::ZERO,
        bandwidth: None,
    };
}

impl Conditions {
    /// # Errors
    ///
    /// `InvalidInput`: a probability is none.
    pub(super) fn check(&self) -> io::Result<()> {
        let Self { loss, duplicate, reorder, corrupt, .. } = *self;
        for (what, value) in
            [("loss", loss), ("duplicate", duplicate), ("reorder", reorder), ("corrupt", corrupt)]
        {
            if !(0.0..=1.0).contains(&value) {
                let reason = format!("{what} is {value}, and must be within 0..=1");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
            }
        }
        Ok(())
    }
}

impl Default for Conditions {
    fn default() -> Self {
        Self::PERFECT
    }
}
