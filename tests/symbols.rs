//! The symbols of the static libraries: each has a name of ours, so that another static libibverbs can be in the program, and
//! no program and no shared library exports one. Otherwise the archives are those that rdma-core's own build makes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The static libraries that the build script has made.
fn archives() -> Vec<PathBuf> {
    let out = Path::new(env!("OUT_DIR"));
    let mut found = Vec::new();
    for folder in [out.to_owned(), out.join("build/lib")] {
        for entry in fs::read_dir(&folder).expect("the build script writes there").flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "a") {
                found.push(entry.path());
            }
        }
    }
    found
}

/// The source tree of rdma-core, and its version.
fn source() -> (PathBuf, String) {
    let source = option_env!("IBVERBS_RDMA_CORE").filter(|tree| !tree.is_empty());
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/vendor/rdma-core");
    let source = PathBuf::from(source.unwrap_or(bundled));
    let settings = fs::read_to_string(source.join("CMakeLists.txt")).expect("CMake's file");
    let version =
        settings.split("PACKAGE_VERSION \"").nth(1).and_then(|rest| rest.split('"').next());
    (source, version.expect("a version").to_owned())
}

/// What the build puts before each name.
fn prefix() -> String {
    format!("ibverbs_bundled_{}_", source().1.replace('.', "_"))
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
fn no_symbol_of_rdma_core_can_be_exported_or_clash() {
    let mut names = BTreeSet::new();
    let prefix = prefix();
    // Wrappers of inline functions, and what this crate's own C has.
    let ours = |name: &str| {
        name.starts_with(&prefix)
            || name.ends_with("__bundled")
            || name.starts_with("ibverbs_bundled_")
    };
    for archive in archives() {
        let symbols = global_symbols(&archive);
        let exported: Vec<_> =
            symbols.iter().filter(|(_, visibility)| visibility != "HIDDEN").collect();
        assert!(exported.is_empty(), "{}: {exported:?}", archive.display());
        let plain: Vec<_> = symbols.iter().filter(|(name, _)| !ours(name)).collect();
        let kept = cfg!(feature = "plain-names");
        assert!(plain.is_empty() || kept, "{}: {plain:?}", archive.display());
        names.extend(symbols.into_iter().map(|(name, _)| name));
    }
    assert!(names.contains("ibverbs_bundled_providers"), "{names:?}");
    let mut wanted = vec!["ibv_open_device", "ibv_reg_mr_iova2"];
    if cfg!(feature = "rdmacm") {
        wanted.push("rdma_connect");
    }
    if cfg!(feature = "mlx5") {
        wanted.push("mlx5dv_query_device");
    }
    let prefix = if cfg!(feature = "plain-names") { "" } else { &prefix };
    for name in wanted {
        let name = format!("{prefix}{name}");
        assert!(names.contains(&name), "{name} is in none of the libraries");
    }
}

/// The members of an archive of `ar`, sorted: their names and contents.
fn members(archive: &Path) -> Vec<(String, Vec<u8>)> {
    let bytes = fs::read(archive).expect("the archive is there");
    let mut rest = bytes.strip_prefix(b"!<arch>\n").expect("an archive");
    let (mut members, mut long_names) = (Vec::new(), String::new());
    while let Some((header, after)) = rest.split_at_checked(60) {
        let text = str::from_utf8(header).expect("a header is text");
        let size: usize = text[48..58].trim().parse().expect("a size");
        let contents = &after[..size];
        match text[..16].trim() {
            "/" | "/SYM64/" => {}
            "//" => long_names = String::from_utf8(contents.to_owned()).expect("names"),
            name => {
                let long = name.strip_prefix('/').and_then(|start| start.parse::<usize>().ok());
                let name = long.map_or(name, |start| &long_names[start..]);
                let name = name.split('/').next().unwrap_or_default();
                members.push((name.to_owned(), contents.to_owned()));
            }
        }
        rest = after.get(size.next_multiple_of(2)..).unwrap_or_default();
    }
    members.sort();
    members
}

fn files_with(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.flatten().map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

/// The build script gives archives their final form. rdma-core has a slower script for that, which serves as the
/// reference. It renames internal functions alone, and with another prefix.
#[test]
#[cfg_attr(
    feature = "plain-names",
    ignore = "the reference is renamed as the build does it by default"
)]
fn the_archives_are_those_of_rdma_cores_own_script() {
    let build = Path::new(env!("OUT_DIR")).join("build");
    let (source, version) = source();
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("archives");
    let _ = fs::remove_dir_all(&scratch);
    fs::create_dir_all(scratch.join("statics")).expect("the target folder is writable");
    let mut script = Command::new("python3");
    script.arg("-B").arg(source.join("buildlib/sanitize_static_lib.py"));
    script.args(["--version", &version, "--ar", "ar", "--nm", "nm", "--objcopy", "objcopy"]);
    // The script is slow, so it takes some providers only.
    let taken = ["libibverbs.a", "librdmacm.a", "libmlx5.a", "libefa.a"];
    let statics = build.join("lib/statics");
    for archive in taken.iter().filter(|name| statics.join(name).exists()) {
        let copy = scratch.join("statics").join(archive);
        fs::copy(statics.join(archive), &copy).expect("the target folder is writable");
        script.arg("--lib").arg(copy);
    }
    for internal in ["ccan/libccan.a", "util/librdma_util.a"] {
        script.arg("--internal_lib").arg(build.join(internal));
    }
    let mut maps =
        vec![build.join("libibverbs/libibverbs.map"), source.join("buildlib/provider.map")];
    maps.push(source.join("librdmacm/librdmacm.map"));
    for provider in fs::read_dir(source.join("providers")).expect("a source tree").flatten() {
        if provider.path().is_dir() {
            maps.extend(files_with(&provider.path(), "map"));
        }
    }
    let output =
        script.args(maps.iter().flat_map(|map| ["--map".as_ref(), map.as_os_str()])).output();
    let output = output.expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let expected = files_with(&scratch, "a");
    assert!(!expected.is_empty(), "the script wrote nothing");
    let theirs = format!("rdmacore{}_", version.replace('.', "_"));
    let defined = expected.iter().flat_map(|archive| global_symbols(archive));
    // A table in libibverbs refers to the providers that are enabled, of which the script got some.
    let built = archives();
    let built = built.iter().flat_map(|archive| global_symbols(archive));
    let providers = built.filter_map(|(name, _)| {
        let plain = name.strip_prefix(&prefix())?;
        plain.starts_with("verbs_provider_").then(|| format!("{plain} {name}\n"))
    });
    let renames: BTreeSet<_> = defined
        .map(|(name, _)| format!("{name} {}{}\n", prefix(), name.trim_start_matches(&theirs)))
        .chain(providers)
        .collect();
    let list = scratch.join("renames");
    fs::write(&list, String::from_iter(renames)).expect("the target folder is writable");
    for archive in &expected {
        let mut rename = Command::new("objcopy");
        rename.arg("-D").arg(format!("--redefine-syms={}", list.display())).arg(archive);
        assert!(rename.status().expect("binutils has objcopy").success());
    }
    for expected in expected {
        let name = expected.file_name().and_then(|name| name.to_str()).expect("a name");
        let ours = name.replacen("lib", "libibverbs_bundled_", 1);
        let same = members(&expected) == members(&build.join("lib").join(ours));
        assert!(same, "{} differs", expected.display());
    }
    let _ = fs::remove_dir_all(&scratch);
}
