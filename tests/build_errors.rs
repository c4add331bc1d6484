//! Messages of the build script about missing tools: one readable line each, all at once, with the
//! packages to install, and no other output.
//!
//! The test runs the build script that built it again, in an environment that lacks something: a
//! PATH that holds all tools except one, a missing libclang, a source tree without sources.

use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Every program that the build starts.
const TOOLS: &[&str] =
    &["ar", "as", "cc", "cmake", "ld", "make", "nm", "objcopy", "pkg-config", "python3"];

/// A machine that lacks something.
struct Machine {
    folder: PathBuf,
    script: Command,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Machine {
    /// Makes a machine with all tools but `missing`, and the default features.
    fn without(test: &str, missing: &[&str]) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("build errors {test}"));
        let _ = fs::remove_dir_all(&folder);
        let (bin, out) = (folder.join("bin"), folder.join("out"));
        for new in [&bin, &out] {
            fs::create_dir_all(new).expect("the target folder is writable");
        }
        for tool in TOOLS.iter().filter(|t| !missing.contains(t)) {
            symlink(real_path_of(tool), bin.join(tool)).expect("the folder is new");
        }
        let target = target();
        let mut script = Command::new(build_script());
        script
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env_clear()
            .envs(env::vars_os().filter(|(name, _)| name == "LIBCLANG_PATH"))
            .env("PATH", &bin)
            .env("OUT_DIR", &out)
            .env("CARGO_MANIFEST_DIR", env!("CARGO_MANIFEST_DIR"))
            .env("CARGO_CFG_TARGET_OS", "linux")
            .env("CARGO_FEATURE_RXE", "1")
            .env("OPT_LEVEL", "0")
            .env("DEBUG", "false")
            .env("NUM_JOBS", "1")
            .env("HOST", &target)
            .env("TARGET", &target)
            .envs(target_configuration(&target));
        Self { folder, script }
    }

    /// Takes the musl target of this processor. Its compiler is a script that lacks the headers that match `pattern`;
    /// without a pattern there is none.
    fn for_musl(test: &str, pattern: Option<&str>) -> Self {
        let mut machine = Self::without(test, &[]);
        let target = target().replace("-gnu", "-musl");
        machine.script.env("TARGET", &target).envs(target_configuration(&target));
        if let Some(pattern) = pattern {
            // The build script tests for headers with `-E -`, and identifies the compiler with `-E FILE`.
            let compiler = machine.folder.join("bin/compiler");
            let text = format!(
                "#!/bin/sh\nfor last; do :; done\n[ \"$last\" = - ] || exec cc \"$@\"\n\
                 while read -r line; do case $line in {pattern}) exit 1 ;; esac; done\n"
            );
            fs::write(&compiler, text).expect("the folder is writable");
            fs::set_permissions(&compiler, PermissionsExt::from_mode(0o755)).expect("its owner");
            machine.script.env(format!("CC_{}", target.replace('-', "_")), &compiler);
        }
        machine
    }

    /// Puts a program in the place of a tool.
    fn with(self, tool: &str, script: &str) -> Self {
        let file = self.folder.join("bin").join(tool);
        let _ = fs::remove_file(&file);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("the folder is writable");
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).expect("its owner");
        self
    }

    fn set(mut self, name: &str, value: &str) -> Self {
        self.script.env(name, value);
        self
    }

    /// The errors that the build script ends with. It must not have built anything before.
    fn errors(mut self) -> Vec<String> {
        let output = self.script.output().expect("the build script starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        // Cargo fails the build for these messages. If the script failed too, cargo would also print its
        // whole output.
        assert!(output.status.success(), "{text}\n{stderr}");
        assert!(text.contains("cargo::error="), "the build went on:\n{text}\n{stderr}");
        for noise in ["panicked", "backtrace"] {
            assert!(!stderr.contains(noise) && !text.contains(noise), "{text}\n{stderr}");
        }
        let built = fs::read_dir(self.folder.join("out")).expect("a folder").flatten();
        // For musl, the check itself needs links to the kernel's headers.
        let built = built.filter(|entry| entry.file_name() != "kernel-headers").count();
        assert_eq!(built, 0, "the build had begun");
        text.lines().filter_map(|l| l.strip_prefix("cargo::error=")).map(str::to_owned).collect()
    }
}

