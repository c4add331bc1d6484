//! The frames of the two sides, as a peer that is not this crate's would write them.

use std::net::Ipv6Addr;

use ibverbs::{QueuePairEndpoint, RemoteMemoryRegion};
use ibverbs_rails::RemoteRailMemory;
use serde::{Deserialize, Serialize};

/// The version of the frames.
pub(crate) const VERSION: u32 = 3;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Frame {
    Hello { version: u32, queue_pairs: u8, rails: Vec<Facts> },
    Pairs { rails: Vec<Facts>, pairs: Vec<(u8, u8)> },
    Refused { version: u32, reason: String },
    Open { pair: u8, epoch: u32, ends: Ends },
    Opened { pair: u8, epoch: u32, ends: Ends },
    CannotOpen { pair: u8, epoch: u32, reason: String },
    Up { pair: u8, epoch: u32 },
    Ready,
    Down { pair: u8, epoch: u32, reason: String },
    DownSeen { pair: u8, epoch: u32 },
    Inbox { memory: RemoteRailMemory, longest: u32 },
    Taken { below: u64 },
    Confirmed { below: u64 },
    Abandoned { number: u64 },
}

/// A description of a device, for the peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) link: Link,
    pub(crate) gids: Vec<Ipv6Addr>,
    pub(crate) speed: u32,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Link {
    InfiniBand,
    Ethernet,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ends {
    pub(crate) endpoints: Vec<QueuePairEndpoint>,
    pub(crate) probe: RemoteMemoryRegion,
}

impl Frame {
    /// The bytes of the frame, with its length in front.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let config = bincode::config::standard();
        let frame = bincode::serde::encode_to_vec(self, config).unwrap();
        [&(frame.len() as u32).to_be_bytes()[..], &frame].concat()
    }

    /// All whole frames of these bytes.
    pub(crate) fn all_of(mut bytes: &[u8]) -> Vec<Self> {
        let mut frames = Vec::new();
        while let Some((length, rest)) = bytes.split_first_chunk()
            && let Some((frame, rest)) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)
        {
            let config = bincode::config::standard();
            frames.push(bincode::serde::decode_from_slice(frame, config).unwrap().0);
            bytes = rest;
        }
        frames
    }
}
