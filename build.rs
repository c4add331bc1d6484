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
#[path = "build/elsewhere.rs"]
mod elsewhere;
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
use common::{exit_with_error, feature, message_of, variable};
use inputs::{check_paths, check_sources, rerun_if_changed};
use installed::link_system;
use providers::providers;
use rdma_core::build_rdma_core;
use source_tree::source_tree;
use tools::check_tools;

fn main() {
    // Prints a panic in a build dependency as one line, like every other failure.
    panic::set_hook(Box::new(|_| {}));
    if let Err(panic) = panic::catch_unwind(build) {
        exit_with_error(&format!("the build script failed: {}", message_of(&*panic)));
    }
}

fn build() {
    let out = variable("OUT_DIR");
    let root = variable("CARGO_MANIFEST_DIR");
    let tree = source_tree(&root);
    tree.declare_release();
    let enabled = providers(&tree);
    let source = &tree.folder;
    // docs.rs needs only the bindings, and has no network and few tools. So does another system.
    let linux = env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux");
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
            elsewhere::missing_functions(&out);
        }
        return;
    }
    std::thread::scope(|scope| {
        let rest = scope.spawn(|| {
            bindings(&tree, &include, &out, &system);
            inline_functions(&tree, &include, &out);
        });
        if bundled {
            build_rdma_core(&root, &tree, &out, &enabled, &tools, &last_flags);
        } else {
            link_system(&tree);
        }
        if let Err(panic) = rest.join() {
            panic::resume_unwind(panic);
        }
    });
}
