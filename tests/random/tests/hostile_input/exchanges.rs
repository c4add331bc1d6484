//! Bytes in place of what a peer sends while two sides connect.

use std::io::{self, Read, Write};
use std::time::Instant;

use ibverbs::tcp::{DeadlineStream, ExchangeError};
use proptest::prelude::*;

use crate::mutation::{mutated, mutations};
use crate::property_tests;
use crate::rig::{Rig, recorded, soon};

/// A stream in memory: reads return the peer's bytes, and nobody gets what is written.
struct Recorded {
    bytes: io::Cursor<Vec<u8>>,
}

impl Read for Recorded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(bytes)
    }
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DeadlineStream for Recorded {
    fn set_deadline(&mut self, _: Option<Instant>) -> io::Result<()> {
        Ok(())
    }
}

/// Lets both roles meet a peer that sends these bytes: they connect, or end with a typed error, and leave
/// nothing behind.
fn meets(rig: &Rig, bytes: &[u8]) {
    for connects in [false, true] {
        let mut stream = Recorded { bytes: io::Cursor::new(bytes.to_vec()) };
        let prepared = rig.prepared();
        let result = if connects {
            prepared.connect_over(&mut stream, b"ours", soon())
        } else {
            prepared.accept_over(&mut stream, b"ours", soon())
        };
        match result.map_err(ExchangeError::from) {
            Ok((channel, told)) => {
                assert!(told.len() <= ibverbs::tcp::MAX_PRIVATE_DATA);
                drop(channel);
            }
            Err(ExchangeError::Io(error)) => panic!("{error}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        rig.assert_nothing_left();
    }
}

proptest! {
    #![proptest_config(property_tests::config(100))]

    #[test]
    fn any_bytes_connect_or_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..200), with_name: bool, version in 0..3_u8,
    ) {
        let rig = Rig::new();
        let bytes = if with_name { [b"ibverbs", &[version][..], &bytes].concat() } else { bytes };
        meets(&rig, &bytes);
    }

    #[test]
    fn nearly_right_bytes_connect_or_are_refused(damage in mutations(any::<u8>())) {
        let rig = Rig::new();
        let (greeting, ready) = recorded(&rig);
        meets(&rig, &mutated([greeting, ready].concat(), &damage));
    }
}
