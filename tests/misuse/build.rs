//! Makes two programs of each case: `wrong/NAME.rs`, which does not compile, and `right/NAME.rs`, which does.

use std::fs;
use std::path::Path;

/// The lines of a case without those of the other program.
fn program(case: &str, own: &str, other: &str) -> String {
    let lines = case.lines().filter(|line| !line.ends_with(other));
    lines.map(|line| line.strip_suffix(own).unwrap_or(line).trim_end().to_owned() + "\n").collect()
}

fn main() {
    println!("cargo::rerun-if-changed=cases");
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    let out = Path::new(&out);
    for folder in ["wrong", "right"] {
        let _ = fs::remove_dir_all(out.join(folder)); // what was removed from `cases`
        fs::create_dir(out.join(folder)).expect("a folder of the build script's");
    }
    let cases =
        fs::read_dir("cases").expect("the folder of cases").map(|entry| entry.unwrap().path());
    let mut cases: Vec<_> =
        cases.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect();
    cases.sort();
    let (mut modules, mut names) = (String::new(), String::new());
    for path in cases {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let case = fs::read_to_string(&path).unwrap();
        let wrong = program(&case, "//~ ERROR", "//~ RIGHT") + "\nfn main() {}\n";
        fs::write(out.join("wrong").join(format!("{name}.rs")), wrong).unwrap();
        let right = out.join("right").join(format!("{name}.rs"));
        fs::write(&right, program(&case, "//~ RIGHT", "//~ ERROR")).unwrap();
        modules += &format!("#[path = {right:?}]\nmod {name};\n");
        names += &format!("{name:?},\n");
    }
    fs::write(out.join("right.rs"), modules).unwrap();
    fs::write(out.join("names.rs"), format!("&[{names}]")).unwrap();
}
