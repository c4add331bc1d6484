#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ibverbs::harness::private_data(data));
