//! Methods of features that are off. Each has a bound that nothing fulfils: a call does not compile, and the message names the
//! feature, which the compiler by itself does not do for methods.

#[cfg(not(feature = "rdmacm"))]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `rdmacm` of `ibverbs-stream`",
    label = "add `rdmacm` to the features of `ibverbs-stream` in Cargo.toml"
)]
pub trait FeatureRdmacm {}

#[cfg(not(feature = "tokio"))]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `tokio` of `ibverbs-stream`",
    label = "add `tokio` to the features of `ibverbs-stream` in Cargo.toml"
)]
pub trait FeatureTokio {}

#[cfg(not(feature = "rdmacm"))]
macro_rules! needs_rdmacm {
    ($($type:ty { $method:ident($($argument:ident),*) })*) => {
        $(
            impl $type {
                #[doc(hidden)]
                pub fn $method<'hub, $($argument),*>(_: &'hub crate::Hub, $(_: $argument),*)
                where
                    &'hub Self: FeatureRdmacm,
                {
                }
            }
        )*
    };
}

#[cfg(not(feature = "rdmacm"))]
needs_rdmacm! {
    crate::Stream { connect_rdmacm(Address, Deadline) }
    crate::Listener { bind_rdmacm(Address) }
}

#[cfg(all(feature = "tokio", not(feature = "rdmacm")))]
needs_rdmacm! {
    crate::tokio::Stream { connect_rdmacm(Address) }
    crate::tokio::Listener { bind_rdmacm(Address) }
}

#[cfg(all(feature = "hyper-util", not(feature = "rdmacm")))]
needs_rdmacm! { crate::hyper::Connector { rdmacm() } }

#[cfg(not(feature = "tokio"))]
impl crate::Hub {
    #[doc(hidden)]
    pub fn run_on_tokio<'hub>(&'hub self)
    where
        &'hub Self: FeatureTokio,
    {
    }
}
