//! Feeds arbitrary bytes to the device: properties that tests check with seeded bytes, and `fuzz/` with those that
//! coverage leads to.

pub use crate::transport::connection::hostile::device_messages;
pub use crate::transport::fuzz_target::device_packets;
pub use crate::transport::table::model::device_objects;
pub use crate::wire::header::property::device_headers;

#[cfg(test)]
mod tests {
    use crate::transport::rig::Random;

    /// The committed corpus, and random bytes.
    fn try_all(name: &str, property: fn(&[u8])) {
        let corpus = format!("{}/../fuzz/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
        let files = std::fs::read_dir(&corpus).unwrap_or_else(|error| panic!("{corpus}: {error}"));
        let inputs: Vec<Vec<u8>> =
            files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert!(inputs.len() >= 4, "{corpus}");
        inputs.iter().for_each(|input| property(input));
        let mut random = Random(7);
        for i in 0..300 {
            let length = random.below(600) as usize;
            let mut bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
            // Half of them begin as one of the corpus does.
            if i % 2 == 0 {
                let input = &inputs[random.below(inputs.len() as u64) as usize];
                let kept = random.below(input.len() as u64 + 1) as usize;
                bytes.splice(..kept.min(length), input[..kept].iter().copied());
            }
            property(&bytes);
        }
    }

    #[test]
    fn packets() {
        try_all("device_packets", super::device_packets);
    }

    #[test]
    fn messages() {
        try_all("device_messages", super::device_messages);
    }

    #[test]
    fn objects() {
        try_all("device_objects", super::device_objects);
    }

    #[test]
    fn headers() {
        try_all("device_headers", super::device_headers);
    }
}
