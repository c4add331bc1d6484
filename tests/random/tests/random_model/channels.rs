//! Random programs on channels.

use proptest::prelude::*;

use crate::model::Model;
use crate::property_tests;
use crate::random::channels::run;
use crate::random::episodes::programs;

proptest! {
    #![proptest_config(property_tests::config(75))]

    #[test]
    fn channels_in_any_order((episodes, ends) in programs(false, 20), stale: bool) {
        let bed = Model::new(stale);
        run(&episodes, &ends, &bed)?;
        bed.device.assert_clean();
    }

    /// Forgotten objects are leaked with their parents, and nothing else is.
    #[test]
    fn forgotten_channels_in_any_order((episodes, ends) in programs(true, 20), stale: bool) {
        run(&episodes, &ends, &Model::new(stale))?;
    }
}
