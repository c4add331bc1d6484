//! Helpers for all build steps: error messages, environment variables, files, commands.

use std::any::Any;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Mutex;

/// Reports an error and ends the build. Below it, cargo shows the output that the script has printed so
/// far.
pub(crate) fn exit_with_error(message: &str) -> ! {
    report_error(message);
    exit(1)
}

/// Ends the build after [`report_error`], with exit status 0: cargo still fails the build, but shows
/// only the reported errors, without the output of the script.
pub(crate) fn exit_after_errors() -> ! {
    exit(0)
}

/// Reports an error, which fails the build once the script ends.
pub(crate) fn report_error(message: &str) {
    println!("cargo::error={}", message.trim().replace('\n', " "));
}

pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "unknown panic".to_owned())
}

/// An environment variable that cargo sets, as a path.
pub(crate) fn variable(name: &str) -> PathBuf {
    match env::var_os(name) {
        Some(value) => value.into(),
        None => exit_with_error(&format!("{name} is not set: run this through cargo")),
    }
}

pub(crate) fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", name.to_uppercase())).is_some()
}

/// The environment variables that the crates `cc`, `cmake` and `pkg-config` read for one: of the target first.
pub(crate) fn of_target(name: &str) -> [String; 4] {
    let target = env::var("TARGET").unwrap_or_default();
    let kind = if env::var("HOST").as_ref() == Ok(&target) { "HOST" } else { "TARGET" };
    [
        format!("{name}_{target}"),
        format!("{name}_{}", target.replace(['-', '.'], "_")),
        format!("{kind}_{name}"),
        name.to_owned(),
    ]
}

/// Whether one of these variables is set.
pub(crate) fn is_set(name: &str) -> bool {
    of_target(name).iter().any(|name| env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// The program that an environment variable names, or `default` if it is not set.
pub(crate) fn program(variable: &str, default: &str) -> String {
    named(variable).map_or_else(|| default.to_owned(), |(_, program)| program)
}

/// The variable, or its variant for the target, that names a program, and what it names.
pub(crate) fn named(variable: &str) -> Option<(String, String)> {
    let variants = of_target(variable).into_iter();
    let mut set = variants.filter_map(|name| env::var(&name).ok().map(|value| (name, value)));
    set.find(|(_, value)| !value.is_empty())
}

/// Returns the result of an operation on a file or folder. An error ends the build.
pub(crate) fn done<T>(path: &Path, result: io::Result<T>) -> T {
    result.unwrap_or_else(|e| exit_with_error(&format!("{}: {e}", path.display())))
}

pub(crate) fn write(path: &Path, contents: impl AsRef<[u8]>) {
    let parent = path.parent().unwrap_or(path);
    done(path, fs::create_dir_all(parent).and_then(|()| fs::write(path, contents)));
}

/// The path as text, because bindgen and make rules accept nothing else.
pub(crate) fn utf8(path: &Path) -> &str {
    path.to_str()
        .unwrap_or_else(|| exit_with_error(&format!("{}: the path is not UTF-8", path.display())))
}

/// Calls `job` for each item, for as many at once as cargo allows.
pub(crate) fn at_once<T: Sync>(items: &[T], job: impl Fn(&T) + Sync) {
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let queue = Mutex::new(items.iter());
    let next = || queue.lock().ok().and_then(|mut queue| queue.next());
    std::thread::scope(|scope| {
        for _ in 0..items.len().min(jobs) {
            scope.spawn(|| {
                while let Some(item) = next() {
                    job(item);
                }
            });
        }
    });
}

pub(crate) fn run(what: &str, command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            exit_with_error(&format!("{what} failed ({status}), see the output: {command:?}"))
        }
        Err(e) => {
            exit_with_error(&format!("{what}: cannot start {:?}: {e}", command.get_program()))
        }
    }
}

pub(crate) fn compile(build: &mut cc::Build, archive: &str) {
    if let Err(e) = build.warnings(false).try_compile(archive) {
        exit_with_error(&format!("compiling {archive}: {e}"));
    }
}