fn real_path_of(tool: &str) -> PathBuf {
    if tool == "python3" {
        // The interpreter is called through a wrapper, and the wrapper would need further tools.
        let output = Command::new(tool).args(["-c", "import sys; print(sys.executable)"]).output();
        let path = String::from_utf8(output.expect("python3 starts").stdout).expect("a path");
        return path.trim().into();
    }
    // ccache, under the names of compilers, looks for these itself.
    let itself =
        |file: &PathBuf| fs::canonicalize(file).is_ok_and(|real| !real.ends_with("ccache"));
    let path = env::var_os("PATH").expect("PATH is set");
    env::split_paths(&path)
        .map(|folder| folder.join(tool))
        .find(itself)
        .unwrap_or_else(|| panic!("this machine has no {tool} itself"))
}

/// The newest build script of this package, with feature `bindgen` if this test has it, and the folder that
/// it wrote to when it built this test.
fn build_script() -> PathBuf {
    let folder = Path::new(env!("OUT_DIR")).ancestors().nth(2).expect("cargo's build folder");
    fs::read_dir(folder)
        .expect("cargo's build folder is there")
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("ibverbs-bundled-"))
        .map(|entry| entry.path().join("build-script-build"))
        .filter(|path| asks_for_libclang(path) == cfg!(feature = "bindgen"))
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .max()
        .unwrap_or_else(|| {
            panic!("no build script in {}: has cargo's layout changed?", folder.display())
        })
        .1
}

fn asks_for_libclang(script: &Path) -> bool {
    let message = "leave out the feature `bindgen`";
    fs::read(script).is_ok_and(|bytes| String::from_utf8_lossy(&bytes).contains(message))
}

fn target() -> String {
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().expect("rustc starts");
    let text = String::from_utf8(output.stdout).expect("rustc prints text");
    let host = text.lines().find_map(|l| l.strip_prefix("host: ")).expect("rustc names its host");
    host.to_owned()
}

/// The variables by which cargo describes the target to a build script, and which `cc` reads.
fn target_configuration(target: &str) -> Vec<(String, String)> {
    let arch = target.split('-').next().unwrap_or_default();
    let env = target.rsplit('-').next().unwrap_or_default();
    [
        ("ARCH", arch),
        ("ENV", env),
        ("VENDOR", "unknown"),
        ("ENDIAN", "little"),
        ("FAMILY", "unix"),
        ("POINTER_WIDTH", "64"),
    ]
    .map(|(name, value)| (format!("CARGO_CFG_TARGET_{name}"), value.to_owned()))
    .to_vec()
}

/// Asserts that the error is one line, which names the missing tool and the packages of Debian and Fedora.
#[track_caller]
fn assert_names(errors: &[String], what: &str, debian: &str, fedora: &str) {
    assert_eq!(errors.len(), 1, "{errors:#?}");
    for part in [what, &format!("apt install {debian} "), &format!("dnf install {fedora} ")] {
        assert!(errors[0].contains(part), "{:?} does not say {part:?}", errors[0]);
    }
}

#[cfg(not(feature = "system"))]
mod tools_of_the_bundled_build {
    use super::{Machine, assert_names};

    #[test]
    fn cmake() {
        let errors = Machine::without("cmake", &["cmake"]).errors();
        assert_names(&errors, "`cmake` is missing", "cmake", "cmake");
    }

    #[test]
    fn make() {
        let errors = Machine::without("make", &["make"]).errors();
        assert_names(&errors, "`make` is missing", "make", "make");
    }

    #[test]
    fn python() {
        let errors = Machine::without("python", &["python3"]).errors();
        assert_names(&errors, "`python3` is missing", "python3", "python3");
    }

    #[test]
    fn binutils() {
        for tool in ["ar", "nm", "objcopy"] {
            let errors = Machine::without(tool, &[tool]).errors();
            assert_names(&errors, &format!("`{tool}` is missing"), "binutils", "binutils");
        }
    }

    #[test]
    fn several_at_once_are_all_named() {
        let errors = Machine::without("several", &["cmake", "cc", "pkg-config"])
            .set("CARGO_FEATURE_NEIGH", "1")
            .set("LIBCLANG_PATH", "/nonexistent")
            .errors();
        // The committed bindings need no libclang.
        let expected = 3 + usize::from(cfg!(feature = "bindgen"));
        assert_eq!(errors.len(), expected, "{errors:#?}");
    }
}

