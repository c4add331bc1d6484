//! The committed bindings are what bindgen generates from `device.h`.
//!
//! `UPDATE_BINDINGS=1 cargo test -p ibverbs-function-device --features bindgen --test committed_bindings` writes
//! them again; it needs rustfmt.

#[path = "../../support/committed.rs"]
mod committed;

use committed::{Bindings, compare};

#[test]
fn bindings_of_the_function_device() {
    let package = env!("CARGO_MANIFEST_DIR");
    compare(Bindings { package, out: env!("OUT_DIR") }, "device.rs");
}
