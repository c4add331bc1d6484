//! Random programs on the model device, which says what it saw: objects that are live, and rules that
//! were broken. To be run under valgrind too.

#[path = "../chance/mod.rs"]
mod chance;
#[path = "../random/mod.rs"]
mod random;

mod channels;
mod model;
mod verbs;
