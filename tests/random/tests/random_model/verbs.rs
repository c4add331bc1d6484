//! Random programs on queue pairs.

use proptest::prelude::*;

use crate::model::Model;
use crate::property_tests;
use crate::random::operations::programs;
use crate::random::world::run;

proptest! {
    #![proptest_config(property_tests::config(75))]

    #[test]
    fn queue_pairs_in_any_order(program in programs(false, 120), stale: bool) {
        let bed = Model::new(stale);
        run(&program, &bed)?;
        bed.device.assert_clean();
    }

    /// Forgotten objects are leaked with their parents, and nothing else is.
    #[test]
    fn forgotten_queue_pairs_in_any_order(program in programs(true, 120), stale: bool) {
        run(&program, &Model::new(stale))?;
    }
}
