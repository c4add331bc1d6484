//! Ownership of a C object that may belong to another process.

use std::mem::ManuallyDrop;

use crate::error::{Error, Result};
use crate::handle::{Handle, Object};

/// A C object that can be imported.
pub(crate) trait Import: Object {
    /// Frees what importing has made, and leaves the object itself alone.
    ///
    /// # Safety
    ///
    /// The object is live and was imported; it is not used again.
    unsafe fn unimport(object: *mut Self);
}

/// Implements [`Import`] for a C struct.
macro_rules! import {
    ($object:ident, $unimport:ident) => {
        impl $crate::importable::Import for $crate::ffi::$object {
            unsafe fn unimport(object: *mut Self) {
                // SAFETY: the caller vouches for the object.
                unsafe { $crate::ffi::$unimport(object) }
            }
        }
    };
}

pub(crate) use import;

/// A [`Handle`] that, when the object was imported, unimports it rather than destroys it.
#[derive(Debug)]
pub(crate) struct Importable<T: Import> {
    handle: ManuallyDrop<Handle<T>>,
    imported: bool,
}

impl<T: Import> Drop for Importable<T> {
    fn drop(&mut self) {
        // SAFETY: the handle is taken once: here, or in `close`, which forgets `self`.
        let handle = unsafe { ManuallyDrop::take(&mut self.handle) };
        Self::end(handle, self.imported);
    }
}

impl<T: Import> Importable<T> {
    /// An object that was made here.
    pub(crate) fn owned(handle: Handle<T>) -> Self {
        Self { handle: ManuallyDrop::new(handle), imported: false }
    }

    /// An object that was imported.
    pub(crate) fn imported(handle: Handle<T>) -> Self {
        Self { handle: ManuallyDrop::new(handle), imported: true }
    }

    /// From now on the object counts as made here.
    pub(crate) fn own(&mut self) {
        self.imported = false;
    }

    fn end(handle: Handle<T>, imported: bool) {
        if imported {
            let handle = ManuallyDrop::new(handle);
            // SAFETY: the handle owns a live object, which was imported, and is forgotten.
            unsafe { T::unimport(handle.as_ptr()) };
        }
    }

    /// Destroys or unimports the object, or gives it back with the reason why that failed.
    pub(crate) fn close(self) -> Result<(), (Self, Error)> {
        let imported = self.imported;
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the handle is put back if it is not gone; `this` is not dropped meanwhile.
        let handle = unsafe { ManuallyDrop::take(&mut this.handle) };
        if imported {
            Self::end(handle, true);
            return Ok(());
        }
        handle.close().map_err(|(handle, error)| (Self::owned(handle), error))
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.handle.as_ptr()
    }

    /// The handle itself, to operate on the object.
    pub(crate) fn handle(&self) -> &Handle<T> {
        &self.handle
    }
}
