//! The committed bindings are what bindgen generates from rdma-core's internal headers.
//!
//! `UPDATE_BINDINGS=1 cargo test -p ibverbs-software --features bindgen --test committed_bindings` writes
//! them again; it needs rustfmt.

#[path = "../../tests/support/committed.rs"]
mod committed;

use committed::{Bindings, compare};

#[test]
#[cfg_attr(
    not(rdma_core_pinned),
    ignore = "they are those of the pinned rdma-core, and this is another"
)]
fn bindings_of_the_provider_interface() {
    let package = env!("CARGO_MANIFEST_DIR");
    compare(Bindings { package, out: env!("OUT_DIR") }, "driver.rs");
}
