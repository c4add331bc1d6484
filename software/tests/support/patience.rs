//! How long tests wait for what must come.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::time::{Duration, Instant};

/// Long enough for a host that is busy with other work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn deadline() -> Instant {
    Instant::now() + PATIENCE
}
