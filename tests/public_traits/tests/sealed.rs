//! Lists the public traits from the sources. Unsafe code trusts what they return, so each is sealed, or an `unsafe trait`, or
//! hostile implementations of it are tested. A new trait fails here until one of these holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A trait of a source file: whether it is unsafe, and how many type parameters it has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trait {
    is_unsafe: bool,
    parameters: usize,
    /// The names of its associated types.
    types: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The traits at the outermost level of a file. Those within modules there (`mod sealed`) are what seals others.
fn traits_of(source: &str) -> Vec<(String, Trait)> {
    let mut found = Vec::new();
    for (number, line) in source.lines().enumerate() {
        let is_unsafe = line.starts_with("pub unsafe trait ");
        let Some(rest) =
            line.strip_prefix("pub trait ").or_else(|| line.strip_prefix("pub unsafe trait "))
        else {
            continue;
        };
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let parameters = match rest[end..].strip_prefix('<') {
            // No parameter of ours has parameters of its own.
            Some(list) => list[..list.find('>').expect("it is closed")]
                .split(',')
                .filter(|one| !one.contains('\''))
                .count(),
            None => 0,
        };
        let body = source.lines().skip(number).take_while(|line| *line != "}");
        let types = body.filter_map(|line| line.strip_prefix("    type "));
        let name_of = |rest: &str| {
            rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
        };
        let types = if line.ends_with('}') { Vec::new() } else { types.map(name_of).collect() };
        found.push((rest[..end].to_owned(), Trait { is_unsafe, parameters, types }));
    }
    found
}

fn all_traits() -> BTreeMap<String, Trait> {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let mut traits = BTreeMap::new();
    for file in files {
        for (name, found) in traits_of(&fs::read_to_string(file).expect("it is UTF-8")) {
            assert_eq!(traits.insert(name.clone(), found), None, "two traits are called {name}");
        }
    }
    traits
}

/// The modules that a program can name, and those within them: those of lib.rs, and those of rooms that it exports.
fn modules() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(root().join("src").join(path)).unwrap_or_default();
    let within = |source: &str| -> Vec<String> {
        let names = source.lines().filter_map(|line| line.strip_prefix("pub mod "));
        names.map(|rest| rest.trim_end_matches([';', '{', ' ']).to_owned()).collect()
    };
    let lib = read("lib.rs");
    let mut all: Vec<_> = within(&lib).into_iter().map(|name| (String::new(), name)).collect();
    for exported in lib.split("\npub use ").skip(1) {
        let exported = exported.split(';').next().unwrap_or_default();
        let Some((room, names)) = exported.split_once("::") else { continue };
        for name in names.trim_matches(['{', '}', '\n', ' ']).split(',').map(str::trim) {
            let name = name.split("::").next().unwrap_or_default().trim();
            if !name.is_empty()
                && ["mod.rs", ".rs"].iter().any(|end| {
                    let folder = root().join("src").join(room);
                    folder.join(name).join(end).exists()
                        || folder.join(format!("{name}{end}")).exists()
                })
            {
                all.push((room.to_owned(), name.to_owned()));
            }
        }
    }
    all.retain(|(_, name)| !matches!(name.as_str(), "ffi" | "harness" | "provider"));
    assert!(all.len() > 12, "{all:?}");
    let inner = |(room, name): &(String, String)| {
        let inner = within(&read(&format!("{room}/{name}/mod.rs")));
        let inner = inner.into_iter().map(|inner| format!("{name}::{inner}"));
        [name.clone()].into_iter().chain(inner).collect::<Vec<_>>()
    };
    all.iter().flat_map(inner).collect()
}

/// The ways to implement a trait: for a type of the program's, and for one of the crate's, if a parameter is the program's.
fn attempts(name: &str, of: &Trait) -> Vec<String> {
    let unsafety = if of.is_unsafe { "unsafe " } else { "" };
    let with = |parameter: &str| match of.parameters {
        0 => String::new(),
        count => format!("<{}>", vec![parameter; count].join(", ")),
    };
    let mut all = vec![format!("{unsafety}impl {name}{} for Mine {{}}", with("Mine"))];
    if of.parameters > 0 {
        all.push(format!("{unsafety}impl {name}{} for Mine {{}}", with("Rc")));
        all.push(format!("{unsafety}impl {name}{} for Mine {{}}", with("PooledBuffer")));
        for theirs in ["Rc", "Ud", "PooledBuffer", "AnyBuffer", "SendWorkRequest<()>"] {
            all.push(format!("{unsafety}impl {name}{} for {theirs} {{}}", with("Mine")));
        }
    }
    all
}

