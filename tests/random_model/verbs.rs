//! Random programs on queue pairs.

use ibverbs::Context;
use ibverbs_test_device::{Kind, TestDevice};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::chance;
use crate::random::Bed;
use crate::random::family::Counts;
use crate::random::operations::programs;
use crate::random::world::run;

/// Both sides on one device.
struct Model(TestDevice);

impl Model {
    fn new() -> Self {
        let device = TestDevice::model();
        // What is in flight reaches memory that was freed too early, and valgrind sees it.
        device.stale_translation(true);
        Self(device)
    }
}

impl Bed for Model {
    fn open(&self, _side: usize) -> Context<'static> {
        // SAFETY: the context is live and handed over.
        unsafe { Context::from_raw(self.0.open().unwrap()) }.unwrap()
    }

    fn run(&self) {
        self.0.run();
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
            prop_assert_eq!(self.0.live(kind), live[0][at] + live[1][at], "{:?}", kind);
        }
        let (count, text) = self.0.violations();
        prop_assert_eq!(count, 0, "{}", text);
        Ok(())
    }

    fn check_end(&self, live: &Counts) -> Result<(), TestCaseError> {
        self.check(live)
    }
}

proptest! {
    #![proptest_config(chance::config(150))]

    #[test]
    fn queue_pairs_in_any_order(program in programs(false, 120)) {
        let bed = Model::new();
        run(&program, &bed)?;
        bed.0.assert_clean();
    }

    /// What is forgotten is leaked, with what it was made from, and nothing else is.
    #[test]
    fn forgotten_queue_pairs_in_any_order(program in programs(true, 120)) {
        run(&program, &Model::new())?;
    }
}
