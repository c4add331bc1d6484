//! Endpoints, regions, GIDs and GUIDs that were deserialised.

use std::fmt::Debug;

use bincode::config::{self, Config};
use ibverbs::device::Guid;
use ibverbs::{Gid, QueuePairEndpoint, RemoteMemoryRegion};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Number, Value, json};

use crate::mutation::{mutated, mutations};
use crate::property_tests;

/// A type whose values must be valid, whatever they were read from.
pub(crate) trait Checked: Copy + PartialEq + Debug + Serialize + DeserializeOwned {
    fn is_valid(&self) -> bool;
}

impl Checked for QueuePairEndpoint {
    fn is_valid(&self) -> bool {
        self.num() < 1 << 24
            && self.gids().len() <= 6
            && self.gids().all(|gid| !gid.is_zero())
            && self.gids().next().unwrap_or_default() == self.gid()
            && !self.to_string().is_empty()
    }
}

impl Checked for RemoteMemoryRegion {
    fn is_valid(&self) -> bool {
        self.address().checked_add(self.length()).is_some()
            && Self::new(self.address(), self.length(), self.rkey()) == Ok(*self)
            && self.sub_region(0, self.length()) == Ok(*self)
            && self.sub_region(self.length(), 0).is_ok()
    }
}

impl Checked for Gid {
    fn is_valid(&self) -> bool {
        Self::from_bytes(self.to_bytes()) == *self && self.to_string().parse() == Ok(*self)
    }
}

impl Checked for Guid {
    fn is_valid(&self) -> bool {
        Self::from_bytes(self.to_bytes()) == *self && self.to_string().parse() == Ok(*self)
    }
}

/// Endpoints with GIDs of every class, with and without the optional parts.
pub(crate) fn endpoint() -> impl Strategy<Value = QueuePairEndpoint> {
    let gids = vec((0..4_u8, 1..=u128::MAX), 0..=6);
    let limits = (
        prop::option::of(0..1_u32 << 24),
        prop::option::of(prop::sample::select(vec![256, 512, 1024, 2048, 4096_u16])),
        prop::option::of(any::<u8>()),
        // Mostly those of a peer that fits.
        (
            prop::sample::select(vec![0_u8, 2, 2, 3, 9, 10, 77, 255]),
            prop::sample::select(vec![0_u16, 0xffff, 0xffff, 0x7fff, 0x8001, 1]),
        ),
    );
    (0..1_u32 << 24, any::<u16>(), limits, gids).prop_map(|(num, lid, limits, gids)| {
        let (psn, mtu, reads, (transport, pkey)) = limits;
        let mut bytes = vec![1];
        bytes.extend(num.to_be_bytes());
        bytes.extend(lid.to_be_bytes());
        bytes.extend(psn.unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend(mtu.unwrap_or(0_u16).to_be_bytes());
        bytes.extend(reads.map_or(u16::MAX, u16::from).to_be_bytes());
        bytes.push(transport);
        bytes.extend(pkey.to_be_bytes());
        bytes.push(gids.len() as u8);
        for (class, gid) in gids {
            bytes.push(class);
            bytes.extend(gid.to_be_bytes());
        }
        QueuePairEndpoint::from_bytes(&bytes).unwrap()
    })
}

fn region() -> impl Strategy<Value = RemoteMemoryRegion> {
    (any::<u64>(), any::<u64>(), any::<u32>()).prop_map(|(address, length, rkey)| {
        RemoteMemoryRegion::new(address, length % (u64::MAX - address).max(1), rkey).unwrap()
    })
}

/// Reads a value by one of bincode's encodings. The result must be valid, and be written as the same bytes
/// (an encoding has one form for each value).
fn read<T: Checked>(bytes: &[u8], config: impl Config) -> Result<Option<T>, TestCaseError> {
    let Ok((value, used)) = bincode::serde::decode_from_slice::<T, _>(bytes, config) else {
        return Ok(None);
    };
    prop_assert!(value.is_valid(), "{value:?}");
    prop_assert!(used <= bytes.len());
    let written = bincode::serde::encode_to_vec(value, config).unwrap();
    let (again, _) = bincode::serde::decode_from_slice::<T, _>(&written, config).unwrap();
    prop_assert_eq!(again, value);
    Ok(Some(value))
}

/// Tries all encodings, of which some read the same bytes differently. Returns in which of them the bytes are
/// a value.
fn read_all<T: Checked>(bytes: &[u8]) -> Result<[Option<T>; 4], TestCaseError> {
    Ok([
        read(bytes, config::legacy())?,
        read(bytes, config::standard())?,
        read(bytes, config::standard().with_big_endian().with_fixed_int_encoding())?,
        read(bytes, config::standard().with_limit::<16>())?,
    ])
}

/// A valid message is read back, a part of it is refused, and after `mutations` either may happen.
fn survives<T: Checked>(
    value: T,
    changed: impl Fn(Vec<u8>) -> Vec<u8>,
) -> Result<(), TestCaseError> {
    let config = config::legacy();
    let bytes = bincode::serde::encode_to_vec(value, config).unwrap();
    prop_assert_eq!(read::<T>(&bytes, config)?, Some(value));
    for len in 0..bytes.len() {
        prop_assert_eq!(read::<T>(&bytes[..len], config)?, None, "{} bytes", len);
    }
    read_all::<T>(&changed(bytes))?;
    let text = serde_json::to_vec(&value).unwrap();
    prop_assert_eq!(serde_json::from_slice::<T>(&text).unwrap(), value);
    for len in 0..text.len() {
        prop_assert!(serde_json::from_slice::<T>(&text[..len]).is_err(), "{len} bytes");
    }
    if let Ok(value) = serde_json::from_slice::<T>(&changed(text)) {
        prop_assert!(value.is_valid(), "{value:?}");
    }
    Ok(())
}

/// A number of any sign and size, or a fraction, as other programs may write it.
fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![0, 1, 0xff_ffff, 0x100_0000, 1 << 32, u64::MAX])
            .prop_map(Value::from),
        any::<f64>().prop_map(|number| Number::from_f64(number).map_or(Value::Null, Value::from)),
    ]
}

