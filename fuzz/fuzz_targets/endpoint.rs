#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let config = || bincode::config::standard().with_fixed_int_encoding();
    ibverbs::harness::endpoint(
        data,
        |bytes| bincode::serde::decode_from_slice(bytes, config()).ok().map(|(read, _)| read),
        |endpoint| bincode::serde::encode_to_vec(endpoint, config()).unwrap(),
    );
    ibverbs::harness::endpoint(
        data,
        |bytes| serde_json::from_slice(bytes).ok(),
        |endpoint| serde_json::to_vec(endpoint).unwrap(),
    );
});
