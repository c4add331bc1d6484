//! The serde form of an endpoint (feature `serde`): a struct whose first field is the version.
//!
//! In binary formats, which have no field names, the upper 24 bits of the version are [`MAGIC`]. So this crate rejects
//! other data at its first four bytes, and so do readers that expect a queue pair number there.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::ser::{SerializeSeq, Serializer};
use serde::{Deserialize, Serialize};

use super::endpoint::QueuePairEndpoint;
use super::endpoint_bytes::{CREDITS_VERSION, VERSION};
use crate::base::GidClass;
use crate::verbs::device::{EndpointGid, EndpointGids, Gid, MAX_GIDS};
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// "QPE": larger than any queue pair number.
const MAGIC: u32 = 0x5150_4500;

/// Version 1 ends before the credit word.
#[derive(Serialize, Deserialize)]
#[serde(rename = "QueuePairEndpoint")]
struct Wire {
    version: Version,
    num: u32,
    lid: u16,
    send_psn: Option<u32>,
    path_mtu: Option<u32>,
    max_dest_rd_atomic: Option<u8>,
    transport: u8,
    pkey: u16,
    gids: EndpointGids,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    credit_word: Option<RemoteMemoryRegion>,
}

const FIELDS: &[&str] = &[
    "version",
    "num",
    "lid",
    "send_psn",
    "path_mtu",
    "max_dest_rd_atomic",
    "transport",
    "pkey",
    "gids",
    "credit_word",
];

/// One of the two versions, with or without [`MAGIC`].
struct Version(u8);

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let magic = if serializer.is_human_readable() { 0 } else { MAGIC };
        serializer.serialize_u32(magic | u32::from(self.0))
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let magic = if deserializer.is_human_readable() { 0 } else { MAGIC };
        let found = u32::deserialize(deserializer)?;
        if magic != 0 && found & !0xff != magic {
            return Err(D::Error::custom(format_args!(
                "this is not a queue pair endpoint with a version, as this crate has it: does the \
                 peer use another version of the crate, or another format? (It begins with \
                 {found:#010x}.)"
            )));
        }
        let version = found & !magic;
        let known = u8::try_from(version).ok();
        let Some(known) = known.filter(|known| (VERSION..=CREDITS_VERSION).contains(known)) else {
            return Err(D::Error::custom(format_args!(
                "the queue pair endpoint has version {version}, but this crate reads versions \
                 {VERSION} and {CREDITS_VERSION}: both sides must use versions of the crate that agree"
            )));
        };
        Ok(Self(known))
    }
}

#[derive(Serialize, Deserialize)]
struct WireGid {
    class: u8,
    gid: Gid,
}

impl Serialize for EndpointGids {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let gids = self.as_slice();
        let mut seq = serializer.serialize_seq(Some(gids.len()))?;
        for gid in gids {
            seq.serialize_element(&WireGid { class: gid.class.code(), gid: gid.gid })?;
        }
        seq.end()
    }
}

impl<'de> Deserialize<'de> for EndpointGids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;

        impl<'de> Visitor<'de> for List {
            type Value = EndpointGids;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_GIDS} GIDs")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<EndpointGids, A::Error> {
                let mut gids = EndpointGids::default();
                while let Some(WireGid { class, gid }) = seq.next_element()? {
                    let class = GidClass::from_code(class).ok_or_else(|| {
                        A::Error::custom(format_args!("a GID has the unknown class {class}"))
                    })?;
                    if gid.is_zero() {
                        return Err(A::Error::custom("a GID of the endpoint is zero"));
                    }
                    if !gids.push(EndpointGid { gid, class }) {
                        return Err(A::Error::invalid_length(MAX_GIDS + 1, &self));
                    }
                }
                Ok(gids)
            }
        }

        deserializer.deserialize_seq(List)
    }
}

impl Serialize for QueuePairEndpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { num, lid, max_dest_rd_atomic, transport, pkey, gids, credit_word, .. } = *self;
        let send_psn = self.send_psn.map(PacketSequenceNumber::value);
        let path_mtu = self.path_mtu.map(MaximumTransferUnit::bytes);
        let version = Version(if credit_word.is_none() { VERSION } else { CREDITS_VERSION });
        Wire {
            version,
            num,
            lid,
            send_psn,
            path_mtu,
            max_dest_rd_atomic,
            transport,
            pkey,
            gids,
            credit_word,
        }
        .serialize(serializer)
    }
}

struct AnyVersion;

