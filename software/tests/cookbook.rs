//! The programs of the cookbook, on two devices made of software.

#![allow(
    clippy::duplicate_mod,
    reason = "each page is a program, and has its own copy of what they share"
)]

/// Runs a page of the cookbook as a test.
macro_rules! pages {
    ($($page:ident: $file:literal;)+) => {
        $(
            #[path = $file]
            mod $page;
        )+

        mod runs {
            $(
                #[test]
                fn $page() {
                    let open = || ibverbs_software::Device::new().unwrap().open().unwrap();
                    crate::$page::run(&open(), &open()).unwrap();
                }
            )+
        }
    };
}

pages! {
    failed_peer: "../../examples/cookbook_failed_peer.rs";
    huge_pages_numa: "../../examples/cookbook_huge_pages_numa.rs";
    large_transfer: "../../examples/cookbook_large_transfer.rs";
    many_peers: "../../examples/cookbook_many_peers.rs";
    many_threads: "../../examples/cookbook_many_threads.rs";
    receive_ring: "../../examples/cookbook_receive_ring.rs";
    remote_lock: "../../examples/cookbook_remote_lock.rs";
    request_response: "../../examples/cookbook_request_response.rs";
    versioned_table: "../../examples/cookbook_versioned_table.rs";
}
