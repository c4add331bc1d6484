//! The options of a device.

use crate::{FunctionDevice, raw};

/// When the model executes posted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Work is executed in [`FunctionDevice::step`] only.
    Manual,
    /// Work is executed also in each poll, and in each request for notification.
    OnPoll,
    /// Work is executed also in each post: what can be done is done when the post returns.
    OnPost,
}

impl Progress {
    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Progress::Manual => raw::DEVICE_MANUAL,
            Progress::OnPoll => raw::DEVICE_ON_POLL,
            Progress::OnPost => raw::DEVICE_ON_POST,
        }
    }
}

/// The network that the ports are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// RoCE. Each port's GID table has `fe80::/64` and `::ffff:10.0.0.<port>`, each as RoCE v1
    /// (indices 0 and 2) and as RoCE v2 (1 and 3). No LIDs. Addresses need a global route.
    Ethernet,
    /// InfiniBand: port `n` has LID `n` and one GID.
    InfiniBand,
}

/// Makes a [`FunctionDevice`]. What is not set has a default large enough for most tests.
#[derive(Clone, Debug)]
pub struct Builder {
    options: raw::device_options,
}

impl Builder {
    /// See [`FunctionDevice::lean`].
    pub fn lean() -> Self {
        Self { options: raw::device_options { kind: raw::DEVICE_LEAN, ..Default::default() } }
    }

    /// See [`FunctionDevice::model`].
    pub fn model() -> Self {
        Self {
            options: raw::device_options {
                kind: raw::DEVICE_MODEL,
                progress: raw::DEVICE_ON_POLL,
                ..Default::default()
            },
        }
    }

    /// Lets receives of a [lean](Self::lean) device, at most this many, wait for
    /// [`deliver`](FunctionDevice::deliver). A queue pair must not be destroyed before its receives have ended.
    pub fn held_receives(mut self, most: u32) -> Self {
        self.options.held_receives = most;
        self
    }

    /// Sets when posted work is executed ([`Progress::OnPoll`]).
    pub fn progress(mut self, progress: Progress) -> Self {
        self.options.progress = progress.to_raw();
        self
    }

    /// The network of all ports ([`LinkLayer::Ethernet`]).
    pub fn link_layer(mut self, link_layer: LinkLayer) -> Self {
        // IBV_LINK_LAYER_*: an unnamed enum in C, whose name in the bindings may change.
        self.options.link_layer = match link_layer {
            LinkLayer::InfiniBand => 1,
            LinkLayer::Ethernet => 2,
        };
        self
    }

    /// The number of ports, 1 to 4 (1).
    pub fn ports(mut self, ports: u32) -> Self {
        self.options.ports = ports;
        self
    }

    /// The number of the first queue pair; the next ones count on (0x11).
    pub fn first_qp_num(mut self, number: u32) -> Self {
        self.options.first_qp_num = number;
        self
    }

    /// Reaches the limits (`max_qp_wr`, `max_cqe` ..); a limit left 0 keeps its default.
    pub fn limits(mut self, set: impl FnOnce(&mut raw::device_options)) -> Self {
        set(&mut self.options);
        self
    }

    /// Makes the device.
    ///
    /// # Panics
    ///
    /// When an option is out of range.
    #[track_caller]
    pub fn build(self) -> FunctionDevice {
        FunctionDevice::from_options(&self.options).expect("the options are in range")
    }
}
