//! Misuse does not compile, and each case fails only for the expected reason.
//!
//! A case is one program, `cases/NAME.rs`. A line that ends with `//~ ERROR` belongs to the mistake, one with `//~ RIGHT` to
//! its correction. The build script makes both programs of it. What the compiler says about the wrong one is in
//! `cases/NAME.stderr`; the right one compiles. This proves that the compiler rejects the mistake and nothing
//! else. To add a case, write it and run this test with `TRYBUILD=overwrite`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

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

#[test]
fn misuse_does_not_compile() {
    // Nothing is linked: as on docs.rs, the headers of rdma-core are enough. Nothing is fetched.
    // SAFETY: the other test reads no variable.
    unsafe {
        std::env::set_var("DOCS_RS", "1");
        std::env::set_var("CARGO_NET_OFFLINE", "true");
    }
    // The messages name the program's path, so it is the same wherever cargo builds.
    let programs = here("target");
    let _ = fs::remove_dir_all(&programs);
    fs::create_dir_all(&programs).unwrap();
    for name in NAMES {
        fs::write(programs.join(format!("{name}.rs")), wrong(name)).unwrap();
        if let Ok(said) = fs::read(here(&format!("cases/{name}.stderr"))) {
            fs::write(programs.join(format!("{name}.stderr")), said).unwrap();
        }
    }
    let only = std::env::var("IBVERBS_MISUSE").unwrap_or_default();
    let cases = trybuild::TestCases::new();
    cases.compile_fail(format!("target/{only}*.rs"));
    drop(cases); // runs them
    if std::env::var("TRYBUILD").is_ok_and(|mode| mode == "overwrite") {
        for name in NAMES {
            let said = format!("{name}.stderr");
            fs::copy(programs.join(&said), here("cases").join(&said)).unwrap();
        }
    }
}
