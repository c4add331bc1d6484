//! Threads that sleep until there is an event: while they do, they let things happen.

use std::ffi::c_int;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::simulation::Simulation;
use crate::files::{Waker, wait, wait_for};
use crate::link::Time;

/// Drives the network until one of the files is readable, the deadline has passed, or a moment has come that a thread
/// waits for.
pub(crate) fn drive_until(network: &Simulation, files: &[c_int], deadline: Option<Instant>) {
    if network.manual {
        return;
    }
    // Without a descriptor, the caller sleeps without driving.
    let Ok(sleeper) = network.sleepers.add() else { return };
    let mut files: Vec<_> =
        files.iter().copied().chain([sleeper.waker.fd()]).map(wait_for).collect();
    let own = files.len() - 1;
    let rung = network.state().rung;
    loop {
        // The deadline is looked at only when there is nothing to do: a network that keeps itself busy
        // must not outlast it either.
        for _ in 0..64 {
            // After an alarm the caller looks what it was for.
            if wait(&mut files[..own], Some(Duration::ZERO)) || network.state().rung != rung {
                return;
            }
            if !network.step(Time::MAX) {
                break;
            }
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) || wait(&mut files[..own], Some(Duration::ZERO))
        {
            return;
        }
        if network.is_idle() {
            wait(&mut files, left);
            if files[own].revents != 0 {
                sleeper.waker.clear();
            }
        }
    }
}

/// A thread that lets things happen on a [`Network`](crate::Network), until this is dropped. See
/// [`Network::drive_in_background`](crate::Network::drive_in_background).
#[derive(Debug)]
#[must_use = "the thread stops when this is dropped"]
pub struct BackgroundDriver {
    network: Arc<Simulation>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BackgroundDriver {
    pub(super) fn start(network: Arc<Simulation>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, driven) = (stop.clone(), network.clone());
        // Failing here is better than in the thread.
        drop(Waker::new()?);
        let thread = std::thread::Builder::new()
            .name("ibverbs-network".to_owned())
            .spawn(move || crate::threads::without_signals(|| drive(&driven, &stopped)))?;
        Ok(Self { network, stop, thread: Some(thread) })
    }
}

fn drive(network: &Simulation, stop: &AtomicBool) {
    let Ok(sleeper) = network.sleepers.add() else { return };
    while !stop.load(Ordering::SeqCst) {
        if network.step(Time::MAX) {
            continue;
        }
        // A wake-up before the call keeps the descriptor readable.
        wait(&mut [wait_for(sleeper.waker.fd())], None);
        sleeper.waker.clear();
    }
}

impl Drop for BackgroundDriver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.network.sleepers.wake();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            std::mem::forget(thread.join());
        }
    }
}
