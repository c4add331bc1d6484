//! The providers (user-space drivers) of rdma-core, and their registration.

use std::path::Path;

use crate::common::{compile, write};

/// A provider (user-space driver) of rdma-core. Its Cargo feature, its folder, and its symbol
/// (`verbs_provider_<name>`) use its name.
pub(crate) struct Provider {
    pub(crate) name: &'static str,
    /// The CMake target of the static library.
    pub(crate) target: &'static str,
    /// The linker map of its exported symbols, if it does not use the common one.
    pub(crate) map: Option<&'static str>,
}

impl Provider {
    /// The library's name, without `lib` and `.a`. A provider without a public API is named after the
    /// version of the interface between libibverbs and its providers, as a plug-in is.
    pub(crate) fn archive(&self, abi: &str) -> String {
        match self.map {
            Some(_) => self.name.to_owned(),
            None => format!("{}-rdmav{abi}", self.name),
        }
    }
}

const fn plain(name: &'static str) -> Provider {
    Provider { name, target: name, map: None }
}

const fn with_api(name: &'static str, target: &'static str, map: &'static str) -> Provider {
    Provider { name, target, map: Some(map) }
}

/// The slowest to compile come first, so that none of them remains for the end.
pub(crate) const PROVIDERS: &[Provider] = &[
    with_api("mlx5", "mlx5-static", "libmlx5.map"),
    with_api("hns", "hns-static", "libhns.map"),
    with_api("mlx4", "mlx4-static", "libmlx4.map"),
    plain("irdma"),
    plain("bnxt_re"),
    plain("cxgb4"),
    plain("qedr"),
    plain("ocrdma"),
    plain("mthca"),
    with_api("efa", "efa-static", "libefa.map"),
    with_api("mana", "mana-static", "libmana.map"),
    plain("vmw_pvrdma"),
    plain("rxe"),
    plain("erdma"),
    plain("hfi1verbs"),
    plain("siw"),
    plain("ipathverbs"),
];

/// Generates a table that refers to each enabled provider, so that the linker takes in the provider's
/// object file, whose constructor then registers the provider.
pub(crate) fn register_providers(out: &Path, enabled: &[&Provider]) {
    let mut text = String::from("struct verbs_device_ops;\n");
    for provider in enabled {
        text +=
            &format!("extern const struct verbs_device_ops verbs_provider_{};\n", provider.name);
    }
    text += "const struct verbs_device_ops *const ibverbs_bundled_providers[] = {\n";
    for provider in enabled {
        text += &format!("\t&verbs_provider_{},\n", provider.name);
    }
    text += "\t0\n};\n";
    let file = out.join("providers.c");
    write(&file, text);
    compile(cc::Build::new().file(file), "ibverbs_providers");
}
