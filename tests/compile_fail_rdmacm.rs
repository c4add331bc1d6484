//! Misuse of connections does not compile. A case is `compile_fail_rdmacm/NAME.rs`, with what the compiler
//! says about it in `NAME.stderr`, and `compile_pass_rdmacm/NAME.rs`, which differs only by the correction.

#[allow(dead_code, unreachable_pub, reason = "compiling is the test")]
mod compile_pass_rdmacm {
    mod connection_outlives_domain;
    mod event_read_while_watched;
    mod request_answered_twice;
    mod send_within_a_watch;
}

#[test]
fn misuse_does_not_compile() {
    // Nothing is linked: as on docs.rs, the headers of rdma-core are enough. Nothing is fetched.
    // SAFETY: there is no other test.
    unsafe {
        std::env::set_var("DOCS_RS", "1");
        std::env::set_var("CARGO_NET_OFFLINE", "true");
    }
    trybuild::TestCases::new().compile_fail("tests/compile_fail_rdmacm/*.rs");
}
