use crate::base::{Error, Result, ffi, trace};

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(crate) trait Object {
    const DESTROY: &'static str;

    /// Frees the result of an import, not the object.
    const UNIMPORT: Option<unsafe extern "C" fn(*mut Self)> = None;

    fn is_made(_object: *mut Self) {}

    /// Returns 0 or an errno value.
    ///
    /// # Safety
    ///
    /// The object is live, and is not used again, whatever this returns.
    unsafe fn destroy(object: *mut Self) -> c_int;

    fn live() -> &'static AtomicUsize;
}

/// Owns a C object, and calls its destroy verb once. If that fails, the object's state is unknown: siw has unmapped its
/// queues by then, ocrdma has freed it. So the object is leaked, with its parents: see [`Leak`].
#[derive(Debug)]
pub(crate) struct Handle<T: Object> {
    object: NonNull<T>,
    /// It is unimported, not destroyed.
    imported: bool,
    /// The destroy verb was called, here or elsewhere.
    gone: bool,
    /// Something made from this object was leaked.
    leaked: AtomicBool,
}

// SAFETY: libibverbs allows every verb on an object, also its destruction, from any thread. Providers lock queues.
unsafe impl<T: Object> Send for Handle<T> {}
// SAFETY: as above. Methods whose verbs must not overlap take `&mut self`, lock, or are `unsafe`.
unsafe impl<T: Object> Sync for Handle<T> {}

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<T: Object> Handle<T> {
    /// Takes over the result of `verb`: an object, or null with `errno`.
    ///
    /// # Safety
    ///
    /// If not null, `pointer` is a live object that nothing else destroys.
    pub(crate) unsafe fn new(verb: &'static str, pointer: *mut T) -> Result<Self> {
        let object = ffi::object(verb, pointer).inspect_err(trace::verb_failed)?;
        T::live().fetch_add(1, Ordering::Relaxed);
        T::is_made(pointer);
        Ok(Self { object, imported: false, gone: false, leaked: AtomicBool::new(false) })
    }

    /// As [`new`](Self::new), for the result of an import.
    ///
    /// # Safety
    ///
    /// If not null, `pointer` is a live object that was imported, and that nothing else unimports.
    pub(crate) unsafe fn import(verb: &'static str, pointer: *mut T) -> Result<Self> {
        // SAFETY: the caller vouches for it.
        let mut handle = unsafe { Self::new(verb, pointer) }?;
        handle.imported = true;
        Ok(handle)
    }

    /// An imported object is destroyed from now on.
    pub(crate) fn own(&mut self) {
        self.imported = false;
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }

    /// On an error the caller leaks the parents.
    pub(crate) fn destroy(&mut self) -> Result<()> {
        let unimport = T::UNIMPORT.filter(|_| self.imported);
        // SAFETY: `end` calls this once, and the handle owns the object, which is live until then, and imported if it says so.
        self.end(|object| unsafe {
            match unimport {
                Some(unimport) => {
                    unimport(object);
                    Ok(())
                }
                None => ffi::status(T::DESTROY, T::destroy(object)),
            }
        })
    }

    /// `end` replaces the destroy verb.
    pub(crate) fn end(&mut self, end: impl FnOnce(*mut T) -> Result<()>) -> Result<()> {
        if std::mem::replace(&mut self.gone, true) {
            return Ok(());
        }
        if *self.leaked.get_mut() {
            let reason = "something that was made from it could not be destroyed: both are leaked";
            return Err(Error::with_reason(T::DESTROY, libc::EBUSY, reason));
        }
        end(self.as_ptr()).inspect_err(trace::object_leaked)?;
        T::live().fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// True also if the destroy verb will never be called.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }

    /// Other code has destroyed the object or, if not `destroyed`, failed to.
    pub(crate) fn disown(&mut self, destroyed: bool) {
        if !std::mem::replace(&mut self.gone, true) && destroyed {
            T::live().fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn leak(&self) {
        self.leaked.store(true, Ordering::Relaxed);
    }
}

/// An object that others are made from. It is leaked when one of those cannot be destroyed.
///
/// The kernel may keep that one alive, and the device may use its parents' memory, such as doorbell records that
/// closing the context would free. The kernel refuses to destroy most parents, but closes a context, and some providers
/// take a parent apart before they ask it.
pub(crate) trait Leak {
    /// Keeps this and its parents from ever being destroyed.
    fn leak(&self);
}

impl<P: Leak + ?Sized> Leak for Arc<P> {
    fn leak(&self) {
        (**self).leak();
    }
}

impl<P: Leak, const N: usize> Leak for [P; N] {
    fn leak(&self) {
        self.iter().for_each(P::leak);
    }
}

impl<P: Leak> Leak for Vec<P> {
    fn leak(&self) {
        self.iter().for_each(P::leak);
    }
}

impl<P: Leak> Leak for Option<P> {
    fn leak(&self) {
        self.iter().for_each(P::leak);
    }
}

/// `Drop`, `close` (with the given documentation) and `Leak` of a resource with its C object, a `$object`, in `$raw`
/// and its parents in `$parent`.
macro_rules! resource {
    ($(#[$close:meta])* $resource:ident<$($lifetime:lifetime),+>: $raw:ident of $object:ident $(, $parent:ident)*) => {
        impl<$($lifetime),+> Drop for $resource<$($lifetime),+> {
            fn drop(&mut self) {
                let _ = self.destroy();
            }
        }

        impl<$($lifetime),+> $resource<$($lifetime),+> {
            fn destroy(&mut self) -> $crate::base::error::Result<()> {
                self.$raw.destroy().inspect_err(|_| {
                    $($crate::base::handle::Leak::leak(&self.$parent);)*
                })
            }

            $(#[$close])*
            pub fn close(mut self) -> $crate::base::error::Result<()> {
                self.destroy()
            }

            /// The C object, valid while this is.
            #[inline]
            pub fn as_raw(&self) -> *mut $crate::base::ffi::$object {
                self.$raw.as_ptr()
            }
        }

        impl<$($lifetime),+> $crate::base::handle::Leak for $resource<$($lifetime),+> {
            fn leak(&self) {
                self.$raw.leak();
                $($crate::base::handle::Leak::leak(&self.$parent);)*
            }
        }
    };
}

pub(crate) use resource;

/// For a C struct whose destroy verb takes only a pointer. `event_acks`: the object has events. A second verb frees the
/// result of an import.
macro_rules! object {
    ($object:ident, $destroy:ident $(or $unimport:ident)? $(, $events:ident)?) => {
        impl $crate::base::handle::Object for $crate::base::ffi::$object {
            const DESTROY: &'static str = stringify!($destroy);

            $(const UNIMPORT: Option<unsafe extern "C" fn(*mut Self)> =
                Some($crate::base::ffi::$unimport);)?

            $(fn is_made(object: *mut Self) {
                $crate::base::$events::is_free(object);
            })?

            unsafe fn destroy(object: *mut Self) -> std::ffi::c_int {
                // SAFETY: the caller promises a live object that is not used again.
                let verb = |object| unsafe { $crate::base::ffi::$destroy(object) };
                // SAFETY: the caller promises a live object.
                $(let context = unsafe { (*object).context };
                let verb = |object| {
                    $crate::base::$events::destroy(stringify!($destroy), object, context, verb)
                };)?
                verb(object)
            }

            fn live() -> &'static std::sync::atomic::AtomicUsize {
                static LIVE: std::sync::atomic::AtomicUsize =
                    std::sync::atomic::AtomicUsize::new(0);
                &LIVE
            }
        }
    };
}

pub(crate) use object;
