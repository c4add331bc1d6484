//! Compiles the contenders written in C, by clang where there is one, else by the default compiler.

use std::env;
use std::path::Path;
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=callgrind.c");
    println!("cargo::rerun-if-changed=contenders.c");
    println!("cargo::rerun-if-changed=contenders.h");
    println!("cargo::rerun-if-changed=memory.c");
    println!("cargo::rerun-if-changed=rails.c");
    println!("cargo::rerun-if-changed=rpc.c");
    println!("cargo::rerun-if-changed=senders.c");
    println!("cargo::rerun-if-changed=server.c");
    println!("cargo::rerun-if-env-changed=OVERHEAD_CC");
    let Some(include) = env::var_os("DEP_IBVERBS_BUNDLED_INCLUDE") else {
        println!("cargo::error=ibverbs-bundled did not say where its headers are");
        exit(1);
    };
    let compiler = env::var("OVERHEAD_CC").unwrap_or_else(|_| {
        let clang = Command::new("clang").arg("--version").output();
        if clang.is_ok_and(|output| output.status.success()) { "clang" } else { "cc" }.to_owned()
    });
    let version = Command::new(&compiler).arg("--version").output();
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let version = version.unwrap_or_default();
    println!("cargo::rustc-env=OVERHEAD_CC={}", version.lines().next().unwrap_or(&compiler));
    cc::Build::new()
        .compiler(Path::new(&compiler))
        .file("callgrind.c")
        .file("contenders.c")
        .file("memory.c")
        .file("rails.c")
        .file("rpc.c")
        .file("senders.c")
        .file("server.c")
        .include(include)
        .opt_level(2)
        .force_frame_pointer(false)
        .std("gnu11")
        .warnings(true)
        .warnings_into_errors(true)
        .compile("contenders");
}
