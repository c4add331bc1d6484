//! What comes from outside: addresses and remote regions in any encoding, GIDs and GUIDs as text, at
//! random and nearly right. None makes the crate panic, none that is invalid gets in, and what a
//! device makes of those that are valid but false ends in a typed error.

mod encodings;
mod mutation;
mod on_a_device;
#[path = "../support/property_tests.rs"]
mod property_tests;
mod text;
