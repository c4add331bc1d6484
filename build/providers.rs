//! The providers (user-space drivers) of rdma-core, and their registration.

use std::fs;
use std::path::Path;

use crate::common::{compile, exit_with_error, feature, write};
use crate::source_tree::Tree;

/// A provider (user-space driver) of rdma-core. Its Cargo feature, its folder, and its symbol
/// (`verbs_provider_<name>`) use its name.
pub(crate) struct Provider {
    pub(crate) name: String,
    /// The linker map of its exported symbols, if it does not use the common one.
    pub(crate) map: Option<String>,
}

impl Provider {
    /// The CMake target of the static library. A provider with a public API has another one for its
    /// shared library, which uses the name alone.
    pub(crate) fn target(&self) -> String {
        match self.map {
            Some(_) => format!("{}-static", self.name),
            None => self.name.clone(),
        }
    }

    /// The library's name, without `lib` and `.a`. A provider without a public API is named after the
    /// version of the interface between libibverbs and its providers, as a plug-in is.
    pub(crate) fn archive(&self, abi: &str) -> String {
        match self.map {
            Some(_) => self.name.clone(),
            None => format!("{}-rdmav{abi}", self.name),
        }
    }

    /// The provider whose folder has this name, as its CMake file declares it: either
    /// `rdma_provider(NAME FILE..)` or `rdma_shared_provider(NAME MAP ..)`. `None`: the tree does not
    /// have it.
    fn of(source: &Path, name: &str) -> Option<Self> {
        let file = source.join("providers").join(name).join("CMakeLists.txt");
        let text = fs::read_to_string(&file).ok()?;
        let arguments = |call: &str| {
            let arguments = text.split_once(call)?.1.split_once(')')?.0;
            Some(arguments.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        let (declared, map) = match arguments("rdma_shared_provider(") {
            Some(arguments) => (arguments.first().cloned(), arguments.get(1).cloned()),
            None => (arguments("rdma_provider(").and_then(|a| a.first().cloned()), None),
        };
        if declared.as_deref() != Some(name) {
            exit_with_error(&format!("{}: it declares no provider {name}", file.display()));
        }
        Some(Self { name: name.to_owned(), map })
    }
}

/// The providers that have a Cargo feature. The slowest to compile come first, so that none of them
/// remains for the end.
const FEATURES: &[&str] = &[
    "mlx5",
    "hns",
    "mlx4",
    "irdma",
    "bnxt_re",
    "cxgb4",
    "qedr",
    "ocrdma",
    "mthca",
    "efa",
    "mana",
    "vmw_pvrdma",
    "rxe",
    "erdma",
    "ionic",
    "hfi1verbs",
    "siw",
    "ipathverbs",
];

/// The providers to build: those whose features are enabled. A tree of another release than the pinned one may lack some,
/// and it may have some that no feature names, which are built too.
pub(crate) fn providers(tree: &Tree) -> Vec<Provider> {
    let source = &tree.folder;
    let mut providers = Vec::new();
    for &name in FEATURES.iter().filter(|name| feature(name)) {
        match Provider::of(source, name) {
            Some(provider) => providers.push(provider),
            None => println!("cargo::warning={} has no provider {name}", source.display()),
        }
    }
    let folders = fs::read_dir(source.join("providers"));
    let mut names: Vec<_> = folders
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !FEATURES.contains(&name.as_str()))
        .collect();
    names.sort();
    providers.extend(names.iter().filter_map(|name| Provider::of(source, name)));
    providers
}

/// Generates a table that refers to each enabled provider, so that the linker takes in the provider's
/// object file, whose constructor then registers the provider. It also refers to `ibverbs_bundled_ioctl`, as a hidden
/// symbol, which makes it one wherever it is linked: Rust exports what C can call; so does `messages.c` with another one; and to a function of libibverbs. All of
/// these have names that begin with `prefix`, which libibverbs has in this release alone.
pub(crate) fn register_providers(out: &Path, enabled: &[Provider], prefix: &str) {
    let mut text = String::from("struct verbs_device_ops;\n");
    for provider in enabled {
        text += &format!(
            "extern const struct verbs_device_ops {prefix}verbs_provider_{};\n",
            provider.name
        );
    }
    text += "const struct verbs_device_ops *const ibverbs_bundled_providers[] = {\n";
    for provider in enabled {
        text += &format!("\t&{prefix}verbs_provider_{},\n", provider.name);
    }
    text += "\t0\n};\n";
    text += "extern int ibverbs_bundled_ioctl(void) __attribute__((visibility(\"hidden\")));\n";
    text += "int (*const ibverbs_bundled_hidden)(void) = ibverbs_bundled_ioctl;\n";
    text += &format!("extern int {prefix}verbs_set_ops(void);\n");
    text += &format!("int (*const ibverbs_bundled_release)(void) = {prefix}verbs_set_ops;\n");
    let file = out.join("providers.c");
    write(&file, text);
    let mut build = cc::Build::new();
    build.file(file).file("src/c/messages.c").flag("-fvisibility=hidden");
    compile(&mut build, "ibverbs_bundled_providers");
}
