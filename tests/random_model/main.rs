//! Random programs on the model device, which says what it saw: objects that are live, and rules that
//! were broken. To be run under valgrind too.

#[path = "../support/property_tests.rs"]
mod property_tests;
#[path = "../support/random/mod.rs"]
mod random;

mod channels;
mod model;
mod verbs;
