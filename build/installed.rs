//! Libraries that are installed on the machine: libibverbs and librdmacm for feature `system`, libnl
//! for feature `neigh`.

#[cfg(feature = "system")]
use std::collections::BTreeSet;
#[cfg(feature = "neigh")]
use std::env;
#[cfg(any(feature = "system", feature = "neigh"))]
use std::fs;
use std::path::Path;
#[cfg(feature = "neigh")]
use std::path::PathBuf;

#[cfg(feature = "neigh")]
use crate::archives::OURS;
#[cfg(any(feature = "system", feature = "neigh"))]
use crate::common::{exit_with_error, write};
use crate::names::Missing;
#[cfg(feature = "system")]
use crate::names::needed;
use crate::source_tree::Tree;

/// Links the machine's libraries. Returns what they lack of what the bindings in `out` declare.
#[cfg(not(feature = "system"))]
pub(crate) fn link_system(_: &Tree, _: &Path) -> Missing {
    Missing::none()
}

/// Links the machine's libraries. Returns what they lack of what the bindings in `out` declare.
#[cfg(feature = "system")]
pub(crate) fn link_system(tree: &Tree, out: &Path) -> Missing {
    let verbs = pkg_config::Config::new().atleast_version("1.14").probe("libibverbs");
    let verbs = verbs.unwrap_or_else(|e| {
        exit_with_error(&format!(
            "feature `system` needs libibverbs 1.14 or later: apt install libibverbs-dev (Debian, \
             Ubuntu), or dnf install rdma-core-devel (Fedora). {}",
            first_line(&e)
        ))
    });
    let mut libraries = vec![verbs];
    libraries.extend(link_direct_verbs(tree));
    #[cfg(feature = "rdmacm")]
    libraries.push(
        pkg_config::Config::new().atleast_version("1.3").probe("librdmacm").unwrap_or_else(|e| {
            exit_with_error(&format!(
                "features `system` and `rdmacm` need librdmacm 1.3 or later: apt install \
                 librdmacm-dev (Debian, Ubuntu), or dnf install rdma-core-devel (Fedora). {}",
                first_line(&e)
            ))
        }),
    );
    Missing::These(missing(&libraries, out))
}

/// The functions that the libraries lack: the C compiler links a program that refers to all of them, as often as the linker
/// names some that it does not find.
#[cfg(feature = "system")]
fn missing(libraries: &[pkg_config::Library], out: &Path) -> BTreeSet<String> {
    let folder = out.join("missing");
    let (source, program) = (folder.join("all.c"), folder.join("all"));
    let compiler = cc::Build::new().cargo_output(false).warnings(false).try_get_compiler();
    let compiler = compiler.unwrap_or_else(|e| exit_with_error(&e.to_string()));
    let mut left = needed(out);
    let mut missing = BTreeSet::new();
    loop {
        let declared = left.iter().map(|name| format!("extern char {name};\n"));
        let used = left.iter().map(|name| format!("\t&{name},\n"));
        let text: String = declared
            .chain(["char *const volatile all[] = {\n".to_owned()])
            .chain(used)
            .chain(["};\nint main(void)\n{\n\treturn !all[0];\n}\n".to_owned()])
            .collect();
        write(&source, text);
        let mut link = compiler.to_command();
        link.arg(&source).arg("-o").arg(&program);
        for library in libraries {
            link.args(library.link_paths.iter().map(|folder| format!("-L{}", folder.display())));
            link.args(library.libs.iter().map(|name| format!("-l{name}")));
        }
        let linked = link.output();
        let linked = linked.unwrap_or_else(|e| exit_with_error(&format!("{link:?}: {e}")));
        if linked.status.success() {
            let _ = fs::remove_dir_all(&folder);
            return missing;
        }
        let said = String::from_utf8_lossy(&linked.stderr).into_owned();
        // The message names each in a way of its linker.
        let named = said.lines().filter(|line| line.contains("undefined"));
        let words = named.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        let found: BTreeSet<_> = words.filter_map(|word| left.take(word)).collect();
        if found.is_empty() {
            exit_with_error(&format!("linking with the machine's libibverbs failed: {said}"));
        }
        missing.extend(found);
    }
}

/// The libraries with direct verbs that are wrapped. Those of other providers are linked if the machine has
/// them: without, their functions fail with `ENOSYS`.
#[cfg(feature = "system")]
const WRAPPED: &[&str] = &["efa", "mlx5"];

#[cfg(feature = "system")]
fn link_direct_verbs(tree: &Tree) -> Vec<pkg_config::Library> {
    let mut found = Vec::new();
    for provider in crate::direct::direct_verbs(tree).map(|direct| direct.provider) {
        match pkg_config::probe_library(&format!("lib{provider}")) {
            Ok(library) => found.push(library),
            Err(e) if WRAPPED.contains(&provider) => exit_with_error(&format!(
                "features `system` and `{provider}` need lib{provider}: apt install libibverbs-dev (Debian, \
                 Ubuntu), or dnf install rdma-core-devel (Fedora); or leave out `{provider}`. {}",
                first_line(&e)
            )),
            Err(_) => {}
        }
    }
    found
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
