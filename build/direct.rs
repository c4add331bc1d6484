//! The direct verbs of providers: public headers of their own, beside `verbs.h`.

use crate::common::feature;
use crate::source_tree::Tree;

/// The direct verbs of a provider, which its cargo feature adds to the bindings.
pub(crate) struct DirectVerbs {
    /// The provider, its cargo feature, and its library.
    pub(crate) provider: &'static str,
    /// The header that programs include, with its version and the others that it needs.
    pub(crate) headers: &'static [&'static str],
    /// Patterns of the functions and types, and those of the constants.
    #[cfg_attr(not(feature = "bindgen"), allow(dead_code))]
    pub(crate) items: &'static str,
    #[cfg_attr(not(feature = "bindgen"), allow(dead_code))]
    pub(crate) constants: &'static str,
    /// Types of the C library that it uses.
    #[cfg_attr(not(feature = "bindgen"), allow(dead_code))]
    pub(crate) libc: &'static [&'static str],
    /// Types that bindgen gets wrong, with their definitions.
    #[cfg_attr(not(feature = "bindgen"), allow(dead_code))]
    pub(crate) replaced: &'static [(&'static str, &'static str)],
}

/// The structure is packed and also aligned, which bindgen cannot express: it would move the fields.
const MLX5_WQE_CTRL_SEG: &str = "\
#[repr(C, align(4))]
#[derive(Debug, Default, Copy, Clone)]
pub struct mlx5_wqe_ctrl_seg {
    pub opmod_idx_opcode: __be32,
    pub qpn_ds: __be32,
    pub signature: u8,
    pub dci_stream_channel_id: [u8; 2],
    pub fm_ce_se: u8,
    pub imm: __be32,
}
";

const DIRECT_VERBS: &[DirectVerbs] = &[
    DirectVerbs {
        provider: "efa",
        headers: &["providers/efa/efadv.h"],
        items: "efadv_.*",
        constants: "EFADV_.*",
        libc: &[],
        replaced: &[],
    },
    DirectVerbs {
        provider: "hns",
        headers: &["providers/hns/hnsdv.h"],
        items: "hnsdv_.*",
        constants: "HNSDV_.*",
        libc: &[],
        replaced: &[],
    },
    DirectVerbs {
        provider: "ionic",
        headers: &["providers/ionic/ionic_dv.h"],
        items: "ionic_dv_.*",
        constants: "IONIC_DV_.*",
        libc: &[],
        replaced: &[],
    },
    DirectVerbs {
        provider: "mana",
        headers: &["providers/mana/manadv.h"],
        items: "manadv_.*",
        constants: "MANADV_.*",
        libc: &[],
        replaced: &[],
    },
    DirectVerbs {
        provider: "mlx4",
        headers: &["providers/mlx4/mlx4dv.h"],
        items: "mlx4_.*|mlx4dv_.*",
        constants: "MLX4_.*|MLX4DV_.*",
        libc: &["off_t"],
        replaced: &[],
    },
    DirectVerbs {
        provider: "mlx5",
        headers: &[
            "providers/mlx5/mlx5dv.h",
            "providers/mlx5/mlx5_api.h",
            "kernel-headers/rdma/mlx5_user_ioctl_verbs.h",
        ],
        items: "_?mlx5_.*|_?mlx5dv_.*|ibv_tmh|ibv_tmh_op",
        constants: "MLX5_.*|MLX5DV_.*|DEVX_.*",
        libc: &["__u8", "FILE", "off_t"],
        replaced: &[("mlx5_wqe_ctrl_seg", MLX5_WQE_CTRL_SEG)],
    },
];

impl DirectVerbs {
    fn is_in(&self, tree: &Tree) -> bool {
        tree.folder.join(self.headers[0]).exists()
    }

    /// The name of its header.
    #[cfg(feature = "bindgen")]
    pub(crate) fn header(&self) -> &'static str {
        self.headers[0].rsplit('/').next().unwrap_or_default()
    }

    /// The file of its bindings.
    #[cfg(feature = "bindgen")]
    pub(crate) fn bindings(&self) -> String {
        format!("bindings_{}.rs", self.provider)
    }

    /// The file of its inline functions. A header without any gives a file without functions.
    pub(crate) fn inline_functions(&self) -> String {
        format!("inline_functions_{}.c", self.provider)
    }
}

/// The direct verbs of the enabled providers. A tree of another release than the pinned one may lack some.
pub(crate) fn direct_verbs(tree: &Tree) -> impl Iterator<Item = &'static DirectVerbs> {
    enabled().filter(|direct| direct.is_in(tree))
}

/// Functions that the tree lacks: their files in `OUT_DIR` are empty.
#[cfg(feature = "bindgen")]
pub(crate) fn missing_direct_verbs(tree: &Tree) -> impl Iterator<Item = &'static DirectVerbs> {
    enabled().filter(|direct| !direct.is_in(tree))
}

fn enabled() -> impl Iterator<Item = &'static DirectVerbs> {
    DIRECT_VERBS.iter().filter(|direct| feature(direct.provider))
}
