//! Builds libibverbs and its providers with rdma-core's own CMake files.

use std::env;
use std::fs;
use std::panic;
use std::path::Path;
use std::process::Command;

use crate::archives::{self, OURS, Tools};
use crate::common::{
    at_once, done, exit_with_error, feature, message_of, program, run, utf8, write,
};
use crate::earlier::Inputs;
use crate::flags::MEMORY;
use crate::inputs::sources;
use crate::installed::link_libnl;
use crate::presets::presets;
use crate::providers::{Provider, register_providers};
use crate::source_tree::{Tree, setting};
use crate::tools::Found;

/// CMake reads this right after `project()`. It leaves out the folders of rdma-core that are not built
/// (tools, daemons, other libraries, other providers), and gives this crate's stand-in for libnl's
/// header precedence over rdma-core's. The flags that come last do so whatever a toolchain file adds. It says which tools CMake
/// uses, also those of a toolchain file, whose choice is not in the cache.
const CMAKE_HOOK: &str = r#"
macro(add_subdirectory folder)
  if("${folder}" IN_LIST BUNDLED_FOLDERS)
    _add_subdirectory(${folder})
    if("${folder}" STREQUAL "libibverbs") # src/c/messages.c
      target_compile_definitions(ibverbs-static PRIVATE fprintf=ibverbs_bundled_message)
    endif()
    if("${folder}" STREQUAL "librdmacm") # src/base/hooks.rs
      target_sources(rdmacm-static PRIVATE "${BUNDLED_C}/manager.c")
      target_compile_definitions(rdmacm-static PRIVATE IBVERBS_BUNDLED
        open_cdev=ibverbs_manager_open write=ibverbs_manager_write close=ibverbs_manager_close
        ibv_get_device_list=ibverbs_bundled_get_device_list
        ibv_get_device_guid=ibverbs_bundled_get_device_guid
        ibv_get_device_index=ibverbs_bundled_get_device_index
        _ibv_get_device_index=ibverbs_bundled_get_device_index)
    endif()
  endif()
endmacro()
file(WRITE "${CMAKE_BINARY_DIR}/tools" "${CMAKE_AR}\n${CMAKE_NM}\n${CMAKE_OBJCOPY}\n")
# A toolchain file may ask for this, and for flags.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
add_compile_options(${BUNDLED_LAST_FLAGS})
if(BUNDLED_INCLUDE)
  include_directories(BEFORE "${BUNDLED_INCLUDE}")
endif()
"#;

/// Replaces CMake's own search for Python, which also looks for files that only pyverbs needs.
const CMAKE_PYTHON: &str = r#"
set(Python_FOUND TRUE)
set(Python_Interpreter_FOUND TRUE)
"#;

/// Replaces CMake's module for pkg-config where nothing asks for a library of the machine: without feature `neigh`.
const CMAKE_PKG_CONFIG: &str = r#"
set(PkgConfig_FOUND TRUE)
set(PKG_CONFIG_FOUND TRUE)
macro(pkg_check_modules prefix)
  set(${prefix}_FOUND FALSE)
endmacro()
"#;

/// The prefix of each name of rdma-core: no other copy of libibverbs has such names.
pub(crate) fn symbol_prefix(tree: &Tree) -> String {
    format!("{OURS}{}_", tree.version.replace(|c: char| !c.is_ascii_alphanumeric(), "_"))
}

pub(crate) fn build_rdma_core(
    root: &Path,
    tree: &Tree,
    out: &Path,
    enabled: &[Provider],
    tools: &Found,
    last_flags: &[String],
    prefix: &str,
) {
    let source = &tree.folder;
    let libnl = link_libnl(out);
    let build = out.join("build");
    let abi = setting(source, "IBVERBS_PABI_VERSION");
    let inputs = Inputs::of(root, tree, out, enabled, &tools.versions);
    if !inputs.take(out) {
        configure(root, source, out, enabled, &tools.python, last_flags);
        compile_all(&build, enabled);
        finish_archives(source, out, &build, enabled, &abi, prefix);
        inputs.offer(out);
    }
    register_providers(out, enabled, prefix);

    println!("cargo::metadata=build={}", build.display());
    println!("cargo::rustc-link-search=native={}", build.join("lib").display());
    for provider in enabled {
        println!("cargo::rustc-link-lib=static={OURS}{}", provider.archive(&abi));
    }
    if feature("rdmacm") {
        println!("cargo::rustc-link-lib=static={OURS}rdmacm"); // before what it uses
    }
    println!("cargo::rustc-link-lib=static={OURS}ibverbs");
    for directive in libnl {
        println!("{directive}");
    }
}

fn compile_all(build: &Path, enabled: &[Provider]) {
    // CMake's `<target>/fast` builds the target alone. Without `/fast`, every provider depends on the
    // shared libibverbs.
    let mut targets = vec!["ibverbs-static", "ccan", "rdma_util"];
    if feature("rdmacm") {
        targets.push("rdmacm-static");
    }
    let static_libraries: Vec<_> = enabled.iter().map(Provider::target).collect();
    targets.extend(static_libraries.iter().map(String::as_str));
    at_once(&targets, |target| {
        // `make` takes further jobs from cargo's job server if that has spare ones.
        let mut make = Command::new(program("CMAKE", "cmake"));
        make.arg("--build").arg(build).args(["--target", &format!("{target}/fast")]);
        if let Some(flags) = env::var_os("CARGO_MAKEFLAGS") {
            make.env("MAKEFLAGS", flags);
        }
        run(&format!("compiling {target} of rdma-core"), &mut make);
    });
}