/// The attempt for a buffer of the program's, which has the open traits that others build on.
fn attempt_for_a_buffer(name: &str, of: &Trait) -> String {
    let parameters = vec!["Buffer"; of.parameters].join(", ");
    let parameters = if parameters.is_empty() { parameters } else { format!("<{parameters}>") };
    format!("impl {name}{parameters} for Buffer {{}}")
}

/// A buffer of the program's.
const BUFFER: &str = "
#[derive(Clone, Copy, Debug)]
pub struct Buffer;
unsafe impl ibverbs::memory::GatherBuffer for Buffer {
    type List = [ibverbs::ffi::ibv_sge; 0];
    type Kept = Self;
    fn gather(&self) -> ibverbs::Result<Self::List> { Ok([]) }
}
unsafe impl ibverbs::memory::ScatterBuffer for Buffer {
    fn scatter(&mut self) -> ibverbs::Result<Self::List> { Ok([]) }
}
unsafe impl ibverbs::memory::BorrowedBuffer for Buffer {}
unsafe impl ibverbs::channel::OwnedBuffer for Buffer {}
#[macro_export]
macro_rules! stream {
    () => {
        impl std::io::Read for Mine {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> { Ok(0) }
        }
        impl std::io::Write for Mine {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> { Ok(0) }
            fn flush(&mut self) -> std::io::Result<()> { Ok(()) }
        }
    };
}

";

