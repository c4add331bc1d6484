//! Builds libibverbs and the enabled providers from `vendor/rdma-core`, or from the tree that
//! `IBVERBS_RDMA_CORE` names, statically, and takes the committed Rust bindings or (feature `bindgen`)
//! generates them. Everything is written to `OUT_DIR`; nothing is fetched, and the source tree is only read.

#[path = "build/archives.rs"]
mod archives;
#[path = "build/bindings.rs"]
mod bindings;
#[path = "build/common.rs"]
mod common;
#[path = "build/direct.rs"]
mod direct;
#[path = "build/earlier.rs"]
mod earlier;
#[path = "build/flags.rs"]
mod flags;
#[cfg(feature = "bindgen")]
#[path = "build/generate.rs"]
mod generate;
#[path = "build/inputs.rs"]
mod inputs;
#[path = "build/installed.rs"]
mod installed;
#[path = "build/musl.rs"]
mod musl;
#[path = "build/names.rs"]
mod names;
#[path = "build/presets.rs"]
mod presets;
#[path = "build/providers.rs"]
mod providers;
#[path = "build/rdma_core.rs"]
mod rdma_core;
#[path = "build/source_tree.rs"]
mod source_tree;
#[path = "build/tools.rs"]
mod tools;

use std::env;
use std::panic;

use bindings::{bindings, inline_functions, stage_headers, system_headers};
use common::{exit_after_errors, exit_with_error, feature, message_of, report_error, variable};
use inputs::{check_paths, check_sources, rerun_if_changed};
use installed::link_system;
use names::{Missing, declare};
use providers::providers;
use rdma_core::{build_rdma_core, symbol_prefix};
use source_tree::source_tree;
use tools::check_tools;

fn main() {
    // Prints a panic in a build dependency as one line, like every other failure.
    panic::set_hook(Box::new(|_| {}));
    if let Err(panic) = panic::catch_unwind(build) {
        exit_with_error(&format!("the build script failed: {}", message_of(&*panic)));
    }
}

/// Where the API compiles, for editors and `cargo check`.
const ELSEWHERE: &[&str] = &["dragonfly", "freebsd", "macos", "netbsd", "openbsd"];

fn build() {
    let system = env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let linux = system == "linux";
    if !linux && !ELSEWHERE.contains(&&*system) {
        report_error(&format!(
            "RDMA is for Linux only, and this crate does not compile for {system}: name it in the manifest under \
             [target.'cfg(target_os = \"linux\")'.dependencies]"
        ));
        exit_after_errors();
    }
    let out = variable("OUT_DIR");
    let root = variable("CARGO_MANIFEST_DIR");
    let tree = source_tree(&root);
    tree.declare_release();
    let enabled = providers(&tree);
    let source = &tree.folder;
    // docs.rs needs only the bindings, and has no network and few tools. So does another system.
    let documentation_only = !linux || env::var_os("DOCS_RS").is_some();
    let bundled = !documentation_only && !feature("system");

    rerun_if_changed(&root, &tree, &enabled, bundled);
    check_sources(&tree, &enabled);
    if bundled {
        check_paths(&root, &tree, &out);
    }
    let last_flags = if documentation_only { Vec::new() } else { flags::settle() };
    if !documentation_only {
        musl::add_kernel_headers(&out);
    }
    let tools = check_tools(&out, documentation_only, bundled);

    let include = stage_headers(&tree, &out);
    println!("cargo::metadata=include={}", include.display());
    println!("cargo::metadata=kernel_headers={}", source.join("kernel-headers").display());
    let system = system_headers();
    if let Ok(folders) = env::join_paths(&system) {
        println!("cargo::metadata=system_headers={}", folders.display());
    }
    if documentation_only {
        bindings(&tree, &include, &out, &system);
        if !linux {
            println!(
                "cargo::warning=RDMA is for Linux only: here the API compiles, and returns ENOSYS"
            );
        }
        let missing = if linux { Missing::none() } else { Missing::All };
        declare(&out, &include, "", &missing);
        return;
    }
    let prefix = if bundled { symbol_prefix(&tree) } else { String::new() };
    let public_prefix = if feature("plain_names") { "" } else { &prefix };
    let rest = || {
        bindings(&tree, &include, &out, &system);
        let missing = if bundled { Missing::none() } else { link_system(&tree, &out) };
        declare(&out, &include, public_prefix, &missing);
        inline_functions(&tree, &include, &out);
    };
    if !bundled {
        return rest();
    }
    std::thread::scope(|scope| {
        let rest = scope.spawn(rest);
        build_rdma_core(&root, &tree, &out, &enabled, &tools, &last_flags, &prefix);
        if let Err(panic) = rest.join() {
            panic::resume_unwind(panic);
        }
    });
    println!("cargo::metadata=symbol_prefix={prefix}");
    println!("cargo::metadata=public_symbol_prefix={public_prefix}");
    println!("cargo::metadata=release={}", tree.version);
}
