//! The files that the build reads, and when cargo has to run it again.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{exit_after_errors, feature, of_target, report_error};
use crate::direct::direct_verbs;
use crate::installed::LIBNL_DYNAMIC;
use crate::providers::Provider;
use crate::source_tree::{Tree, missing, pinned_version};

/// The folders and files of `vendor/rdma-core` that the build reads, without those of the enabled
/// providers. The build does not compile the libraries `libibumad` and `libibmad`; a helper includes
/// their headers.
const SOURCES: &[&str] = &[
    "CMakeLists.txt",
    "buildlib",
    "ccan",
    "kernel-headers",
    "libibmad",
    "libibumad",
    "libibverbs",
    "util",
];

/// Returns the paths that the build reads in `vendor/rdma-core` with the enabled features.
pub(crate) fn sources() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().copied().chain(feature("rdmacm").then_some("librdmacm"))
}

/// The public headers with the enabled features.
pub(crate) fn headers(tree: &Tree) -> impl Iterator<Item = &'static str> {
    let connection_manager: &[&str] = if feature("rdmacm") { RDMACM_HEADERS } else { &[] };
    let direct = direct_verbs(tree).flat_map(|direct| direct.headers);
    HEADERS.iter().chain(connection_manager).chain(direct).copied()
}

/// The public headers of libibverbs, which become `infiniband/*.h`.
const HEADERS: &[&str] = &[
    "libibverbs/verbs.h",
    "libibverbs/verbs_api.h",
    "libibverbs/tm_types.h",
    "libibverbs/opcode.h",
    "libibverbs/arch.h",
    "kernel-headers/rdma/ib_user_ioctl_verbs.h",
];

/// The public headers of librdmacm. Those in its folder become `rdma/*.h`, the others `infiniband/*.h`.
const RDMACM_HEADERS: &[&str] = &["librdmacm/rdma_cma.h", "libibverbs/sa.h"];

pub(crate) fn rerun_if_changed(root: &Path, tree: &Tree, enabled: &[Provider], bundled: bool) {
    let source = &tree.folder;
    let mut read = Vec::new();
    // Cargo itself notices when the build script's own files change.
    if bundled {
        println!("cargo::rerun-if-changed=src/c");
        let providers = enabled.iter().map(|p| format!("providers/{}", p.name));
        for name in sources().map(str::to_owned).chain(providers) {
            read.extend(files(&source.join(name)));
        }
    } else {
        read.extend(headers(tree).map(|header| source.join(header)));
        read.extend(files(&source.join("kernel-headers")));
    }
    for path in read {
        // Relative to the package where it can be: so a moved package is not built again.
        println!("cargo::rerun-if-changed={}", path.strip_prefix(root).unwrap_or(&path).display());
    }
    // The crates `cc` and `pkg-config` tell cargo which variables they read.
    for name in ["CMAKE", "CMAKE_TOOLCHAIN_FILE", "CMAKE_PREFIX_PATH"] {
        for name in of_target(name) {
            println!("cargo::rerun-if-env-changed={name}");
        }
    }
    for name in
        ["DOCS_RS", "LIBCLANG_PATH", "LLVM_CONFIG_PATH", "CLANG_PATH", "BINDGEN_EXTRA_CLANG_ARGS"]
            .iter()
            .chain(LIBNL_DYNAMIC)
    {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// The files that the build reads at or under `path`, without folders: cargo would also watch the other files there.
pub(crate) fn files(path: &Path) -> Vec<PathBuf> {
    // A file, or a missing path: cargo runs the build script again until it exists.
    let Ok(entries) = fs::read_dir(path) else { return vec![path.to_owned()] };
    let unread = ["man", "tests", "examples", "__pycache__"];
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| !unread.contains(&name.as_str()))
        .flat_map(|name| files(&path.join(name)))
        .collect()
}

/// Checks that the paths of the package, the sources and the target folder have no character that CMake, make or a shell
/// between them takes for something else.
pub(crate) fn check_paths(root: &Path, tree: &Tree, out: &Path) {
    for (what, path, cure) in [
        ("the package", root, "move it"),
        ("the sources of rdma-core", &*tree.folder, "move them"),
        (
            "the target folder",
            out,
            "choose another (CARGO_TARGET_DIR, or `build.target-dir` of cargo's configuration)",
        ),
    ] {
        let Some(text) = path.to_str() else {
            report_error(&format!("the path of {what} is not UTF-8 ({}): {cure}", path.display()));
            exit_after_errors();
        };
        let wrong = |c: &char| c.is_control() || "#$;'\"\\()&:*?[]{}|<>!`".contains(*c);
        if let Some(character) = text.chars().find(wrong) {
            report_error(&format!(
                "the path of {what} has the character {character:?}, which CMake or make takes for something else \
                 ({path:?}): {cure}"
            ));
            exit_after_errors();
        }
    }
}

pub(crate) fn check_sources(tree: &Tree, enabled: &[Provider]) {
    // The committed bindings are those of one release.
    if cfg!(not(feature = "bindgen")) && !tree.pinned() {
        report_error(&format!(
            "{} is rdma-core v{}, and the committed bindings are those of v{}: enable the feature `bindgen`, which \
             generates them",
            tree.folder.display(),
            tree.version,
            pinned_version()
        ));
        exit_after_errors();
    }
    let providers = enabled.iter().map(|p| format!("providers/{}/CMakeLists.txt", p.name));
    let needed = sources().chain(headers(tree)).map(str::to_owned).chain(providers);
    let source = &tree.folder;
    match needed.into_iter().find(|name| !source.join(name).exists()) {
        None => {}
        Some(file) if !tree.named => missing(&file),
        Some(file) => {
            report_error(&format!(
                "{} is no source tree of rdma-core: it has no {file}",
                source.display()
            ));
            exit_after_errors();
        }
    }
}
