//! The direct verbs of EFA and mlx5, and what of librdmacm takes a newer kernel than those of other tests, played by the functions of these tests: the very calls that the providers
//! would get, and the errors on other devices.

mod dc;
mod efa;
mod memory_keys;
#[cfg(rdma_core_65)]
mod names;
mod support;
