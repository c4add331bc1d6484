//! Makes a stand-in for another static libibverbs, for the test `three`: it has every name that rdma-core's libraries have, public
//! ones as they are, and internal ones with the prefix that rdma-core's own build gives them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(machine_has_libibverbs)");
    let said = |name: &str| env::var(format!("DEP_IBVERBS_BUNDLED_{name}")).unwrap_or_default();
    let prefix = said("SYMBOL_PREFIX");
    if prefix.is_empty() {
        return; // the documentation alone
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let symbols = Path::new(&said("INCLUDE")).join("infiniband/ibverbs_bundled_symbols.h");
    let symbols = fs::read_to_string(symbols).expect("the crate's build has written it");
    let public: Vec<_> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let mut names: Vec<_> = public.iter().map(|&name| name.to_owned()).collect();

    for archive in
        fs::read_dir(Path::new(&said("BUILD")).join("lib")).expect("it is built").flatten()
    {
        if archive.path().extension().is_none_or(|extension| extension != "a") {
            continue;
        }
        let output = Command::new("nm").arg("--defined-only").arg(archive.path()).output();
        let output = output.expect("binutils has nm");
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let [_, kind, symbol] = line.split_whitespace().collect::<Vec<_>>()[..] else {
                continue;
            };
            let name = symbol.trim_start_matches(&prefix);
            if kind.chars().all(char::is_uppercase) && !public.contains(&name) {
                let theirs = format!("rdmacore{}", prefix.trim_start_matches("ibverbs_bundled_"));
                let provider = name.starts_with("verbs_provider_");
                names.push(if provider { name.to_owned() } else { format!("{theirs}{name}") });
            }
        }
    }
    names.sort();
    names.dedup();
    let mut text = String::new();
    for name in &names {
        let result = if name == "ibv_wc_status_str" { "\"the stand-in\"" } else { "\"\"" };
        text += &format!(
            "const char *{name}(void);\nconst char *{name}(void) {{ return {result}; }}\n"
        );
    }
    let file = out.join("stand_in.c");
    fs::write(&file, text).expect("OUT_DIR is writable");
    // As a static library is built that minds others.
    let mut c = cc::Build::new();
    c.cargo_metadata(false).flag("-fvisibility=hidden").file(&file).compile("stand_in");
    let archive = out.join("libstand_in.a");
    let archive = archive.display();
    println!("cargo::rustc-link-arg-tests=-Wl,--whole-archive,{archive},--no-whole-archive");

    let mut link = cc::Build::new().get_compiler().to_command();
    link.args(["-shared", "-o"]).arg(out.join("nothing.so")).args([
        "-x",
        "c",
        "/dev/null",
        "-libverbs",
    ]);
    if link.output().is_ok_and(|output| output.status.success()) {
        println!("cargo::rustc-cfg=machine_has_libibverbs");
        println!("cargo::rustc-link-arg-tests=-Wl,--no-as-needed,-libverbs,--as-needed");
    }
}
