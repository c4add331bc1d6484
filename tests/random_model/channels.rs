//! Random programs on channels.

use proptest::prelude::*;

use crate::chance;
use crate::model::Model;
use crate::random::channels::{programs, run};

proptest! {
    #![proptest_config(chance::config(150))]

    #[test]
    fn channels_in_any_order((episodes, ends) in programs(false, 20)) {
        let bed = Model::new();
        run(&episodes, &ends, &bed)?;
        bed.device.assert_clean();
    }

    #[test]
    fn forgotten_channels_in_any_order((episodes, ends) in programs(true, 20)) {
        let bed = Model::new();
        run(&episodes, &ends, &bed)?;
        let (count, text) = bed.device.violations();
        prop_assert_eq!(count, 0, "{}", text);
    }
}
