//! Targets other than Linux: the API compiles, and returns `ENOSYS`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::write;

/// Writes a function for each that the bindings declare: one that returns a pointer returns null with `ENOSYS` in `errno`,
/// others `ENOSYS`. So no object exists, and no other function is called with one.
pub(crate) fn missing_functions(out: &Path) {
    let mut found = BTreeMap::new();
    for file in fs::read_dir(out).into_iter().flatten().flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        if !(name.starts_with("bindings") && name.ends_with(".rs")) {
            continue;
        }
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        // A type of Linux's headers.
        let text = text.replace("use libc::__u8;", "type __u8 = u8;");
        write(&file.path(), &text);
        for function in text.split("pub fn ").skip(1) {
            let Some((signature, _)) = function.split_once(';') else { continue };
            let Some((name, rest)) = signature.split_once('(') else { continue };
            // A method has a body.
            if !rest.contains('{') {
                found.insert(name.trim().to_owned(), rest.contains("-> *"));
            }
        }
    }
    let mut text = String::new();
    for (name, pointer) in found {
        let result = if pointer { "0" } else { "libc::ENOSYS as usize" };
        text += &format!(
            "#[unsafe(no_mangle)]\nextern \"C\" fn {name}() -> usize {{\n    \
             super::set_errno(libc::ENOSYS);\n    {result}\n}}\n"
        );
    }
    write(&out.join("elsewhere.rs"), &text);
}
