//! Domains: which objects work together, and on which threads.
//!
//! ```
//! # fn main() -> ibverbs::Result<()> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! let context = ibverbs::open_first()?;
//! let domain = context.alloc_pd()?;
//! // Only objects of one protection domain work together.
//! let region = domain.allocate::<u8>(4096)?;
//! let channel = domain.create_channel().build()?;
//! # Ok(())
//! # }
//! ```
//!
//! | | |
//! |---|---|
//! | [`ProtectionDomain`] | memory, queue pairs and address handles that work together |
//! | [`ThreadDomain`] | spares the provider locks: one thread at a time uses its objects |
//! | [`Allocator`], [`Allocation`] | where a provider takes the memory of its queues from |
//! | [`XrcDomain`], [`XrcDomainScope`] | XRC queue pairs and shared receive queues that work together, across processes if it belongs to a file |

mod allocator;
mod protection_domain;

pub use allocator::{Allocation, Allocator, ThreadDomain};
pub(crate) use protection_domain::DomainRef;
pub use protection_domain::{ProtectionDomain, XrcDomain, XrcDomainScope};
