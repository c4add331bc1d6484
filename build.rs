//! Builds libibverbs and the enabled providers from `vendor/rdma-core`, statically, and generates
//! the Rust bindings. Everything is written to `OUT_DIR`; nothing is fetched, and the source tree is
//! only read.

use std::any::Any;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::panic;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};
use std::sync::Mutex;

/// A provider (user-space driver) of rdma-core v55.0. Cargo feature, folder, and symbol
/// (`verbs_provider_<name>`) all go by its name.
struct Provider {
    name: &'static str,
    /// The CMake target of the static library.
    target: &'static str,
    /// The library's name, without `lib` and `.a`.
    archive: &'static str,
    /// The linker map that names what it exports, if it is not the common one.
    map: Option<&'static str>,
}

const fn plain(name: &'static str, archive: &'static str) -> Provider {
    Provider { name, target: name, archive, map: None }
}

const fn with_api(name: &'static str, target: &'static str, map: &'static str) -> Provider {
    Provider { name, target, archive: name, map: Some(map) }
}

/// Those that take longest to compile first, so that none of them is left for the end.
const PROVIDERS: &[Provider] = &[
    with_api("mlx5", "mlx5-static", "libmlx5.map"),
    with_api("hns", "hns-static", "libhns.map"),
    with_api("mlx4", "mlx4-static", "libmlx4.map"),
    plain("irdma", "irdma-rdmav34"),
    plain("bnxt_re", "bnxt_re-rdmav34"),
    plain("cxgb4", "cxgb4-rdmav34"),
    plain("qedr", "qedr-rdmav34"),
    plain("ocrdma", "ocrdma-rdmav34"),
    plain("mthca", "mthca-rdmav34"),
    with_api("efa", "efa-static", "libefa.map"),
    with_api("mana", "mana-static", "libmana.map"),
    plain("vmw_pvrdma", "vmw_pvrdma-rdmav34"),
    plain("rxe", "rxe-rdmav34"),
    plain("erdma", "erdma-rdmav34"),
    plain("hfi1verbs", "hfi1verbs-rdmav34"),
    plain("siw", "siw-rdmav34"),
    plain("ipathverbs", "ipathverbs-rdmav34"),
];

/// What the build reads of `vendor/rdma-core`, besides the folders of the enabled providers. The
/// libraries `libibumad` and `libibmad` are not built; a helper includes their headers.
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

/// The public headers, which become `infiniband/*.h`.
const HEADERS: &[&str] = &[
    "libibverbs/verbs.h",
    "libibverbs/verbs_api.h",
    "libibverbs/tm_types.h",
    "libibverbs/opcode.h",
    "libibverbs/arch.h",
    "kernel-headers/rdma/ib_user_ioctl_verbs.h",
];

/// Read by CMake right after `project()`. Leaves out the folders of rdma-core that are not built
/// (tools, daemons, other libraries, other providers), and lets our stand-in for libnl's header take
/// precedence over rdma-core's.
const CMAKE_HOOK: &str = r#"
macro(add_subdirectory folder)
  if("${folder}" IN_LIST BUNDLED_FOLDERS)
    _add_subdirectory(${folder})
  endif()
endmacro()
if(BUNDLED_INCLUDE)
  include_directories(BEFORE "${BUNDLED_INCLUDE}")
endif()
"#;

/// In the place of CMake's own search for Python, which also looks for what only pyverbs needs.
const CMAKE_PYTHON: &str = r#"
set(Python_FOUND TRUE)
set(Python_Interpreter_FOUND TRUE)
"#;

