//! The model device as the test bed of random programs.

use ibverbs::Context;
use ibverbs_function_device::{FunctionDevice, Kind};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::random::Bed;
use crate::random::family::Counts;

/// A model device, which both sides use.
pub(crate) struct Model {
    pub(crate) device: FunctionDevice,
}

impl Model {
    /// Whether a reset leaves completions in their queue, as on some devices.
    pub(crate) fn new(stale: bool) -> Self {
        let device = FunctionDevice::model();
        // The device accesses memory by the address in the request, so valgrind sees an access to memory that
        // was freed too early.
        device.stale_translation(true);
        device.keep_stale_completions(stale);
        Self { device }
    }
}

impl Bed for Model {
    fn open(&self, _side: usize) -> Context<'static> {
        self.device.context()
    }

    fn disturb(&self, verb: &str, times: u32) {
        self.device.fail(verb).errno(libc::EIO).times(times);
    }

    fn can_fail(&self) -> bool {
        true
    }

    fn calm(&self) {
        self.device.clear_faults();
    }

    fn in_flight(&self, queue_pair: u32) -> Option<u32> {
        let (sends, receives) = self.device.outstanding(queue_pair);
        Some(sends + receives)
    }

    fn run(&self) {
        self.device.run();
    }

    fn is_slow(&self) -> bool {
        false
    }

    fn check(&self, live: &Counts) -> Result<(), TestCaseError> {
        let kinds = [
            Kind::Context,
            Kind::ProtectionDomain,
            Kind::CompletionQueue,
            Kind::MemoryRegion,
            Kind::QueuePair,
        ];
        for (at, kind) in kinds.into_iter().enumerate() {
            prop_assert_eq!(self.device.live(kind), live[0][at] + live[1][at], "{:?}", kind);
        }
        let (count, text) = self.device.violations();
        prop_assert_eq!(count, 0, "{}", text);
        Ok(())
    }

    fn check_end(&self, live: &Counts) -> Result<(), TestCaseError> {
        self.check(live)
    }
}