#[test]
fn c_compiler() {
    let errors = Machine::without("cc", &["cc"]).errors();
    assert_names(&errors, "a C compiler is missing", "gcc libc6-dev", "gcc glibc-devel");
}

#[test]
fn c_library_headers() {
    let errors = Machine::without("headers", &[]).set("CFLAGS", "-nostdinc").errors();
    assert_names(&errors, "a header of the C library, is missing", "libc6-dev", "glibc-devel");
    assert!(errors[0].contains("no include path in which to search for stdlib.h"), "{errors:?}");
}

/// Asserts that the error is one line, which says what the tool says, and not that something is missing.
#[track_caller]
fn assert_says(errors: &[String], what: &str, said: &str) {
    assert_eq!(errors.len(), 1, "{errors:#?}");
    assert!(errors[0].contains(what) && errors[0].contains(said), "{:?}", errors[0]);
    assert!(!errors[0].contains("missing"), "{:?}", errors[0]);
}

#[test]
fn a_c_compiler_that_fails_is_not_missing() {
    let errors = Machine::without("unknown flag", &[]).set("CFLAGS", "-mnone-such").errors();
    assert_says(&errors, "the C compiler does not work", "-mnone-such");
    let errors = Machine::without("layout", &[]).set("CFLAGS", "-fpack-struct=2").errors();
    assert_says(&errors, "the C compiler does not work", "flags_change_the_layout_of_structures");
    let broken = "echo 'cc: no licence today' >&2; exit 3";
    let errors = Machine::without("broken", &[]).with("cc", broken).errors();
    assert_says(&errors, "the C compiler does not work", "cc: no licence today");
}

/// The flags of the environment that no other flag undoes.
#[test]
fn a_c_compiler_makes_plain_objects() {
    for (flag, found) in
        [("-m32", "another kind of processor"), ("-S", "no ELF file"), ("-fsyntax-only", "no ELF")]
    {
        let errors = Machine::without("objects", &[]).set("CFLAGS", flag).errors();
        assert_says(&errors, "not plain objects for ", found);
    }
    for (flag, found) in
        [("-flto", "code for the linker"), ("--coverage", "calls a runtime for sanitizers")]
    {
        let machine = Machine::without("wrapper", &[]);
        let wrapper = format!("exec {} \"$@\" {flag}", real_path_of("cc").display());
        let errors = machine.with("cc", &wrapper).errors();
        assert_says(&errors, "not plain objects for ", found);
    }
}

/// The error is one line, which names the character and the folder.
#[cfg(not(feature = "system"))]
#[test]
fn a_path_that_cmake_or_make_misreads() {
    for character in "#$'(`\n".chars() {
        let machine = Machine::without("path", &[]);
        let odd = machine.folder.join(format!("a{character}b"));
        symlink(env!("CARGO_MANIFEST_DIR"), &odd).expect("the folder is new");
        let odd = odd.to_str().expect("UTF-8").to_owned();
        let named = format!("{character:?}");
        let errors = machine.set("OUT_DIR", &odd).errors();
        assert_says(&errors, "the path of the target folder", &named);
        let machine = Machine::without("path", &[]);
        symlink(env!("CARGO_MANIFEST_DIR"), &odd).expect("the folder is new");
        let errors = machine.set("CARGO_MANIFEST_DIR", &odd).errors();
        assert_says(&errors, "the path of the package", &named);
        assert!(errors[0].contains(&format!("{odd:?}")), "{errors:?}");
    }
}

#[cfg(not(feature = "system"))]
#[test]
fn tools_that_fail_are_not_missing() {
    let errors = Machine::without("home", &[]).set("PYTHONHOME", "/nonexistent").errors();
    assert_says(&errors, "`python3` does not work", "Fatal Python error");
    for tool in ["cmake", "make", "ar", "nm", "objcopy"] {
        let broken = format!("echo '{tool}: libfoo.so.1: cannot open' >&2; exit 127");
        let errors = Machine::without("fails", &[]).with(tool, &broken).errors();
        assert_says(&errors, &format!("`{tool}` does not work"), "libfoo.so.1: cannot open");
    }
    let errors = Machine::without("pkg", &[])
        .with("pkg-config", "echo 'no cache' >&2; exit 1")
        .set("CARGO_FEATURE_NEIGH", "1")
        .errors();
    assert_says(&errors, "`pkg-config` does not work", "no cache");
    let machine = Machine::without("rights", &[]).with("cmake", "exit");
    let cmake = machine.folder.join("bin/cmake");
    fs::set_permissions(cmake, PermissionsExt::from_mode(0o644)).expect("its owner");
    assert_says(&machine.errors(), "`cmake` does not work", "Permission denied");
}

