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
    let said =
        |name: &str| std::env::var(format!("DEP_IBVERBS_BUNDLED_{name}")).unwrap_or_default();
    let (release, prefix) = (said("RELEASE"), said("PUBLIC_SYMBOL_PREFIX"));
    let major = release.split('.').next();
    let is_65 = major.is_some_and(|major| major.parse().is_ok_and(|major: u32| major >= 65));
    if is_65 {
        println!("cargo::rustc-cfg=rdma_core_65");
    }
    // An older librdmacm lacks some of its functions, whose tests are left out.
    for name in WRAPPED.iter().filter(|name| is_65 || !name.starts_with("rdma_")) {
        println!("cargo::rustc-link-arg-tests=-Wl,--wrap={prefix}{name}");
        // The tests know no prefix.
        if !prefix.is_empty() {
            println!(
                "cargo::rustc-link-arg-tests=-Wl,--defsym=__wrap_{prefix}{name}=__wrap_{name}"
            );
            println!(
                "cargo::rustc-link-arg-tests=-Wl,--defsym=__real_{name}=__real_{prefix}{name}"
            );
        }
    }
}
