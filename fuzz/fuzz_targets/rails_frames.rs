#![no_main]
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../rails/tests/simulated/between.rs"]
mod between;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../rails/tests/simulated/frames.rs"]
mod frames;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../rails/tests/simulated/support.rs"]
mod support;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    between::frames_between(data);
});
