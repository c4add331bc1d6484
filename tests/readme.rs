//! README and the design agree with the repository.

use std::fs;
use std::path::Path;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The content of the first block of code in this language.
fn block<'a>(text: &'a str, language: &str) -> &'a str {
    let start = format!("```{language}\n");
    let (_, rest) = text.split_once(&start).expect("a block of code");
    rest.split_once("```").expect("its end").0
}

#[test]
fn its_program_is_the_example_and_short() {
    let readme = read("README.md");
    let program = block(&readme, "rust");
    assert_eq!(program, read("examples/hello.rs"), "that is what is compiled and run");
    assert!(program.lines().count() <= 26, "{} lines", program.lines().count());
}

/// The README's second program is one of the guide, whose programs are compiled.
#[test]
fn its_program_that_leaves_its_function_is_that_of_the_guide() {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("```rust\n").expect("the first program");
    assert!(read("src/guide/lifetimes.md").contains(block(rest, "rust")));
}

#[test]
fn it_is_short() {
    assert!(read("README.md").lines().count() <= 150);
}

#[test]
fn it_leads_with_the_two_commands() {
    let readme = read("README.md");
    let commands: Vec<_> =
        readme.lines().filter_map(|line| line.strip_prefix("    script/")).collect();
    assert_eq!(commands[..2], ["demo", "test"]);
    let position = |text: &str| readme.find(text).expect(text);
    assert!(position("    script/test\n") < position("```rust"));
}

#[test]
fn it_names_the_version_of_rust_and_building_every_feature() {
    let (readme, building) = (read("README.md"), read("docs/building.md"));
    let manifest = read("Cargo.toml");
    let section = manifest.split_once("\n[features]\n").expect("features").1;
    let section = section.split_once("\n[").expect("what follows").0;
    let lines = section.lines().filter(|line| !line.starts_with(['#', ' ']));
    let features: Vec<_> =
        lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name).collect();
    assert!(features.len() > 15, "{features:?}");
    for feature in features.into_iter().filter(|&feature| feature != "default") {
        assert!(building.contains(&format!("`{feature}`")), "{feature}");
    }
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let version = version.expect("rust-version").trim_matches('"');
    assert!(readme.contains(&format!("Rust {version} or later")), "{version}");
}

#[test]
fn what_it_links_to_is_there() {
    let readme = read("README.md");
    let links: Vec<_> = readme
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(to, _)| to)
        .collect();
    assert!(links.len() > 4, "{links:?}");
    for link in links.into_iter().filter(|link| !link.starts_with("https://")) {
        let (file, _) = link.split_once('#').unwrap_or((link, ""));
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(file).exists(), "{link}");
    }
}

#[test]
fn the_files_that_the_design_names_are_there() {
    let design = read("docs/design.md");
    let is_path = |name: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
        name.ends_with(".rs") && name.chars().all(plain)
    };
    let names: Vec<_> = design.split('`').skip(1).step_by(2).filter(is_path).collect();
    assert!(names.len() > 50, "{names:?}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // Without the room, too.
    let places = ["", "src", "src/base", "src/verbs", "src/connect", "src/serve"];
    for name in names {
        assert!(places.iter().any(|place| root.join(place).join(name).exists()), "{name}");
    }
}