/// Anything that may stand in place of a value.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        4 => number(),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => ".{0,20}".prop_map(Value::from),
        2 => vec(0..300_u32, 14..18).prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 20, 18, |inner| vec(inner, 0..18).prop_map(Value::from))
}

/// An object that has most of the expected fields.
fn object(fields: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let name = prop_oneof![9 => prop::sample::select(fields), 1 => Just("other")];
    vec((name, anything()), 0..5).prop_map(|fields| {
        let mut object = json!({});
        for (name, value) in fields {
            object[name] = value;
        }
        object
    })
}

/// Numbers within their ranges are read as they are, others are refused.
fn region_from(value: &Value) -> Result<(), TestCaseError> {
    let wanted = || {
        let (address, length) = (value["address"].as_u64()?, value["length"].as_u64()?);
        let rkey = u32::try_from(value["rkey"].as_u64()?).ok()?;
        address.checked_add(length)?;
        RemoteMemoryRegion::new(address, length, rkey).ok()
    };
    prop_assert_eq!(serde_json::from_value::<RemoteMemoryRegion>(value.clone()).ok(), wanted());
    Ok(())
}

proptest! {
    #![proptest_config(property_tests::config(500))]

    #[test]
    fn random_bytes_make_valid_values_or_none(bytes in vec(any::<u8>(), 0..40)) {
        read_all::<QueuePairEndpoint>(&bytes)?;
        read_all::<RemoteMemoryRegion>(&bytes)?;
        read_all::<Gid>(&bytes)?;
        read_all::<Guid>(&bytes)?;
        let _ = serde_json::from_slice::<QueuePairEndpoint>(&bytes);
        let _ = serde_json::from_slice::<RemoteMemoryRegion>(&bytes);
    }

    /// Random bytes with the right version and length, which they rarely have by chance.
    #[test]
    fn any_number_of_24_bits_and_no_other(num: u32, shift in 0..32_u32, lid: u16) {
        let num = num >> shift;
        let without_limits = b"\xff\xff\xff\xff\0\0\xff\xff\0\0\0\0";
        let bytes =
            [b"\x13\0\0\0\0\0\0\0\x01", &num.to_be_bytes()[..], &lid.to_be_bytes(), without_limits].concat();
        let endpoint = read::<QueuePairEndpoint>(&bytes, config::legacy())?;
        prop_assert_eq!(endpoint, QueuePairEndpoint::new(num, lid, Gid::ZERO).ok());
        prop_assert_eq!(endpoint.is_some(), num < 1 << 24);
    }

    #[test]
    fn any_region_that_ends_and_no_other(address: u64, length: u64, shift in 0..64_u32, rkey: u32) {
        let length = length >> shift;
        let bytes =
            [&address.to_le_bytes()[..], &length.to_le_bytes(), &rkey.to_le_bytes()].concat();
        let region = read::<RemoteMemoryRegion>(&bytes, config::legacy())?;
        prop_assert_eq!(region.is_some(), address.checked_add(length).is_some());
    }

    #[test]
    fn a_part_is_never_more_than_the_whole(
        region in region(), offset: u64, length: u64, shifts in (0..64_u32, 0..64_u32),
    ) {
        let (offset, length) = (offset >> shifts.0, length >> shifts.1);
        let inside = offset.checked_add(length).is_some_and(|end| end <= region.length());
        let part = region.sub_region(offset, length);
        prop_assert_eq!(part.is_ok(), inside);
        if let Ok(part) = part {
            prop_assert!(part.is_valid());
            prop_assert_eq!(part.address() - region.address(), offset);
            prop_assert_eq!((part.length(), part.rkey()), (length, region.rkey()));
        }
    }

    #[test]
    fn what_is_damaged_on_the_way_is_valid_or_refused(
        endpoint in endpoint(), region in region(), gid: [u8; 16], guid: [u8; 8],
        damage in mutations(any::<u8>()),
    ) {
        let changed = |bytes| mutated(bytes, &damage);
        survives(endpoint, changed)?;
        survives(region, changed)?;
        survives(Gid::from_bytes(gid), changed)?;
        survives(Guid::from_bytes(guid), changed)?;
    }

    #[test]
    fn json_is_taken_at_its_word_or_refused(
        region in object(&["address", "length", "rkey"]),
    ) {
        region_from(&region)?;
    }

    /// A valid object with one wrong field.
    #[test]
    fn one_wrong_field_is_enough(region in region(), which in 0..3_usize, wrong in anything()) {
        let mut value = serde_json::to_value(region).unwrap();
        value[["address", "length", "rkey"][which]] = wrong;
        region_from(&value)?;
    }
}
