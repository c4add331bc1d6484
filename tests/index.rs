//! The index of the documentation's first page names every public item once.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(name)).unwrap()
}

/// What `lib.rs` makes public: the names of each `pub use`, and the public module.
fn exported(lib: &str) -> Vec<&str> {
    let uses = lib.split("\npub use ").skip(1).map(|rest| rest.split_once(';').expect("its end").0);
    let names = uses.flat_map(|tree| match tree.split_once('{') {
        Some((_, list)) => list.trim_end_matches(['}', '\n']).split(',').collect::<Vec<_>>(),
        None => vec![tree.rsplit("::").next().expect("a path")],
    });
    names.map(str::trim).filter(|name| !name.is_empty()).chain(["ffi"]).collect()
}

#[test]
fn it_names_every_public_item_once() {
    let (lib, index) = (read("lib.rs"), read("index.md"));
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, rest) in index.match_indices("[`").map(|(at, _)| index.split_at(at + 2)) {
        *times.entry(rest.split_once("`]").expect("a link").0).or_default() += 1;
    }
    let exported = exported(&lib);
    assert!(exported.len() > 200, "{exported:?}");
    let missing: Vec<_> = exported.iter().filter(|name| !times.contains_key(*name)).collect();
    let unknown: Vec<_> = times.keys().filter(|name| !exported.contains(name)).collect();
    let double: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
    assert!(
        missing.is_empty() && unknown.is_empty() && double.is_empty(),
        "missing: {missing:?}\nunknown: {unknown:?}\nmore than once: {double:?}"
    );
}
