//! Libraries that are installed on the machine: libibverbs and librdmacm for feature `system`, libnl
//! for feature `neigh`.

use std::path::Path;
#[cfg(feature = "neigh")]
use std::path::PathBuf;
#[cfg(feature = "neigh")]
use std::{env, fs};

#[cfg(feature = "neigh")]
use crate::archives::OURS;
#[cfg(any(feature = "system", feature = "neigh"))]
use crate::common::exit_with_error;
#[cfg(feature = "neigh")]
use crate::common::write;
use crate::source_tree::Tree;

#[cfg_attr(not(feature = "system"), allow(unused_variables))]
pub(crate) fn link_system(tree: &Tree) {
    #[cfg(feature = "system")]
    if let Err(e) = pkg_config::Config::new().atleast_version("1.14").probe("libibverbs") {
        exit_with_error(&format!(
            "feature `system` needs libibverbs 1.14 or later: apt install libibverbs-dev (Debian, \
             Ubuntu), or dnf install rdma-core-devel (Fedora). {}",
            first_line(&e)
        ));
    }
    #[cfg(feature = "system")]
    link_direct_verbs(tree);
    #[cfg(all(feature = "system", feature = "rdmacm"))]
    if let Err(e) = pkg_config::Config::new().atleast_version("1.3").probe("librdmacm") {
        exit_with_error(&format!(
            "features `system` and `rdmacm` need librdmacm 1.3 or later: apt install \
             librdmacm-dev (Debian, Ubuntu), or dnf install rdma-core-devel (Fedora). {}",
            first_line(&e)
        ));
    }
}

/// The libraries with direct verbs that are wrapped. Those of other providers are linked if the machine has
/// them: without, only a program that calls them by `ffi` fails to link.
#[cfg(feature = "system")]
const WRAPPED: &[&str] = &["efa", "mlx5"];

#[cfg(feature = "system")]
fn link_direct_verbs(tree: &Tree) {
    for provider in crate::direct::direct_verbs(tree).map(|direct| direct.provider) {
        if let Err(e) = pkg_config::probe_library(&format!("lib{provider}"))
            && WRAPPED.contains(&provider)
        {
            exit_with_error(&format!(
                "features `system` and `{provider}` need lib{provider}: apt install libibverbs-dev (Debian, \
                 Ubuntu), or dnf install rdma-core-devel (Fedora); or leave out `{provider}`. {}",
                first_line(&e)
            ));
        }
    }
}

#[cfg(any(feature = "system", feature = "neigh"))]
fn first_line(error: &pkg_config::Error) -> String {
    error.to_string().lines().find(|l| !l.trim().is_empty()).unwrap_or_default().to_owned()
}

/// Environment variables that ask for the shared libnl: this crate's own, and the one by which the
/// crate `pkg-config` chooses all shared libraries.
pub(crate) const LIBNL_DYNAMIC: &[&str] = &["IBVERBS_LIBNL_DYNAMIC", "PKG_CONFIG_ALL_DYNAMIC"];

/// Directives that link libnl, for feature `neigh`: statically if the machine has the archives.
pub(crate) fn link_libnl(out: &Path) -> Vec<String> {
    #[cfg(not(feature = "neigh"))]
    {
        let _ = out;
        Vec::new()
    }
    #[cfg(feature = "neigh")]
    {
        // In the order in which the linker needs them.
        let libraries = ["nl-route-3", "nl-3"];
        let found = pkg_config::Config::new().cargo_metadata(false).probe("libnl-route-3.0");
        let found = found.unwrap_or_else(|e| {
            exit_with_error(&format!(
                "feature `neigh` needs libnl: apt install libnl-route-3-dev (Debian, Ubuntu), or dnf \
                 install libnl3-devel (Fedora). {}",
                first_line(&e)
            ))
        });
        let mut directives = Vec::new();
        let archives: Option<Vec<_>> =
            libraries.iter().map(|name| find_archive(name, &found.link_paths)).collect();
        // A shared library must use the shared libnl, because distributions compile the archives for
        // programs only.
        let dynamic = LIBNL_DYNAMIC.iter().any(|name| env::var_os(name).is_some());
        if let Some(archives) = archives.filter(|_| !dynamic) {
            // Link copies, so that no system folder gets into the search path.
            for (name, archive) in libraries.iter().zip(archives) {
                let copy = out.join("libnl").join(format!("lib{OURS}{name}.a"));
                match fs::read(&archive) {
                    Ok(contents) => write(&copy, contents),
                    Err(e) => exit_with_error(&format!("{}: {e}", archive.display())),
                }
                directives.push(format!("cargo::rustc-link-lib=static={OURS}{name}"));
            }
            let folder = out.join("libnl");
            directives.push(format!("cargo::rustc-link-search=native={}", folder.display()));
        } else {
            directives.extend(libraries.map(|name| format!("cargo::rustc-link-lib=dylib={name}")));
            directives.extend(
                found
                    .link_paths
                    .iter()
                    .map(|p| format!("cargo::rustc-link-search=native={}", p.display())),
            );
        }
        directives
    }
}

/// Finds the static library in one of the folders, or where the compiler looks.
#[cfg(feature = "neigh")]
fn find_archive(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let file = format!("lib{name}.a");
    if let Some(path) = folders.iter().map(|f| f.join(&file)).find(|p| p.exists()) {
        return Some(path);
    }
    let compiler = cc::Build::new().cargo_output(false).try_get_compiler().ok()?;
    let output = compiler.to_command().arg(format!("-print-file-name={file}")).output().ok()?;
    // The compiler prints a name without a folder if it does not find the file.
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
