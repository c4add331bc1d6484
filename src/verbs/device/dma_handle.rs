use crate::base::{Handle, Result, c_enum, debug, ffi, object, resource};
use crate::verbs::device::ContextRef;

object!(ibv_dmah, ibv_dealloc_dmah);

c_enum! {
    /// `enum ibv_tph_mem_type`: the kind of memory.
    #[doc(alias = "ibv_tph_mem_type")]
    pub enum HintedMemory: ibv_tph_mem_type(u32) {
        /// Memory that loses its contents without power.
        Volatile = IBV_TPH_MEM_TYPE_VM,
        /// Memory that keeps them.
        Persistent = IBV_TPH_MEM_TYPE_PM,
    }
}

/// `struct ibv_dmah_init_attr`: the hints of a [`DmaHandle`]. `None` leaves it to the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[doc(alias = "ibv_dmah_init_attr")]
pub struct DmaHints {
    /// The processor that will use the data (number in `/proc/cpuinfo`): written data go to its cache.
    pub cpu: Option<u32>,
    /// The PCI Express processing hint: 0 bidirectional use, 1 use by the device, 2 by the processor, 3 by
    /// the processor with priority.
    pub processing_hint: Option<u8>,
    /// The kind of memory.
    pub memory: Option<HintedMemory>,
}

/// `struct ibv_dmah`: PCI Express processing hints (TPH) for the device's access to memory.
///
/// Register a region with it:
/// [`RawMemoryRegion::with_dma_handle`](crate::memory::RawMemoryRegion::with_dma_handle). Needs rdma-core 65.
#[doc(alias = "ibv_dmah")]
pub struct DmaHandle<'ctx> {
    raw: Handle<ffi::ibv_dmah>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_dealloc_dmah`: frees the handle, and returns an error that dropping would ignore.
    ///
    /// # Errors
    ///
    /// The handle, with all that it was made from, is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed).
    ///
    ///  - `EBUSY`: a region that was registered with it exists.
    #[doc(alias = "ibv_dealloc_dmah")]
    DmaHandle<'ctx>: raw of ibv_dmah, context
}

impl<'ctx> DmaHandle<'ctx> {
    /// `ibv_alloc_dmah`.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device or the kernel has no such handles.
    ///  - `EINVAL`: there is no such processor, or the device does not know the hint.
    ///  - `ENOMEM`: none left on the device.
    #[doc(alias = "ibv_alloc_dmah")]
    pub fn new(context: impl Into<ContextRef<'ctx>>, hints: DmaHints) -> Result<Self> {
        use ffi::ibv_dmah_init_attr_mask as mask;

        let context = context.into();
        let mut attributes = ffi::ibv_dmah_init_attr::default();
        if let Some(cpu) = hints.cpu {
            attributes.cpu_id = cpu;
            attributes.comp_mask |= mask::IBV_DMAH_INIT_ATTR_MASK_CPU_ID.0;
        }
        if let Some(hint) = hints.processing_hint {
            attributes.ph = hint;
            attributes.comp_mask |= mask::IBV_DMAH_INIT_ATTR_MASK_PH.0;
        }
        if let Some(memory) = hints.memory {
            // C's field has 8 bits. No device knows the last number.
            attributes.tph_mem_type =
                u8::try_from(ffi::ibv_tph_mem_type::from(memory).0).unwrap_or(u8::MAX);
            attributes.comp_mask |= mask::IBV_DMAH_INIT_ATTR_MASK_TPH_MEM_TYPE.0;
        }
        // SAFETY: the context is live; a handle that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_alloc_dmah(context.as_raw(), &mut attributes);
            Handle::new("ibv_alloc_dmah", raw)
        }?;
        Ok(Self { raw, context })
    }
}

debug! { DmaHandle<'_>, self, raw: self.as_raw(), .. }
