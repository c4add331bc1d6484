//! A device of software: on a simulated network of its own, where whoever waits lets things happen, or on sockets.

#![allow(dead_code, reason = "not every test program needs all of it")]

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::Context;
use ibverbs_software::{
    BackgroundDriver, Builder, Device, LiveObjects, Network, NetworkBuilder, Verb, When,
};

/// A clone is another handle of the same device.
#[derive(Clone)]
pub(crate) struct Software {
    device: Arc<Device>,
    network: Option<Network>,
}

impl Software {
    pub(crate) fn new() -> Self {
        Self::with(|builder| builder)
    }

    /// Makes a device that carries out posted requests only in [`run`](Self::run).
    pub(crate) fn manual() -> Self {
        Self::on(Network::builder().manual(), |builder| builder)
    }

    /// Makes a device with limits, for example.
    pub(crate) fn with(set: impl FnOnce(Builder) -> Builder) -> Self {
        Self::on(Network::builder(), set)
    }

    fn on(network: NetworkBuilder, set: impl FnOnce(Builder) -> Builder) -> Self {
        let network = network.build();
        let device = set(Device::builder().network(&network)).build().unwrap();
        Self::observed(device, Some(network))
    }

    /// Makes a device with a thread of its own, in real time: for waits that something else than the device
    /// may end.
    pub(crate) fn on_sockets() -> Self {
        Self::observed(Device::new().unwrap(), None)
    }

    fn observed(device: Device, network: Option<Network>) -> Self {
        device.observe();
        Self { device: Arc::new(device), network }
    }

    fn network(&self) -> &Network {
        self.network.as_ref().expect("the device is on a simulated network")
    }

    pub(crate) fn context(&self) -> Context<'static> {
        self.device.open().unwrap()
    }

    /// Lets everything happen that can.
    pub(crate) fn run(&self) {
        assert!(self.network().run_until_idle(Duration::from_secs(1000)));
    }

    /// Carries out posted requests at once, as long as the result lives.
    pub(crate) fn drive(&self) -> BackgroundDriver {
        self.network().drive_in_background().unwrap()
    }

    /// The next call of a verb fails, before it has an effect.
    pub(crate) fn fail_next(&self, verb: Verb, errno: i32) {
        self.device.fail(verb, errno, When::Before, 1);
    }

    /// All calls of a verb fail, before they have an effect, until `clear_failures`.
    pub(crate) fn fail_always(&self, verb: Verb, errno: i32) {
        self.device.fail(verb, errno, When::Before, u32::MAX);
    }

    /// Asserts that nothing is left, and that no memory was deregistered under a request.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.device.live_objects(), LiveObjects::default());
        assert_eq!(self.device.early_deregistrations(), 0);
    }
}

impl Deref for Software {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}
