//! Flags for the C compiler, whatever the environment says.
//!
//! The build rewrites rdma-core's objects (`archives.rs`), and rustc links them. So they are plain objects: without code for
//! the linker to optimise, and without calls of a runtime for sanitizers, coverage or profiles that rustc may not link.

use std::env;

use crate::common::{exit_after_errors, of_target, report_error};

/// The environment variable with flags that come after all others.
const OWN: &str = "IBVERBS_CFLAGS";

/// These flags come after those of the environment, and undo them. No program and no shared library exports a hidden symbol.
/// The system's libibverbs would otherwise call functions of this one in a program that exports all it has (`-rdynamic`),
/// because the names are the same.
const LAST: &[&str] = &[
    "-fvisibility=hidden",
    "-fPIC",
    "-fno-lto",
    "-fno-sanitize=all",
    "-fno-profile-generate",
    "-fno-profile-arcs",
    "-fno-test-coverage",
    "-fno-split-stack",
    "-fno-short-enums",
    "-std=gnu11",
];
const LAST_GCC: &[&str] = &["-fno-whole-program", "-fno-sanitize-coverage=trace-pc,trace-cmp"];
const LAST_CLANG: &[&str] = &[
    "-fno-profile-instr-generate",
    "-fno-coverage-mapping",
    "-fno-sanitize-coverage=func,bb,edge,trace-pc,trace-pc-guard,inline-8bit-counters",
    "-fno-xray-instrument",
];

/// With `-Zsanitizer=memory`, the one sanitizer to which code that is not instrumented looks wrong. Rust passes parameters so.
pub(crate) const MEMORY: &[&str] = &["-fsanitize=memory", "-fsanitize-memory-param-retval"];

/// Flags that no other flag undoes, whatever stands behind an equals sign: clang links a runtime for these, which need not be there,
/// to the programs by which CMake tries it.
const TAKEN_OUT: &[&str] = &[
    "--coverage",
    "-coverage",
    "-fcs-profile-generate",
    "-fembed-bitcode",
    "-finstrument-functions",
    "-fprofile-generate",
    "-fprofile-instr-generate",
    "-fsanitize",
    "-p",
    "-pg",
];

/// Changes this process's variables so that the crate `cc` takes these flags. Returns those that come last.
///
/// It is called before any thread is started.
pub(crate) fn settle() -> Vec<String> {
    println!("cargo::rerun-if-env-changed={OWN}");
    let [last_read, ..] = of_target("CFLAGS");
    for name in ["CC", "CFLAGS"] {
        for name in of_target(name) {
            let Ok(value) = env::var(&name) else { continue };
            let is_kept =
                |word: &&str| !word.split('=').next().is_some_and(|flag| TAKEN_OUT.contains(&flag));
            let kept: Vec<_> = value.split_ascii_whitespace().filter(is_kept).collect();
            let kept = kept.join(" ");
            // SAFETY: this is the only thread.
            unsafe { env::set_var(name, kept) };
        }
    }
    // Without a compiler, the check for tools says so.
    let Ok(compiler) = cc::Build::new().cargo_output(false).try_get_compiler() else {
        return Vec::new();
    };
    let own = env::var(OWN).unwrap_or_default();
    let sanitizers = env::var("CARGO_CFG_SANITIZE").unwrap_or_default();
    let memory = sanitizers.split(',').any(|name| name == "memory");
    if memory && !compiler.is_like_clang() {
        report_error(
            "-Zsanitizer=memory takes all that plain C writes for undefined: set CC=clang, which compiles rdma-core \
             for MemorySanitizer too",
        );
        exit_after_errors();
    }
    let last: Vec<_> = LAST
        .iter()
        .chain(if compiler.is_like_clang() { LAST_CLANG } else { LAST_GCC })
        .chain(if memory { MEMORY } else { &[] })
        .copied()
        .chain(own.split_whitespace())
        .map(str::to_owned)
        .collect();
    let given = env::var(&last_read).unwrap_or_default();
    // SAFETY: this is the only thread.
    unsafe { env::set_var(last_read, format!("{given} {}", last.join(" "))) };
    last
}
