//! The cfg for which `src/base/sync.rs` takes loom's locks. rdma-core is not built: the tests never call C.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=../../build/committed");
    println!("cargo::rustc-cfg=ibverbs_loom");
    // The committed bindings are those of a release that has it.
    println!("cargo::rustc-cfg=rdma_core_65");
    println!("cargo::rustc-check-cfg=cfg(rdma_core_65)");
    println!("cargo::rustc-check-cfg=cfg(rdma_core_pinned)");
    println!("cargo::rustc-check-cfg=cfg(feature, values(any()))");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("ffi");
    fs::create_dir_all(&out).expect("OUT_DIR is writable");
    fs::write(out.join("missing.rs"), "").expect("OUT_DIR is writable");
    for file in fs::read_dir("../../build/committed").expect("the bindings are there").flatten() {
        fs::copy(file.path(), out.join(file.file_name())).expect("OUT_DIR is writable");
    }
    // The symbols of rdma-core are 0, so that the tests link without it.
    let bindings = fs::read_to_string(out.join("bindings.rs")).expect("it is UTF-8");
    let names = bindings.split(['"', ' ', '(']).filter(|word| word.contains("ibv_"));
    let names = names.chain(["ibverbs_bundled_message", "ibverbs_bundled_providers"]);
    for name in names.filter(|word| word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')) {
        println!("cargo::rustc-link-arg=-Wl,--defsym={name}=0");
    }
}
