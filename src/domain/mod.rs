//! domain

mod protection_domain;
mod thread_domain;
mod xrc_domain;

pub use protection_domain::ProtectionDomain;
pub use thread_domain::ThreadDomain;
pub use xrc_domain::{XrcDomain, XrcDomainScope};
