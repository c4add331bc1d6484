//! The bindings, and the header's inline functions.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{compile, fail, utf8, write};
use crate::inputs::HEADERS;

/// The public headers under the names that programs include them by.
pub(crate) fn stage_headers(source: &Path, out: &Path) -> PathBuf {
    let include = out.join("include");
    for header in HEADERS {
        let from = source.join(header);
        let contents =
            fs::read(&from).unwrap_or_else(|e| fail(&format!("{}: {e}", from.display())));
        let name = from.file_name().unwrap_or_default();
        write(&include.join("infiniband").join(name), contents);
    }
    include
}

pub(crate) fn bindings(source: &Path, include: &Path, out: &Path) {
    let generated = bindgen::Builder::default()
        .header(utf8(&include.join("infiniband/verbs.h")))
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
        Err(e) => fail(&format!("bindgen cannot read verbs.h: {e}")),
    };
    if let Err(e) = written {
        fail(&format!("{}: {e}", out.join("bindings.rs").display()));
    }
}

/// The header's inline functions, which have no symbol of their own, as one object file.
pub(crate) fn inline_functions(source: &Path, include: &Path, out: &Path) {
    compile(
        cc::Build::new()
            .file(out.join("inline_functions.c"))
            .include(include)
            .include(source.join("kernel-headers")),
        "ibverbs_inline",
    );
}
