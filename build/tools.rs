//! Checks for the tools that the build needs, before any slow step.

use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::{env, fs, io};

use crate::common::{exit_after_errors, feature, is_set, named, program, report_error};

/// The tools that were found.
pub(crate) struct Found {
    /// The Python interpreter.
    pub(crate) python: String,
    /// The versions that the tools print.
    pub(crate) versions: String,
}

/// Why a tool is of no use.
pub(crate) enum Trouble {
    Missing,
    /// The tool is there, and prints this.
    Fails(String),
}

/// Checks for every tool that the build needs. Reports each that is missing, with the packages that contain it, and each
/// that fails, with what it says; then ends the build.
pub(crate) fn check_tools(out: &Path, documentation_only: bool, bundled: bool) -> Found {
    let mut troubles = Vec::new();
    #[cfg(feature = "bindgen")]
    if let Err(panic) = std::panic::catch_unwind(bindgen::clang_version) {
        let why = crate::common::message_of(&*panic);
        let why = format!(", or leave out the feature `bindgen`. {why}");
        troubles.push(missing("libclang is", "libclang-dev", "clang-devel", &why));
    }
    let mut found = Found { python: String::new(), versions: String::new() };
    if !documentation_only {
        if let Err(trouble) = c_compiler(out) {
            troubles.push(trouble);
        } else if bundled
            && feature("valgrind")
            && let Err(Trouble::Fails(why)) = finds(&["valgrind/memcheck.h"])
        {
            // CMake would leave the annotations out, and only mention it in its output.
            let why = format!(", for feature `valgrind`. The C compiler says: {why}");
            troubles.push(missing("valgrind/memcheck.h is", "valgrind", "valgrind-devel", &why));
        }
    }
    let mut tool = |name: &str, arguments: &[&str], debian: &str, fedora: &str| {
        let said = started(Command::new(name).args(arguments).output());
        match &said {
            Ok(said) => {
                found.versions += said.lines().next().unwrap_or_default();
                found.versions += "\n";
            }
            Err(Trouble::Missing) => {
                let variables = ["CMAKE", "PKG_CONFIG"].into_iter().filter_map(named);
                let variable = variables.into_iter().find(|(_, program)| program == name);
                let absent = || missing(&format!("`{name}` is"), debian, fedora, "");
                troubles.push(variable.map_or_else(absent, is_not_there));
            }
            Err(Trouble::Fails(why)) => troubles.push(format!("`{name}` does not work: {why}")),
        }
        said.unwrap_or_default()
    };
    if !documentation_only && (feature("neigh") || feature("system")) {
        let pkg_config = program("PKG_CONFIG", "pkg-config");
        tool(&pkg_config, &["--version"], "pkg-config", "pkgconf-pkg-config");
    }
    if bundled {
        tool(&program("CMAKE", "cmake"), &["--version"], "cmake", "cmake");
        let make = Command::new("make").arg("--version").output();
        let gmake = make.is_err_and(|e| e.kind() == ErrorKind::NotFound)
            && Command::new("gmake").arg("--version").output().is_ok();
        tool(if gmake { "gmake" } else { "make" }, &["--version"], "make", "make");
        if env::var("HOST") == env::var("TARGET") && !is_set("CMAKE_TOOLCHAIN_FILE") {
            // Without these, CMake uses the tools of the compiler, or of the file.
            for name in ["ar", "nm", "objcopy"] {
                tool(name, &["--version"], "binutils", "binutils");
            }
        }
        // Use the interpreter itself: the build starts it many times, and a wrapper such as pyenv's is
        // slow.
        let script =
            "import sys; assert sys.version_info >= (3, 2), sys.version; print(sys.executable)";
        let python = tool("python3", &["-c", script], "python3", "python3");
        found.python = python.trim().to_owned();
    }
    // A launcher may do anything when it is asked for its version.
    if bundled
        && let Some((variable, launcher)) = named("CMAKE_C_COMPILER_LAUNCHER")
        && let Some(program) = launcher.split(';').next()
        && !is_installed(program)
    {
        troubles.push(is_not_there((variable, program.to_owned())));
    }
    if bundled
        && let Some((variable, file)) = named("CMAKE_TOOLCHAIN_FILE")
        && Path::new(&file).is_absolute()
        && !Path::new(&file).is_file()
    {
        troubles.push(format!("there is no file `{file}`, which the variable {variable} names"));
    }
    if !troubles.is_empty() {
        for message in &troubles {
            report_error(message);
        }
        exit_after_errors();
    }
    found
}

/// A message about what is missing: its name, with the verb.
fn missing(what: &str, debian: &str, fedora: &str, why: &str) -> String {
    format!(
        "{what} missing: apt install {debian} (Debian, Ubuntu), or dnf install {fedora} (Fedora){why}"
    )
}

fn is_installed(program: &str) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    // To join an absolute path is to take it alone.
    program.contains('/') && Path::new(program).is_file()
        || env::split_paths(&folders).any(|folder| folder.join(program).is_file())
}

/// A message about a program that a variable names.
fn is_not_there((variable, program): (String, String)) -> String {
    format!("there is no program `{program}`, which the variable {variable} names")
}

