//! Panics of the program's code: wakers, subscribers, allocators, closures.
//!
//! Only this module catches panics; `script/test layers` fails elsewhere.

use std::any::Any;
use std::mem::ManuallyDrop;
#[cfg(any(feature = "channel", test))]
use std::panic::resume_unwind;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Dropping it ends the panic, which was printed when it began. The payload is forgotten: its drop may panic again.
pub(crate) struct Panic(ManuallyDrop<Box<dyn Any + Send>>);

impl Panic {
    #[cfg(any(feature = "channel", test))]
    pub(crate) fn resume(self) -> ! {
        resume_unwind(ManuallyDrop::into_inner(self.0))
    }
}

/// Afterwards, nothing of ours that `f` could have changed is used.
pub(crate) fn catch<R>(f: impl FnOnce() -> R) -> Result<R, Panic> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| Panic(ManuallyDrop::new(payload)))
}

/// The first panic of several calls.
///
/// A waker that panics must take no wake-up from other tasks. So its panic is kept here until the others are woken. A
/// drop ends it: a second panic during a panic ends the process.
#[cfg(any(feature = "async", test))]
#[derive(Default)]
#[must_use]
pub(crate) struct Panics(Option<Panic>);

#[cfg(any(feature = "async", test))]
impl Panics {
    pub(crate) fn catch(&mut self, f: impl FnOnce()) {
        if let Err(thrown) = catch(f) {
            self.add(Self(Some(thrown)));
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        if self.0.is_none() {
            *self = other;
        }
    }

    #[inline]
    pub(crate) fn resume(self) {
        if let Some(thrown) = self.0 {
            thrown.resume();
        }
    }

    pub(crate) fn forget(self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn no_payload_is_dropped() {
        let throw = || std::panic::panic_any(Bomb);
        assert!(catch::<()>(throw).is_err());
        let mut panics = Panics::default();
        panics.catch(throw);
        panics.catch(throw);
        panics.forget();
        let mut panics = Panics::default();
        panics.catch(|| panic!("the first"));
        panics.catch(throw);
        let Err(thrown) = catch(|| panics.resume()) else { panic!("it did not go on") };
        assert_eq!(thrown.0.downcast_ref(), Some(&"the first"));
    }
}
