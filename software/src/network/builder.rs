//! The settings of a network.

use std::sync::Arc;
use std::time::Duration;

use super::Network;
use super::conditions::Conditions;
use super::settings::Settings;
use super::simulation::Simulation;

/// Makes a [`Network`].
///
/// ```
/// use std::time::Duration;
/// use ibverbs_software::Network;
///
/// let network = Network::builder()
///     .seed(7)
///     .loss(0.01)
///     .reorder(0.05)
///     .delay(Duration::from_micros(20))
///     .bandwidth(12_500_000_000)
///     .build();
/// assert_eq!(network.conditions().loss, 0.01);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct NetworkBuilder(pub(super) Settings);

macro_rules! condition_methods {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $value:expr;)*) => {
        impl NetworkBuilder {
            $($(#[$doc])*
            pub fn $name(mut self, $name: $type) -> Self {
                self.0.conditions.$name = $value;
                self
            })*
        }
    };
}

condition_methods! {
    /// The probability that a packet is lost; 0 if not set.
    loss: f64 => loss;
    /// The probability that a packet arrives twice; 0 if not set.
    duplicate: f64 => duplicate;
    /// The probability that later packets overtake a packet; 0 if not set. See [`Conditions::reorder`].
    reorder: f64 => reorder;
    /// The probability that a bit of a packet changes; 0 if not set.
    corrupt: f64 => corrupt;
    /// The time that a packet takes; one microsecond if not set.
    delay: Duration => delay;
    /// A random time up to this is added to the delay of each packet; none if not set.
    jitter: Duration => jitter;
    /// The bytes per second that each device can send; without limit if not set.
    bandwidth: u64 => Some(bandwidth);
}

impl Network {
    /// A network that loses nothing, with a delay of one microsecond.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Configures a network.
    pub fn builder() -> NetworkBuilder {
        NetworkBuilder::new()
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl NetworkBuilder {
    fn new() -> Self {
        Self(Settings {
            seed: 0,
            conditions: Conditions::PERFECT,
            manual: false,
            trace_bytes: 16 << 20,
            queue: 65_536,
        })
    }

    /// The seed of all that is random; 0 if not set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.0.seed = seed;
        self
    }

    /// All conditions at once.
    pub fn conditions(mut self, conditions: Conditions) -> Self {
        self.0.conditions = conditions;
        self
    }

    /// Lets time pass by [`Network::advance`] and [`Network::run_until_idle`] only. Then a program must not wait
    /// for a completion on the thread that has to call them.
    pub fn manual(mut self) -> Self {
        self.0.manual = true;
        self
    }

    /// How many bytes of packets the trace keeps; 16 MiB if not set. When it is full, the oldest packets leave it.
    pub fn trace_bytes(mut self, bytes: usize) -> Self {
        self.0.trace_bytes = bytes;
        self
    }

    /// How many packets can be under way; 65,536 if not set. Further ones are lost.
    pub fn queue(mut self, packets: usize) -> Self {
        self.0.queue = packets;
        self
    }

    /// Makes the network.
    #[must_use]
    pub fn build(self) -> Network {
        Network(Arc::new(Simulation::new(self.0)))
    }
}