/// Returns what a program has printed, if it ended successfully.
fn started(output: io::Result<Output>) -> Result<String, Trouble> {
    let output = output.map_err(|e| match e.kind() {
        ErrorKind::NotFound => Trouble::Missing,
        _ => Trouble::Fails(e.to_string()),
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let said = text(&output.stderr) + &text(&output.stdout);
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines().next().unwrap_or("it prints nothing");
    // Some say first where they are.
    let error = lines().find(|line| line.to_lowercase().contains("error:"));
    Err(Trouble::Fails(match error {
        Some(error) if error != first => format!("{first} .. {error} ({})", output.status),
        _ => format!("{first} ({})", output.status),
    }))
}

/// Checks that the C compiler finds the C library's headers and the kernel's, and makes objects for the target. If not,
/// returns the message.
fn c_compiler(out: &Path) -> Result<(), String> {
    let musl = env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("musl");
    let why = match finds(&["stdlib.h", "linux/types.h"]) {
        Ok(()) => return makes_objects(out),
        Err(Trouble::Missing) => {
            let absent = || match musl {
                true => missing("a C compiler for musl is", "musl-tools", "musl-gcc", ""),
                false => missing("a C compiler is", "gcc libc6-dev", "gcc glibc-devel", ""),
            };
            return Err(named("CC").map_or_else(absent, is_not_there));
        }
        Err(Trouble::Fails(why)) if finds(&[]).is_err() => {
            return Err(format!("the C compiler does not work: {why}"));
        }
        Err(Trouble::Fails(why)) => {
            makes_objects(out)?;
            format!(". The C compiler says: {why}")
        }
    };
    Err(if musl && finds(&["stdlib.h"]).is_ok() {
        missing("linux/types.h is", "linux-libc-dev", "kernel-headers", &why)
    } else if musl {
        missing("musl, the C library, is", "musl-tools", "musl-gcc", &why)
    } else {
        missing("stdlib.h, a header of the C library, is", "libc6-dev", "glibc-devel", &why)
    })
}

/// Checks that the C compiler finds these headers.
pub(crate) fn finds(headers: &[&str]) -> Result<(), Trouble> {
    let text: String = headers.iter().map(|h| format!("#include <{h}>\n")).collect();
    compiler(&["-E", "-x", "c", "-"], &text).map(drop)
}

/// Starts the C compiler with its usual flags, and gives it a text to read. Returns what it prints.
fn compiler(arguments: &[&str], text: &str) -> Result<String, Trouble> {
    let compiler = cc::Build::new().cargo_output(false).warnings(false).try_get_compiler();
    let compiler = compiler.map_err(|e| match e.to_string() {
        text if text.starts_with("ToolNotFound") => Trouble::Missing,
        text => Trouble::Fails(text),
    })?;
    let mut command = compiler.to_command();
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    started(command.spawn().and_then(|mut child| {
        if let Some(mut stdin) = child.stdin.take() {
            // If the compiler stops reading, its exit status tells why.
            let _ = stdin.write_all(text.as_bytes());
        }
        child.wait_with_output()
    }))
    .map_err(|trouble| match trouble {
        Trouble::Fails(why) => {
            let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
            let name = command.get_program().display().to_string();
            Trouble::Fails(format!("{why}: `{name} {}`", arguments.join(" ")))
        }
        missing => missing,
    })
}

/// A function, and an assertion that structures are those of the bindings: flags such as `-fpack-struct=2` change them.
const OBJECT: &str = "
enum kind { ONE };
struct pair { char one; long two; };
typedef char flags_change_the_layout_of_structures
    [sizeof(enum kind) == sizeof(int) && sizeof(struct pair) == 2 * sizeof(long) ? 1 : -1];
int f(int n) { return n + 1; }
";

/// Checks that the C compiler makes objects of the target that can be rewritten.
fn makes_objects(out: &Path) -> Result<(), String> {
    let folder = out.join("check"); // with coverage, the compiler writes more than the object
    if let Err(e) = fs::create_dir_all(&folder) {
        return Err(format!("{}: {e}", folder.display()));
    }
    let file = folder.join("check.o");
    let name = file.to_string_lossy();
    let made = compiler(&["-c", "-x", "c", "-", "-o", &name], OBJECT);
    let object = fs::read(&file).unwrap_or_default();
    let _ = fs::remove_dir_all(&folder);
    match made {
        Err(Trouble::Fails(why)) => return Err(format!("the C compiler does not work: {why}")),
        Err(Trouble::Missing) | Ok(_) => {}
    }
    let target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let bits = if target("POINTER_WIDTH") == "32" { 1 } else { 2 };
    let order = if target("ENDIAN") == "big" { 2 } else { 1 };
    let has = |word: &str| object.windows(word.len()).any(|bytes| bytes == word.as_bytes());
    let found = if !object.starts_with(b"\x7fELF") {
        "no ELF file"
    } else if object.get(4..6) != Some(&[bits, order]) {
        "an ELF file of another kind of processor"
    } else if has(".gnu.lto_") {
        "code for the linker to optimise"
    } else if ["__gcov", "llvm_gcov", "__asan", "__tsan", "mcount"].iter().any(|word| has(word)) {
        "code that calls a runtime for sanitizers, coverage or profiles"
    } else {
        return Ok(());
    };
    let variables =
        "CC, CFLAGS, their variants with the target's name, and those that the compiler reads";
    Err(format!(
        "the C compiler makes {found}, not plain objects for {}: see {variables}",
        env::var("TARGET").unwrap_or_default()
    ))
}
