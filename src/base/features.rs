//! Methods of features that are off.
//!
//! The compiler names the feature of a missing module, type or function, but not that of a missing method. Each method
//! that this declares has a bound that nothing fulfils: a call does not compile, and the message names the feature.

/// Declares such methods. The arguments are names of type parameters.
#[allow(unused_macros)]
macro_rules! methods_of_feature {
    ($feature:path: $(
        impl[$($generics:tt)*] $type:ty { $($method:ident($($argument:ident),*)),* }
    )*) => {
        $(
            impl<$($generics)*> $type {
                $(
                    #[doc(hidden)]
                    pub fn $method<'call, $($argument),*>(&'call self, $(_: $argument),*)
                    where
                        &'call Self: $feature,
                    {
                    }
                )*
            }
        )*
    };
}
#[allow(unused_imports)]
pub(crate) use methods_of_feature;

#[cfg(not(feature = "efa"))]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `efa` of `ibverbs-bundled`",
    label = "add `efa` to the features of `ibverbs-bundled` in Cargo.toml"
)]
pub trait FeatureEfa {}

#[cfg(not(feature = "mlx5"))]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `mlx5` of `ibverbs-bundled`",
    label = "add `mlx5` to the features of `ibverbs-bundled` in Cargo.toml"
)]
pub trait FeatureMlx5 {}

#[cfg(all(not(feature = "tokio"), any(feature = "async", feature = "rdmacm")))]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `tokio` of `ibverbs-bundled`",
    label = "add `tokio` to the features of `ibverbs-bundled` in Cargo.toml"
)]
pub trait FeatureTokio {}
