//! Methods that only read or store a field, as tables.

/// Methods that return a value of a field: `getters! { self, name: Type => self.field; }`,
/// or with `const self`.
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

/// Methods of a builder that store a value: `setters! { self, name(value: Type) => self.field = Some(value); }`,
/// or with `const self`.
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
