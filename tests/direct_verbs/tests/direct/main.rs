//! The direct verbs of EFA and mlx5, played by the functions of these tests: the very calls that the providers
//! would get, and the errors on other devices.

mod dc;
mod efa;
mod support;
