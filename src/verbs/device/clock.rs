#[cfg(feature = "channel")]
use std::ptr::NonNull;
use std::time::Duration;
#[cfg(feature = "channel")]
use std::time::Instant;

use super::context::Context;
#[cfg(feature = "channel")]
use crate::base::hooks;
use crate::base::{Error, Result, ffi};

/// The time for *when to post*: virtual on a simulated network, so that the same calls give the same packets. Callers'
/// deadlines are always the machine's.
#[cfg(feature = "channel")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// `None`: the machine's clock.
    context: Option<NonNull<ffi::ibv_context>>,
}

#[cfg(feature = "channel")]
impl Clock {
    /// # Safety
    ///
    /// The context is null, or live while the clock is used.
    pub(crate) const unsafe fn of(context: *mut ffi::ibv_context) -> Self {
        Self { context: NonNull::new(context) }
    }

    fn virtual_time(self, reach: Option<Instant>) -> Option<Instant> {
        let (hooks, context) = hooks::hooks().zip(self.context)?;
        // SAFETY: the creator of this clock vouches for the context.
        unsafe { (hooks.virtual_time)(context.as_ptr(), reach) }
    }

    pub(crate) fn now(self) -> Instant {
        self.virtual_time(None).unwrap_or_else(Instant::now)
    }

    /// Time passes by polling, not by sleeping.
    pub(crate) fn is_virtual(self) -> bool {
        self.virtual_time(None).is_some()
    }

    /// Virtual time reaches `at` by itself, and sleeping threads then return.
    pub(crate) fn reach(self, at: Instant) {
        self.virtual_time(Some(at));
    }
}

impl Context<'_> {
    /// `ibv_query_rt_values_ex`: reads the device's raw clock, which completion timestamps use.
    ///
    /// It counts cycles since some moment, at
    /// [`DeviceAttributes::core_clock`](crate::device::DeviceAttributes::core_clock). The provider returns
    /// seconds and nanoseconds; mlx4 and mlx5 store all cycles in the nanoseconds.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no readable raw clock.
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn query_raw_clock(&self) -> Result<RawClock> {
        const VERB: &str = "ibv_query_rt_values_ex";
        let wanted = ffi::ibv_values_mask::IBV_VALUES_MASK_RAW_CLOCK.0;
        let mut raw = ffi::ibv_values_ex { comp_mask: wanted, ..Default::default() };
        // SAFETY: the context is live and `raw` is writable.
        let returned = unsafe { ffi::ibv_query_rt_values_ex(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned)?;
        Error::unsupported_if(raw.comp_mask & wanted == 0, VERB, "the device has no raw clock")?;
        // C's fields are shorter on 32-bit machines.
        #[allow(clippy::useless_conversion)]
        let (seconds, nanoseconds) = (raw.raw_clock.tv_sec.into(), raw.raw_clock.tv_nsec.into());
        Ok(RawClock { seconds, nanoseconds })
    }
}

/// The result of [`Context::query_raw_clock`]: the provider's `struct timespec`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawClock {
    /// `tv_sec`.
    pub seconds: i64,
    /// `tv_nsec`, which may exceed 10⁹.
    pub nanoseconds: i64,
}

impl RawClock {
    /// The cycles, where the nanoseconds hold them all (mlx4, mlx5).
    pub fn cycles(self) -> u64 {
        self.nanoseconds as u64
    }

    /// The time, where the provider stores seconds and nanoseconds; `None` if the fields are no valid time.
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
