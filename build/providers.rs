//! The providers (user-space drivers) of rdma-core, and their registration.

use std::path::Path;

use crate::common::{compile, write};

/// A provider (user-space driver) of rdma-core v55.0. Cargo feature, folder, and symbol
/// (`verbs_provider_<name>`) all go by its name.
pub(crate) struct Provider {
    pub(crate) name: &'static str,
    /// The CMake target of the static library.
    pub(crate) target: &'static str,
    /// The library's name, without `lib` and `.a`.
    pub(crate) archive: &'static str,
    /// The linker map that names what it exports, if it is not the common one.
    pub(crate) map: Option<&'static str>,
}

const fn plain(name: &'static str, archive: &'static str) -> Provider {
    Provider { name, target: name, archive, map: None }
}

const fn with_api(name: &'static str, target: &'static str, map: &'static str) -> Provider {
    Provider { name, target, archive: name, map: Some(map) }
}

/// Those that take longest to compile first, so that none of them is left for the end.
pub(crate) const PROVIDERS: &[Provider] = &[
    with_api("mlx5", "mlx5-static", "libmlx5.map"),
    with_api("hns", "hns-static", "libhns.map"),
    with_api("mlx4", "mlx4-static", "libmlx4.map"),
    plain("irdma", "irdma-rdmav34"),
    plain("bnxt_re", "bnxt_re-rdmav34"),
    plain("cxgb4", "cxgb4-rdmav34"),
    plain("qedr", "qedr-rdmav34"),
    plain("ocrdma", "ocrdma-rdmav34"),
    plain("mthca", "mthca-rdmav34"),
    with_api("efa", "efa-static", "libefa.map"),
    with_api("mana", "mana-static", "libmana.map"),
    plain("vmw_pvrdma", "vmw_pvrdma-rdmav34"),
    plain("rxe", "rxe-rdmav34"),
    plain("erdma", "erdma-rdmav34"),
    plain("hfi1verbs", "hfi1verbs-rdmav34"),
    plain("siw", "siw-rdmav34"),
    plain("ipathverbs", "ipathverbs-rdmav34"),
];

/// A table that refers to each enabled provider, so that the linker takes in its object file, whose
/// constructor then registers it.
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
