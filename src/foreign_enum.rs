//! Typed views of numbers that come from the kernel, a provider or a peer.

/// Defines an enum over a C enumeration, with an `Unknown(n)` variant for every other number, so that
/// no number is undefined behaviour. It converts in both directions without loss.
macro_rules! foreign_enum {
    (
        $(#[$outer:meta])*
        pub enum $name:ident: $raw:ident($repr:ty) {
            $($(#[$inner:meta])* $variant:ident = $constant:ident,)+
        }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$inner])* $variant,)+
            /// A value that this version of the crate has no name for.
            Unknown($repr),
        }

        impl From<$crate::ffi::$raw> for $name {
            fn from(raw: $crate::ffi::$raw) -> Self {
                match raw {
                    $($crate::ffi::$raw::$constant => Self::$variant,)+
                    $crate::ffi::$raw(other) => Self::Unknown(other),
                }
            }
        }

        impl From<$name> for $crate::ffi::$raw {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => Self::$constant,)+
                    $name::Unknown(other) => Self(other),
                }
            }
        }
    };
}

pub(crate) use foreign_enum;
