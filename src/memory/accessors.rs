//! The accessors that all regions have.

/// Defines the accessors of every region: its key, its domain and its C object. `$raw` is the `ibv_mr`,
/// `$domain` the field that holds the protection domain.
macro_rules! region_accessors {
    ([$($generics:tt)*] $region:ty, |$this:ident| $raw:expr, $domain:expr) => {
        impl<$($generics)*> $region {
            /// The key by which this program's work requests name the region.
            #[inline]
            pub fn lkey(&self) -> u32 {
                // SAFETY: the region is live.
                unsafe { (*self.as_raw()).lkey }
            }

            /// The domain that it is registered in.
            pub fn protection_domain(&self) -> &$crate::domain::ProtectionDomain<'pd> {
                let $this = self;
                $domain
            }

            /// The C object. It is valid while the region is.
            #[inline]
            pub fn as_raw(&self) -> *mut $crate::ffi::ibv_mr {
                let $this = self;
                $raw
            }
        }
    };
}

/// Defines the additional accessors of regions that peers access: the key for peers and the kernel's
/// number.
macro_rules! shared_region_accessors {
    ([$($generics:tt)*] $region:ty) => {
        impl<$($generics)*> $region {
            /// The key by which peers name the region. A peer that knows it, and has a connection into
            /// this protection domain, can do what the region's access flags allow.
            #[inline]
            pub fn rkey(&self) -> u32 {
                // SAFETY: the region is live.
                unsafe { (*self.as_raw()).rkey }
            }

            /// The kernel's number of the region, by which a process that shares the device's file
            /// descriptor [imports](crate::RawMemoryRegion::import) it.
            pub fn handle(&self) -> u32 {
                // SAFETY: the region is live.
                unsafe { (*self.as_raw()).handle }
            }
        }
    };
}

pub(super) use {region_accessors, shared_region_accessors};
