//! Lets the linker send the calls of these functions to the tests' own, which are called `__wrap_..` and reach
//! the provider's as `__real_..`.

const WRAPPED: &[&str] = &[
    "efadv_create_qp_ex",
    "efadv_query_ah",
    "efadv_query_device",
    "ibv_modify_qp",
    "mlx5dv_create_mkey",
    "mlx5dv_create_qp",
    "mlx5dv_dci_stream_id_reset",
    "mlx5dv_destroy_mkey",
    "mlx5dv_init_obj",
    "mlx5dv_is_supported",
    "mlx5dv_qp_ex_from_ibv_qp_ex",
    "mlx5dv_query_device",
    "rdma_ack_cm_event",
    "rdma_create_event_channel",
    "rdma_create_id",
    "rdma_destroy_event_channel",
    "rdma_destroy_id",
    "rdma_freeaddrinfo",
    "rdma_get_cm_event",
    "rdma_query_addrinfo",
    "rdma_resolve_addr",
    "rdma_resolve_addrinfo",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(rdma_core_65)");
    // "rdmacore65_0_" is the prefix of v65.0.
    let prefix = std::env::var("DEP_IBVERBS_SYMBOL_PREFIX").unwrap_or_default();
    let major = prefix.trim_start_matches(char::is_alphabetic).split('_').next();
    if major.is_some_and(|major| major.parse().is_ok_and(|major: u32| major >= 65)) {
        println!("cargo::rustc-cfg=rdma_core_65");
    }
    for name in WRAPPED {
        println!("cargo::rustc-link-arg-tests=-Wl,--wrap={name}");
    }
}
