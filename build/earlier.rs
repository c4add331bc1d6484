//! C that an earlier run of this script has compiled from the same inputs, in the same target folder.
//!
//! Cargo runs the script once for each set of features and profile, into a folder of its own, and most of them change no
//! line of C. A run that has compiled leaves a stamp beside the result: the inputs, and a list of the files. A run with the
//! same inputs then takes these files instead of compiling, as hard links where the file system has them. It only reads the
//! folders of other runs. The stamp is removed before anything changes, is written last, and is never the same twice: a run
//! that has seen the same stamp before and after it took the files has taken what belongs to it, whatever another run does
//! meanwhile.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Stdio, id};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs, io};

use crate::common::{done, exit_with_error, feature, utf8, write};
use crate::inputs::{files, sources};
use crate::providers::Provider;
use crate::source_tree::Tree;

/// The code that decides how C is compiled.
const CODE: &[&str] = &[
    include_str!("archives.rs"),
    include_str!("flags.rs"),
    include_str!("presets.rs"),
    include_str!("providers.rs"),
    include_str!("rdma_core.rs"),
];

/// The folder of `OUT_DIR` with all that comes from rdma-core's C.
const RESULT: &str = "build";
const STAMP: &str = "build.stamp";
/// The line of a stamp behind which the files are listed, each with its kind.
const FILES: &str = "files:";

/// The inputs of a build of rdma-core.
pub(crate) struct Inputs(String);

impl Inputs {
    pub(crate) fn of(
        root: &Path,
        tree: &Tree,
        out: &Path,
        enabled: &[Provider],
        tools: &str,
    ) -> Self {
        let mut text = String::new();
        let mut add = |name: &str, value: &str| {
            // Each run has an `OUT_DIR` of its own, which some flags name.
            let value = value.replace(utf8(out), "OUT_DIR").replace('\n', "\n\t");
            let _ = writeln!(text, "{name}: {value}"); // a `String` takes all
        };
        add("code", &format!("{:x}", hash(CODE.iter().map(|code| code.as_bytes()))));
        add("package", utf8(root));
        add("tree", utf8(&tree.folder));
        let providers = enabled.iter().map(|p| format!("providers/{}", p.name));
        for name in sources().map(str::to_owned).chain(providers) {
            let files = files(&tree.folder.join(&name));
            add(&name, &format!("{:x}", hash_of_files(&files)));
        }
        add("src/c", &format!("{:x}", hash_of_files(&files(&root.join("src/c")))));
        for name in ["neigh", "plain_names", "rdmacm", "valgrind"] {
            add(name, &feature(name).to_string());
        }
        for name in ["HOST", "TARGET"] {
            add(name, &env::var(name).unwrap_or_default());
        }
        // CMake, and the crate of this name, read these.
        let mut variables: Vec<_> = env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value))
            .filter(|(name, _)| name.contains("CMAKE"))
            .collect();
        variables.sort();
        for (name, value) in variables {
            add(&name, &value.to_string_lossy());
            if name.contains("TOOLCHAIN_FILE") {
                add("its text", &fs::read_to_string(value).unwrap_or_default());
            }
        }
        add("tools", tools);
        let (compiler, headers) = compiler();
        add("compiler", &compiler);
        add("headers", &format!("{headers:x}"));
        Self(text)
    }

    /// Takes what a run of the same inputs has made: this one's own folder, or that of another. Returns whether there is
    /// any; if not, nothing is left in this run's folder.
    pub(crate) fn take(&self, out: &Path) -> bool {
        let own = Stamp::read(out);
        if own.as_ref().is_some_and(|own| own.is_of(self) && own.is_complete(out)) {
            return true;
        }
        remove(out);
        for other in others(out) {
            if let Some(stamp) = Stamp::read(&other).filter(|stamp| stamp.is_of(self)) {
                // The other run may replace its files meanwhile.
                if stamp.link(&other, out) && Stamp::read(&other).as_ref() == Some(&stamp) {
                    self.offer(out);
                    return true;
                }
                remove(out);
            }
        }
        false
    }

    /// Lets other runs take what is in this one's folder now.
    pub(crate) fn offer(&self, out: &Path) {
        let mut text = self.0.clone();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let _ = writeln!(text, "run: {} {}\n{FILES}", id(), since.as_nanos());
        let result = out.join(RESULT);
        list(&result, &result, &mut text);
        let new = out.join(format!("{STAMP}.new"));
        write(&new, text);
        done(&new, fs::rename(&new, out.join(STAMP)));
    }
}

#[derive(PartialEq)]
struct Stamp(String);

impl Stamp {
    fn read(out: &Path) -> Option<Self> {
        fs::read_to_string(out.join(STAMP)).ok().map(Self)
    }

    fn is_of(&self, inputs: &Inputs) -> bool {
        self.0.strip_prefix(&inputs.0).is_some_and(|rest| rest.starts_with("run: "))
    }

    fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        let files = self.0.split_once(&format!("\n{FILES}\n")).map_or("", |(_, files)| files);
        files.lines().filter_map(|line| line.split_once(' '))
    }

    fn is_complete(&self, out: &Path) -> bool {
        let result = out.join(RESULT);
        self.files().all(|(kind, name)| kind_of(&result.join(name)).is_ok_and(|is| is == kind))
    }

    /// Makes this run's folder the same as the other one. Returns whether that has worked.
    fn link(&self, other: &Path, out: &Path) -> bool {
        let (from, to) = (other.join(RESULT), out.join(RESULT));
        self.is_complete(other)
            && self.files().all(|(_, name)| link(&from.join(name), &to.join(name)).is_ok())
            && self.is_complete(out)
    }
}

