//! The final form of rdma-core's static libraries.
//!
//! The libraries and providers use internal ones (`ccan`, `rdma_util`), which become part of whatever uses
//! them, and each function gets a prefix that makes its name unique. rdma-core's own script for this
//! (`buildlib/sanitize_static_lib.py`) starts three programs for each object file; this starts three for
//! each library.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{at_once, exit_with_error, run, utf8, write};

/// The prefix of all archives' names, after `lib`: no other package has such, so that a library of the machine which
/// the linker finds first is not taken for ours.
pub(crate) const OURS: &str = "ibverbs_bundled_";

/// The programs of binutils, or what the compiler has in their place.
pub(crate) struct Tools {
    pub(crate) ar: String,
    pub(crate) nm: String,
    pub(crate) objcopy: String,
}

struct Library {
    archive: PathBuf,
    internal: bool,
    defined: BTreeSet<String>,
    needed: BTreeSet<String>,
}

/// Writes the final form of each of `libraries` to `finished`. All functions get `prefix`, but those that a linker map
/// among `maps` calls global.
pub(crate) fn finish(
    tools: &Tools,
    libraries: &[PathBuf],
    internal: &[PathBuf],
    maps: &[PathBuf],
    prefix: &str,
    (temporary, finished): (&Path, &Path),
) {
    let read = |internal| {
        move |archive: &PathBuf| {
            let (defined, needed) = symbols(&tools.nm, archive);
            Library { archive: archive.clone(), internal, defined, needed }
        }
    };
    let all: Vec<_> =
        libraries.iter().map(read(false)).chain(internal.iter().map(read(true))).collect();

    let public: BTreeSet<_> = maps.iter().flat_map(|map| global_names(&text(map))).collect();
    let renamed: BTreeSet<_> = all.iter().flat_map(|library| &library.defined).collect();
    let renamed: String = renamed
        .into_iter()
        .filter(|name| !public.contains(*name))
        .map(|name| format!("{name} {prefix}{name}\n"))
        .collect();
    let _ = fs::remove_dir_all(temporary); // objects of an earlier build
    let renames = temporary.join("renames");
    write(&renames, renamed);

    at_once(&all, |library| {
        let folder = if library.internal { &objects(temporary, library) } else { finished };
        if let Err(e) = fs::create_dir_all(folder) {
            exit_with_error(&format!("{}: {e}", folder.display()));
        }
        let result = folder.join(finished_name(&library.archive));
        let mut rename = Command::new(&tools.objcopy);
        rename.arg("-D").arg(format!("--redefine-syms={}", utf8(&renames)));
        run("renaming symbols", rename.arg(&library.archive).arg(&result));
        if library.internal {
            let mut extract = Command::new(&tools.ar);
            run("unpacking a library", extract.arg("x").arg(&result).current_dir(folder));
            let _ = fs::remove_file(&result);
        }
    });
    for (library, parts) in all.iter().zip(incorporated(&all)) {
        let mut members: Vec<_> =
            parts.iter().flat_map(|&part| files(&objects(temporary, &all[part]))).collect();
        members.sort();
        if !members.is_empty() {
            let result = finished.join(finished_name(&library.archive));
            run("joining libraries", Command::new(&tools.ar).arg("qs").arg(result).args(members));
        }
    }
}

/// For each library, the internal ones that become part of it: all that it needs, directly or through
/// others, but not those that are already part of a library that it needs.
fn incorporated(all: &[Library]) -> Vec<BTreeSet<usize>> {
    let needs = |user: &Library| -> BTreeSet<usize> {
        let defines = |other: &Library| !other.defined.is_disjoint(&user.needed);
        (0..all.len()).filter(|&other| defines(&all[other])).collect()
    };
    let direct: Vec<_> = all.iter().map(needs).collect();
    let reached: Vec<_> = direct.iter().map(|first| closure(first, &direct)).collect();
    let parts = |library: usize| -> BTreeSet<usize> {
        reached[library].iter().copied().filter(|&other| all[other].internal).collect()
    };
    (0..all.len())
        .map(|library| {
            if all[library].internal {
                return BTreeSet::new();
            }
            let others = reached[library].iter().filter(|&&other| other != library);
            let elsewhere: BTreeSet<_> =
                others.filter(|&&other| !all[other].internal).flat_map(|&o| parts(o)).collect();
            &parts(library) - &elsewhere
        })
        .collect()
}

fn closure(first: &BTreeSet<usize>, direct: &[BTreeSet<usize>]) -> BTreeSet<usize> {
    let mut reached = first.clone();
    let mut new: Vec<_> = first.iter().copied().collect();
    while let Some(library) = new.pop() {
        new.extend(direct[library].iter().copied().filter(|&other| reached.insert(other)));
    }
    reached
}

/// The names that an archive's objects define for each other and for others, and those that it needs from
/// elsewhere.
fn symbols(nm: &str, archive: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    // Without a folder in the name, no line that names an object looks like that of a symbol.
    let mut list = Command::new(nm);
    list.arg(file_name(archive)).current_dir(archive.parent().unwrap_or(archive));
    let output = match list.output() {
        Ok(output) if output.status.success() => output.stdout,
        Ok(output) => exit_with_error(&format!(
            "reading the symbols of {} failed ({}): {}",
            archive.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )),
        Err(e) => exit_with_error(&format!("cannot start {nm:?}: {e}")),
    };
    let (mut defined, mut needed) = (BTreeSet::new(), BTreeSet::new());
    for line in String::from_utf8_lossy(&output).lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["U", name] if !is_provider(name) => {
                needed.insert(name.to_owned());
            }
            // Lower case are the names that only their own object sees.
            [_, kind, name] if kind.len() == 1 && kind.chars().all(char::is_uppercase) => {
                defined.insert(name.to_owned());
            }
            _ => {}
        }
    }
    let needed = &needed - &defined;
    (defined, needed)
}

/// The names that a linker map calls global, without those of private versions.
fn global_names(map: &str) -> BTreeSet<String> {
    let mut text = String::new();
    for (i, part) in map.split("/*").enumerate() {
        text += if i == 0 { part } else { part.split_once("*/").map_or("", |(_, rest)| rest) };
    }
    let mut names = BTreeSet::new();
    for stanza in text.split('}') {
        // Before the brace: the end of the stanza before, and this one's version.
        let Some((head, body)) = stanza.split_once('{') else { continue };
        if head.rsplit(';').next().is_some_and(|version| version.contains("PRIVATE")) {
            continue;
        }
        let mut global = true;
        for word in body.replace(':', ": ").split(|c: char| c == ';' || c.is_whitespace()) {
            match word {
                "" => {}
                "global:" => global = true,
                "local:" => global = false,
                name => {
                    if global {
                        names.insert(name.to_owned());
                    }
                }
            }
        }
    }
    names
}

/// Providers are objects of these names, to which programs refer and libibverbs does not.
fn is_provider(name: &str) -> bool {
    name.starts_with("verbs_provider_")
}

fn file_name(archive: &Path) -> &str {
    archive.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn finished_name(archive: &Path) -> String {
    format!("lib{OURS}{}", file_name(archive).trim_start_matches("lib"))
}

/// The folder for an internal library's objects.
fn objects(temporary: &Path, library: &Library) -> PathBuf {
    temporary.join(file_name(&library.archive).trim_end_matches(".a"))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(e) => exit_with_error(&format!("{}: {e}", folder.display())),
    }
}

fn text(file: &Path) -> String {
    fs::read_to_string(file)
        .unwrap_or_else(|e| exit_with_error(&format!("{}: {e}", file.display())))
}
