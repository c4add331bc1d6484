//! Feature `bindgen`: generates the bindings from the headers.
//!
//! Types of the C library are those of the crate `libc`, which fit each target. What is left has no size
//! that depends on the target, so the bindings of one machine, committed, are good for all 64-bit ones.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use bindgen::callbacks::{DeriveTrait, ImplementsTrait, ParseCallbacks};

use crate::common::{exit_with_error, feature, utf8, write};
use crate::direct::{direct_verbs, missing_direct_verbs};
use crate::source_tree::Tree;

/// The types of the C library that the headers of libibverbs use.
const LIBC: &str = "pthread_cond_t|pthread_mutex_t|timespec";
/// Further types that the headers of librdmacm use.
const LIBC_RDMACM: &str = "sockaddr|sockaddr_in|sockaddr_in6|sockaddr_storage|socklen_t";

/// Functions that are a macro of another name in C, which bindgen does not see, and that name. Older releases have a
/// function of that name.
const RENAMED: &[(&str, &str)] = &[("_mlx5dv_create_flow", "mlx5dv_create_flow")];

pub(crate) fn generate(tree: &Tree, include: &Path, out: &Path, system: &[PathBuf]) {
    let builder = |wrappers: &str| {
        bindgen::Builder::default()
            .clang_args(system.iter().flat_map(|folder| ["-isystem", utf8(folder)]))
            .clang_arg(format!("-I{}", utf8(include)))
            .clang_arg(format!("-I{}", utf8(&tree.folder.join("kernel-headers"))))
            .default_enum_style(bindgen::EnumVariation::NewType {
                is_bitfield: false,
                is_global: false,
            })
            .prepend_enum_name(false)
            .derive_default(true)
            .wrap_static_fns(true)
            .wrap_static_fns_path(out.join(wrappers))
            .wrap_static_fns_suffix("__bundled")
            .generate_comments(false)
            .parse_callbacks(Box::new(LibcTypes))
            .formatter(bindgen::Formatter::None)
    };
    let verbs = builder("inline_functions.c")
        .header(utf8(&include.join("infiniband/verbs.h")))
        .allowlist_function("_*ibv_.*|(mult|mbps)_to_ibv_rate")
        .allowlist_type("ibv_.*|ib_uverbs_flow_action_esp.*|verbs_context")
        .allowlist_var("(IBV|IB)_.*")
        .bitfield_enum("ibv_.*_(flags|mask|cap|caps|bits|fields)(_.*)?|ibv_values_mask")
        .bitfield_enum("ibv_access_flags|ibv_qp_open_attr_mask|ibv_device_cap_flags")
        .blocklist_type(format!("{LIBC}|__.*_t|__pthread.*|__atomic.*"))
        .raw_line(format!("pub use libc::{{{}}};", LIBC.replace('|', ", ")));
    save(verbs, include, out, "bindings.rs", "inline_functions.c");
    if feature("rdmacm") {
        let rdmacm = builder("inline_functions_rdmacm.c")
            .header(utf8(&include.join("rdma/rdma_cma.h")))
            .allowlist_recursively(false)
            .allowlist_function("rdma_.*")
            .allowlist_type("rdma_.*|ibv_sa_.*|ibv_path_.*")
            .allowlist_var("(RDMA|RAI)_.*|IBV_PATH_.*")
            .raw_line(format!("pub use libc::{{{}}};", LIBC_RDMACM.replace('|', ", ")));
        save(rdmacm, include, out, "bindings_rdmacm.rs", "inline_functions_rdmacm.c");
    }
    for direct in missing_direct_verbs(tree) {
        write(&out.join(direct.bindings()), "");
    }
    for direct in direct_verbs(tree) {
        let (rust, c) = (direct.bindings(), direct.inline_functions());
        let verbs = builder(&c)
            .header(utf8(&include.join("infiniband").join(direct.header())))
            .allowlist_recursively(false)
            .allowlist_function(direct.items)
            .allowlist_type(direct.items)
            .allowlist_var(direct.constants)
            .bitfield_enum(".*_(flags|mask|cap|caps|bits|fields)(_.*)?|.*_flag")
            .constified_enum("_bindgen_ty_.*");
        let verbs =
            direct.libc.iter().fold(verbs, |b, name| b.raw_line(format!("use libc::{name};")));
        let verbs = direct
            .replaced
            .iter()
            .fold(verbs, |b, (name, text)| b.blocklist_type(name).raw_line(*text));
        save(verbs, include, out, &rust, &c);
    }
}

fn save(builder: bindgen::Builder, include: &Path, out: &Path, name: &str, wrappers: &str) {
    let mut bindings = match builder.generate() {
        Ok(bindings) => bindings.to_string(),
        Err(e) => exit_with_error(&format!("bindgen cannot read the headers: {e}")),
    };
    for (function, name) in RENAMED {
        if bindings.contains(&format!("pub fn {function} (")) {
            bindings += &format!("pub use self :: {function} as {name} ;\n");
        }
    }
    write(&out.join(name), bindings);
    // Headers under the names that programs include them by, which are the same on every machine.
    let path = out.join(wrappers);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        // bindgen writes no file for a header without inline functions.
        Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
        Err(e) => exit_with_error(&format!("{}: {e}", path.display())),
    };
    let folder = format!("\"{}/", utf8(include));
    let mut portable = String::with_capacity(text.len());
    for line in text.lines() {
        match line.strip_prefix("#include ").and_then(|name| name.strip_prefix(&folder)) {
            Some(name) => portable += &format!("#include <{}>\n", name.trim_end_matches('"')),
            None => portable += &format!("{line}\n"),
        }
    }
    write(&path, portable);
}

/// Tells bindgen which traits the types of the crate `libc` implement.
#[derive(Debug)]
struct LibcTypes;

impl ParseCallbacks for LibcTypes {
    fn blocklisted_type_implements_trait(
        &self,
        name: &str,
        derive: DeriveTrait,
    ) -> Option<ImplementsTrait> {
        let libc = || LIBC.split('|').chain(LIBC_RDMACM.split('|')).any(|other| other == name);
        match derive {
            DeriveTrait::Copy => Some(ImplementsTrait::Yes),
            DeriveTrait::Debug if libc() => Some(ImplementsTrait::Yes),
            _ => None,
        }
    }
}
