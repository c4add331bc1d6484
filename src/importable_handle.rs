//! Ownership of a C object that may belong to another process.

use crate::error::Result;
use crate::handle::{Handle, Object};

/// A C object that can be imported.
pub(crate) trait ImportableObject: Object {
    /// Frees the result of an import, and leaves the object itself alone.
    ///
    /// # Safety
    ///
    /// The object is live and was imported; it is not used again.
    unsafe fn unimport(object: *mut Self);
}

/// Implements [`ImportableObject`] for a C struct.
macro_rules! importable_object {
    ($object:ident, $unimport:ident) => {
        impl $crate::importable_handle::ImportableObject for $crate::ffi::$object {
            unsafe fn unimport(object: *mut Self) {
                // SAFETY: the caller vouches for the object.
                unsafe { $crate::ffi::$unimport(object) }
            }
        }
    };
}

pub(crate) use importable_object;

/// A [`Handle`] that unimports an imported object instead of destroying it.
#[derive(Debug)]
pub(crate) struct ImportableHandle<T: ImportableObject> {
    handle: Handle<T>,
    imported: bool,
}

impl<T: ImportableObject> Drop for ImportableHandle<T> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<T: ImportableObject> ImportableHandle<T> {
    /// An object that this process made.
    pub(crate) fn owned(handle: Handle<T>) -> Self {
        Self { handle, imported: false }
    }

    /// An object that was imported.
    pub(crate) fn imported(handle: Handle<T>) -> Self {
        Self { handle, imported: true }
    }

    /// From now on treats the object as one that this process made.
    pub(crate) fn own(&mut self) {
        self.imported = false;
    }

    /// Destroys or unimports the object, like [`Handle::destroy`].
    pub(crate) fn destroy(&mut self) -> Result<()> {
        if !self.imported {
            return self.handle.destroy();
        }
        self.handle.end(|object| {
            // SAFETY: the handle owns a live object, which was imported; this is called once.
            unsafe { T::unimport(object) };
            Ok(())
        })
    }

    /// See [`Handle::leak`].
    pub(crate) fn leak(&self) {
        self.handle.leak();
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.handle.as_ptr()
    }

    /// The handle itself, for operations on the object.
    pub(crate) fn handle(&self) -> &Handle<T> {
        &self.handle
    }
}
