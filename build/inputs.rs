//! The files that the build reads, and when cargo has to run it again.

use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::common::{exit_after_errors, feature, report_error};
use crate::direct::direct_verbs;
use crate::installed::LIBNL_DYNAMIC;
use crate::providers::Provider;

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

/// What the build reads of `vendor/rdma-core` with the enabled features.
pub(crate) fn sources() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().copied().chain(feature("rdmacm").then_some("librdmacm"))
}

/// The public headers with the enabled features.
pub(crate) fn headers() -> impl Iterator<Item = &'static str> {
    let connection_manager: &[&str] = if feature("rdmacm") { RDMACM_HEADERS } else { &[] };
    let direct = direct_verbs().flat_map(|direct| direct.headers);
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

/// The environment variable that names another tree of rdma-core to build.
const RDMA_CORE: &str = "IBVERBS_RDMA_CORE";

/// The sources of rdma-core, and whether they are others than this crate's own.
pub(crate) fn source_tree(root: &Path) -> (PathBuf, bool) {
    println!("cargo::rerun-if-env-changed={RDMA_CORE}");
    let Some(tree) = env::var_os(RDMA_CORE).filter(|tree| !tree.is_empty()).map(PathBuf::from)
    else {
        return (root.join("vendor/rdma-core"), false);
    };
    // Cargo runs build scripts in the folder of their package, not in that of the user.
    if !tree.is_absolute() || !tree.join("CMakeLists.txt").is_file() {
        report_error(&format!(
            "{RDMA_CORE} must be the absolute path of a source tree of rdma-core, v55.0 or later: \
             {} is none",
            tree.display()
        ));
        exit_after_errors();
    }
    (tree, true)
}

pub(crate) fn rerun_if_changed(root: &Path, source: &Path, enabled: &[Provider], bundled: bool) {
    // Cargo itself notices when the build script's own files change.
    if bundled {
        println!("cargo::rerun-if-changed=src/c");
        let providers = enabled.iter().map(|p| format!("providers/{}", p.name));
        for name in sources().map(str::to_owned).chain(providers) {
            rerun_if_file_changed(root, &source.join(name));
        }
    } else {
        for header in headers() {
            rerun_if_file_changed(root, &source.join(header));
        }
        rerun_if_file_changed(root, &source.join("kernel-headers"));
    }
    // The crates `cc` and `pkg-config` tell cargo which variables they read.
    for name in [
        "DOCS_RS",
        "CMAKE",
        "CMAKE_TOOLCHAIN_FILE",
        "CMAKE_PREFIX_PATH",
        "LIBCLANG_PATH",
        "LLVM_CONFIG_PATH",
        "CLANG_PATH",
        "BINDGEN_EXTRA_CLANG_ARGS",
    ]
    .iter()
    .chain(LIBNL_DYNAMIC)
    {
        println!("cargo::rerun-if-env-changed={name}");
    }
}

/// Names each file at or under `path`, not the folder: cargo would also watch files that the build does
/// not read.
fn rerun_if_file_changed(root: &Path, path: &Path) {
    match fs::read_dir(path) {
        Ok(entries) => {
            for name in entries.flatten().filter_map(|e| e.file_name().into_string().ok()) {
                if !["man", "tests", "examples", "__pycache__"].contains(&name.as_str()) {
                    rerun_if_file_changed(root, &path.join(name));
                }
            }
        }
        // A file, or a missing path: cargo runs the build script again until it exists.
        // Relative to the package where it can be: so a moved package is not built again.
        Err(_) => {
            let path = path.strip_prefix(root).unwrap_or(path);
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
}

pub(crate) fn check_sources(source: &Path, another: bool, enabled: &[Provider]) {
    let providers = enabled.iter().map(|p| format!("providers/{}/CMakeLists.txt", p.name));
    let needed = sources().chain(headers()).map(str::to_owned).chain(providers);
    if let Some(missing) = needed.into_iter().find(|name| !source.join(name).exists()) {
        report_error(&if another {
            format!("{} is no source tree of rdma-core: it has no {missing}", source.display())
        } else {
            format!(
                "the sources of rdma-core are missing (vendor/rdma-core/{missing}): run \
                 script/bootstrap, or `git submodule update --init`"
            )
        });
        exit_after_errors();
    }
}
