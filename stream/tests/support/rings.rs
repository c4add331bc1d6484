//! The memory by which devices of software of two processes talk. If one of these dies, the other one notices it at once by that memory's
//! end, and else by keep-alive. A busy machine may take seconds until they share it.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use ibverbs_stream::Stream;

/// Each has an inode.
fn rings(process: u32) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let rings = maps.lines().filter(|line| line.contains("/memfd:ibverbs-software"));
    rings.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

/// Talks to a process that [echoes](echo), until each reads what the other one writes there.
pub(crate) fn wait_until_shared(stream: &mut Stream, process: u32) {
    let until = Instant::now() + Duration::from_secs(60);
    let mut rounds = 0;
    // A process maps a ring before it takes it, which may fail: then the ring is gone after one more exchange.
    while rounds < 2 {
        let count = rings(std::process::id()).intersection(&rings(process)).count();
        assert!(Instant::now() < until, "the processes share {count} rings, not 2");
        rounds = if count == 2 { rounds + 1 } else { 0 };
        stream.write_all(b"x").unwrap();
        stream.read_exact(&mut [0; 1]).unwrap();
    }
}

/// Sends what it receives, until the stream ends.
pub(crate) fn echo(stream: &mut Stream) {
    let mut byte = [0; 1];
    while stream.read_exact(&mut byte).is_ok() {
        stream.write_all(&byte).unwrap();
    }
}
