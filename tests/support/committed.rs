//! Compares committed bindings with generated ones, or writes them again.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

const HEAD: &str = "\
// Generated from the headers of rdma-core vRELEASE by bindgen (build/generate.rs); do not edit.
// tests/committed_bindings.rs compares this file with what bindgen generates, and writes it again.
//
// rdma-core is under a choice of two licenses, GPL-2.0 or the OpenIB.org BSD license
// (vendor/rdma-core/COPYING.md). This file is used under the latter; the copyright is that of the
// authors of the headers.

";

/// The function device's are of no rdma-core's headers.
const HEAD_OF_OURS: &str = "\
// Generated from device.h by bindgen (build.rs); do not edit. tests/committed_bindings.rs compares this file with what
// bindgen generates, and writes it again.

";

/// Assertions about the layout, which depend on the target. The committed bindings come without; the
/// tests `layout` compare them with C.
const ASSERTION: (&str, &str) =
    ("# [allow (clippy :: unnecessary_operation , clippy :: identity_op)] const _ : () = {", "} ;");

/// Where a package has its committed bindings, and where its build script has written the others.
#[derive(Clone, Copy)]
pub(crate) struct Bindings {
    pub(crate) package: &'static str,
    pub(crate) out: &'static str,
}

fn head() -> String {
    let version = env!("CARGO_PKG_VERSION");
    match version.split_once("+rdma-core.") {
        Some((_, release)) => HEAD.replace("RELEASE", release),
        None => HEAD_OF_OURS.to_owned(),
    }
}

fn generated(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut rest = text.as_str();
    let mut kept = String::new();
    while let Some((before, after)) = rest.split_once(ASSERTION.0) {
        kept += before;
        rest = after.split_once(ASSERTION.1).expect("an assertion ends").1;
    }
    kept + rest
}

/// The text without comments, white space, and commas at the end of a list, which rustfmt adds.
fn normal(text: &str) -> String {
    let mut code = String::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        code.extend(line.chars().filter(|c| !c.is_whitespace()));
    }
    let code = code.replace(",>", ">").replace(",}", "}").replace(",)", ")").replace(",]", "]");
    code.split_once("*/").map_or(code.clone(), |(_, rest)| rest.to_owned())
}

pub(crate) fn compare(bindings: Bindings, name: &str) {
    let generated = generated(&Path::new(bindings.out).join(name));
    let path = Path::new(bindings.package).join("build/committed").join(name);
    if env::var_os("UPDATE_BINDINGS").is_some() {
        let text = if name.ends_with(".rs") { format(&generated) } else { generated.clone() };
        fs::write(&path, format!("{}{text}", head()))
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(text.starts_with(&head()), "{name} does not say where it comes from");
    let (ours, theirs) = (normal(&text), normal(&generated));
    if ours != theirs {
        let same = ours.bytes().zip(theirs.bytes()).take_while(|(a, b)| a == b).count();
        let about = |text: &str| {
            let bytes = &text.as_bytes()[same.saturating_sub(80)..text.len().min(same + 160)];
            String::from_utf8_lossy(bytes).into_owned()
        };
        panic!(
            "{} is not what bindgen generates: see the head of the test\n committed: {}\n generated: {}",
            path.display(),
            about(&ours),
            about(&theirs)
        );
    }
}

fn format(code: &str) -> String {
    let program = env::var("RUSTFMT").unwrap_or_else(|_| "rustfmt".to_owned());
    let mut rustfmt = Command::new(&program)
        .args(["--edition", "2024"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{program}: {e}"));
    let mut input = rustfmt.stdin.take().expect("it is a pipe");
    let code = code.to_owned();
    let writer = std::thread::spawn(move || input.write_all(code.as_bytes()));
    let output = rustfmt.wait_with_output().expect("rustfmt runs");
    writer.join().expect("the writer does not panic").expect("rustfmt reads all");
    assert!(output.status.success(), "rustfmt failed");
    String::from_utf8(output.stdout).expect("rustfmt writes UTF-8")
}