/// Checks of rdma-core's CMake files that have no effect on the result, hence need not be made:
/// whether the compiler knows a warning (we show none), what is there for tools and tests, and how
/// to version a shared library (a check that fails where the path has spaces in it).
const CMAKE_PRESETS: &[(&str, &str)] = &[
    ("HAVE_C_WARNINGS", "0"),
    ("HAVE_C_WMISSING_PROTOTYPES", "0"),
    ("HAVE_C_WMISSING_DECLARATIONS", "0"),
    ("HAVE_C_WWRITE_STRINGS", "0"),
    ("HAVE_C_WFORMAT_2", "0"),
    ("HAVE_C_WCAST_FUNCTION", "0"),
    ("HAVE_C_WFORMAT_NONLITERAL", "0"),
    ("HAVE_C_WDATE_TIME", "0"),
    ("HAVE_C_WNESTED_EXTERNS", "0"),
    ("HAVE_C_WSTRICT_PROTOTYPES", "0"),
    ("HAVE_C_WOLD_STYLE_DEFINITION", "0"),
    ("HAVE_C_WREDUNDANT_DECLS", "0"),
    ("HAVE_C_WORKING_SHADOW", "0"),
    ("HAVE_C_WORKING_MISSING_FIELD_INITIALIZERS", "1"),
    ("HAVE_C_VARIABLE_SIZE", "1"),
    ("HAVE_NO_VAR_TRACKING_ASSIGNMENTS", "0"),
    ("_LDSYMVER_SUCCESS", "1"),
    ("CMAKE_DISABLE_FIND_PACKAGE_UDev", "1"),
    ("CMAKE_DISABLE_FIND_PACKAGE_Systemd", "1"),
    ("DRM_INCLUDE_DIRS", "/nonexistent"),
    ("SYSTEMCTL_BIN", "/bin/systemctl"),
];

fn main() {
    // A panic in a build dependency becomes one line, like every other failure.
    panic::set_hook(Box::new(|_| {}));
    if let Err(panic) = panic::catch_unwind(build) {
        fail(&format!("the build script failed: {}", message_of(&*panic)));
    }
}

fn build() {
    let out = variable("OUT_DIR");
    let root = variable("CARGO_MANIFEST_DIR");
    let source = root.join("vendor/rdma-core");
    let enabled: Vec<_> = PROVIDERS.iter().filter(|p| feature(p.name)).collect();
    // docs.rs needs the bindings alone, and has no network and few tools.
    let documentation_only = env::var_os("DOCS_RS").is_some();
    let bundled = !documentation_only && !feature("system");

    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        complain("RDMA verbs exist on Linux only");
        refuse();
    }
    rerun_if_changed(&root, &enabled, bundled);
    check_sources(&source, &enabled);
    let python = check_tools(documentation_only, bundled);

    let include = stage_headers(&source, &out);
    println!("cargo::metadata=include={}", include.display());
    println!("cargo::metadata=kernel_headers={}", source.join("kernel-headers").display());
    if documentation_only {
        return bindings(&source, &include, &out);
    }
    std::thread::scope(|scope| {
        let rest = scope.spawn(|| {
            bindings(&source, &include, &out);
            inline_functions(&source, &include, &out);
        });
        if bundled {
            build_rdma_core(&root, &source, &out, &enabled, &python);
        } else {
            link_system();
        }
        if let Err(panic) = rest.join() {
            panic::resume_unwind(panic);
        }
    });
}

// What every step uses.

/// Ends the build with one readable message, below which cargo shows the output so far.
fn fail(message: &str) -> ! {
    complain(message);
    exit(1)
}

/// Ends the build after complaints that say it all: to a script that succeeds, cargo adds nothing.
fn refuse() -> ! {
    exit(0)
}

fn complain(message: &str) {
    println!("cargo::error={}", message.trim().replace('\n', " "));
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "unknown panic".to_owned())
}

/// A variable that cargo sets, as a path.
fn variable(name: &str) -> PathBuf {
    match env::var_os(name) {
        Some(value) => value.into(),
        None => fail(&format!("{name} is not set: run this through cargo")),
    }
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some()
}

/// A program that a variable of the environment may name.
fn program(variable: &str, default: &str) -> String {
    env::var(variable).ok().filter(|v| !v.is_empty()).unwrap_or_else(|| default.to_owned())
}

fn write(path: &Path, contents: impl AsRef<[u8]>) {
    let parent = path.parent().unwrap_or(path);
    if let Err(e) = fs::create_dir_all(parent).and_then(|()| fs::write(path, contents)) {
        fail(&format!("{}: {e}", path.display()));
    }
}

