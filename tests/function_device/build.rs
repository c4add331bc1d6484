//! Compiles the device against the headers that the bundled rdma-core was built with.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::exit;

const SOURCES: &[&str] = &[
    "batch.c",
    "completion_controls.c",
    "completion_queue.c",
    "datagram.c",
    "device.c",
    "flow.c",
    "kernel.c",
    "lean.c",
    "memory.c",
    "memory_region.c",
    "port.c",
    "post.c",
    "queue_pair.c",
    "raw_packet.c",
    "resources.c",
    "shared_receive_queue.c",
    "since_65.c",
    "transfer.c",
    "transitions.c",
    "work_queue.c",
];

/// Functions for providers, which no public header declares.
const PRIVATE: &[&str] = &[
    "_verbs_init_and_alloc_context",
    "ibverbs_device_hold",
    "ibverbs_device_put",
    "verbs_set_ops",
    "verbs_uninit_context",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=device.h");
    println!("cargo::rerun-if-changed=internal.h");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if env::var_os("DOCS_RS").is_some() {
        // rdma-core was not built: enough to check Rust code, nothing can be linked.
        let include = env::var_os("DEP_IBVERBS_BUNDLED_INCLUDE").expect("its build script sets it");
        return bindings(&PathBuf::from(include), &out);
    }
    let Some(build) = env::var_os("DEP_IBVERBS_BUNDLED_BUILD") else {
        println!(
            "cargo::error=the function device needs the bundled rdma-core: build without `system`"
        );
        exit(1);
    };
    let include = PathBuf::from(build).join("include");

    let mut c = cc::Build::new();
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
        c.file(source);
    }
    let prefix = env::var("DEP_IBVERBS_BUNDLED_SYMBOL_PREFIX").unwrap_or_default();
    // The symbols of the public functions.
    let public = env::var_os("DEP_IBVERBS_BUNDLED_INCLUDE").expect("its build script sets it");
    let symbols = PathBuf::from(public).join("infiniband/ibverbs_bundled_symbols.h");
    c.flag("-include").flag(symbols);
    for name in PRIVATE {
        c.define(name, format!("{prefix}{name}").as_str());
    }
    let release = env::var("DEP_IBVERBS_BUNDLED_RELEASE").unwrap_or_default();
    if release
        .split('.')
        .next()
        .is_some_and(|major| major.parse().is_ok_and(|major: u32| major >= 65))
    {
        c.define("RDMA_CORE_65", None);
    }
    // The kernel would have these files in /sys for each port that a device can have.
    let sysfs = out.join("sysfs");
    for port in 1..=4 {
        let keys = sysfs.join(format!("ports/{port}/pkeys"));
        fs::create_dir_all(&keys).expect("OUT_DIR is writable");
        fs::write(keys.join("0"), "0xffff\n").expect("OUT_DIR is writable");
    }
    let sysfs = sysfs.to_str().expect("the build path is UTF-8");
    c.define("DEVICE_SYSFS", format!("{sysfs:?}").as_str());
    // musl comes without the kernel's headers: its compiler finds them where the crate's build has found them.
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("musl") {
        let system = env::var_os("DEP_IBVERBS_BUNDLED_SYSTEM_HEADERS").unwrap_or_default();
        for folder in env::split_paths(&system).filter(|folder| folder.is_absolute()) {
            c.flag("-idirafter").flag(folder);
        }
    }
    // Always optimised: benchmarks count the instructions of the device apart, in any profile.
    c.include(&include)
        .include(".")
        .opt_level(2)
        .std("gnu11")
        .define("_GNU_SOURCE", None)
        .flag("-Wno-unused-parameter")
        .flag_if_supported("-fno-strict-aliasing")
        .warnings(true)
        .compile("ibverbs_function_device");
    bindings(&include, &out);
}

/// Without bindgen: the committed ones, which fit every rdma-core whose structures are those of the pinned one.
#[cfg(not(feature = "bindgen"))]
fn bindings(_include: &Path, out: &Path) {
    println!("cargo::rerun-if-changed=build/committed");
    fs::copy("build/committed/device.rs", out.join("device.rs")).expect("OUT_DIR is writable");
}

#[cfg(feature = "bindgen")]
fn bindings(include: &Path, out: &Path) {
    let mut clang = vec![format!("-I{}", include.display())];
    if let Some(kernel) = env::var_os("DEP_IBVERBS_BUNDLED_KERNEL_HEADERS") {
        clang.push(format!("-I{}", PathBuf::from(kernel).display()));
    }
    // A cross compiler finds the C library's headers in these folders.
    let system = env::var_os("DEP_IBVERBS_BUNDLED_SYSTEM_HEADERS").unwrap_or_default();
    for folder in env::split_paths(&system).filter(|folder| folder.is_absolute()) {
        clang.extend(["-isystem".to_owned(), folder.display().to_string()]);
    }
    bindgen::Builder::default()
        .header("device.h")
        .clang_args(clang)
        .allowlist_item("function_device|(device|DEVICE)_.*")
        .allowlist_recursively(false)
        .raw_line("use ibverbs::ffi::*;")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        .formatter(bindgen::Formatter::None)
        .generate()
        .expect("device.h is plain C")
        .write_to_file(out.join("device.rs"))
        .expect("OUT_DIR is writable");
}
