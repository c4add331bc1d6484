//! The source tree of rdma-core that is built, and its release.

use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::common::{exit_after_errors, exit_with_error, report_error};

/// The environment variable that names another tree of rdma-core to build.
const RDMA_CORE: &str = "IBVERBS_RDMA_CORE";

/// A source tree of rdma-core.
pub(crate) struct Tree {
    pub(crate) folder: PathBuf,
    pub(crate) version: String,
    /// Whether the user has named it.
    pub(crate) named: bool,
}

/// The release that the committed bindings and the list of providers are those of.
pub(crate) fn pinned_version() -> &'static str {
    let version = env!("CARGO_PKG_VERSION");
    version.split_once("+rdma-core.").map_or(version, |(_, release)| release)
}

impl Tree {
    /// Whether it is of the pinned release.
    pub(crate) fn pinned(&self) -> bool {
        self.version == pinned_version()
    }

    /// Tells this crate's code by `rdma_core_65` that the tree has what is new in v65.0, and its tests by
    /// `rdma_core_pinned` that the committed bindings are for it.
    pub(crate) fn declare_release(&self) {
        println!("cargo::rustc-check-cfg=cfg(rdma_core_65)");
        println!("cargo::rustc-check-cfg=cfg(rdma_core_pinned)");
        if self.pinned() {
            println!("cargo::rustc-cfg=rdma_core_pinned");
        }
        let major = self.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= 65) {
            println!("cargo::rustc-cfg=rdma_core_65");
        }
    }
}

/// The sources of rdma-core: this crate's own, or those that the user has named.
pub(crate) fn source_tree(root: &Path) -> Tree {
    println!("cargo::rerun-if-env-changed={RDMA_CORE}");
    let tree = env::var_os(RDMA_CORE).filter(|tree| !tree.is_empty()).map(PathBuf::from);
    let named = tree.is_some();
    let folder = tree.unwrap_or_else(|| root.join("vendor/rdma-core"));
    // Cargo runs build scripts in the folder of their package, not in that of the user.
    if named && (!folder.is_absolute() || !folder.join("CMakeLists.txt").is_file()) {
        report_error(&format!(
            "{RDMA_CORE} must be the absolute path of a source tree of rdma-core, v55.0 or later: \
             {} is none",
            folder.display()
        ));
        exit_after_errors();
    }
    if !folder.join("CMakeLists.txt").is_file() {
        missing("CMakeLists.txt");
    }
    let version = setting(&folder, "PACKAGE_VERSION");
    Tree { folder, version, named }
}

/// Reports that this crate's own tree lacks a file, and ends the build.
pub(crate) fn missing(file: &str) -> ! {
    report_error(&format!(
        "the sources of rdma-core are missing (vendor/rdma-core/{file}): run script/bootstrap, or `git submodule \
         update --init`"
    ));
    exit_after_errors()
}

/// Reads a variable that rdma-core's CMake files set: `set(NAME "value")`.
pub(crate) fn setting(source: &Path, name: &str) -> String {
    let file = source.join("CMakeLists.txt");
    let text = fs::read_to_string(&file)
        .unwrap_or_else(|e| exit_with_error(&format!("{}: {e}", file.display())));
    let start = format!("set({name} \"");
    text.lines()
        .find_map(|line| line.trim().strip_prefix(&start)?.strip_suffix("\")"))
        .unwrap_or_else(|| exit_with_error(&format!("{}: {name} is not set", file.display())))
        .to_owned()
}
