//! Misuse does not compile, and each case fails only for the expected reason.
//!
//! A case is one program, `cases/NAME.rs`. A line that ends with `//~ ERROR` belongs to the mistake, one with `//~ RIGHT` to
//! its correction. The build script makes both programs of it. What the compiler says about the wrong one is in
//! `cases/NAME.stderr`; the right one compiles. This proves that the compiler rejects the mistake and nothing
//! else. To add a case, write it and run this test with `UPDATE_MISUSE=1`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

/// The right programs, as modules of this test.
#[allow(dead_code, unreachable_pub, reason = "compiling is the test")]
#[allow(clippy::undocumented_unsafe_blocks, reason = "nothing of it is ever run")]
mod right {
    include!(concat!(env!("OUT_DIR"), "/right.rs"));
}

const NAMES: &[&str] = include!(concat!(env!("OUT_DIR"), "/names.rs"));

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The wrong program of a case.
fn wrong(name: &str) -> String {
    fs::read_to_string(format!("{}/wrong/{name}.rs", env!("OUT_DIR"))).unwrap()
}

#[test]
fn every_case_is_complete_and_short() {
    let files = here("cases").read_dir().unwrap().map(|entry| entry.unwrap().file_name());
    let files: BTreeSet<_> = files.map(|name| name.into_string().unwrap()).collect();
    let named = NAMES.iter().flat_map(|name| [format!("{name}.rs"), format!("{name}.stderr")]);
    assert_eq!(files, named.collect());
    for name in NAMES {
        let wrong = wrong(name);
        let lines = wrong.lines().filter(|line| !line.starts_with("use "));
        assert!(lines.count() <= 14, "{name} is too long, imports not counted");
        let case = fs::read_to_string(here(&format!("cases/{name}.rs"))).unwrap();
        assert!(case.contains("//~ "), "{name}: both programs are the same");
        let said = fs::read_to_string(here(&format!("cases/{name}.stderr"))).unwrap();
        // The compiler may say several things of one place: each trait that a type lacks, for one.
        let places: BTreeSet<_> = said
            .split("\nerror")
            .map(|error| error.lines().find(|line| line.trim_start().starts_with("--> ")))
            .collect();
        assert_eq!(places.len(), 1, "{name} fails for more than one reason: {places:?}");
    }
}

/// Takes out of what the compiler says all that depends on the machine or on lines of other files.
fn normal(said: &str) -> String {
    let root = here("../..").canonicalize().unwrap().display().to_string();
    let arrow = said.lines().find_map(|line| line.find("--> ")).unwrap_or_default();
    let (mut kept, mut is_elsewhere) = (String::new(), false);
    for line in said.trim_end().lines() {
        let text = line.trim_start();
        if let Some(place) = text.strip_prefix("--> ").or_else(|| text.strip_prefix("::: ")) {
            is_elsewhere = !place.starts_with("src/");
            let file = place.split(':').next().unwrap().replace(&root, "$WORKSPACE");
            let after = |folder| file.split_once(folder).map(|(_, rest)| rest);
            let shown = match (after("/library/"), after("/out/")) {
                _ if !is_elsewhere => place.to_owned(),
                (Some(rest), _) => format!("$RUST/{rest}"),
                (_, Some(rest)) => format!("$OUT_DIR/{rest}"),
                _ => file.clone(),
            };
            kept += &format!("   {} {shown}\n", &text[..3]);
            continue;
        }
        let (number, rest) =
            text.split_at(text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len());
        let rest = rest.trim_start();
        let is_source = rest.starts_with('|') || rest.starts_with("...");
        if is_elsewhere && is_source {
            continue;
        }
        // The widest number of a line moves all others.
        kept += match line.get(arrow..) {
            _ if is_source => format!("{number:>3} {rest}"),
            Some(rest) if line[..arrow].trim().is_empty() => format!("   {rest}"),
            _ => line.to_owned(),
        }
        .trim_end();
        kept.push('\n');
    }
    kept
}

#[test]
fn misuse_does_not_compile() {
    // One crate has all wrong programs as modules: no error of one hides those of another, since all are of types and
    // borrows. As on docs.rs, the headers of rdma-core are enough. Nothing is fetched.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("misuse");
    let _ = fs::remove_dir_all(folder.join("src"));
    fs::create_dir_all(folder.join("src")).unwrap();
    let manifest = format!(
        "[package]\nname = \"cases\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
         ibverbs-bundled = {{ path = {:?}, default-features = false, features = [\"async\", \"mlx5\", \"rdmacm\"] }}\n\
         ibverbs-rails = {{ path = {:?}, default-features = false }}\n\
         ibverbs-software = {{ path = {:?} }}\n\
         ibverbs-stream = {{ path = {:?}, default-features = false }}\n\
         zerocopy = {{ version = \"0.8.14\", features = [\"derive\"] }}\n",
        here("../..").canonicalize().unwrap(),
        here("../../rails").canonicalize().unwrap(),
        here("../../software").canonicalize().unwrap(),
        here("../../stream").canonicalize().unwrap()
    );
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::copy(here("../../Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let mut modules = "#![allow(warnings)]\n".to_owned();
    for name in NAMES {
        fs::write(folder.join(format!("src/{name}.rs")), wrong(name)).unwrap();
        modules += &format!("pub mod {name};\n");
    }
    fs::write(folder.join("src/lib.rs"), modules).unwrap();
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["check", "--offline", "--message-format=json", "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(folder.with_file_name("checked")) // as in tests/public_traits: it has the same dependencies
        .env("DOCS_RS", "1")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .expect("cargo starts");
    let mut said = BTreeMap::<String, String>::new();
    for line in String::from_utf8(output.stdout).expect("it is UTF-8").lines() {
        let line: Value = serde_json::from_str(line).expect("it is JSON");
        let message = &line["message"];
        let Some(rendered) = message["rendered"].as_str() else { continue };
        // A summary has no place, and what a macro brings begins in the macro's own file.
        let mut places = rendered.split(['>', ':']).filter_map(|text| text.strip_prefix(" src/"));
        let Some(name) = places.find_map(|place| place.strip_suffix(".rs")) else { continue };
        let text = said.entry(name.to_owned()).or_default();
        if !text.is_empty() {
            text.push('\n');
        }
        *text += &normal(rendered);
    }
    assert!(!said.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let is_update = env::var_os("UPDATE_MISUSE").is_some();
    let mut others = Vec::new();
    for name in NAMES {
        let path = here(&format!("cases/{name}.stderr"));
        let found = said.remove(*name).unwrap_or_default();
        if is_update {
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        if found.is_empty() {
            others.push(format!("{name} compiles"));
        } else if found != expected {
            others.push(format!("{name}: the compiler says\n{found}\nand not\n{expected}"));
        }
    }
    others.extend(said.into_iter().map(|(name, text)| format!("{name} is no case:\n{text}")));
    assert!(others.is_empty(), "{}", others.join("\n"));
}
