//! The committed bindings are what bindgen generates from the headers of the pinned rdma-core.
//!
//! `UPDATE_BINDINGS=1 cargo test --features rdmacm --test committed_bindings` writes them again; it needs
//! rustfmt. That is for a new version of rdma-core or of bindgen, and for changes to `build/generate.rs`.

#[path = "support/committed.rs"]
mod committed;

use committed::{Bindings, compare};

const BINDINGS: Bindings = Bindings { package: env!("CARGO_MANIFEST_DIR"), out: env!("OUT_DIR") };

#[test]
#[cfg_attr(
    not(rdma_core_pinned),
    ignore = "they are those of the pinned rdma-core, and this is another"
)]
fn bindings_of_libibverbs() {
    compare(BINDINGS, "bindings.rs");
    compare(BINDINGS, "inline_functions.c");
}

#[cfg(feature = "rdmacm")]
#[test]
#[cfg_attr(
    not(rdma_core_pinned),
    ignore = "they are those of the pinned rdma-core, and this is another"
)]
fn bindings_of_librdmacm() {
    compare(BINDINGS, "bindings_rdmacm.rs");
    compare(BINDINGS, "inline_functions_rdmacm.c");
}

/// Compares the bindings of the direct verbs of each provider that has any.
macro_rules! direct_verbs {
    ($($feature:literal: $test:ident;)+) => {$(
        #[cfg(feature = $feature)]
        #[test]
        #[cfg_attr(not(rdma_core_pinned), ignore = "they are those of the pinned rdma-core, and this is another")]
        fn $test() {
            compare(BINDINGS, concat!("bindings_", $feature, ".rs"));
            compare(BINDINGS, concat!("inline_functions_", $feature, ".c"));
        }
    )+};
}

direct_verbs! {
    "efa": bindings_of_efa;
    "hns": bindings_of_hns;
    "ionic": bindings_of_ionic;
    "mana": bindings_of_mana;
    "mlx4": bindings_of_mlx4;
    "mlx5": bindings_of_mlx5;
}