#[cfg(not(feature = "system"))]
#[test]
fn a_program_that_a_variable_names_and_that_is_not_there_is_named_with_it() {
    for variable in ["CC", "CMAKE", "PKG_CONFIG", "CMAKE_C_COMPILER_LAUNCHER"] {
        let machine = Machine::without("not there", &[]).set("CARGO_FEATURE_NEIGH", "1");
        let errors = machine.set(variable, "no-such-program").errors();
        assert_says(&errors, "no program `no-such-program`", &format!("the variable {variable} "));
    }
    let errors = Machine::without("no file", &[]).set("CMAKE_TOOLCHAIN_FILE", "/no.cmake").errors();
    assert_says(&errors, "no file `/no.cmake`", "the variable CMAKE_TOOLCHAIN_FILE ");
    let errors = Machine::without("silent", &[]).with("cc", "exit 1").errors();
    assert_says(&errors, "the C compiler does not work", "it prints nothing");
}

#[test]
fn musl_c_compiler() {
    let errors = Machine::for_musl("musl cc", None).errors();
    assert_names(&errors, "a C compiler for musl is missing", "musl-tools", "musl-gcc");
}

#[test]
fn musl_c_library_headers() {
    let errors = Machine::for_musl("musl headers", Some("*stdlib*")).errors();
    assert_names(&errors, "musl, the C library, is missing", "musl-tools", "musl-gcc");
}

#[test]
fn musl_kernel_headers() {
    let errors = Machine::for_musl("musl kernel", Some("*linux/*")).errors();
    assert_names(&errors, "linux/types.h is missing", "linux-libc-dev", "kernel-headers");
}

/// The compiler for musl finds all headers here, so the only error is the missing `make`.
#[test]
#[cfg(not(feature = "system"))]
fn musl_complete() {
    let machine = Machine::for_musl("musl complete", Some("nothing"));
    fs::remove_file(machine.folder.join("bin/make")).expect("a link");
    assert_names(&machine.errors(), "`make` is missing", "make", "make");
}

#[test]
#[cfg(not(feature = "system"))]
fn valgrind_headers() {
    // A machine that has the C library's headers and no others.
    let include = Path::new(env!("CARGO_TARGET_TMPDIR")).join("headers_of_the_c_library");
    fs::create_dir_all(include.join("linux")).expect("the target folder is writable");
    for header in ["stdlib.h", "linux/types.h"] {
        fs::write(include.join(header), "").expect("the folder is writable");
    }
    let errors = Machine::without("valgrind", &["make"])
        .set("CFLAGS", &format!("-nostdinc -I{}", include.display()))
        .set("CARGO_FEATURE_VALGRIND", "1")
        .errors();
    assert_names(&errors[..1], "valgrind/memcheck.h is missing", "valgrind", "valgrind-devel");
    // The message says what the header is needed for. The other checks still run.
    assert!(errors[0].contains("feature `valgrind`"), "{errors:?}");
    assert_eq!(errors.len(), 2, "{errors:?}");
}

#[test]
fn pkg_config() {
    let errors =
        Machine::without("pkg-config", &["pkg-config"]).set("CARGO_FEATURE_NEIGH", "1").errors();
    assert_names(&errors, "`pkg-config` is missing", "pkg-config", "pkgconf-pkg-config");
}

#[cfg(feature = "bindgen")]
#[test]
fn libclang() {
    let errors = Machine::without("libclang", &[]).set("LIBCLANG_PATH", "/nonexistent").errors();
    assert_names(&errors, "libclang is missing", "libclang-dev", "clang-devel");
}

