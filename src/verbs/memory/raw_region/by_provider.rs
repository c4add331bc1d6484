use super::provider_buffer::ProviderBuffer;
use super::{Raw, RawMemoryRegion};
use crate::base::{Error, Handle, Result, ffi, linux};
use crate::verbs::domain::DomainRef;
use crate::verbs::memory::options::{AccessFlags, check_access};
use crate::verbs::memory::region::Parts;

impl<'pd> RawMemoryRegion<'pd> {
    /// `ibv_alloc_buf`, `ibv_reg_buf_mr`: registers `bytes` zeroed bytes that the provider allocates.
    ///
    /// It allocates as this domain needs: in a confidential virtual machine, memory that the device can reach.
    /// It frees them once the region is deregistered. Since rdma-core 65.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is 0, or the access includes [`ZERO_BASED`](AccessFlags::ZERO_BASED), or remote
    ///    write or atomic access without local write access.
    ///  - `ENOMEM`: no memory, no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    #[doc(alias = "ibv_alloc_buf")]
    #[doc(alias = "ibv_free_buf")]
    #[doc(alias = "ibv_reg_buf_mr")]
    pub fn allocate_by_provider(
        domain: impl Into<DomainRef<'pd>>,
        bytes: usize,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_buf_mr";
        let domain = domain.into();
        check_access(VERB, &domain, access)?;
        Error::invalid_if(bytes == 0, VERB, "the region is empty")?;
        let reason = "such a region begins at its address";
        Error::invalid_if(access.contains(AccessFlags::ZERO_BASED), VERB, reason)?;
        let buffer = ProviderBuffer::new(domain.clone(), bytes)?;
        let (address, flags) = (buffer.address, access.bits() as i32);
        // SAFETY: domain and buffer are live. The region frees the buffer only once it is deregistered.
        let raw = unsafe {
            let (domain, buffer) = (domain.as_raw(), buffer.raw.as_ptr());
            Handle::new(VERB, ffi::ibv_reg_buf_mr(domain, buffer, address.cast(), bytes, flags))
        }?;
        Ok(Self::from_parts(
            Parts::by_address(raw, address, bytes, access),
            Raw { provider: Some(buffer), dmabuf: None },
            domain,
        ))
    }

    /// `ibv_export_buf_dmabuf_fd`: a dma-buf of memory from
    /// [`allocate_by_provider`](Self::allocate_by_provider), which keeps it alive.
    ///
    /// Another device can [register](Self::from_dmabuf) it. Since rdma-core 65.
    ///
    /// # Errors
    ///
    ///  - `ENODATA`: the memory is no dma-buf, or the provider has not allocated it.
    ///  - `EMFILE`: too many open files.
    #[doc(alias = "ibv_export_buf_dmabuf_fd")]
    pub fn export_dmabuf(&self) -> Result<std::os::fd::OwnedFd> {
        const VERB: &str = "ibv_export_buf_dmabuf_fd";
        let Some(buffer) = &self.memory().provider else {
            let reason = "the provider has not allocated this memory";
            return Err(Error::with_reason(VERB, linux::ENODATA, reason));
        };
        // SAFETY: the buffer is live, and the descriptor is new.
        unsafe { ffi::new_fd(VERB, ffi::ibv_export_buf_dmabuf_fd(buffer.raw.as_ptr())) }
    }
}
