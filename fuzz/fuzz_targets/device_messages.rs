#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| ibverbs_software::harness::device_messages(data));
