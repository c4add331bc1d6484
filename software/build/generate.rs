//! Feature `bindgen`: generates the bindings from rdma-core's internal headers, in the tree that the main
//! crate has built.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use crate::{fail, write};

pub(crate) fn generate(out: &Path) {
    let include = match env::var_os("DEP_IBVERBS_BUNDLED_BUILD").map(PathBuf::from) {
        Some(build) => build.join("include"),
        // The documentation alone: the main crate has built nothing, and nothing is linked.
        None => headers_of_sources(out),
    };
    bindings(&include, out);
}

fn bindings(include: &Path, out: &Path) {
    let header = out.join("provider.h");
    write(
        &header,
        "#include <infiniband/driver.h>\n#include <rdma/ib_user_ioctl_cmds.h>\n#include <rdma/rdma_user_ioctl_cmds.h>\n#include <rdma/ib_user_verbs.h>\n",
    );
    // The headers of the C library when cross compiling.
    let system = env::var_os("DEP_IBVERBS_BUNDLED_SYSTEM_HEADERS").unwrap_or_default();
    let mut clang = vec![format!("-I{}", include.display()), "-D_GNU_SOURCE".to_owned()];
    if let Some(kernel) = env::var_os("DEP_IBVERBS_BUNDLED_KERNEL_HEADERS") {
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
        .blocklist_type("pthread_.*|__pthread.*|__atomic.*")
        .raw_line("use ibverbs::ffi::*;")
        .raw_line("#[allow(non_camel_case_types)] pub(crate) type ibv_mr_type = u32;")
        // Unions with the size of their members, which differs between processors (`pthread_mutex_t`): the default
        // for members that cannot be copied is an array of the size that they have here.
        .default_non_copy_union_style(bindgen::NonCopyUnionStyle::ManuallyDrop)
        .generate_comments(false)
        .layout_tests(true)
        .derive_default(true)
        .formatter(bindgen::Formatter::None)
        .generate();
    match generated {
        Ok(bindings) => write(&out.join("driver.rs"), &bindings.to_string()),
        Err(e) => fail(&format!("bindgen cannot read driver.h: {e}")),
    }
}

/// rdma-core's internal headers as its build lays them out, from its sources.
fn headers_of_sources(out: &Path) -> PathBuf {
    let kernel = env::var_os("DEP_IBVERBS_BUNDLED_KERNEL_HEADERS").map(PathBuf::from);
    let Some(kernel) = kernel else { fail("the main crate does not say where rdma-core is") };
    let source = kernel.parent().unwrap_or(&kernel);
    let include = out.join("include");
    for (from, to) in [("libibverbs", "infiniband"), ("ccan", "ccan"), ("util", "util")] {
        if let Err(e) = copy_headers(&source.join(from), &include.join(to)) {
            fail(&format!("{from}: {e}"));
        }
    }
    // `verbs_api.h` includes it by this name.
    let name = "ib_user_ioctl_verbs.h";
    if let Err(e) = fs::copy(kernel.join("rdma").join(name), include.join("infiniband").join(name))
    {
        fail(&format!("{name}: {e}"));
    }
    // What CMake finds out about the machine: nothing that the structures depend on.
    write(&include.join("config.h"), "");
    let abi = include.join("kernel-abi");
    if let Err(e) = fs::create_dir_all(&abi) {
        fail(&format!("{}: {e}", abi.display()));
    }
    let made = Command::new("python3")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(source.join("buildlib/make_abi_structs.py"))
        .args([kernel.join("rdma/ib_user_verbs.h"), abi.join("ib_user_verbs.h")])
        .status();
    if !made.is_ok_and(|status| status.success()) {
        fail("make_abi_structs.py of rdma-core failed: is there a python3?");
    }
    include
}

fn copy_headers(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "h")
            && let Some(name) = path.file_name()
        {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}
