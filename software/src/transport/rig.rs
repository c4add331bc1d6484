//! A rig in which tests and fuzz targets run an engine: virtual time, and a wire that keeps what is sent.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::{SharedReceiveQueue, XrcQueue};
use crate::ffi::ibv_qp_cap;
use crate::link::Time;
use crate::link::{Clock, Link};
use crate::wire::{PORT, Packet, icrc};

#[derive(Debug, Default)]
pub(crate) struct VirtualClock(pub(crate) AtomicU64);

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        self.0.load(Ordering::Relaxed)
    }

    fn wall_clock(&self) -> Time {
        self.now()
    }

    /// A late peer gets a nanosecond more, which tests can see.
    fn timeout(&self, configured: Time, late: bool) -> Time {
        configured + Time::from(late)
    }
}

pub(crate) type Sent = Arc<Mutex<VecDeque<(IpAddr, IpAddr, Vec<u8>)>>>;

#[derive(Debug)]
pub(crate) struct MemoryLink {
    sent: Sent,
    /// The device leaves arriving packets unread.
    pub(crate) is_unread: Arc<AtomicBool>,
}

impl MemoryLink {
    pub(crate) fn new(sent: &Sent) -> Self {
        Self { sent: sent.clone(), is_unread: Arc::default() }
    }
}

impl Link for MemoryLink {
    fn send(&mut self, packets: &mut [Packet]) -> bool {
        let mut sent = self.sent.lock().unwrap();
        for packet in packets {
            let (from, to) = packet.addresses.unwrap();
            sent.push_back((from, to, packet.bytes.clone()));
        }
        true
    }

    fn seed(&self) -> u64 {
        1
    }

    fn is_unread(&mut self, _: IpAddr, _: IpAddr) -> bool {
        self.is_unread.load(Ordering::Relaxed)
    }

    fn join(&mut self, _: IpAddr) -> io::Result<()> {
        Ok(())
    }

    fn leave(&mut self, _: IpAddr) {}

    fn set_addresses(&mut self, _: &[IpAddr]) -> io::Result<()> {
        Ok(())
    }
}

/// xorshift64*
#[cfg(test)]
pub(crate) struct Random(pub(crate) u64);

#[cfg(test)]
impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A shared receive queue for extended reliable connections.
pub(crate) fn extended_queue((domain, pd, cq): (u32, u32, u32), max_wr: u32) -> SharedReceiveQueue {
    SharedReceiveQueue {
        handle: 3,
        context: 0,
        pd,
        receives: Default::default(),
        max_wr,
        max_sge: 4,
        limit: 0,
        users: 0,
        async_events: 0,
        xrc: Some(XrcQueue { handle: domain, domain: 0, cq }),
    }
}

/// The receiving half of an extended reliable connection.
pub(crate) fn receiving(domain: u32) -> NewQueuePair {
    NewQueuePair {
        handle: 4,
        context: 0,
        pd: None,
        xrc_domain: Some(domain),
        transport: Transport::XrcReceive,
        send_cq: None,
        receive_cq: None,
        srq: None,
        all_signaled: false,
        cap: ibv_qp_cap::default(),
    }
}

/// A packet with a correct CRC and arbitrary contents.
pub(crate) fn seal(from: IpAddr, to: IpAddr, mut packet: Vec<u8>) -> Vec<u8> {
    packet.truncate(packet.len() / 4 * 4);
    let icrc = icrc::compute((from, PORT), (to, PORT), &packet);
    packet.extend_from_slice(&icrc.to_le_bytes());
    packet
}
