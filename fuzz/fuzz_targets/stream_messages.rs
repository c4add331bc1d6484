#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ibverbs_stream::harness::messages(data));
