//! The function device itself, driven as a C program would drive it: what all other tests on it rest on.
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
