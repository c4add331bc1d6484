//! Transports that only a verb of their provider creates: SRD of EFA, DC of mlx5.
//!
//! Both are of the C type `IBV_QPT_DRIVER`, and share nothing else. What is particular to one is in its own
//! files; here is where the builder, the state changes and the posting interface ask.

use super::attributes::AttributeMask;
#[cfg(feature = "mlx5")]
use super::dc_options::{self as dc, DcStreams};
#[cfg(feature = "efa")]
use super::srd_options::{self as srd, SrdOptions};
use crate::ffi;
use crate::queue_pair_state::QueuePairState;

/// The transport of a queue pair of type [`Driver`](crate::QueuePairType::Driver) that this crate creates.
#[derive(Clone, Copy, Debug)]
pub enum DriverTransport {
    #[cfg(feature = "efa")]
    Srd {
        options: SrdOptions,
        /// The device can be told how often to repeat a send that found no receive.
        rnr_retry: bool,
    },
    #[cfg(feature = "mlx5")]
    DcInitiator(Option<DcStreams>),
    #[cfg(feature = "mlx5")]
    DcTarget { access_key: u64 },
}

impl DriverTransport {
    /// The verb that creates a queue pair.
    pub(super) fn verb(self) -> &'static str {
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { .. } => srd::CREATE,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) | Self::DcTarget { .. } => dc::CREATE,
        }
    }

    /// Whether it is mlx5's.
    pub(super) fn is_dc(self) -> bool {
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { .. } => false,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) | Self::DcTarget { .. } => true,
        }
    }

    /// Whether its requests can be divided into streams.
    #[cfg(feature = "mlx5")]
    pub(super) fn has_streams(self) -> bool {
        matches!(self, Self::DcInitiator(Some(_)))
    }

    /// Calls the verb.
    ///
    /// # Safety
    ///
    /// `context` is live, as is all that `attributes` names.
    pub(super) unsafe fn create(
        self,
        context: *mut ffi::ibv_context,
        attributes: &mut ffi::ibv_qp_init_attr_ex,
    ) -> *mut ffi::ibv_qp {
        // With no such transport, there is nothing to create.
        let _ = (context, &attributes);
        match self {
            #[cfg(feature = "efa")]
            // SAFETY: the caller's guarantees are passed on, here and below.
            Self::Srd { options, .. } => unsafe { srd::create(context, attributes, options) },
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(streams) => {
                // SAFETY: as above.
                unsafe { dc::create(context, attributes, dc::initiator(streams)) }
            }
            #[cfg(feature = "mlx5")]
            Self::DcTarget { access_key } => {
                // SAFETY: as above.
                unsafe { dc::create(context, attributes, dc::target(access_key)) }
            }
        }
    }

    /// The attributes that a step on the way up needs. The kernel does not know them: these are the rules of
    /// the kernel's drivers.
    pub(super) fn attributes(
        self,
        from: QueuePairState,
        to: QueuePairState,
        of_datagrams: AttributeMask,
    ) -> AttributeMask {
        let _ = (from, to, of_datagrams);
        match self {
            #[cfg(feature = "efa")]
            Self::Srd { rnr_retry: true, .. } if to == QueuePairState::ReadyToSend => {
                of_datagrams | AttributeMask::MAX_RNR_RETRIES
            }
            #[cfg(feature = "efa")]
            Self::Srd { .. } => of_datagrams,
            #[cfg(feature = "mlx5")]
            Self::DcInitiator(_) => dc::initiator_attributes(from, to),
            #[cfg(feature = "mlx5")]
            Self::DcTarget { .. } => dc::target_attributes(from, to),
        }
    }
}