/// Compiles each of these lines apart from the others, and returns the codes of its errors.
fn compile(lines: &[String]) -> Vec<BTreeSet<String>> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("public_traits");
    fs::create_dir_all(folder.join("src")).expect("it can be made");
    let manifest = format!(
        "[package]\nname = \"attempts\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n[dependencies]\n\
         ibverbs-bundled = {{ path = {:?}, default-features = false, features = [\"async\", \"mlx5\", \"rdmacm\"] }}\n\
         zerocopy = {{ version = \"0.8.14\", features = [\"derive\"] }}\n",
        root().canonicalize().expect("it is there")
    );
    fs::write(folder.join("Cargo.toml"), manifest).expect("it can be written");
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).expect("it can be copied");
    let globs =
        modules().iter().map(|name| format!("use ibverbs::{name}::*;\n")).collect::<String>();
    let mut program =
        String::from("#![allow(unused_imports, ambiguous_glob_reexports)]\nfn main() {}\n");
    program += BUFFER;
    for (number, line) in lines.iter().enumerate() {
        let number = number + 1;
        program += &format!(
            "mod attempt_{number} {{\n#[derive(Clone, Copy, Debug)]\npub struct Mine;\ncrate::stream!();\npub use super::Buffer;\nuse ibverbs::*;\n{globs}{line} // {number}\n}}\n"
        );
    }
    fs::write(folder.join("src/main.rs"), &program).expect("it can be written");
    // Nothing is linked: as on docs.rs, the headers of rdma-core are enough. Nothing is fetched.
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["check", "--offline", "--message-format=short", "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(folder.with_file_name("checked")) // as in tests/misuse: it has the same dependencies
        .env("DOCS_RS", "1")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .expect("cargo starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("src/main.rs:") || output.status.success(), "{said}");
    let mut codes = vec![BTreeSet::new(); lines.len()];
    for message in said.lines().filter_map(|line| line.strip_prefix("src/main.rs:")) {
        let mut parts = message.splitn(3, ':');
        let at: usize = parts.next().and_then(|at| at.parse().ok()).expect("the number of a line");
        let Some(text) = parts.nth(1) else { continue };
        let Some(code) = text.trim().strip_prefix("error[").and_then(|rest| rest.get(..5)) else {
            continue;
        };
        let line = program.lines().nth(at - 1).expect("there is such a line");
        let Some((_, number)) = line.rsplit_once("// ") else { panic!("{message}: {line}") };
        let number: usize = number.parse().expect("the number of an attempt");
        codes[number - 1].insert(code.to_owned());
        if text.contains("sealed::") {
            codes[number - 1].insert(SEALED.to_owned());
        }
    }
    codes
}

/// Beside the codes: the bound is of a module that seals.
const SEALED: &str = "sealed";

/// A bound that nobody can meet, an implementation that is there already, or a type that is not the program's.
const REFUSED: [&str; 4] = ["E0277", "E0119", "E0117", "E0210"];

#[test]
fn every_public_trait_is_sealed_or_implemented_here() {
    let traits = all_traits();
    for known in [
        "LoopBuffer",
        "IntoSend",
        "IntoReceive",
        "AddressedBy",
        "ElementSlice",
        "Share",
        "GatherBuffer",
    ] {
        assert!(traits.contains_key(known), "{known} was not found");
    }
    // A trait that no program can name is not public.
    let names: Vec<_> = traits.keys().collect();
    let named =
        compile(&names.iter().map(|name| format!("use {name} as _Named;")).collect::<Vec<_>>());
    let public: Vec<&str> = names
        .iter()
        .zip(&named)
        .filter(|(_, codes)| codes.is_empty())
        .map(|(name, _)| name.as_str())
        .collect();
    assert!(public.len() >= 35, "{public:?}");
    let mut lines: Vec<_> = public
        .iter()
        .flat_map(|&name| attempts(name, &traits[name]).into_iter().map(move |line| (name, line)))
        .collect();
    // Where one implementation conflicts with another, the compiler says nothing of the trait's others: those for a type of
    // the program's own are compiled apart.
    lines.sort_by_key(|(_, line)| !line.ends_with(" for Mine {}"));
    let own = lines.partition_point(|(_, line)| line.ends_with(" for Mine {}"));
    let mut codes = Vec::new();
    for part in [&lines[..own], &lines[own..]] {
        codes.extend(compile(&part.iter().map(|(_, line)| line.clone()).collect::<Vec<_>>()));
    }
    let safe = public.iter().filter(|&&name| !traits[name].is_unsafe);
    let for_buffers: Vec<_> =
        safe.map(|&name| (name, attempt_for_a_buffer(name, &traits[name]))).collect();
    codes.extend(compile(&for_buffers.iter().map(|(_, line)| line.clone()).collect::<Vec<_>>()));
    lines.extend(for_buffers);
    let mut open = BTreeMap::new();
    for ((name, line), codes) in lines.iter().zip(&codes) {
        // E0404 means that the name is that of a type, and not of the trait.
        let is_type = codes.contains("E0404");
        if !is_type && !codes.iter().any(|code| REFUSED.contains(&&**code)) {
            open.entry(*name).or_insert_with(Vec::new).push(line.clone());
        }
    }
    // Where an associated type is missing, the compiler may say nothing more.
    let again: Vec<_> = open
        .iter()
        .filter(|(name, _)| !traits[**name].types.is_empty() && !traits[**name].is_unsafe)
        .flat_map(|(&name, lines)| lines.iter().map(move |line| (name, line.as_str())))
        .collect();
    let with_types = |(name, line): &(&str, &str)| {
        let types: String =
            traits[*name].types.iter().map(|one| format!("type {one} = (); ")).collect();
        line.replace("{}", &format!("{{ {types}}}"))
    };
    let said = compile(&again.iter().map(with_types).collect::<Vec<_>>());
    let is_open = |name: &str| {
        again.iter().zip(&said).any(|((other, _), said)| *other == name && !said.contains(SEALED))
    };
    let closed: Vec<_> =
        again.iter().map(|(name, _)| *name).filter(|name| !is_open(name)).collect();
    open.retain(|name, _| !closed.contains(name));
    let here = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/implementations/main.rs"),
    )
    .unwrap();
    let mut all = here;
    for file in ["buffers", "streams", "allocators"] {
        let path = format!("tests/implementations/{file}.rs");
        all += &fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    }
    let is_here = |name: &str| {
        all.lines().any(|line| line.contains("impl") && line.contains(&format!("{name} for ")))
    };
    let missing: Vec<_> = open.iter().filter(|(name, _)| !is_here(name)).collect();
    assert!(
        missing.is_empty(),
        "neither sealed nor implemented in tests/implementations: {missing:#?}"
    );
    // These traits must be open, or the test would test nothing.
    for name in ["GatherBuffer", "BorrowedBuffer", "Allocator", "AsyncStream", "DeadlineStream"] {
        assert!(open.contains_key(name), "{name} is not open any more");
    }
}

#[test]
fn traits_are_found_with_their_parameters() {
    let source = "pub trait One {\n    type Item: Sized;\n    pub trait Inner {}\n}\npub unsafe trait Two<A>: Sized {\n}\n\
                  pub trait Three<'a, A, B>: Four {}\n    type Other;\ntrait Own {}\n";
    let found = traits_of(source);
    let expected =
        [("One", false, 0, &["Item"][..]), ("Two", true, 1, &[]), ("Three", false, 2, &[])];
    let expected = expected.map(|(name, is_unsafe, parameters, types)| {
        let types = types.iter().map(|&one| one.to_owned()).collect();
        (name.to_owned(), Trait { is_unsafe, parameters, types })
    });
    assert_eq!(found, expected);
}
