//! The huge pages that a buffer can consist of.

/// The huge pages that a region's buffer consists of.
///
/// A device translates addresses page by page and caches few translations; with huge pages a large
/// region needs few.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum HugePages {
    /// `MADV_HUGEPAGE`: transparent huge pages. The buffer begins on a multiple of 2 MiB, and the
    /// kernel backs it with huge pages as far as it has free ones. The administrator need not set any
    /// aside.
    Transparent,
    /// `MAP_HUGETLB`: pages of 2 MiB, from those that the administrator has set aside (in
    /// `/proc/sys/vm/nr_hugepages`).
    Size2MiB,
    /// `MAP_HUGETLB`: pages of 1 GiB, from those that were set aside when the machine started (by
    /// `hugepagesz=1G hugepages=N`).
    Size1GiB,
}

impl HugePages {
    /// The size of a page in bytes, as a power of 2.
    pub(super) const fn shift(self) -> u32 {
        match self {
            Self::Transparent | Self::Size2MiB => 21,
            Self::Size1GiB => 30,
        }
    }

    /// The size of a page in bytes.
    pub const fn bytes(self) -> usize {
        1 << self.shift()
    }
}
