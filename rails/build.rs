//! Ends a build for a system without epoll with one line. `ibverbs-bundled` compiles there, for editors; this crate does not.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let system = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    if system != "linux" {
        println!(
            "cargo::error=ibverbs-rails is for Linux only, and does not compile for {system}: name it in the manifest under \
             [target.'cfg(target_os = \"linux\")'.dependencies]"
        );
    }
}
