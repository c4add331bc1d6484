//! Lets the linker send the calls of these functions to the tests' own, which are called `__wrap_..` and reach
//! the provider's as `__real_..`.

const WRAPPED: &[&str] = &[
    "efadv_create_qp_ex",
    "efadv_query_ah",
    "efadv_query_device",
    "ibv_modify_qp",
    "mlx5dv_create_qp",
    "mlx5dv_dci_stream_id_reset",
    "mlx5dv_qp_ex_from_ibv_qp_ex",
    "mlx5dv_query_device",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for name in WRAPPED {
        println!("cargo::rustc-link-arg-tests=-Wl,--wrap={name}");
    }
}
