//! The bindings agree with the C compiler.
//!
//! bindgen sees the headers through libclang; the libraries are compiled by the machine's own C
//! compiler. These tests ask that compiler for the size of every structure and enumeration of
//! `verbs.h`, for the place and size of every field, and for the value of every constant.

#[cfg(any(feature = "efa", feature = "mlx5"))]
mod direct;
mod enumerations;
mod structures;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use ibverbs::ffi::*;

/// C expressions, and their values in Rust.
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

/// Lets the C compiler evaluate the same expressions.
#[track_caller]
fn assert_agrees(name: &str, rust: Values) {
    assert_agrees_with("verbs.h", name, rust);
}

/// Lets the C compiler evaluate the same expressions with a header beside `verbs.h`.
#[track_caller]
fn assert_agrees_with(header: &str, name: &str, rust: Values) {
    let c = values_in_c(header, name, &rust);
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

/// The values follow this mark in the object file.
const MARK: &str = "the values that verbs.h has in C:";

/// Read from an object file, so that nothing has to run: this works for other machines too.
fn values_in_c(header: &str, name: &str, values: &Values) -> BTreeMap<String, i128> {
    // Byte by byte, so that the order does not depend on the target.
    let mut text = format!("#include <stddef.h>\n#include <infiniband/{header}>\n");
    text.push_str(
        "\
         #define BYTE(x, n) (unsigned char)((unsigned long long)(x) >> 8 * n)\n\
         #define BYTES(x) BYTE(x, 0), BYTE(x, 1), BYTE(x, 2), BYTE(x, 3), \\\n\
         \tBYTE(x, 4), BYTE(x, 5), BYTE(x, 6), BYTE(x, 7)\n\
         const unsigned char values[] = {\n",
    );
    for byte in MARK.bytes() {
        write!(text, "{byte}, ").expect("memory");
    }
    for (expression, _) in values {
        writeln!(text, "\n\tBYTES((long long)({expression})),").expect("memory");
    }
    text += "};\n";

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, object) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.o")));
    fs::write(&source, text).expect("the target folder is writable");
    let mut compiler = compiler();
    let status = compiler
        .args(["-std=gnu11", "-c", "-I"])
        .arg(Path::new(env!("OUT_DIR")).join("include"))
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("vendor/rdma-core/kernel-headers"))
        .args([source.as_path(), Path::new("-o"), object.as_path()])
        .status()
        .unwrap_or_else(|e| panic!("{compiler:?}: {e}"));
    assert!(status.success(), "{compiler:?} does not compile {}", source.display());
    let object = fs::read(&object).expect("the compiler has written it");
    let mark = object.windows(MARK.len()).position(|bytes| bytes == MARK.as_bytes());
    let bytes = &object[mark.expect("the values are in the object file") + MARK.len()..];
    let numbers = bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
    values.iter().zip(numbers).map(|((c, _), number)| (c.clone(), number.into())).collect()
}

/// The compiler that has compiled rdma-core.
fn compiler() -> Command {
    let cache = Path::new(env!("OUT_DIR")).join("build/CMakeCache.txt");
    let cache = fs::read_to_string(cache).unwrap_or_default(); // none with feature `system`
    let entry = |name: &str| {
        let line = cache.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.split_once('=')?.1.to_owned())
    };
    let default = || env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compiler = Command::new(entry("CMAKE_C_COMPILER").unwrap_or_else(default));
    let flags = entry("CMAKE_C_FLAGS").unwrap_or_default();
    compiler.args(flags.split(' ').filter(|flag| flag.starts_with("-m")));
    // musl comes without the kernel's headers.
    compiler.env("C_INCLUDE_PATH", Path::new(env!("OUT_DIR")).join("kernel-headers"));
    compiler
}
