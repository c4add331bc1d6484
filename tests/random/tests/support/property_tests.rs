//! How the property tests are run.

use std::time::{SystemTime, UNIX_EPOCH};

use proptest::test_runner::{Config, RngSeed};

/// `cases` cases, the same ones each time, so that a test that passes keeps passing. `PROPTEST_CASES` sets
/// another number, with different cases each time; `PROPTEST_RNG_SEED` repeats them.
pub(crate) fn config(cases: u32) -> Config {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    let is_set = |name| std::env::var_os(name).is_some();
    let seed = if is_set("PROPTEST_CASES") {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
    } else {
        config.cases = cases;
        0
    };
    if !is_set("PROPTEST_RNG_SEED") {
        config.rng_seed = RngSeed::Fixed(seed);
    }
    eprintln!("{} cases, PROPTEST_RNG_SEED={}", config.cases, config.rng_seed);
    config
}