fn configure(
    root: &Path,
    source: &Path,
    out: &Path,
    enabled: &[Provider],
    python: &str,
    last_flags: &[String],
) {
    let modules = out.join("cmake");
    write(&modules.join("hook.cmake"), CMAKE_HOOK);
    write(&modules.join("FindPython.cmake"), CMAKE_PYTHON);
    let mut folders: Vec<_> = sources().map(str::to_owned).collect();
    folders.extend(enabled.iter().map(|p| format!("providers/{}", p.name)));
    if enabled.is_empty() {
        // rdma-core's CMake files fail if there is no provider; this one is not compiled.
        folders.push("providers/rxe".to_owned());
    }
    let neigh = feature("neigh");
    if !neigh {
        write(&modules.join("FindPkgConfig.cmake"), CMAKE_PKG_CONFIG);
    }
    let replacements = root.join("src/c");
    // A C++ compiler is looked for but not used: do not warn if there is none.
    let mut no_cxx = cc::Build::new();
    no_cxx.cargo_warnings(false);

    let mut config = cmake::Config::new(source);
    config
        .out_dir(out)
        .profile("Release")
        .generator("Unix Makefiles")
        .init_cxx_cfg(no_cxx)
        .cflag("-Dioctl=ibverbs_bundled_ioctl") // src/base/hooks.rs
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("LDFLAGS", "") // no program is made, but the compiler is tried with them
        .define("BUNDLED_LAST_FLAGS", last_flags.join(";"))
        .define("CMAKE_C_FLAGS_RELEASE", "-O2 -DNDEBUG") // as rdma-core means its Release to be
        .define("CMAKE_INSTALL_PREFIX", "/usr")
        .define("CMAKE_MODULE_PATH", utf8(&modules))
        .define("CMAKE_PROJECT_rdma-core_INCLUDE", utf8(&modules.join("hook.cmake")))
        .define("BUNDLED_C", utf8(&replacements))
        .define("BUNDLED_FOLDERS", folders.join(";"))
        .define("BUNDLED_INCLUDE", if neigh { "" } else { utf8(&replacements) })
        .define("PYTHON_EXECUTABLE", python)
        .define("ENABLE_STATIC", "1")
        .define("ENABLE_RESOLVE_NEIGH", if neigh { "1" } else { "0" })
        .define("ENABLE_VALGRIND", if feature("valgrind") { "1" } else { "0" })
        .define("NO_MAN_PAGES", "1")
        .define("NO_PYVERBS", "1")
        .build_target("kern-abi");
    if last_flags.iter().any(|flag| flag == MEMORY[0]) {
        // The checks would link with clang's own runtime, which need not be there.
        config.define("CMAKE_TRY_COMPILE_TARGET_TYPE", "STATIC_LIBRARY");
    }
    for (name, value) in presets() {
        config.define(name, value);
    }
    if let Err(panic) = panic::catch_unwind(panic::AssertUnwindSafe(|| config.build())) {
        exit_with_error(&format!(
            "configuring rdma-core failed, see CMake's output: {}",
            message_of(&*panic)
        ));
    }
}

/// Gives the static libraries their final form, with the tools that CMake has found.
fn finish_archives(
    source: &Path,
    out: &Path,
    build: &Path,
    enabled: &[Provider],
    abi: &str,
    prefix: &str,
) {
    let file = build.join("tools");
    let text = done(&file, fs::read_to_string(&file));
    let found = text.lines().zip(["ar", "nm", "objcopy"]).map(|(path, name)| {
        if path.is_empty() || path.ends_with("-NOTFOUND") {
            exit_with_error(&format!(
                "CMake found no {name}: apt install binutils (Debian, Ubuntu), or dnf install binutils (Fedora)"
            ));
        }
        path.to_owned()
    });
    let [ar, nm, objcopy] = <[String; 3]>::try_from(found.collect::<Vec<_>>())
        .unwrap_or_else(|_| exit_with_error(&format!("{}: {text}", file.display())));
    let tools = Tools { ar, nm, objcopy };
    let statics = build.join("lib/statics");
    let mut libraries = vec![statics.join("libibverbs.a")];
    let mut maps = Vec::new();
    if feature("rdmacm") {
        libraries.push(statics.join("librdmacm.a"));
    }
    for provider in enabled {
        libraries.push(statics.join(format!("lib{}.a", provider.archive(abi))));
    }
    if feature("plain_names") {
        maps.push(build.join("libibverbs/libibverbs.map"));
        if feature("rdmacm") {
            maps.push(source.join("librdmacm/librdmacm.map"));
        }
        for provider in enabled {
            let map = provider.map.iter();
            maps.extend(map.map(|map| source.join("providers").join(&provider.name).join(map)));
        }
    }
    let internal = [build.join("ccan/libccan.a"), build.join("util/librdma_util.a")];
    let folders = (&*out.join("tmp"), &*build.join("lib"));
    archives::finish(&tools, &libraries, &internal, &maps, prefix, folders);
}