/// docs.rs has libclang but no other tool, so the build for docs.rs may require nothing else.
#[cfg(feature = "bindgen")]
#[test]
fn docs_rs_needs_libclang_alone() {
    let errors = Machine::without(
        "docs",
        &["ar", "cc", "cmake", "make", "nm", "objcopy", "pkg-config", "python3"],
    )
    .set("DOCS_RS", "1")
    .set("LIBCLANG_PATH", "/nonexistent")
    .errors();
    assert_names(&errors, "libclang is missing", "libclang-dev", "clang-devel");
}

#[test]
fn sources() {
    let machine = Machine::without("sources", &[]);
    let empty = machine.folder.join("checkout");
    fs::create_dir_all(empty.join("vendor/rdma-core")).expect("the folder is new");
    let empty = empty.to_str().expect("the test's folder is UTF-8").to_owned();
    let errors = machine.set("CARGO_MANIFEST_DIR", &empty).errors();
    assert_eq!(errors.len(), 1, "{errors:#?}");
    for cure in ["script/bootstrap", "git submodule update --init"] {
        assert!(errors[0].contains(cure), "{errors:#?}");
    }
}

/// Editors and `cargo check` work: no tool is asked for.
#[test]
fn the_api_compiles_on_systems_like_it() {
    for system in ["macos", "freebsd", "netbsd", "openbsd", "dragonfly"] {
        let mut machine = Machine::without("system", TOOLS).set("CARGO_CFG_TARGET_OS", system);
        let output = machine.script.output().expect("the build script starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && !text.contains("cargo::error="), "{text}");
        let warnings: Vec<_> = text.lines().filter(|line| line.contains("warning=")).collect();
        let warning =
            "cargo::warning=RDMA is for Linux only: here the API compiles, and returns ENOSYS";
        assert_eq!(warnings, [warning]);
        let read = |name: &str| {
            let file = machine.folder.join("out/ffi").join(name);
            fs::read_to_string(file).expect("it is made")
        };
        // Each function that the bindings name.
        let (bindings, functions) = (read("bindings.rs"), read("missing.rs"));
        let named: Vec<_> = bindings
            .split("link_name")
            .skip(1)
            .filter_map(|attribute| attribute.split('"').nth(1))
            .collect();
        for wanted in ["ibverbs_bundled_missing_ibv_get_device_list", "ibv_wr_start__bundled"] {
            assert!(named.contains(&wanted), "{named:?}");
        }
        for name in named {
            assert!(functions.contains(&format!("fn {name}()")), "{name} in {functions}");
        }
    }
}

#[test]
fn other_systems_get_one_line() {
    for system in ["windows", "android", "illumos", "wasi"] {
        let errors = Machine::without("other", TOOLS).set("CARGO_CFG_TARGET_OS", system).errors();
        assert_eq!(errors.len(), 1, "{errors:#?}");
        assert!(errors[0].contains(&format!("does not compile for {system}")), "{errors:?}");
        assert!(errors[0].contains("cfg(target_os = \"linux\")"), "{errors:?}");
    }
}

/// zig's compiler takes what it reads from a pipe for C only if it is told.
#[cfg(not(feature = "system"))]
#[test]
fn the_compiler_is_told_the_language() {
    let told = format!(
        "case \" $* \" in *' -x c '*) ;; *' - '*) echo 'error: unknown language' >&2; exit 1 ;; esac\nexec {} \"$@\"",
        real_path_of("cc").display()
    );
    let errors = Machine::without("told", &["make"]).with("cc", &told).errors();
    assert_names(&errors, "`make` is missing", "make", "make");
}

/// What the crate `cmake` takes by a variable of the target, or a toolchain file names, need not be on the path.
#[cfg(not(feature = "system"))]
#[test]
fn tools_are_asked_for_as_they_are_used() {
    let cmake = real_path_of("cmake");
    let cmake = cmake.to_str().expect("UTF-8");
    let kinds = ["CMAKE".to_owned(), "HOST_CMAKE".to_owned(), format!("CMAKE_{}", target())];
    for name in kinds.into_iter().chain([format!("CMAKE_{}", target().replace('-', "_"))]) {
        let errors = Machine::without("named", &["cmake", "make"]).set(&name, cmake).errors();
        assert_names(&errors, "`make` is missing", "make", "make");
    }
    let binutils = ["ar", "nm", "objcopy", "make"];
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let errors = Machine::without("file", &binutils).set("CMAKE_TOOLCHAIN_FILE", file).errors();
    assert_names(&errors, "`make` is missing", "make", "make");
}
