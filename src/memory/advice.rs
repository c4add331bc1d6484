//! Advice about memory that is paged on demand.

use super::scatter_gather::GatherElement;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::foreign_enum::foreign_enum;

foreign_enum! {
    /// `enum ibv_advise_mr_advice`: how memory that is paged on demand is going to be used.
    #[doc(alias = "ibv_advise_mr_advice")]
    pub enum MemoryAdvice: ib_uverbs_advise_mr_advice(u32) {
        /// It will be read: bring it in.
        Prefetch = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        /// It will be written: bring it in, writable.
        PrefetchWrite = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        /// It will be read: map those of its pages that are in memory anyway, and bring in no others.
        PrefetchNoFault = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    }
}

/// `IBV_ADVISE_MR_FLAG_FLUSH`, which the header defines as a macro for a constant of the kernel.
const FLUSH: u32 = 1 << 0;

impl ProtectionDomain<'_> {
    /// `ibv_advise_mr`: tells the device how memory in regions of this domain that are [paged on
    /// demand](crate::RegionOptions::on_demand) is going to be used, so that it need not wait for pages
    /// later. With `flush`, this returns when the device has the pages; otherwise the device may still
    /// be bringing them in.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs on-demand paging
    /// use ibverbs::memory::MemoryAdvice;
    /// use ibverbs::{MemoryRegion, RegionOptions};
    ///
    /// # let context = ibverbs::open("mlx5_0")?;
    /// let domain = context.alloc_pd()?;
    /// let options = RegionOptions::new().on_demand();
    /// let region = MemoryRegion::<u8>::with_options(&domain, 1 << 30, options)?;
    /// domain.advise_mr(MemoryAdvice::Prefetch, true, &[region.gather_element(..1 << 20)?])?;
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the list is empty, or the kernel does not know the advice.
    ///  - `EOPNOTSUPP`: the device takes no advice.
    ///  - `EFAULT`, `ENOENT`: an element is not in a region of this domain that is paged on demand.
    ///  - `EPERM`: an element's region is of another domain, or the advice is to write and the region
    ///    is not writable.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise_mr(
        &self,
        advice: MemoryAdvice,
        flush: bool,
        elements: &[GatherElement<'_>],
    ) -> Result<()> {
        const VERB: &str = "ibv_advise_mr";
        Error::invalid_if(elements.is_empty(), VERB, "there is nothing to give advice about")?;
        let Ok(count) = u32::try_from(elements.len()) else {
            return Err(Error::invalid(VERB, "there are too many elements"));
        };
        let flags = if flush { FLUSH } else { 0 };
        // The list is only read.
        let list = GatherElement::raw_list(elements).as_ptr().cast_mut();
        // SAFETY: the domain is live, and the list has that many elements. The call brings pages in and
        // does not change their contents.
        let returned =
            unsafe { ffi::ibv_advise_mr(self.as_raw(), advice.into(), flags, list, count) };
        ffi::status(VERB, returned)
    }
}