/// Makes `new` the same file, or symbolic link, as `old`.
fn link(old: &Path, new: &Path) -> io::Result<()> {
    if let Some(folder) = new.parent() {
        fs::create_dir_all(folder)?;
    }
    match fs::read_link(old) {
        Ok(target) => std::os::unix::fs::symlink(target, new),
        Err(_) => fs::hard_link(old, new).or_else(|_| fs::copy(old, new).map(drop)),
    }
}

/// The size of a file, or that it is a symbolic link.
fn kind_of(path: &Path) -> io::Result<String> {
    let metadata = path.symlink_metadata()?;
    Ok(if metadata.is_symlink() { "link".to_owned() } else { metadata.len().to_string() })
}

/// Lists all files below `folder`, by their paths from `top`.
fn list(top: &Path, folder: &Path, text: &mut String) {
    for entry in done(folder, fs::read_dir(folder)).flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            list(top, &path, text);
        } else if let Ok(name) = path.strip_prefix(top) {
            let _ = writeln!(text, "{} {}", done(&path, kind_of(&path)), utf8(name));
        }
    }
}

/// Removes the result in this run's folder. The stamp goes first: without it no other build copies a half-removed result.
fn remove(out: &Path) {
    let (stamp, result) = (out.join(STAMP), out.join(RESULT));
    for (path, removed) in
        [(&stamp, fs::remove_file(&stamp)), (&result, fs::remove_dir_all(&result))]
    {
        if !removed.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            done(path, removed);
        }
    }
}

/// The folders of this package's other runs: `PROFILE/build/NAME-HASH/out` in the target folder, with the target's name before
/// the profile if cargo was given one. The next layout of cargo has `NAME/HASH/out`. Cargo tags a target folder only if it has
/// made it: one that was there (a mount, a volume) is known by this layout alone.
fn others(out: &Path) -> Vec<PathBuf> {
    let Some(build) = out.ancestors().find(|folder| folder.file_name() == Some("build".as_ref()))
    else {
        return Vec::new();
    };
    let Some(mut target) = build.ancestors().nth(2) else { return Vec::new() };
    let named = target.file_name() == env::var_os("TARGET").as_deref();
    if named && !target.join("CACHEDIR.TAG").exists() {
        target = target.parent().unwrap_or(target);
    }
    let profiles = entries(target);
    let with_target: Vec<_> = profiles.iter().flat_map(|folder| entries(folder)).collect();
    let package = |folder: &PathBuf| {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let rest = name.strip_prefix(env!("CARGO_PKG_NAME"));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    let mut found: Vec<_> = profiles
        .iter()
        .chain(&with_target)
        .flat_map(|profile| entries(&profile.join("build")))
        .filter(package)
        .flat_map(|folder| entries(&folder).into_iter().chain([folder]))
        .map(|folder| folder.join("out"))
        .filter(|other| other != out && other.join(STAMP).exists())
        .collect();
    found.sort();
    found
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// The C compiler with its flags and what it says of itself, which includes the folders that it searches, and a hash of some
/// headers of the machine as it reads them.
fn compiler() -> (String, u64) {
    let mut build = cc::Build::new();
    // The flags that the crate `cmake` takes.
    build.cargo_output(false).opt_level(0).debug(false).warnings(false);
    let run = || -> Result<_, String> {
        let compiler = build.try_get_compiler().map_err(|e| e.to_string())?;
        let mut command = compiler.to_command();
        command.args(["-E", "-dD", "-v", "-x", "c", "-"]);
        let program = command.get_program().to_owned();
        let arguments: Vec<_> = command.get_args().collect();
        let text = format!("{program:?} {arguments:?}"); // `Debug` of the command would have all variables
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{text}: {e}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            let mut source = String::new();
            for header in HEADERS {
                let _ = writeln!(source, "#if __has_include({header})\n#include {header}\n#endif");
            }
            let _ = stdin.write_all(source.as_bytes()); // the exit status tells
        }
        let output = child.wait_with_output().map_err(|e| format!("{text}: {e}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(format!("{text}: {said}"));
        }
        Ok((format!("{text}\n{said}"), hash([&*output.stdout])))
    };
    run().unwrap_or_else(|e| exit_with_error(&e))
}

/// Headers of the C library and of optional libraries.
const HEADERS: &[&str] = &[
    "<stdio.h>",
    "<stdlib.h>",
    "<pthread.h>",
    "<stdatomic.h>",
    "<sys/random.h>",
    "<sys/socket.h>",
    "<valgrind/memcheck.h>",
    "<libnl3/netlink/version.h>",
];

fn hash_of_files(files: &[PathBuf]) -> u64 {
    let mut all = Vec::new();
    for file in files {
        let contents = done(file, fs::read(file));
        all.extend([hash([utf8(file).as_bytes(), &contents]).to_le_bytes()]);
    }
    all.sort_unstable();
    hash(all.iter().map(|one| &one[..]))
}

/// FNV-1a, over words instead of bytes, because nothing here is optimised.
fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |word: u64| hash = (hash ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    for part in parts {
        let (words, rest) = part.as_chunks::<8>();
        words.iter().for_each(|word| add(u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        add(u64::from_le_bytes(last));
        add(part.len() as u64);
    }
    hash
}
