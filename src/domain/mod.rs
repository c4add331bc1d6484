//! Domains: which objects work together, and on which threads.
//!
//! Memory, queue pairs and address handles of one [`ProtectionDomain`] work together. A
//! [`ThreadDomain`] tells the provider that one thread at a time uses the objects created with it, so
//! that it need not lock. An [`XrcDomain`] ties XRC queue pairs and shared receive queues together,
//! across processes if the domain belongs to a file.

mod allocator;
mod protection_domain;
mod thread_domain;
mod xrc_domain;

pub use allocator::{DomainAllocation, DomainAllocator};
pub use protection_domain::ProtectionDomain;
pub use thread_domain::ThreadDomain;
pub use xrc_domain::{XrcDomain, XrcDomainScope};
