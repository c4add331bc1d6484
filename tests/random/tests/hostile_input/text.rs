//! GIDs and GUIDs as text.

use ibverbs::Gid;
use ibverbs::device::Guid;
use proptest::prelude::*;

use crate::mutation::{mutated, mutations};
use crate::property_tests;

/// The characters that such texts consist of, and a few others.
fn alphabet() -> impl Strategy<Value = u8> + Clone {
    prop::sample::select(b"0123456789abcdefABCDEF::::....gG +-%/x\0".to_vec())
}

/// A GUID is four groups of four hexadecimal digits. This checks it in another way than the parser.
fn is_guid(text: &str) -> bool {
    text.len() == 19
        && text.bytes().enumerate().all(|(at, byte)| match at % 5 {
            4 => byte == b':',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// Texts of other kinds are not addresses: names, ports, scopes and the like.
fn may_be_gid(text: &str) -> bool {
    (2..=45).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.')
        && text.matches(':').count() >= 2
        && text.matches("::").count() <= 1
        && text.split([':', '.']).all(|group| group.len() <= 4)
}

fn check(text: &str) -> Result<(), TestCaseError> {
    if let Ok(gid) = text.parse::<Gid>() {
        prop_assert!(may_be_gid(text), "{text:?} was taken for {gid}");
        prop_assert_eq!(gid.to_string().parse(), Ok(gid));
    }
    let guid = text.parse::<Guid>();
    prop_assert_eq!(guid.is_ok(), is_guid(text), "{:?}", text);
    if let Ok(guid) = guid {
        prop_assert_eq!(guid.to_string(), text.to_ascii_lowercase());
    }
    Ok(())
}

proptest! {
    #![proptest_config(property_tests::config(1000))]

    #[test]
    fn a_gid_reads_what_it_writes(bytes: [u8; 16], zeros: u16) {
        let mut bytes = bytes;
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte *= (zeros >> at & 1) as u8;
        }
        let gid = Gid::from_bytes(bytes);
        prop_assert_eq!(gid.to_string().parse(), Ok(gid));
        prop_assert_eq!(gid.to_string().to_uppercase().parse(), Ok(gid));
        prop_assert_eq!(gid.to_bytes(), bytes);
        let halves = u128::from(gid.subnet_prefix()) << 64 | u128::from(gid.interface_id());
        prop_assert_eq!(halves.to_be_bytes(), bytes);
        prop_assert_eq!(gid.is_zero(), bytes == [0; 16]);
    }

    #[test]
    fn a_guid_reads_what_it_writes(bytes: [u8; 8]) {
        let guid = Guid::from_bytes(bytes);
        prop_assert_eq!(guid.to_string().parse(), Ok(guid));
        prop_assert_eq!(guid.to_string().to_uppercase().parse(), Ok(guid));
        prop_assert_eq!(guid.to_bytes(), bytes);
        prop_assert_eq!(&guid.oui().to_be_bytes()[1..], &bytes[..3]);
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,50}") {
        check(&text)?;
    }

    #[test]
    fn text_of_the_right_letters_too(bytes in prop::collection::vec(alphabet(), 0..50)) {
        check(&String::from_utf8(bytes).unwrap())?;
    }

    #[test]
    fn text_that_is_nearly_right(
        gid: [u8; 16], guid: [u8; 8], mapped: [u8; 4], damage in mutations(alphabet()),
    ) {
        let texts = [
            Gid::from_bytes(gid).to_string(),
            Guid::from_bytes(guid).to_string(),
            Gid::from(std::net::Ipv4Addr::from(mapped)).to_string(),
        ];
        for text in texts {
            // Characters of several bytes occur too, and parts of them, which are not valid text.
            check(&String::from_utf8_lossy(&mutated(text.into_bytes(), &damage)))?;
        }
    }
}
