//! Properties that hold for arbitrary bytes of a peer. Tests check them with seeded bytes, `fuzz/` with those that
//! coverage leads to.

#[cfg(feature = "rdmacm")]
pub use crate::connect::rdmacm::private_data;
#[cfg(feature = "channel")]
pub use crate::connect::tcp::exchanged_bytes;
use crate::verbs::queue_pair::QueuePairEndpoint;

/// Reads an endpoint in a format of serde. A valid one survives writing and reading.
pub fn endpoint(
    data: &[u8],
    read: impl Fn(&[u8]) -> Option<QueuePairEndpoint>,
    write: impl Fn(&QueuePairEndpoint) -> Vec<u8>,
) {
    let Some(endpoint) = read(data) else { return };
    assert!(endpoint.num() <= 0xff_ffff);
    assert_eq!(read(&write(&endpoint)), Some(endpoint));
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

    fn try_all(name: &str, property: fn(&[u8])) {
        let corpus = format!("{}/fuzz/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
        let files = std::fs::read_dir(&corpus).unwrap_or_else(|error| panic!("{corpus}: {error}"));
        let inputs: Vec<Vec<u8>> =
            files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert!(inputs.len() >= 3, "{corpus}");
        inputs.iter().for_each(|input| property(input));
        // Each run has the same numbers.
        let random = |number: usize| {
            BuildHasherDefault::<DefaultHasher>::default().hash_one(number) as usize
        };
        for i in 0..20_000 {
            let mut bytes = inputs[random(i) % inputs.len()].clone();
            for change in 0..random(i + 1) % 4 {
                let (at, to) = (random(7 * i + change), random(11 * i + change));
                match (bytes.len(), to % 3) {
                    (0, _) => bytes.push(to as u8),
                    (length, 0) => bytes.truncate(at % length),
                    (length, _) => bytes[at % length] = (to >> 8) as u8,
                }
            }
            property(&bytes);
        }
    }

    #[test]
    #[cfg(feature = "channel")]
    #[cfg_attr(miri, ignore = "files, and a long time")]
    fn exchanged_bytes() {
        try_all("exchanged_bytes", super::exchanged_bytes);
    }

    #[test]
    #[cfg(feature = "rdmacm")]
    #[cfg_attr(miri, ignore = "files, and a long time")]
    fn private_data() {
        try_all("private_data", super::private_data);
    }

    #[test]
    #[cfg(feature = "serde")]
    #[cfg_attr(miri, ignore = "files, and a long time")]
    fn endpoint() {
        try_all("endpoint", |data| {
            let config = || bincode::config::standard().with_fixed_int_encoding();
            super::endpoint(
                data,
                |bytes| {
                    bincode::serde::decode_from_slice(bytes, config()).ok().map(|(read, _)| read)
                },
                |endpoint| bincode::serde::encode_to_vec(endpoint, config()).unwrap(),
            );
            super::endpoint(
                data,
                |bytes| serde_json::from_slice(bytes).ok(),
                |endpoint| serde_json::to_vec(endpoint).unwrap(),
            );
        });
    }
}
