//! Untrusted input: endpoints and remote regions in any encoding, GIDs and GUIDs as text, random and
//! almost correct. None makes the crate panic, invalid input is refused, and on a device, input that is valid but
//! false ends in a typed error.

mod encodings;
mod mutation;
mod on_a_device;
#[path = "../support/property_tests.rs"]
mod property_tests;
mod text;
