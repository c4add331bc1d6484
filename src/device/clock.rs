//! The device's clock.

use std::time::Duration;

use super::context::Context;
use crate::error::{Error, Result};
use crate::ffi;

impl Context<'_> {
    /// `ibv_query_rt_values_ex`: the device's raw clock now, as completion timestamps count it:
    /// cycles since some moment in the past, in the unit of
    /// [`DeviceAttributes::core_clock`](crate::DeviceAttributes::core_clock). The provider
    /// puts it into a time of seconds and nanoseconds, of which mlx4 and mlx5 use the nanoseconds
    /// for the whole count of cycles.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not tell.
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn query_raw_clock(&self) -> Result<RawClock> {
        const VERB: &str = "ibv_query_rt_values_ex";
        let wanted = ffi::ibv_values_mask::IBV_VALUES_MASK_RAW_CLOCK.0;
        let mut raw = ffi::ibv_values_ex { comp_mask: wanted, ..Default::default() };
        // SAFETY: the context is live and `raw` is writable.
        let returned = unsafe { ffi::ibv_query_rt_values_ex(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned)?;
        if raw.comp_mask & wanted == 0 {
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, "the device has no raw clock"));
        }
        // Longer than in C on 32-bit machines.
        #[allow(clippy::useless_conversion)]
        let (seconds, nanoseconds) = (raw.raw_clock.tv_sec.into(), raw.raw_clock.tv_nsec.into());
        Ok(RawClock { seconds, nanoseconds })
    }
}

/// What [`Context::query_raw_clock`] finds: the `struct timespec` as the provider filled it in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawClock {
    /// `tv_sec`.
    pub seconds: i64,
    /// `tv_nsec`, which need not be below 10⁹.
    pub nanoseconds: i64,
}

impl RawClock {
    /// The cycles, for a provider that puts them all into the nanoseconds (mlx4, mlx5).
    pub fn cycles(self) -> u64 {
        self.nanoseconds as u64
    }

    /// The time, for a provider that really fills in seconds and nanoseconds; `None` if that is not
    /// a time.
    pub fn duration(self) -> Option<Duration> {
        let nanoseconds = u32::try_from(self.nanoseconds).ok().filter(|&n| n < 1_000_000_000)?;
        Some(Duration::new(u64::try_from(self.seconds).ok()?, nanoseconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_cycles_or_a_time() {
        let time = RawClock { seconds: 3, nanoseconds: 5 };
        assert_eq!(time.duration(), Some(Duration::new(3, 5)));
        let cycles = RawClock { seconds: 0, nanoseconds: 7_000_000_000 };
        assert_eq!((cycles.cycles(), cycles.duration()), (7_000_000_000, None));
        assert_eq!(RawClock { seconds: -1, nanoseconds: 0 }.duration(), None);
    }
}
