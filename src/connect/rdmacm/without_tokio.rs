//! The methods of `on_tokio`, which feature `tokio` adds: a call names the feature.

use super::connectable::sealed;
use super::connecting::{Connecting, PendingAccept};
use super::connection::{Connection, ConnectionControl};
use super::listener::{ConnectionRequest, Listener};
use super::route::{Route, RouteBuilder, RouteResolution};
use crate::base::features::{FeatureTokio, methods_of_feature};

methods_of_feature! {
    FeatureTokio:
    impl[] RouteBuilder { resolve_on_tokio(Deadline) }
    impl[] RouteResolution { finish_on_tokio() }
    impl[] Route { connect_on_tokio(Prepared, PrivateData) }
    impl[Q: sealed::Connected] Connecting<Q> { finish_on_tokio() }
    impl[] Listener { next_on_tokio() }
    impl[] ConnectionRequest { accept_on_tokio(Prepared, PrivateData) }
    impl[] PendingAccept { accept_on_tokio(PrivateData) }
    impl[Q: sealed::Connected] Connection<Q> { event_on_tokio() }
    impl[] ConnectionControl { event_on_tokio() }
}
