//! Untrusted input: endpoints and remote regions in any encoding, GIDs and GUIDs as text, and what peers
//! send to connect, random and almost correct. None makes the crate panic, invalid input is refused, and on a
//! device, input that is valid but false ends in a typed error.

mod encodings;
mod exchanges;
mod mutation;
mod on_a_device;
#[path = "../support/property_tests.rs"]
mod property_tests;
#[path = "../../../support/rig.rs"]
mod rig;
#[path = "../../../support/software.rs"]
mod software;
mod text;
