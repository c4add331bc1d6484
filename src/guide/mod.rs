//! The guide: a page for each thing that a program does first, with programs that run.
//!
#![cfg_attr(
    feature = "async",
    doc = "
| page | what it shows |
|---|---|
| [`getting_started`] | a first program, a message from start to end, the hierarchy of resources |
| [`lifetimes`] | borrowed lifetimes or `Arc`; threads, fork |
| [`memory`] | memory that peers read and write |
| [`servers`] | many clients on a thread; futures in a runtime |
| [`connecting`] | over TCP, over any stream, by IP address |
| [`failures`] | time-outs, retries, flow control, errors |
| [`testing`] | tests without RDMA hardware |
| [`verbs`] | queue pairs as in C, event loops, InfiniBand and RoCE, datagrams |
| [`features`] | the features of the crate |"
)]
#![cfg_attr(
    not(feature = "async"),
    doc = "
| page | what it shows |
|---|---|
| [`verbs`] | queue pairs as in C, event loops, InfiniBand and RoCE, datagrams |
| [`features`] | the features of the crate |"
)]

/// Declares a page, whose links see the items of the root and of three modules.
macro_rules! page {
    ($(#[doc = $text:expr])* $name:ident $(if $feature:literal)?) => {
        $(#[cfg(feature = $feature)])?
        pub mod $name {
            $(#![doc = $text])*

            #[allow(unused_imports, reason = "the links of the page")]
            use crate::{completion::*, memory::*, settings::*, *};
        }
    };
}

page! {
    /// A first message, and which resource is made from which.
    ///
    /// # A first program
    ///
    /// It runs on any machine: where there is no RDMA device, it registers one made of software.
    ///
    /// ```
    #[doc = include_str!("../../examples/hello.rs")]
    /// ```
    ///
    #[doc = include_str!("getting_started.md")]
    getting_started if "async"
}
page! {
    #[doc = include_str!("lifetimes.md")]
    lifetimes if "async"
}
page! {
    #[doc = include_str!("memory.md")]
    memory if "async"
}
page! {
    #[doc = include_str!("servers.md")]
    servers if "async"
}
page! {
    #[doc = include_str!("connecting.md")]
    connecting if "async"
}
page! {
    #[doc = include_str!("failures.md")]
    failures if "async"
}
page! {
    #[doc = include_str!("testing.md")]
    testing if "async"
}
page! {
    /// Queue pairs as in C: post, poll, and keep track of buffers yourself.
    ///
    #[doc = include_str!("queue_pair.md")]
    ///
    #[doc = include_str!("verbs.md")]
    verbs
}
page! {
    #[doc = include_str!("features.md")]
    features
}
