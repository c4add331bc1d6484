//! The symbols of the static libraries: no program and no shared library exports one of them, so that none meets the
//! same name in the system's libibverbs, which the process may also load.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The static libraries that the build script has made.
fn archives() -> Vec<PathBuf> {
    let out = Path::new(env!("OUT_DIR"));
    let mut found = Vec::new();
    for folder in [out.to_owned(), out.join("build/lib")] {
        for entry in std::fs::read_dir(&folder).expect("the build script writes there").flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "a") {
                found.push(entry.path());
            }
        }
    }
    found
}

/// The symbols that a file defines for others, each with its visibility.
fn global_symbols(file: &Path) -> Vec<(String, String)> {
    let output = Command::new("readelf").args(["--symbols", "--wide"]).arg(file).output();
    let output = output.expect("binutils has readelf");
    assert!(output.status.success(), "{}: {}", file.display(), output.status);
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| {
            // Number, value, size, type, binding, visibility, section, name.
            let fields: Vec<_> = line.split_whitespace().collect();
            let [_, _, _, _, "GLOBAL" | "WEAK", visibility, section, name] = fields[..] else {
                return None;
            };
            (section != "UND").then(|| (name.to_owned(), visibility.to_owned()))
        })
        .collect()
}

#[test]
fn no_symbol_of_rdma_core_can_be_exported() {
    let mut names = BTreeSet::new();
    for archive in archives() {
        let symbols = global_symbols(&archive);
        let exported: Vec<_> =
            symbols.iter().filter(|(_, visibility)| visibility != "HIDDEN").collect();
        assert!(exported.is_empty(), "{}: {exported:?}", archive.display());
        names.extend(symbols.into_iter().map(|(name, _)| name));
    }
    let mut wanted = vec!["ibv_open_device", "ibv_reg_mr_iova2", "ibverbs_bundled_providers"];
    if cfg!(feature = "rdmacm") {
        wanted.push("rdma_connect");
    }
    if cfg!(feature = "mlx5") {
        wanted.push("mlx5dv_query_device");
    }
    for name in wanted {
        assert!(names.contains(name), "{name} is in none of the libraries");
    }
}
