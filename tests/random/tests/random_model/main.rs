//! Random programs on the model device, which counts live objects and violations of its rules.
//! `script/test memcheck` also runs them under valgrind.

#[path = "../support/property_tests.rs"]
mod property_tests;
#[path = "../support/random/mod.rs"]
mod random;

mod channels;
mod futures;
mod ledger;
mod loops;
mod model;
mod verbs;
