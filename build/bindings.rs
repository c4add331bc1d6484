//! The bindings, and the header's inline functions.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{env, fs};

use crate::common::{compile, exit_with_error, feature, utf8, write};
use crate::inputs::headers;

/// The public headers under the names that programs include them by.
pub(crate) fn stage_headers(source: &Path, out: &Path) -> PathBuf {
    let include = out.join("include");
    for header in headers() {
        let from = source.join(header);
        let contents = fs::read(&from)
            .unwrap_or_else(|e| exit_with_error(&format!("{}: {e}", from.display())));
        let name = from.file_name().unwrap_or_default();
        let folder = if header.starts_with("librdmacm/") { "rdma" } else { "infiniband" };
        write(&include.join(folder).join(name), contents);
    }
    include
}

/// The folders in which the C compiler finds the C library's headers, when cross compiling; otherwise
/// none. libclang knows these folders for some distributions only. Elsewhere it takes the headers of
/// the build machine, whose types may differ in size.
pub(crate) fn system_headers() -> Vec<PathBuf> {
    if env::var("HOST") == env::var("TARGET") {
        return Vec::new();
    }
    let Ok(compiler) = cc::Build::new().cargo_output(false).try_get_compiler() else {
        return Vec::new();
    };
    let command = || compiler.to_command();
    let searched = command().args(["-E", "-v", "-x", "c", "-"]).stdin(Stdio::null()).output();
    let Ok(searched) = searched else { return Vec::new() };
    // The compiler's own headers (`stddef.h`) are for that compiler only; libclang has its own.
    let own = command().arg("-print-file-name=include").output().ok();
    let own = own.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    let own = fs::canonicalize(own.trim()).ok().and_then(|own| Some(own.parent()?.to_owned()));
    String::from_utf8_lossy(&searched.stderr)
        .lines()
        .skip_while(|line| !line.starts_with("#include <"))
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        .filter_map(|line| fs::canonicalize(line.trim()).ok())
        .filter(|folder| own.as_ref().is_none_or(|own| !folder.starts_with(own)))
        .collect()
}

pub(crate) fn bindings(source: &Path, include: &Path, out: &Path, system: &[PathBuf]) {
    let mut builder = bindgen::Builder::default()
        .clang_args(system.iter().flat_map(|folder| ["-isystem", utf8(folder)]))
        .header(utf8(&include.join("infiniband/verbs.h")));
    if feature("rdmacm") {
        builder = builder
            .header(utf8(&include.join("rdma/rdma_cma.h")))
            .allowlist_function("rdma_.*")
            .allowlist_type("rdma_.*")
            .allowlist_var("(RDMA|RAI)_.*");
    }
    let generated = builder
        .clang_arg(format!("-I{}", utf8(include)))
        .clang_arg(format!("-I{}", utf8(&source.join("kernel-headers"))))
        .allowlist_function("_*ibv_.*")
        .allowlist_type("ibv_.*|verbs_context")
        .allowlist_var("(IBV|IB)_.*")
        .default_enum_style(bindgen::EnumVariation::NewType {
            is_bitfield: false,
            is_global: false,
        })
        .bitfield_enum("ibv_.*_(flags|mask|cap|caps|bits|fields)(_.*)?|ibv_values_mask")
        .bitfield_enum("ibv_access_flags|ibv_qp_open_attr_mask|ibv_device_cap_flags")
        .prepend_enum_name(false)
        .derive_default(true)
        .wrap_static_fns(true)
        .wrap_static_fns_path(out.join("inline_functions.c"))
        .wrap_static_fns_suffix("__bundled")
        .generate_comments(false)
        .formatter(bindgen::Formatter::None)
        .generate();
    let written = match generated {
        Ok(bindings) => bindings.write_to_file(out.join("bindings.rs")),
        Err(e) => exit_with_error(&format!("bindgen cannot read verbs.h: {e}")),
    };
    if let Err(e) = written {
        exit_with_error(&format!("{}: {e}", out.join("bindings.rs").display()));
    }
}

/// Compiles the header's inline functions, which have no symbol of their own, into one object file.
pub(crate) fn inline_functions(source: &Path, include: &Path, out: &Path) {
    compile(
        cc::Build::new()
            .file(out.join("inline_functions.c"))
            .include(include)
            .include(source.join("kernel-headers")),
        "ibverbs_inline",
    );
}
