//! The example, as a test.

#[path = "../examples/engine.rs"]
#[allow(dead_code, reason = "a test calls what it needs")]
mod engine;

#[test]
fn blocks_are_copied_to_many_peers() {
    engine::main().unwrap();
}
