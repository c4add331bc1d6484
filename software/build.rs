//! Bindings of rdma-core's provider interface: the committed ones, or (feature `bindgen`) generated from
//! the tree that the main crate has built.

#[cfg(feature = "bindgen")]
#[path = "build/generate.rs"]
mod generate;

use std::path::{Path, PathBuf};
use std::process::exit;
use std::{env, fs};

/// The release of rdma-core that the committed bindings are for.
fn committed_release() -> &'static str {
    env!("CARGO_PKG_VERSION").split_once("+rdma-core.").map_or("", |(_, release)| release)
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let system = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    if system != "linux" {
        fail(&format!(
            "ibverbs-software is for Linux only, and does not compile for {system}: name it in the manifest under \
             [target.'cfg(target_os = \"linux\")'.dependencies]"
        ));
    }
    // The documentation alone links nothing.
    if env::var_os("DEP_IBVERBS_BUNDLED_BUILD").is_none() && env::var_os("DOCS_RS").is_none() {
        fail(
            "the software device needs the rdma-core that ibverbs-bundled builds: do not enable its feature `system`",
        );
    }
    let release = committed_release();
    let built = env::var("DEP_IBVERBS_BUNDLED_RELEASE").unwrap_or_else(|_| release.to_owned());
    let pinned = built == release;
    println!("cargo::rustc-check-cfg=cfg(rdma_core_pinned)");
    println!("cargo::rustc-check-cfg=cfg(rdma_core_65)");
    if pinned {
        println!("cargo::rustc-cfg=rdma_core_pinned");
    }
    let major = built.split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major >= 65) {
        println!("cargo::rustc-cfg=rdma_core_65");
    }
    #[cfg(feature = "bindgen")]
    generate::generate(&out);
    #[cfg(not(feature = "bindgen"))]
    if pinned {
        write(&out.join("driver.rs"), include_str!("build/committed/driver.rs"));
    } else {
        fail(&format!(
            "the committed bindings are those of rdma-core v{release}, and ibverbs-bundled has built another version: enable the feature `bindgen` of ibverbs-software"
        ));
    }
    let functions = [
        (
            "_verbs_init_and_alloc_context",
            "fn init_and_alloc_context(device: *mut ibv_device, cmd_fd: c_int, size: usize, offset: *mut verbs_context, driver_id: u32) -> *mut c_void",
        ),
        (
            "verbs_set_ops",
            "fn verbs_set_ops(context: *mut verbs_context, ops: *const verbs_context_ops)",
        ),
        ("verbs_uninit_context", "fn verbs_uninit_context(context: *mut verbs_context)"),
        ("ibverbs_device_hold", "fn device_hold(device: *mut ibv_device)"),
        ("ibverbs_device_put", "fn device_put(device: *mut ibv_device)"),
    ];
    let public = [
        ("ibv_dofork_range", "fn dofork_range(base: *mut c_void, size: usize) -> c_int"),
        ("ibv_dontfork_range", "fn dontfork_range(base: *mut c_void, size: usize) -> c_int"),
    ];
    let mut text = String::from("unsafe extern \"C\" {\n");
    for (prefix, functions) in
        [("SYMBOL_PREFIX", &functions[..]), ("PUBLIC_SYMBOL_PREFIX", &public)]
    {
        let prefix = env::var(format!("DEP_IBVERBS_BUNDLED_{prefix}")).unwrap_or_default();
        for (name, signature) in functions {
            text += &format!("#[link_name = \"{prefix}{name}\"]\npub(crate) {signature};\n");
        }
    }
    text += "}\n";
    write(&out.join("private.rs"), &text);
}

fn write(path: &Path, text: &str) {
    if let Err(e) = fs::write(path, text) {
        fail(&format!("{}: {e}", path.display()));
    }
}

fn fail(message: &str) -> ! {
    println!("cargo::error={message}");
    exit(1)
}