/// What bindgen, and make in its rules, can take.
fn utf8(path: &Path) -> &str {
    path.to_str().unwrap_or_else(|| fail(&format!("{}: the path is not UTF-8", path.display())))
}

fn run(what: &str, command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{what} failed ({status}), see the output: {command:?}")),
        Err(e) => fail(&format!("{what}: cannot start {:?}: {e}", command.get_program())),
    }
}

// Before anything takes long: what must be there.

fn rerun_if_changed(root: &Path, enabled: &[&Provider], bundled: bool) {
    println!("cargo::rerun-if-changed=build.rs");
    if bundled {
        println!("cargo::rerun-if-changed=src/c");
        let providers = enabled.iter().map(|p| format!("providers/{}", p.name));
        for name in SOURCES.iter().map(|s| (*s).to_owned()).chain(providers) {
            rerun_if_file_changed(root, &format!("vendor/rdma-core/{name}"));
        }
    } else {
        for header in HEADERS {
            println!("cargo::rerun-if-changed=vendor/rdma-core/{header}");
        }
        rerun_if_file_changed(root, "vendor/rdma-core/kernel-headers");
    }
    // The crates `cc` and `pkg-config` name what they read themselves.
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

/// Each file at or under `path`, not the folder: cargo would look into what the build does not read.
fn rerun_if_file_changed(root: &Path, path: &str) {
    match fs::read_dir(root.join(path)) {
        Ok(entries) => {
            for name in entries.flatten().filter_map(|e| e.file_name().into_string().ok()) {
                if !["man", "tests", "examples", "__pycache__"].contains(&name.as_str()) {
                    rerun_if_file_changed(root, &format!("{path}/{name}"));
                }
            }
        }
        // A file, or nothing: then cargo runs this again until it is there.
        Err(_) => println!("cargo::rerun-if-changed={path}"),
    }
}

fn check_sources(source: &Path, enabled: &[&Provider]) {
    let providers = enabled.iter().map(|p| format!("providers/{}/CMakeLists.txt", p.name));
    let needed = SOURCES.iter().chain(HEADERS).map(|s| (*s).to_owned()).chain(providers);
    if let Some(missing) = needed.into_iter().find(|name| !source.join(name).exists()) {
        complain(&format!(
            "the sources of rdma-core are missing (vendor/rdma-core/{missing}): run script/bootstrap, \
             or `git submodule update --init`"
        ));
        refuse();
    }
}

/// Names every tool that the build needs and the machine lacks, with the packages that have it, and
/// ends the build if there are any. Returns the Python interpreter.
fn check_tools(documentation_only: bool, bundled: bool) -> String {
    let mut missing = Vec::new();
    let mut lacks = |what: &str, debian: &str, fedora: &str, why: &str| {
        missing.push(format!(
            "{what} is missing: apt install {debian} (Debian, Ubuntu), or dnf install {fedora} \
             (Fedora){why}"
        ));
    };
    let starts = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success())
    };

    if let Err(panic) = panic::catch_unwind(bindgen::clang_version) {
        let why = message_of(&*panic);
        lacks("libclang", "libclang-dev", "clang-devel", &format!(". {why}"));
    }
    let mut python = String::new();
    if !documentation_only {
        if let Err(why) = c_compiler() {
            lacks("a C compiler", "gcc libc6-dev", "gcc glibc-devel", &format!(". {why}"));
        }
        let pkg_config = program("PKG_CONFIG", "pkg-config");
        if !starts(&pkg_config) {
            lacks(&format!("`{pkg_config}`"), "pkg-config", "pkgconf-pkg-config", "");
        }
    }
    if bundled {
        let cmake = program("CMAKE", "cmake");
        if !starts(&cmake) {
            lacks(&format!("`{cmake}`"), "cmake", "cmake", "");
        }
        if !starts("make") && !starts("gmake") {
            lacks("`make`", "make", "make", "");
        }
        let cross = env::var("HOST") != env::var("TARGET");
        for name in ["ar", "nm", "objcopy"] {
            // Cross compilation takes those of the compiler, which CMake finds.
            if !cross && !starts(name) {
                lacks(&format!("`{name}`"), "binutils", "binutils", "");
            }
        }
        // The interpreter itself, because a wrapper such as pyenv's is slow, and many are started.
        let output = Command::new("python3")
            .args(["-c", "import sys; assert sys.version_info >= (3, 2); print(sys.executable)"])
            .output();
        match output {
            Ok(o) if o.status.success() => {
                python = String::from_utf8_lossy(&o.stdout).trim().to_owned();
            }
            _ => lacks("`python3`", "python3", "python3", ""),
        }
    }
    if !missing.is_empty() {
        for message in &missing {
            complain(message);
        }
        refuse();
    }
    python
}

