//! What every step of the build uses: messages, the environment, files, commands.

use std::any::Any;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// Ends the build with one readable message, below which cargo shows the output so far.
pub(crate) fn fail(message: &str) -> ! {
    complain(message);
    exit(1)
}

/// Ends the build after complaints that say it all: to a script that succeeds, cargo adds nothing.
pub(crate) fn refuse() -> ! {
    exit(0)
}

pub(crate) fn complain(message: &str) {
    println!("cargo::error={}", message.trim().replace('\n', " "));
}

pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "unknown panic".to_owned())
}

/// A variable that cargo sets, as a path.
pub(crate) fn variable(name: &str) -> PathBuf {
    match env::var_os(name) {
        Some(value) => value.into(),
        None => fail(&format!("{name} is not set: run this through cargo")),
    }
}

pub(crate) fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some()
}

/// A program that a variable of the environment may name.
pub(crate) fn program(variable: &str, default: &str) -> String {
    env::var(variable).ok().filter(|v| !v.is_empty()).unwrap_or_else(|| default.to_owned())
}

pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) {
    let parent = path.parent().unwrap_or(path);
    if let Err(e) = fs::create_dir_all(parent).and_then(|()| fs::write(path, contents)) {
        fail(&format!("{}: {e}", path.display()));
    }
}

/// What bindgen, and make in its rules, can take.
pub(crate) fn utf8(path: &Path) -> &str {
    path.to_str().unwrap_or_else(|| fail(&format!("{}: the path is not UTF-8", path.display())))
}

pub(crate) fn run(what: &str, command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{what} failed ({status}), see the output: {command:?}")),
        Err(e) => fail(&format!("{what}: cannot start {:?}: {e}", command.get_program())),
    }
}

pub(crate) fn compile(build: &mut cc::Build, archive: &str) {
    if let Err(e) = build.warnings(false).try_compile(archive) {
        fail(&format!("compiling {archive}: {e}"));
    }
}
