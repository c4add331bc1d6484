//! Which buffers the device has, as against those that the pool has.

use ibverbs::queue_pair::GlobalRouteHeader;
use ibverbs::{AccessFlags, BufferPool, PooledBuffer, ProtectionDomain, ffi};
use ibverbs_function_device::{FunctionDevice, raw};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use std::sync::Arc;

/// The number of buffers of each pool, and their length.
const CHUNKS: usize = 48;
pub(crate) const LEN: usize = 16;

pub(crate) struct Ledger {
    pub(crate) device: FunctionDevice,
    pool: BufferPool,
    datagrams: BufferPool,
    /// The numbers of all queue pairs that there have been.
    numbers: Vec<u32>,
    next: u8,
}

impl Ledger {
    pub(crate) fn new(device: &FunctionDevice, domain: &Arc<ProtectionDomain<'static>>) -> Self {
        let pool = |len| BufferPool::new(domain, len, CHUNKS, AccessFlags::empty()).unwrap();
        let (pool, datagrams) = (pool(LEN), pool(GlobalRouteHeader::LEN + LEN));
        Self { device: device.clone(), pool, datagrams, numbers: vec![], next: 0 }
    }

    pub(crate) fn add(&mut self, number: u32) {
        self.numbers.push(number);
    }

    /// A buffer of equal bytes, other ones each time. `None`: the program has leaked them all.
    pub(crate) fn buffer(&mut self) -> Option<PooledBuffer> {
        self.next = self.next.wrapping_add(1);
        self.pool.take_from(&[self.next; LEN]).unwrap()
    }

    /// Room for a datagram.
    pub(crate) fn datagram(&self) -> Option<PooledBuffer> {
        self.datagrams.take()
    }

    /// How many buffers are not in their pool.
    pub(crate) fn away(&self) -> usize {
        2 * CHUNKS - self.pool.available() - self.datagrams.available()
    }

    /// The requests of all queue pairs that the device still has.
    fn in_flight(&self) -> usize {
        let of = |&number: &u32| {
            let (mut sends, mut receives) = (0, 0);
            // SAFETY: the handle is valid, and so are the places for the results. If there is no such queue pair,
            // nothing is written.
            unsafe {
                let device = self.device.as_raw();
                raw::device_outstanding(device, number, &mut sends, &mut receives);
            }
            (sends + receives) as usize
        };
        self.numbers.iter().map(of).sum()
    }

    /// No buffer is in the pool that the device has.
    pub(crate) fn check(&self) -> Result<(), TestCaseError> {
        let (in_flight, away) = (self.in_flight(), self.away());
        prop_assert!(in_flight <= away, "the device has {in_flight}, and the pool lacks {away}");
        let (count, text) = self.device.violations();
        prop_assert_eq!(count, 0, "{}", text);
        Ok(())
    }

    /// Checks that a received buffer has the length of a message, and equal bytes.
    pub(crate) fn check_message(buffer: &[u8]) -> Result<(), TestCaseError> {
        prop_assert_eq!(buffer.len(), LEN);
        prop_assert!(buffer.iter().all(|&byte| byte == buffer[0]), "{:?}", buffer);
        Ok(())
    }

    /// Puts a completion into a queue that is of no operation in flight: of another queue pair, of an earlier request of
    /// the slot, of a later one (not the next, which may follow), of a slot that does not exist.
    pub(crate) fn inject_stranger(&self, queue: *mut ffi::ibv_cq, number: u32, which: u8) {
        let mut posted = (0..64).map_while(|back| self.device.posted(back));
        let Some(latest) = posted.find(|posted| posted.qp_num == number) else { return };
        let wr_id = latest.wr_id;
        let (wr_id, qp_num) = match which % 6 {
            0 => (wr_id, number ^ 0x80_0000),
            1 => (wr_id - (1 << 32), number),
            2 => (wr_id | 0x7fff_ffff, number),
            3 => (u64::from(which), number),
            // This number has bits that neither slots nor shared receives have.
            4 => (u64::from(which) << 50 | 3 << 30 | u64::from(which % 4), number),
            _ => (wr_id ^ (1 << 63), number),
        };
        let status = ffi::ibv_wc_status(u32::from(which / 6 % 2) * 5);
        let stranger = ffi::ibv_wc { wr_id, qp_num, status, ..Default::default() };
        self.device.inject(queue, &stranger);
    }
}
