//! A simulation, as its program has it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use super::host::Host;
use super::hosts::Inner;
use crate::network::Network;

/// The hosts of a [simulation](super::simulate()), and the [`Network`] between them, whose methods it has.
///
/// A clone is another handle of the same world.
#[derive(Clone)]
pub struct World {
    network: Network,
    pub(super) inner: Arc<Inner>,
}

impl World {
    pub(super) fn new(network: Network, seed: u64) -> Self {
        let inner = Arc::new(Inner::new(network.clone(), seed));
        Self { network, inner }
    }

    /// Adds a host, on which nothing runs yet.
    ///
    /// # Panics
    ///
    /// If there are 32,768 hosts already.
    pub fn host(&self, name: &str) -> Host {
        Host { world: self.inner.clone(), number: self.inner.add_host(name) }
    }

    /// A number below `limit`, and 0 if that is 0, which the seed decides; each call gives another. For what the program
    /// of the simulation decides: when a host crashes, and what a client does next.
    pub fn random(&self, limit: u64) -> u64 {
        self.inner.random(limit)
    }
}

impl Deref for World {
    type Target = Network;

    fn deref(&self) -> &Network {
        &self.network
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("hosts", &self.inner.state().hosts.len()).finish()
    }
}
