//! The bindings, generated or committed, and the headers' inline functions.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::{env, fs};

use crate::common::{compile, exit_with_error, feature, write};
use crate::direct::direct_verbs;
use crate::inputs::headers;
use crate::source_tree::Tree;

/// The public headers under the names that programs include them by.
pub(crate) fn stage_headers(tree: &Tree, out: &Path) -> PathBuf {
    let include = out.join("include");
    for header in headers(tree) {
        let from = tree.folder.join(header);
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

/// Writes the bindings and the wrappers of inline functions to `OUT_DIR`: generated from the headers, or
/// the committed ones.
pub(crate) fn bindings(tree: &Tree, include: &Path, out: &Path, system: &[PathBuf]) {
    #[cfg(feature = "bindgen")]
    crate::generate::generate(tree, include, out, system);
    #[cfg(not(feature = "bindgen"))]
    {
        let _ = (tree, include, system);
        for (name, contents) in COMMITTED {
            write(&out.join(name), contents);
        }
    }
}

/// The test `committed_bindings` compares this with generated bindings.
#[cfg(not(feature = "bindgen"))]
const COMMITTED: &[(&str, &str)] = &[
    ("bindings.rs", include_str!("committed/bindings.rs")),
    ("inline_functions.c", include_str!("committed/inline_functions.c")),
    #[cfg(feature = "rdmacm")]
    ("bindings_rdmacm.rs", include_str!("committed/bindings_rdmacm.rs")),
    #[cfg(feature = "rdmacm")]
    ("inline_functions_rdmacm.c", include_str!("committed/inline_functions_rdmacm.c")),
    #[cfg(feature = "efa")]
    ("bindings_efa.rs", include_str!("committed/bindings_efa.rs")),
    #[cfg(feature = "efa")]
    ("inline_functions_efa.c", include_str!("committed/inline_functions_efa.c")),
    #[cfg(feature = "hns")]
    ("bindings_hns.rs", include_str!("committed/bindings_hns.rs")),
    #[cfg(feature = "hns")]
    ("inline_functions_hns.c", include_str!("committed/inline_functions_hns.c")),
    #[cfg(feature = "ionic")]
    ("bindings_ionic.rs", include_str!("committed/bindings_ionic.rs")),
    #[cfg(feature = "ionic")]
    ("inline_functions_ionic.c", include_str!("committed/inline_functions_ionic.c")),
    #[cfg(feature = "mana")]
    ("bindings_mana.rs", include_str!("committed/bindings_mana.rs")),
    #[cfg(feature = "mana")]
    ("inline_functions_mana.c", include_str!("committed/inline_functions_mana.c")),
    #[cfg(feature = "mlx4")]
    ("bindings_mlx4.rs", include_str!("committed/bindings_mlx4.rs")),
    #[cfg(feature = "mlx4")]
    ("inline_functions_mlx4.c", include_str!("committed/inline_functions_mlx4.c")),
    #[cfg(feature = "mlx5")]
    ("bindings_mlx5.rs", include_str!("committed/bindings_mlx5.rs")),
    #[cfg(feature = "mlx5")]
    ("inline_functions_mlx5.c", include_str!("committed/inline_functions_mlx5.c")),
];

/// Compiles the headers' inline functions, which have no symbol of their own, into one archive.
pub(crate) fn inline_functions(tree: &Tree, include: &Path, out: &Path) {
    let mut build = cc::Build::new();
    build.file(out.join("inline_functions.c"));
    if feature("rdmacm") {
        build.file(out.join("inline_functions_rdmacm.c"));
    }
    for direct in direct_verbs(tree) {
        build.file(out.join(direct.inline_functions()));
    }
    build.include(include).include(tree.folder.join("kernel-headers"));
    compile(&mut build, "ibverbs_bundled_inline");
}
