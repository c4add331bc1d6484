//! Tests of the function device itself, which all other tests on it rely on. They use it like a C program.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "a C program in Rust: each test owns all that it creates until its end"
)]

mod control;
mod events;
mod faults;
mod lean;
mod others;
mod rig;
mod transfer;
