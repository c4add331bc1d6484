//! Tables of similar items: typed views of numbers from the kernel, a provider or a peer, and methods that only read or
//! store a field.

/// Defines an enum over a C enumeration. Numbers without a name are `Unknown(n)`, so none is undefined behaviour.
macro_rules! c_enum {
    // With words for `Display`.
    (
        $(#[$outer:meta])*
        pub enum $name:ident: $raw:ident($repr:ty), $unknown:literal {
            $($(#[$inner:meta])* $variant:ident = $constant:ident, $words:literal;)+
        }
    ) => {
        $crate::base::c_enum::c_enum! {
            $(#[$outer])*
            pub enum $name: $raw($repr) { $($(#[$inner])* $variant = $constant,)+ }
        }
        $crate::base::c_enum::display_texts! { $name, $unknown: $($variant, $words;)+ }
    };
    (
        $(#[$outer:meta])*
        pub enum $name:ident: $raw:ident($repr:ty) {
            $($(#[$inner:meta])* $variant:ident = $constant:ident,)+
        }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$inner])* $variant,)+
            /// A value without a name in this version of the crate.
            Unknown($repr),
        }

        impl From<$crate::base::ffi::$raw> for $name {
            fn from(raw: $crate::base::ffi::$raw) -> Self {
                match raw {
                    $($crate::base::ffi::$raw::$constant => Self::$variant,)+
                    $crate::base::ffi::$raw(other) => Self::Unknown(other),
                }
            }
        }

        impl From<$name> for $crate::base::ffi::$raw {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$variant => Self::$constant,)+
                    $name::Unknown(other) => Self(other),
                }
            }
        }
    };
}

pub(crate) use c_enum;

macro_rules! display_texts {
    ($name:ident, $unknown:literal: $($variant:ident, $words:literal;)+) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($words),)+
                    Self::Unknown(other) => write!(f, concat!($unknown, " {}"), other),
                }
            }
        }
    };
}

pub(crate) use display_texts;

/// `getters! { self, name: Type => self.field; }`, or with `const self`.
macro_rules! getters {
    (const $self:ident, $($(#[$meta:meta])* $name:ident: $type:ty => $value:expr;)+) => {$(
        $(#[$meta])*
        pub const fn $name(&$self) -> $type {
            $value
        }
    )+};
    ($self:ident, $($(#[$meta:meta])* $name:ident: $type:ty => $value:expr;)+) => {$(
        $(#[$meta])*
        pub fn $name(&$self) -> $type {
            $value
        }
    )+};
}

pub(crate) use getters;

/// [`getters!`] of a type, which serialises as a struct of what they return: `serialized_getters! { Type, self, .. }`.
macro_rules! serialized_getters {
    ($of:ident, $self:ident, $($(#[$meta:meta])* $name:ident: $type:ty => $value:expr;)+) => {
        impl $of {
            $crate::base::c_enum::getters! { $self, $($(#[$meta])* $name: $type => $value;)+ }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $of {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeStruct as _;

                let count = [$(stringify!($name)),+].len();
                let mut fields = serializer.serialize_struct(stringify!($of), count)?;
                $(fields.serialize_field(stringify!($name), &self.$name())?;)+
                fields.end()
            }
        }
    };
}

pub(crate) use serialized_getters;

/// `setters! { self, name(value: Type) => self.field = Some(value); }`, or with `const self`.
macro_rules! setters {
    (const $self:ident, $($(#[$meta:meta])* $name:ident($($value:ident: $type:ty)?) => $store:expr;)+) => {$(
        $(#[$meta])*
        pub const fn $name(mut $self $(, $value: $type)?) -> Self {
            $store;
            $self
        }
    )+};
    ($self:ident, $($(#[$meta:meta])* $name:ident($($value:ident: $type:ty)?) => $store:expr;)+) => {$(
        $(#[$meta])*
        pub fn $name(mut $self $(, $value: $type)?) -> Self {
            $store;
            $self
        }
    )+};
}

pub(crate) use setters;
