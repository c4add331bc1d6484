//! Bindings of rdma-core's provider interface, from the tree that the main crate has built.

use std::path::{Path, PathBuf};
use std::process::exit;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let build = env::var_os("DEP_IBVERBS_BUILD").map(PathBuf::from);
    let (include, prefix) = match build {
        Some(build) => (build.join("include"), prefix(&build)),
        // The documentation alone: the main crate has built nothing, and nothing is linked.
        None if env::var_os("DOCS_RS").is_some() => (headers_of_sources(&out), String::new()),
        None => fail(
            "the software device needs the rdma-core that ibverbs-bundled builds: do not enable its feature `system`",
        ),
    };
    bindings(&include, &out);
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
    let mut text = String::from("unsafe extern \"C\" {\n");
    for (name, signature) in functions {
        text += &format!("#[link_name = \"{prefix}{name}\"]\npub(crate) {signature};\n");
    }
    text += "}\n";
    write(&out.join("private.rs"), &text);
}

/// rdma-core's static libraries rename what is for providers only. The name that a function has now is
/// in the archive.
fn prefix(build: &Path) -> String {
    const KNOWN: &[u8] = b"verbs_set_ops\0";
    let archive = build.join("lib/statics/libibverbs.a");
    let installed = build.join("lib/libibverbs.a");
    println!("cargo::rerun-if-changed={}", installed.display());
    let mut found: Vec<String> = Vec::new();
    for archive in [installed, archive] {
        let Ok(bytes) = fs::read(&archive) else { continue };
        for at in 0..bytes.len().saturating_sub(KNOWN.len()) {
            if bytes[at..].starts_with(KNOWN) {
                let start = bytes[..at].iter().rposition(|&b| b == 0).map_or(0, |zero| zero + 1);
                if let Ok(prefix) = std::str::from_utf8(&bytes[start..at])
                    && prefix.starts_with("rdmacore")
                {
                    found.push(prefix.to_owned());
                }
            }
        }
        if !found.is_empty() {
            break;
        }
    }
    found.dedup();
    match found.as_slice() {
        [prefix] => prefix.clone(),
        _ => fail(&format!("no single name of verbs_set_ops in {}: {found:?}", build.display())),
    }
}

fn bindings(include: &Path, out: &Path) {
    let header = out.join("provider.h");
    write(
        &header,
        "#include <infiniband/driver.h>\n#include <rdma/ib_user_ioctl_cmds.h>\n#include <rdma/rdma_user_ioctl_cmds.h>\n#include <rdma/ib_user_verbs.h>\n",
    );
    // When cross compiling, where the C library's headers are.
    let system = env::var_os("DEP_IBVERBS_SYSTEM_HEADERS").unwrap_or_default();
    let mut clang = vec![format!("-I{}", include.display()), "-D_GNU_SOURCE".to_owned()];
    if let Some(kernel) = env::var_os("DEP_IBVERBS_KERNEL_HEADERS") {
        clang.push(format!("-I{}", PathBuf::from(kernel).display()));
    }
    for folder in env::split_paths(&system).filter(|folder| folder.is_absolute()) {
        clang.extend(["-isystem".to_owned(), folder.display().to_string()]);
    }
    let generated = bindgen::Builder::default()
        .header(header.to_string_lossy())
        .clang_args(clang)
        .allowlist_type("verbs_(device|device_ops|context_ops|mr|cq|qp|qp_mask|srq|xrcd)")
        .allowlist_type(
            "ib_uverbs_(ioctl_hdr|attr|write_cmds)|uverbs_(default_objects|methods_device)",
        )
        .allowlist_type(
            "uverbs_attrs_(query_gid_(table|entry)_cmd_attr_ids|invoke_write_cmd_attr_ids)",
        )
        .allowlist_var("UVERBS_ATTR_CORE_OUT|RDMA_VERBS_IOCTL")
        .prepend_enum_name(false)
        .blocklist_type("ibv_.*|__be.*")
        .blocklist_type("verbs_context")
        .blocklist_type("pthread_.*|__pthread.*")
        .raw_line("use ibverbs::ffi::*;")
        .raw_line("#[allow(non_camel_case_types)] pub(crate) type ibv_mr_type = u32;")
        .generate_comments(false)
        .layout_tests(true)
        .derive_default(true)
        .generate();
    match generated {
        Ok(bindings) => write(&out.join("driver.rs"), &bindings.to_string()),
        Err(e) => fail(&format!("bindgen cannot read driver.h: {e}")),
    }
}

/// rdma-core's internal headers as its build lays them out, from its sources.
fn headers_of_sources(out: &Path) -> PathBuf {
    let kernel = env::var_os("DEP_IBVERBS_KERNEL_HEADERS").map(PathBuf::from);
    let Some(kernel) = kernel else { fail("the main crate does not say where rdma-core is") };
    let source = kernel.parent().unwrap_or(&kernel);
    let include = out.join("include");
    for (from, to) in [
        ("libibverbs/driver.h", "infiniband/driver.h"),
        ("libibverbs/verbs.h", "infiniband/verbs.h"),
        ("libibverbs/verbs_api.h", "infiniband/verbs_api.h"),
        ("libibverbs/kern-abi.h", "infiniband/kern-abi.h"),
        ("libibverbs/cmd_ioctl.h", "infiniband/cmd_ioctl.h"),
        ("libibverbs/sa.h", "infiniband/sa.h"),
        ("ccan/list.h", "ccan/list.h"),
        ("ccan/container_of.h", "ccan/container_of.h"),
        ("ccan/check_type.h", "ccan/check_type.h"),
        ("ccan/str.h", "ccan/str.h"),
        ("ccan/build_assert.h", "ccan/build_assert.h"),
        ("ccan/bitmap.h", "ccan/bitmap.h"),
        ("util/compiler.h", "util/compiler.h"),
        ("util/util.h", "util/util.h"),
    ] {
        let to = include.join(to);
        let folder = to.parent().unwrap_or(&include);
        let from = source.join(from);
        if let Err(e) = fs::create_dir_all(folder).and_then(|()| fs::copy(&from, &to)) {
            fail(&format!("{}: {e}", from.display()));
        }
    }
    include
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
