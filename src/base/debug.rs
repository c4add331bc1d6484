//! `Debug` of structs that show named values.

/// Implements `Debug`: `debug! { Name<'_>, self, field: self.value(), .. }`. `..` says that the struct has more fields.
/// Type parameters come first: `impl[T: Element] Name<'_, T>`.
macro_rules! debug {
    (impl[$($parameter:tt)*] $name:ident $(<$($argument:tt),*>)?, $self:ident,
     $($field:ident: $value:expr),+, ..) => {
        $crate::base::debug::debug! {
            @finish_non_exhaustive [$($parameter)*] $name [$(<$($argument),*>)?] $self [$($field: $value),+]
        }
    };
    (impl[$($parameter:tt)*] $name:ident $(<$($argument:tt),*>)?, $self:ident,
     $($field:ident: $value:expr),+) => {
        $crate::base::debug::debug! {
            @finish [$($parameter)*] $name [$(<$($argument),*>)?] $self [$($field: $value),+]
        }
    };
    (@$finish:ident [$($parameter:tt)*] $name:ident [$($arguments:tt)*] $self:ident
     [$($field:ident: $value:expr),+]) => {
        impl<$($parameter)*> std::fmt::Debug for $name $($arguments)* {
            fn fmt(&$self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    $(.field(stringify!($field), &$value))+
                    .$finish()
            }
        }
    };
    ($name:ident $($rest:tt)*) => {
        $crate::base::debug::debug! { impl[] $name $($rest)* }
    };
}

pub(crate) use debug;
