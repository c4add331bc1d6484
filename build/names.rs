//! The symbols by which Rust and C reach rdma-core's functions.
//!
//! The archives have a prefix before each name, so that another static libibverbs, and the machine's shared one, can be in the
//! same program. The bindings name the symbols by `link_name`; the public headers for C by a pragma that GCC and Clang know.
//! A function that the library lacks (feature `system` with an older one, another system than Linux) gets one that fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::common::{done, write};

/// The folder in `OUT_DIR` with the bindings that the crate includes.
const LINKED: &str = "ffi";

/// A function that the bindings declare.
struct Function {
    name: String,
    /// Where its declaration begins in the text.
    at: usize,
    /// The symbol that the bindings name: the wrapper of an inline function.
    wrapper: Option<String>,
    /// Whether it returns a pointer or a truth value, and not an errno value.
    fails_by_zero: bool,
}

/// The files of bindings in `out`, with their texts.
fn files(out: &Path) -> Vec<(String, String)> {
    let mut files = Vec::new();
    for entry in done(out, fs::read_dir(out)).flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("bindings") && name.ends_with(".rs") {
            files.push((name, done(&entry.path(), fs::read_to_string(entry.path()))));
        }
    }
    files
}

fn functions(text: &str) -> Vec<Function> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("pub fn ") {
        let Some((signature, _)) = text[at + "pub fn ".len()..].split_once(';') else { continue };
        // A method has a body.
        let Some((name, rest)) = signature.split_once('(').filter(|(_, rest)| !rest.contains('{'))
        else {
            continue;
        };
        let attribute = text[..at].rsplit(['{', ';']).next().unwrap_or_default();
        let wrapper = attribute.contains("link_name").then(|| attribute.split('"').nth(1));
        found.push(Function {
            name: name.trim().to_owned(),
            at,
            wrapper: wrapper.flatten().map(str::to_owned),
            fails_by_zero: ["->*", "->bool"]
                .iter()
                .any(|kind| rest.replace(' ', "").contains(kind)),
        });
    }
    found
}

/// The functions that the library has to have: all that the bindings in `out` declare, but for inline ones.
#[cfg(feature = "system")]
pub(crate) fn needed(out: &Path) -> BTreeSet<String> {
    let all = files(out).into_iter().flat_map(|(_, text)| functions(&text));
    all.filter(|function| function.wrapper.is_none()).map(|function| function.name).collect()
}

/// Which functions the library lacks.
pub(crate) enum Missing {
    All,
    These(BTreeSet<String>),
}

impl Missing {
    pub(crate) fn none() -> Self {
        Self::These(BTreeSet::new())
    }
}

/// Writes the bindings and, for C, the headers with the symbols of this build: `prefix` before each name, or a function that
/// fails.
pub(crate) fn declare(out: &Path, include: &Path, prefix: &str, missing: &Missing) {
    let (mut symbols, mut failing) = (BTreeMap::new(), BTreeMap::new());
    for (file, text) in files(out) {
        let (mut linked, mut copied) = (String::new(), 0);
        for function in functions(&text) {
            let is_missing = match missing {
                Missing::All => true,
                Missing::These(names) => names.contains(&function.name),
            };
            linked += &text[copied..function.at];
            copied = function.at;
            if let Some(wrapper) = function.wrapper {
                if is_missing {
                    failing.insert(wrapper, function.fails_by_zero);
                }
                continue;
            }
            let prefix = if is_missing { "ibverbs_bundled_missing_" } else { prefix };
            let symbol = format!("{prefix}{}", function.name);
            if symbol != function.name {
                linked += &format!("#[link_name = \"{symbol}\"] ");
                symbols.insert(function.name, symbol.clone());
            }
            if is_missing {
                failing.insert(symbol, function.fails_by_zero);
            }
        }
        linked += &text[copied..];
        if matches!(missing, Missing::All) {
            // A type of Linux's headers.
            linked = linked.replace("use libc::__u8;", "type __u8 = u8;");
        }
        write(&out.join(LINKED).join(file), linked);
    }
    write(&out.join(LINKED).join("missing.rs"), failing_functions(failing));

    let mut pragmas = String::new();
    for (name, symbol) in symbols {
        pragmas += &format!("#pragma redefine_extname {name} {symbol}\n");
    }
    // Every other public header includes this one.
    let header = include.join("infiniband/verbs.h");
    let text = done(&header, fs::read_to_string(&header));
    write(&header, format!("#include <infiniband/{HEADER}>\n{text}"));
    write(&include.join("infiniband").join(HEADER), pragmas);
}

/// The header with the symbols.
const HEADER: &str = "ibverbs_bundled_symbols.h";

/// One that returns a pointer or a truth value returns null or false with `ENOSYS` in `errno`, others `ENOSYS`. So no object
/// exists, and no other function is called with one.
fn failing_functions(symbols: BTreeMap<String, bool>) -> String {
    let mut text = String::new();
    for (symbol, fails_by_zero) in symbols {
        let result = if fails_by_zero { "0" } else { "libc::ENOSYS as usize" };
        text += &format!(
            "#[unsafe(no_mangle)]\nextern \"C\" fn {symbol}() -> usize {{\n    \
             super::set_errno(libc::ENOSYS);\n    {result}\n}}\n"
        );
    }
    text
}