/// Whether there is a C compiler, and the C library's headers; if not, why.
fn c_compiler() -> Result<(), String> {
    let compiler = cc::Build::new().cargo_output(false).try_get_compiler();
    let compiler = compiler.map_err(|e| e.to_string())?;
    let name = compiler.path().display();
    let mut child = compiler
        .to_command()
        .args(["-E", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| format!("`{name}`: {e}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // If the compiler does not read it, its status tells.
        let _ = stdin.write_all(b"#include <stdlib.h>\n#include <linux/types.h>\n");
    }
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(format!("`{name}` does not find the C library's headers")),
    }
}

// The bindings.

/// The public headers under the names that programs include them by.
fn stage_headers(source: &Path, out: &Path) -> PathBuf {
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

fn bindings(source: &Path, include: &Path, out: &Path) {
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
fn inline_functions(source: &Path, include: &Path, out: &Path) {
    compile(
        cc::Build::new()
            .file(out.join("inline_functions.c"))
            .include(include)
            .include(source.join("kernel-headers")),
        "ibverbs_inline",
    );
}

fn compile(build: &mut cc::Build, archive: &str) {
    if let Err(e) = build.warnings(false).try_compile(archive) {
        fail(&format!("compiling {archive}: {e}"));
    }
}

// libibverbs and its providers.

fn link_system() {
    #[cfg(feature = "system")]
    if let Err(e) = pkg_config::Config::new().atleast_version("1.14").probe("libibverbs") {
        fail(&format!(
            "feature `system` needs libibverbs 1.14 or later: apt install libibverbs-dev (Debian, \
             Ubuntu), or dnf install rdma-core-devel (Fedora). {}",
            first_line(&e)
        ));
    }
}

#[cfg(any(feature = "system", feature = "neigh"))]
fn first_line(error: &pkg_config::Error) -> String {
    error.to_string().lines().find(|l| !l.trim().is_empty()).unwrap_or_default().to_owned()
}

fn build_rdma_core(root: &Path, source: &Path, out: &Path, enabled: &[&Provider], python: &str) {
    if enabled.is_empty() {
        println!("cargo::warning=no provider is enabled: no RDMA device will ever be found");
    }
    let libnl = link_libnl(out);
    let build = configure(root, source, out, enabled, python);
    // What CMake calls `<target>/fast` builds the target alone. Without it, every provider
    // depends on the shared libibverbs.
    let mut targets = vec!["ibverbs-static", "ccan", "rdma_util"];
    targets.extend(enabled.iter().map(|p| p.target));
    compile_targets(&build, &targets);
    finish_archives(source, out, &build, enabled, python);
    register_providers(out, enabled);

    println!("cargo::metadata=build={}", build.display());
    println!("cargo::rustc-link-search=native={}", build.join("lib").display());
    for provider in enabled {
        println!("cargo::rustc-link-lib=static={}", provider.archive);
    }
    println!("cargo::rustc-link-lib=static=ibverbs");
    for directive in libnl {
        println!("{directive}");
    }
}

fn configure(
    root: &Path,
    source: &Path,
    out: &Path,
    enabled: &[&Provider],
    python: &str,
) -> PathBuf {
    let build = out.join("build");
    // Single targets do not look at what changed in headers.
    if build.exists()
        && let Err(e) = fs::remove_dir_all(&build)
    {
        fail(&format!("{}: {e}", build.display()));
    }
    let modules = out.join("cmake");
    write(&modules.join("hook.cmake"), CMAKE_HOOK);
    write(&modules.join("FindPython.cmake"), CMAKE_PYTHON);
    let mut folders: Vec<_> = SOURCES.iter().map(|s| (*s).to_owned()).collect();
    folders.extend(enabled.iter().map(|p| format!("providers/{}", p.name)));
    if enabled.is_empty() {
        // rdma-core's CMake files fail without any provider; this one is not compiled.
        folders.push("providers/rxe".to_owned());
    }
    let neigh = feature("neigh");
    let stand_in = root.join("src/c");

    let mut config = cmake::Config::new(source);
    config
        .out_dir(out)
        .profile("Release")
        .generator("Unix Makefiles")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .define("CMAKE_C_FLAGS_RELEASE", "-O2 -DNDEBUG") // as rdma-core means its Release to be
        .define("CMAKE_INSTALL_PREFIX", "/usr")
        .define("CMAKE_MODULE_PATH", utf8(&modules))
        .define("CMAKE_PROJECT_rdma-core_INCLUDE", utf8(&modules.join("hook.cmake")))
        .define("BUNDLED_FOLDERS", folders.join(";"))
        .define("BUNDLED_INCLUDE", if neigh { "" } else { utf8(&stand_in) })
        .define("PYTHON_EXECUTABLE", python)
        .define("ENABLE_STATIC", "1")
        .define("ENABLE_RESOLVE_NEIGH", if neigh { "1" } else { "0" })
        .define("ENABLE_VALGRIND", "0")
        .define("NO_MAN_PAGES", "1")
        .define("NO_PYVERBS", "1")
        .build_target("kern-abi");
    for (name, value) in CMAKE_PRESETS {
        config.define(name, value);
    }
    if let Err(panic) = panic::catch_unwind(panic::AssertUnwindSafe(|| config.build())) {
        fail(&format!("configuring rdma-core failed, see CMake's output: {}", message_of(&*panic)));
    }
    build
}

/// Builds each target alone, as many at once as cargo allows; each takes further jobs from cargo's
/// job server if it has some to spare.
fn compile_targets(build: &Path, targets: &[&str]) {
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let queue = Mutex::new(targets.iter());
    let next = || queue.lock().ok().and_then(|mut queue| queue.next());
    std::thread::scope(|scope| {
        for _ in 0..targets.len().min(jobs) {
            scope.spawn(|| {
                while let Some(target) = next() {
                    let mut make = Command::new(program("CMAKE", "cmake"));
                    make.arg("--build").arg(build).args(["--target", &format!("{target}/fast")]);
                    if let Some(flags) = env::var_os("CARGO_MAKEFLAGS") {
                        make.env("MAKEFLAGS", flags);
                    }
                    run(&format!("compiling {target} of rdma-core"), &mut make);
                }
            });
        }
    });
}

/// rdma-core gives static libraries their final form (internal names made unique, the common
/// helpers put in) with a script of its own; running it by hand limits it to what was built.
fn finish_archives(source: &Path, out: &Path, build: &Path, enabled: &[&Provider], python: &str) {
    let cache = build.join("CMakeCache.txt");
    let cache =
        fs::read_to_string(&cache).unwrap_or_else(|e| fail(&format!("{}: {e}", cache.display())));
    let tool = |name: &str| {
        cache
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.split_once('=').map(|(_, value)| value))
            .find(|value| !value.ends_with("-NOTFOUND"))
            .unwrap_or_else(|| {
                fail(&format!("CMake found no {name}: apt install binutils (Debian, Ubuntu), or dnf install binutils (Fedora)"))
            })
    };
    let temporary = out.join("tmp");
    write(&temporary.join(".keep"), "");
    let mut finish = Command::new(python);
    finish
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("TMPDIR", &temporary)
        .arg(source.join("buildlib/sanitize_static_lib.py"))
        .args(["--version", "55.0", "--ar", tool("CMAKE_AR")])
        .args(["--nm", tool("CMAKE_NM"), "--objcopy", tool("CMAKE_OBJCOPY")]);
    let mut option = |name: &str, value: &OsStr| {
        finish.arg(name).arg(value);
    };
    option("--map", build.join("libibverbs/libibverbs.map").as_ref());
    option("--map", source.join("buildlib/provider.map").as_ref());
    option("--lib", build.join("lib/statics/libibverbs.a").as_ref());
    for provider in enabled {
        let archive = format!("lib/statics/lib{}.a", provider.archive);
        option("--lib", build.join(archive).as_ref());
        if let Some(map) = provider.map {
            option("--map", source.join("providers").join(provider.name).join(map).as_ref());
        }
    }
    option("--internal_lib", build.join("ccan/libccan.a").as_ref());
    option("--internal_lib", build.join("util/librdma_util.a").as_ref());
    run("finishing the static libraries", &mut finish);
}

/// A table that refers to each enabled provider, so that the linker takes in its object file, whose
/// constructor then registers it.
fn register_providers(out: &Path, enabled: &[&Provider]) {
    let mut text = String::from("struct verbs_device_ops;\n");
    for provider in enabled {
        text +=
            &format!("extern const struct verbs_device_ops verbs_provider_{};\n", provider.name);
    }
    text += "const struct verbs_device_ops *const ibverbs_bundled_providers[] = {\n";
    for provider in enabled {
        text += &format!("\t&verbs_provider_{},\n", provider.name);
    }
    text += "\t0\n};\n";
    let file = out.join("providers.c");
    write(&file, text);
    compile(cc::Build::new().file(file), "ibverbs_providers");
}

/// Variables of the environment that ask for the shared libnl: ours, and that of the crate
/// `pkg-config` for all libraries.
const LIBNL_DYNAMIC: &[&str] = &["IBVERBS_LIBNL_DYNAMIC", "PKG_CONFIG_ALL_DYNAMIC"];

/// How to link libnl, for feature `neigh`: statically where the machine has the archives.
fn link_libnl(out: &Path) -> Vec<String> {
    #[cfg(not(feature = "neigh"))]
    {
        let _ = out;
        Vec::new()
    }
    #[cfg(feature = "neigh")]
    {
        // The order in which the linker needs them.
        let libraries = ["nl-route-3", "nl-3"];
        let found = pkg_config::Config::new().cargo_metadata(false).probe("libnl-route-3.0");
        let found = found.unwrap_or_else(|e| {
            fail(&format!(
                "feature `neigh` needs libnl: apt install libnl-route-3-dev (Debian, Ubuntu), or dnf \
                 install libnl3-devel (Fedora). {}",
                first_line(&e)
            ))
        });
        let mut directives = Vec::new();
        let archives: Option<Vec<_>> =
            libraries.iter().map(|name| find_archive(name, &found.link_paths)).collect();
        // Distributions compile the archives for programs, not for shared libraries.
        let dynamic = LIBNL_DYNAMIC.iter().any(|name| env::var_os(name).is_some());
        if let Some(archives) = archives.filter(|_| !dynamic) {
            // Copies, so that no folder of the system comes into the search path.
            for (name, archive) in libraries.iter().zip(archives) {
                let copy = out.join("libnl").join(format!("lib{name}.a"));
                match fs::read(&archive) {
                    Ok(contents) => write(&copy, contents),
                    Err(e) => fail(&format!("{}: {e}", archive.display())),
                }
                directives.push(format!("cargo::rustc-link-lib=static={name}"));
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

/// Where the static library is: in one of the folders, or where the compiler looks.
#[cfg(feature = "neigh")]
fn find_archive(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let file = format!("lib{name}.a");
    if let Some(path) = folders.iter().map(|f| f.join(&file)).find(|p| p.exists()) {
        return Some(path);
    }
    let compiler = cc::Build::new().cargo_output(false).try_get_compiler().ok()?;
    let output = compiler.to_command().arg(format!("-print-file-name={file}")).output().ok()?;
    // Without a folder if the compiler knows of none.
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
