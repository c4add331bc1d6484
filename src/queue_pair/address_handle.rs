//! Address handles.

use super::address_vector::AddressVector;
use crate::debug::debug;
use crate::device::Context;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, object, resource};
use crate::parent::Parent;

object!(ibv_ah, ibv_destroy_ah);

const VERB: &str = "ibv_create_ah";

/// `struct ibv_ah`: the path to a peer, made ready for datagrams.
///
/// A UD queue pair sends to any peer that it has an address handle for, together with the number and
/// the Q_Key of the peer's queue pair: see [`SendWorkRequest::to`](crate::SendWorkRequest::to), and
/// [Datagrams](crate::_guide::verbs#datagrams) for an example.
#[doc(alias = "ibv_ah")]
pub struct AddressHandle<'pd> {
    raw: Handle<ffi::ibv_ah>,
    domain: Parent<'pd, ProtectionDomain<'pd>>,
}

resource! {
    /// `ibv_destroy_ah`: destroys the handle and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The handle is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_destroy_ah")]
    AddressHandle<'pd>: raw of ibv_ah, domain
}

impl<'pd> AddressHandle<'pd> {
    /// `ibv_create_ah`: creates the handle. The queue pair that sends through it must be of the same
    /// domain.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the port, the index of our own GID or another part of the path is wrong for this
    ///    device, or the path has no [global route](AddressVector::global), which RoCE needs.
    ///  - `ETIMEDOUT`, `ENETUNREACH`, `EHOSTUNREACH`: on RoCE, the peer's MAC address could not be
    ///    resolved, or there is no route to its GID. The error names both GIDs.
    ///  - `ENOMEM`: the device has no address handle left, or the machine has no memory left.
    #[doc(alias = "ibv_create_ah")]
    pub fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        path: &AddressVector,
    ) -> Result<Self> {
        let domain = domain.into();
        let mut attributes = path.to_raw();
        // mlx5 fails without an errno value in some cases.
        ffi::set_errno(0);
        // SAFETY: the domain is live; a handle that comes back is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_create_ah(domain.as_raw(), &mut attributes)) };
        let raw = raw.map_err(|error| explain(domain.context(), path, error))?;
        Ok(Self { raw, domain })
    }

    /// Takes over a handle that was created elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live address handle, and nothing else destroys it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_ah,
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
    ) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).pd } != domain.as_raw();
        Error::invalid_if(is_foreign, VERB, "not an address handle of this domain")?;
        // SAFETY: the caller hands over a live handle.
        Ok(Self { raw: unsafe { Handle::new(VERB, raw) }?, domain })
    }

    /// The domain that it was created in.
    pub fn protection_domain(&self) -> &ProtectionDomain<'pd> {
        &self.domain
    }
}

/// Finds the cause of an error, as far as possible.
#[cold]
fn explain(context: &Context<'_>, path: &AddressVector, error: Error) -> Error {
    let Ok(device) = context.query_device() else { return error };
    let (port, ports) = (path.port(), device.phys_port_cnt());
    if port == 0 || port > ports {
        return Error::out_of_range(VERB, "port number", port.into(), 1, ports.into());
    }
    // mlx5 sets no errno value in some cases, which has become `EIO`.
    if !matches!(error.errno(), libc::EINVAL | libc::EIO) {
        return path.explain_unreachable(context, error);
    }
    let Ok(attributes) = context.query_port(port) else { return error };
    path.check_route(VERB, context, &attributes).err().unwrap_or(error)
}

impl ProtectionDomain<'_> {
    /// `ibv_create_ah`: creates an address handle that borrows this domain. See
    /// [`AddressHandle::new`].
    ///
    /// For a value that leaves its function: `AddressHandle::new(domain, ..)`, with the domain by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`AddressHandle::new`].
    #[doc(alias = "ibv_create_ah")]
    pub fn create_ah(&self, path: &AddressVector) -> Result<AddressHandle<'_>> {
        AddressHandle::new(self, path)
    }
}

debug! { AddressHandle<'_>, self, device: self.domain.context().name(), .. }
