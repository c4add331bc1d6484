use crate::base::{Error, Handle, Result, debug, ffi, object, resource};
use crate::verbs::device::mlx5;
use crate::verbs::domain::{DomainRef, ProtectionDomain};

object!(mlx5dv_mkey, mlx5dv_destroy_mkey);

/// `struct mlx5dv_mkey`: a memory key of mlx5 that names pieces of any regions as one piece, which begins at
/// address 0.
///
/// A request sets the list of pieces: [`Batch::set_memory_key`](crate::operation::Batch::set_memory_key).
#[doc(alias = "mlx5dv_mkey")]
pub struct MemoryKey<'pd> {
    raw: Handle<ffi::mlx5dv_mkey>,
    max_entries: u16,
    domain: DomainRef<'pd>,
}

resource! {
    /// `mlx5dv_destroy_mkey`: destroys the key. Unlike a drop, it returns the error.
    ///
    /// # Errors
    ///
    /// The provider's errno. The key is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "mlx5dv_destroy_mkey")]
    MemoryKey<'pd>: raw of mlx5dv_mkey, domain
}

// Threads may share it: what changes it is posted under the lock of a send queue.

impl<'pd> MemoryKey<'pd> {
    /// `mlx5dv_create_mkey`: creates a key for up to `max_entries` pieces.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no mlx5 device, or its driver has no DevX, which such keys need.
    ///  - `EINVAL`: `max_entries` is 0, or more than the device has.
    ///  - `ENOMEM`: none left on the device.
    #[doc(alias = "mlx5dv_create_mkey")]
    pub fn new(domain: impl Into<DomainRef<'pd>>, max_entries: u16) -> Result<Self> {
        const VERB: &str = "mlx5dv_create_mkey";
        let domain = domain.into();
        Error::within(VERB, "max_entries", max_entries, 1, u16::MAX)?;
        let mut attributes = ffi::mlx5dv_mkey_init_attr {
            pd: domain.as_raw(),
            create_flags: ffi::mlx5dv_mkey_init_attr_flags::MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT.0,
            max_entries,
        };
        // SAFETY: the domain is live; a key that comes back is ours alone.
        let raw = unsafe { Handle::new(VERB, ffi::mlx5dv_create_mkey(&mut attributes)) };
        let raw = raw.map_err(|error| mlx5::explain(VERB, error))?;
        Ok(Self { raw, max_entries: attributes.max_entries, domain })
    }

    /// The key by which this program's work requests name the pieces.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the key is live.
        unsafe { (*self.as_raw()).lkey }
    }

    /// The key by which peers name the pieces.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the key is live.
        unsafe { (*self.as_raw()).rkey }
    }

    /// How many pieces it can name, at least as many as asked for.
    pub fn max_entries(&self) -> u16 {
        self.max_entries
    }

    /// The domain that it was created in.
    pub fn protection_domain(&self) -> &ProtectionDomain<'pd> {
        &self.domain
    }
}

// Without the keys.
debug! { MemoryKey<'_>, self, max_entries: self.max_entries, .. }
