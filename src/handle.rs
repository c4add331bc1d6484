//! Ownership of one C object.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use crate::error::Error;
use crate::ffi;

/// A C object that a verb destroys.
pub(crate) trait Object {
    /// The name of that verb.
    const DESTROY: &'static str;

    /// Calls that verb; returns 0 or an errno value.
    ///
    /// # Safety
    ///
    /// The object is live, and is not used again if this succeeds.
    unsafe fn destroy(object: *mut Self) -> c_int;
}

/// Owns a C object: the only one that destroys it.
///
/// In a resource the handle is the first field and the parents come after it, so that it is
/// destroyed before they are. A destroy that fails when the handle is dropped leaks the object:
/// `Drop` neither panics nor reports, [`close`](Self::close) does.
#[derive(Debug)]
pub(crate) struct Handle<T: Object>(NonNull<T>);

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: the handle owns a live object, and nothing uses the handle after this.
        let _ = unsafe { T::destroy(self.as_ptr()) };
    }
}

impl<T: Object> Handle<T> {
    /// Takes ownership of what `verb` returned: an object, or null with `errno`.
    ///
    /// # Safety
    ///
    /// If it is not null, `pointer` is a live object that nothing else destroys.
    pub(crate) unsafe fn new(verb: &'static str, pointer: *mut T) -> Result<Self, Error> {
        ffi::object(verb, pointer).map(Self)
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Destroys the object, or gives the handle back with the reason why that failed.
    pub(crate) fn close(self) -> Result<(), (Self, Error)> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the handle owns a live object; on success it is forgotten.
        match ffi::status(T::DESTROY, unsafe { T::destroy(this.as_ptr()) }) {
            Ok(()) => Ok(()),
            Err(error) => Err((ManuallyDrop::into_inner(this), error)),
        }
    }
}

/// Implements [`Object`] for a C struct whose destroying verb takes just a pointer to it.
macro_rules! object {
    ($object:ident, $destroy:ident) => {
        impl $crate::handle::Object for $crate::ffi::$object {
            const DESTROY: &'static str = stringify!($destroy);

            unsafe fn destroy(object: *mut Self) -> std::ffi::c_int {
                // SAFETY: the caller vouches for the object.
                unsafe { $crate::ffi::$destroy(object) }
            }
        }
    };
}

pub(crate) use object;
