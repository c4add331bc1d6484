//! Checks for the tools that the build needs, before any slow step.

use std::env;
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::common::{exit_after_errors, feature, program, report_error};

/// Checks for every tool that the build needs. If the machine lacks any, reports each with the packages
/// that contain it, and ends the build. Returns the Python interpreter.
pub(crate) fn check_tools(documentation_only: bool, bundled: bool) -> String {
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

    #[cfg(feature = "bindgen")]
    if let Err(panic) = std::panic::catch_unwind(bindgen::clang_version) {
        let why = crate::common::message_of(&*panic);
        let why = format!(", or leave out the feature `bindgen`. {why}");
        lacks("libclang", "libclang-dev", "clang-devel", &why);
    }
    let mut python = String::new();
    if !documentation_only {
        let musl = env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("musl");
        if let (true, Ok(()), Err(_)) = (musl, finds(&["stdlib.h"]), finds(&["linux/types.h"])) {
            // A compiler and musl's own headers are there.
            lacks("linux/types.h", "linux-libc-dev", "kernel-headers", "");
        } else if let (true, Err(why)) = (musl, c_compiler()) {
            let why = format!(". {why}");
            lacks("a C compiler for musl", "musl-tools", "musl-gcc", &why);
        } else if let Err(why) = c_compiler() {
            lacks("a C compiler", "gcc libc6-dev", "gcc glibc-devel", &format!(". {why}"));
        } else if bundled && feature("valgrind") && finds(&["valgrind/memcheck.h"]).is_err() {
            // CMake would leave the annotations out, and only mention it in its output.
            lacks("valgrind/memcheck.h", "valgrind", "valgrind-devel", ", for feature `valgrind`");
        }
        let pkg_config = program("PKG_CONFIG", "pkg-config");
        if (feature("neigh") || feature("system")) && !starts(&pkg_config) {
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
            // Cross compilation uses the tools of the compiler, which CMake finds.
            if !cross && !starts(name) {
                lacks(&format!("`{name}`"), "binutils", "binutils", "");
            }
        }
        // Use the interpreter itself: the build starts it many times, and a wrapper such as pyenv's is
        // slow.
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
            report_error(message);
        }
        exit_after_errors();
    }
    python
}

/// Checks that there are a C compiler and the C library's headers; if not, returns the reason.
fn c_compiler() -> Result<(), String> {
    match finds(&["stdlib.h", "linux/types.h"]) {
        Ok(()) => Ok(()),
        Err(Some(why)) => Err(why),
        Err(None) => Err("The one there does not find the C library's headers".to_owned()),
    }
}

/// Checks that the C compiler finds these headers. If there is no compiler, the error has the reason.
pub(crate) fn finds(headers: &[&str]) -> Result<(), Option<String>> {
    let compiler = cc::Build::new().cargo_output(false).try_get_compiler();
    let compiler = compiler.map_err(|e| Some(e.to_string()))?;
    let name = compiler.path().display();
    let mut child = compiler
        .to_command()
        .args(["-E", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| Some(format!("`{name}`: {e}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        let text: String = headers.iter().map(|h| format!("#include <{h}>\n")).collect();
        // If the compiler stops reading, its exit status tells why.
        let _ = stdin.write_all(text.as_bytes());
    }
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(None),
    }
}
