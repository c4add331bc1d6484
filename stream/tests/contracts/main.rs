//! The promises of the traits to programs, and of the crate to peers, on devices of software.

mod drivers;
mod failures;
mod few_buffers;
mod few_files;
mod handshakes;
mod listeners;
mod orders;
mod owned;
mod promises;
#[path = "../support/rings.rs"]
mod rings;
mod stopped;
mod tasks;
mod threads;

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use ibverbs_software::Device;
use ibverbs_stream::{Hub, HubBuilder};

/// The device that the connection manager knows. A process has one, as a client's route is that of any device that is known.
static MANAGED: LazyLock<Device> = LazyLock::new(|| {
    let device = Device::new().unwrap();
    device.register();
    device
});

/// A hub on the device that the connection manager knows.
fn managed_hub(most: u32) -> Hub {
    let context = Arc::new(MANAGED.open().unwrap());
    Hub::builder(&context).max_connections(most).build().unwrap()
}

/// A hub on a device of its own.
struct Host {
    hub: Hub,
    device: Device,
}

impl Host {
    fn new() -> Self {
        Self::with(|builder| builder)
    }

    fn with(set: impl FnOnce(HubBuilder) -> HubBuilder) -> Self {
        let device = Device::new().unwrap();
        let builder = Hub::builder(&Arc::new(device.open().unwrap())).max_connections(16);
        Self { hub: set(builder).build().unwrap(), device }
    }

    /// Waits until every packet that the device has sent has come back to it, for streams with both ends here.
    fn wait_until_all_has_arrived(&self) {
        loop {
            let counters = self.device.counters();
            if counters.packets_sent == counters.packets_received {
                break;
            }
            std::thread::yield_now();
        }
    }
}

/// Longer than anything takes that comes to an end.
fn soon() -> Instant {
    Instant::now() + PATIENCE
}

const PATIENCE: Duration = Duration::from_secs(120);

/// This many bytes that differ.
fn data(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
}
