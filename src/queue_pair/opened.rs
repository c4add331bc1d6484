//! Queue pairs of XRC domains that other processes have created.

use super::attributes::AttributeMask;
use super::transition::StateTransition;
use crate::debug::debug;
use crate::domain::XrcDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, resource};
use crate::parent::Parent;
use crate::queue_pair_state::{QueuePairState, QueuePairType};

const VERB: &str = "ibv_open_qp";

/// A receiving XRC queue pair that was opened by its number, such as one of another process whose XRC
/// domain belongs to the same file.
///
/// Opening it keeps it alive: it is destroyed when every process that has created or opened it has closed
/// it. Events about it come to all of them.
pub struct OpenedQueuePair<'res> {
    raw: Handle<ffi::ibv_qp>,
    domain: Parent<'res, XrcDomain<'res>>,
}

resource! {
    /// `ibv_destroy_qp`: gives the queue pair up, and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The queue pair is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its domain.
    #[doc(alias = "ibv_destroy_qp")]
    OpenedQueuePair<'res>: raw of ibv_qp, domain
}

impl<'res> OpenedQueuePair<'res> {
    /// `ibv_open_qp`: opens the receiving XRC queue pair of this number.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the domain has no such queue pair, or the number has more than 24 bits.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no extended reliable connections.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_open_qp")]
    pub fn open(domain: impl Into<Parent<'res, XrcDomain<'res>>>, number: u32) -> Result<Self> {
        use ffi::ibv_qp_open_attr_mask as mask;

        let domain = domain.into();
        Error::within(VERB, "the number of the queue pair", number, 0, 0xff_ffff_u32)?;
        let fields =
            mask::IBV_QP_OPEN_ATTR_NUM | mask::IBV_QP_OPEN_ATTR_XRCD | mask::IBV_QP_OPEN_ATTR_TYPE;
        let mut attributes = ffi::ibv_qp_open_attr {
            comp_mask: fields.0,
            qp_num: number,
            xrcd: domain.as_raw(),
            qp_type: ffi::ibv_qp_type::IBV_QPT_XRC_RECV,
            ..Default::default()
        };
        // SAFETY: context and domain are live, and kept; a queue pair that comes back is ours alone.
        let raw = unsafe {
            Handle::new(VERB, ffi::ibv_open_qp(domain.context().as_raw(), &mut attributes))
        }?;
        Ok(Self { raw, domain })
    }

    /// `ibv_modify_qp`: changes the state, attributes, or both.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::modify`](crate::QueuePair::modify).
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, transition: StateTransition) -> Result<()> {
        transition.check(QueuePairType::XrcReceive, self.state()?)?;
        let (mut raw, mask) = transition.to_raw();
        // SAFETY: the queue pair is live; the mask is made of the defined bits, which fit.
        let returned = unsafe { ffi::ibv_modify_qp(self.as_raw(), &mut raw, mask.0 as i32) };
        ffi::status("ibv_modify_qp", returned)
    }

    /// `ibv_query_qp`: the state.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_query_qp")]
    pub fn state(&self) -> Result<QueuePairState> {
        let mut raw = ffi::ibv_qp_attr::default();
        let mut created = ffi::ibv_qp_init_attr::default();
        let mask = AttributeMask::STATE.bits() as i32;
        // SAFETY: the queue pair is live, and both structs are writable.
        let returned = unsafe { ffi::ibv_query_qp(self.as_raw(), &mut raw, mask, &mut created) };
        ffi::status("ibv_query_qp", returned)?;
        Ok(raw.qp_state.into())
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// The domain that it was opened in.
    pub fn xrc_domain(&self) -> &XrcDomain<'res> {
        &self.domain
    }
}

debug! { OpenedQueuePair<'_>, self, number: self.number(), .. }
