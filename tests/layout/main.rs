//! The bindings agree with the C compiler.
//!
//! bindgen sees the headers through libclang; the libraries are compiled by the machine's own C
//! compiler. Here that compiler is asked for the size of every structure and enumeration of
//! `verbs.h`, for the place and size of every field, and for the value of every constant.

mod enumerations;
mod structures;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use ibverbs::ffi::*;

/// What is compared: a C expression, and its value in Rust.
type Values = Vec<(String, i128)>;

fn value(number: usize) -> i128 {
    number.try_into().expect("a size")
}

#[test]
fn structures_have_the_layout_of_c() {
    assert_agrees("structures", structures::all());
}

#[test]
fn constants_have_the_value_of_c() {
    let mut values = enumerations::all();
    values.extend([
        ("IBV_LINK_LAYER_UNSPECIFIED".to_owned(), IBV_LINK_LAYER_UNSPECIFIED.0.into()),
        ("IBV_LINK_LAYER_INFINIBAND".to_owned(), IBV_LINK_LAYER_INFINIBAND.0.into()),
        ("IBV_LINK_LAYER_ETHERNET".to_owned(), IBV_LINK_LAYER_ETHERNET.0.into()),
        ("IBV_WC_STANDARD_FLAGS".to_owned(), IBV_WC_STANDARD_FLAGS.0.into()),
        ("IBV_CREATE_CQ_SUP_WC_FLAGS".to_owned(), IBV_CREATE_CQ_SUP_WC_FLAGS.0.into()),
        ("IBV_WC_IP_CSUM_OK_SHIFT".to_owned(), IBV_WC_IP_CSUM_OK_SHIFT.0.into()),
        ("IBV_DEVICE_RAW_SCATTER_FCS".to_owned(), IBV_DEVICE_RAW_SCATTER_FCS.into()),
        ("IBV_DEVICE_PCI_WRITE_END_PADDING".to_owned(), IBV_DEVICE_PCI_WRITE_END_PADDING.into()),
        ("IBV_ACCESS_OPTIONAL_FIRST".to_owned(), IBV_ACCESS_OPTIONAL_FIRST.into()),
        ("IBV_SYSFS_NAME_MAX".to_owned(), IBV_SYSFS_NAME_MAX.0.into()),
        ("IBV_SYSFS_PATH_MAX".to_owned(), IBV_SYSFS_PATH_MAX.0.into()),
    ]);
    assert_agrees("constants", values);
}

/// Has a C program print the same expressions.
#[track_caller]
fn assert_agrees(name: &str, rust: Values) {
    let c = values_in_c(name, &rust);
    let mut differences = String::new();
    for (expression, value) in &rust {
        let in_c = c.get(expression);
        if in_c != Some(value) {
            writeln!(differences, "{expression}: {value} in Rust, {in_c:?} in C").expect("memory");
        }
    }
    assert!(differences.is_empty(), "{differences}");
    assert_eq!(c.len(), rust.len(), "an expression is listed twice");
}

fn values_in_c(name: &str, values: &Values) -> BTreeMap<String, i128> {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void)\n{\n",
    );
    for (expression, _) in values {
        let line = format!("printf(\"%lld {expression}\\n\", (long long)({expression}));");
        writeln!(text, "\t{line}").expect("memory");
    }
    text += "\treturn 0;\n}\n";

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    fs::write(&source, text).expect("the target folder is writable");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(&compiler)
        .arg("-std=gnu11")
        .arg("-I")
        .arg(Path::new(env!("OUT_DIR")).join("include"))
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor/rdma-core/kernel-headers"))
        .args([source.as_path(), Path::new("-o"), program.as_path()])
        .status()
        .unwrap_or_else(|e| panic!("{compiler:?}: {e}"));
    assert!(status.success(), "{compiler:?} does not compile {}", source.display());
    let output = Command::new(&program).output().expect("the program starts");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("it prints text");
    text.lines()
        .map(|line| line.split_once(' ').expect("a number and an expression"))
        .map(|(number, expression)| (expression.to_owned(), number.parse().expect("a number")))
        .collect()
}