impl<'de> Visitor<'de> for AnyVersion {
    type Value = Wire;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("struct QueuePairEndpoint")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Wire, A::Error> {
        fn field<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(
            seq: &mut A,
            index: usize,
        ) -> Result<T, A::Error> {
            seq.next_element()?.ok_or_else(|| A::Error::invalid_length(index, &AnyVersion))
        }

        let version: Version = field(&mut seq, 0)?;
        Ok(Wire {
            num: field(&mut seq, 1)?,
            lid: field(&mut seq, 2)?,
            send_psn: field(&mut seq, 3)?,
            path_mtu: field(&mut seq, 4)?,
            max_dest_rd_atomic: field(&mut seq, 5)?,
            transport: field(&mut seq, 6)?,
            pkey: field(&mut seq, 7)?,
            gids: field(&mut seq, 8)?,
            credit_word: if version.0 < CREDITS_VERSION { None } else { field(&mut seq, 9)? },
            version,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Wire, A::Error> {
        Wire::deserialize(MapAccessDeserializer::new(map))
    }
}

impl<'de> Deserialize<'de> for QueuePairEndpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = if deserializer.is_human_readable() {
            Wire::deserialize(deserializer)?
        } else {
            deserializer.deserialize_struct("QueuePairEndpoint", FIELDS, AnyVersion)?
        };
        if (wire.version.0 == CREDITS_VERSION) != wire.credit_word.is_some() {
            return Err(D::Error::custom(
                "the queue pair endpoint has a credit word in version 2, and only there",
            ));
        }
        let mut endpoint = Self::new(wire.num, wire.lid, Gid::ZERO).map_err(D::Error::custom)?;
        let psn = wire.send_psn.map(PacketSequenceNumber::new).transpose();
        endpoint.send_psn = psn.map_err(D::Error::custom)?;
        let mtu = wire.path_mtu.map(MaximumTransferUnit::from_bytes).transpose();
        endpoint.path_mtu = mtu.map_err(D::Error::custom)?;
        endpoint.max_dest_rd_atomic = wire.max_dest_rd_atomic;
        (endpoint.transport, endpoint.pkey) = (wire.transport, wire.pkey);
        endpoint.gids = wire.gids;
        endpoint.credit_word = wire.credit_word;
        Ok(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> QueuePairEndpoint {
        let mut endpoint = QueuePairEndpoint::new(0x1234, 5, Gid::ZERO)
            .unwrap()
            .with_send_psn(PacketSequenceNumber::new(0xabcdef).unwrap())
            .with_path_mtu(MaximumTransferUnit::Mtu1024)
            .with_max_dest_rd_atomic(16)
            .with_pkey(0x8001);
        endpoint.transport = 2;
        for (gid, class) in [("::ffff:10.0.0.1", GidClass::RoceV2), ("fe80::9:8", GidClass::RoceV1)]
        {
            endpoint.gids.push(EndpointGid { gid: gid.parse().unwrap(), class });
        }
        endpoint
    }

    #[derive(Serialize, Deserialize)]
    struct Unversioned {
        num: u32,
        lid: u16,
        gid: Gid,
    }

    fn binary() -> impl bincode::config::Config {
        bincode::config::standard().with_fixed_int_encoding()
    }

    fn read(bytes: &[u8]) -> Result<QueuePairEndpoint, String> {
        let found = bincode::serde::decode_from_slice::<QueuePairEndpoint, _>(bytes, binary());
        found.map(|(endpoint, _)| endpoint).map_err(|error| error.to_string())
    }

    #[test]
    fn the_binary_form_is_stable() {
        let bytes = bincode::serde::encode_to_vec(endpoint(), binary()).unwrap();
        let mut expected = vec![1, 0x45, 0x50, 0x51, 0x34, 0x12, 0, 0, 5, 0];
        expected.extend([1, 0xef, 0xcd, 0xab, 0, 1, 0, 4, 0, 0, 1, 16, 2, 1, 0x80]);
        expected.extend([2, 0, 0, 0, 0, 0, 0, 0]);
        for (class, gid) in [(3, endpoint().gids().next()), (2, endpoint().gids().nth(1))] {
            expected.push(class);
            expected.extend(gid.unwrap().to_bytes());
        }
        assert_eq!(bytes, expected);
        assert_eq!(read(&bytes), Ok(endpoint()));
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn the_text_form_is_stable() {
        let text = serde_json::to_string(&endpoint()).unwrap();
        assert!(
            text.starts_with(
                r#"{"version":1,"num":4660,"lid":5,"send_psn":11259375,"path_mtu":1024,"max_dest_rd_atomic":16,"transport":2,"pkey":32769,"gids":[{"class":3,"gid":["#
            ),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<QueuePairEndpoint>(&text).unwrap(), endpoint());
    }

    #[test]
    fn too_many_gids_are_refused_by_their_number() {
        let text = serde_json::to_string(&endpoint()).unwrap();
        let (start, end) = (text.find("[{").unwrap(), text.rfind("}]").unwrap() + 2);
        let one = &text[start + 1..text.find("]}").unwrap() + 2];
        let with = |count| {
            let text =
                format!("{}[{}]{}", &text[..start], vec![one; count].join(","), &text[end..]);
            serde_json::from_str::<QueuePairEndpoint>(&text)
        };
        assert!(with(MAX_GIDS).is_ok());
        let error = with(MAX_GIDS + 1).unwrap_err().to_string();
        let expected = format!("length {}, expected a list of at most {MAX_GIDS}", MAX_GIDS + 1);
        assert!(error.contains(&expected), "{error}");
    }

    #[test]
    fn a_credit_word_makes_it_version_two() {
        let word = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 8, 0x99aa_bbcc).unwrap();
        let with = endpoint().with_credit_word(word);
        let plain = bincode::serde::encode_to_vec(endpoint(), binary()).unwrap();
        let bytes = bincode::serde::encode_to_vec(with, binary()).unwrap();
        let mut expected = plain.clone();
        expected[0] = 2;
        expected.push(1);
        expected.extend(0x1122_3344_5566_7788_u64.to_le_bytes());
        expected.extend(8_u64.to_le_bytes());
        expected.extend(0x99aa_bbcc_u32.to_le_bytes());
        assert_eq!(bytes, expected);
        assert_eq!((read(&bytes).unwrap(), read(&plain).unwrap()), (with, endpoint()));
        assert!(read(&bytes[..bytes.len() - 1]).is_err());

        let text = serde_json::to_string(&with).unwrap();
        assert!(text.starts_with(r#"{"version":2,"#), "{text}");
        let tail = r#""credit_word":{"address":1234605616436508552,"length":8,"rkey":2578103244}}"#;
        assert!(text.ends_with(tail), "{text}");
        assert_eq!(serde_json::from_str::<QueuePairEndpoint>(&text).unwrap(), with);
        for wrong in [
            text.replace(r#""version":2"#, r#""version":1"#),
            serde_json::to_string(&endpoint()).unwrap().replace(r#""version":1"#, r#""version":2"#),
        ] {
            let error = serde_json::from_str::<QueuePairEndpoint>(&wrong).unwrap_err();
            assert!(error.to_string().contains("in version 2, and only there"), "{error}");
        }
        let overflow = text.replace(r#""length":8"#, r#""length":18446744073709551615"#);
        assert!(serde_json::from_str::<QueuePairEndpoint>(&overflow).is_err());
    }

    #[test]
    fn other_versions_are_refused_by_name() {
        let mut bytes = bincode::serde::encode_to_vec(endpoint(), binary()).unwrap();
        bytes[0] = 3;
        let error = read(&bytes).unwrap_err();
        assert!(error.contains("has version 3, but this crate reads versions 1 and 2"), "{error}");
        let text = serde_json::to_string(&endpoint()).unwrap();
        let text = text.replace(r#""version":1"#, r#""version":3,"news":true"#);
        let error = serde_json::from_str::<QueuePairEndpoint>(&text).unwrap_err().to_string();
        assert!(error.contains("has version 3, but this crate reads versions 1 and 2"), "{error}");
    }

    #[test]
    fn forms_with_and_without_a_version_refuse_each_other() {
        let old = Unversioned { num: 0x1234, lid: 0, gid: "::ffff:10.0.0.1".parse().unwrap() };
        let bytes = bincode::serde::encode_to_vec(&old, binary()).unwrap();
        let error = read(&bytes).unwrap_err();
        assert!(error.contains("not a queue pair endpoint with a version"), "{error}");
        let text = serde_json::to_string(&old).unwrap();
        let error = serde_json::from_str::<QueuePairEndpoint>(&text).unwrap_err().to_string();
        assert!(error.contains("missing field `version`"), "{error}");

        // A versioned form's number exceeds any queue pair's.
        let bytes = bincode::serde::encode_to_vec(endpoint(), binary()).unwrap();
        let (old, _): (Unversioned, _) =
            bincode::serde::decode_from_slice(&bytes, binary()).unwrap();
        assert!(QueuePairEndpoint::new(old.num, old.lid, old.gid).is_err());
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let value = serde_json::to_value(endpoint()).unwrap();
        let gid = value["gids"][0].clone();
        let many: Vec<_> = (0..7).map(|_| gid.clone()).collect();
        let zero = serde_json::json!([{ "class": 3, "gid": Gid::ZERO }]);
        let foreign = serde_json::json!([{ "class": 4, "gid": gid["gid"] }]);
        for (field, wrong, says) in [
            ("num", (1 << 24).into(), "queue pair number"),
            ("send_psn", (1 << 24).into(), "psn"),
            ("path_mtu", 1500.into(), "path_mtu"),
            ("max_dest_rd_atomic", 256.into(), "256"),
            ("gids", many.into(), "at most 6 GIDs"),
            ("gids", zero, "zero"),
            ("gids", foreign, "class 4"),
        ] {
            let mut value = value.clone();
            value[field] = wrong;
            let error = serde_json::from_value::<QueuePairEndpoint>(value).unwrap_err().to_string();
            assert!(error.contains(says), "{field}: {error}");
        }
    }
}
