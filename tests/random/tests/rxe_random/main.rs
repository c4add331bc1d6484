//! Random programs on Soft-RoCE, in the machine that `script/vm` starts: those of
//! `random_model`; here the kernel counts the objects.
//!
//! A few of them also run under valgrind there, which is slow (part "memcheck" of
//! `script/soak`), with feature `valgrind`: without it, valgrind does not know which memory the kernel
//! writes, and treats that memory as undefined.

#[path = "../support/property_tests.rs"]
mod property_tests;
#[path = "../support/random/mod.rs"]
mod random;
#[path = "../../../support/vm/mod.rs"]
mod vm;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ibverbs::Context;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use random::family::Counts;
use random::{Bed, channels, episodes, operations, world};

const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// Objects that tests have forgotten exist as long as this process.
static FORGOTTEN: Mutex<Counts> = Mutex::new([[0; 5]; 2]);

struct Rxe;

/// The counts that the kernel should report with these objects, its own included.
fn resources([context, domain, queue, region, queue_pair]: [u32; 5]) -> String {
    assert_eq!(vm::BASELINE, "pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0");
    format!(
        "pd {} cq {} qp {} cm_id 0 mr {region} ctx {context} srq 0",
        domain + 1,
        queue + 1,
        queue_pair + 1
    )
}

impl Bed for Rxe {
    fn open(&self, side: usize) -> Context<'static> {
        ibverbs::open(DEVICES[side]).unwrap()
    }

    /// Calls do not fail on this device.
    fn disturb(&self, _verb: &str, _times: u32) {}

    fn can_fail(&self) -> bool {
        false
    }

    fn calm(&self) {}

    fn in_flight(&self, _queue_pair: u32) -> Option<u32> {
        None
    }

    fn run(&self) {
        std::thread::sleep(Duration::from_micros(200));
    }

    fn is_slow(&self) -> bool {
        true
    }

    /// The kernel is asked only at the end, since it takes long.
    fn check(&self, _live: &Counts) -> Result<(), TestCaseError> {
        Ok(())
    }

    fn check_end(&self, live: &Counts) -> Result<(), TestCaseError> {
        let mut forgotten = FORGOTTEN.lock().unwrap();
        for (sums, counts) in forgotten.iter_mut().zip(live) {
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        let expected =
            [0, 1].map(|side| format!("{}: {}", DEVICES[side], resources(forgotten[side])));
        // Asked once for both, since it takes long. The kernel destroys some objects a little later.
        let start = Instant::now();
        loop {
            let there = vm::run("rdma resource show");
            if expected.iter().all(|line| there.lines().any(|other| other.contains(line))) {
                break;
            }
            let late = start.elapsed() > vm::PATIENCE;
            prop_assert!(!late, "{there}, not {expected:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(property_tests::config(6))]

    #[test]
    fn queue_pairs_in_any_order(program in operations::programs(false, 120)) {
        let _lock = vm::one_at_a_time();
        world::run(&program, &Rxe)?;
    }

    #[test]
    fn forgotten_queue_pairs_in_any_order(program in operations::programs(true, 120)) {
        let _lock = vm::one_at_a_time();
        world::run(&program, &Rxe)?;
    }

    #[test]
    fn channels_in_any_order((episodes, ends) in episodes::programs(false, 20)) {
        let _lock = vm::one_at_a_time();
        channels::run(&episodes, &ends, &Rxe)?;
    }

    #[test]
    fn forgotten_channels_in_any_order((episodes, ends) in episodes::programs(true, 20)) {
        let _lock = vm::one_at_a_time();
        channels::run(&episodes, &ends, &Rxe)?;
    }
}
