//! Two connected channels on one device: of software, or the model of the function device.

use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, Context, MemoryRegion, ProtectionDomain,
    SharedMemoryRegion, ffi, settings::MaxRnrRetries,
};
use ibverbs_function_device::FunctionDevice;

use crate::software::Software;

/// A device on which a pair can run.
pub(crate) trait TestDevice: Clone {
    fn make() -> Self;
    fn open(&self) -> Context<'static>;
    /// The sends and receives of a queue pair that the device still owns.
    fn in_flight(&self, queue_pair: u32) -> (u32, u32);
    /// Asserts that nothing is left, and that no memory was taken from the device too early.
    #[track_caller]
    fn assert_clean(&self);
}

impl TestDevice for Software {
    fn make() -> Self {
        Self::new()
    }

    fn open(&self) -> Context<'static> {
        self.context()
    }

    #[track_caller]
    fn in_flight(&self, queue_pair: u32) -> (u32, u32) {
        self.outstanding(queue_pair).expect("the device has the queue pair")
    }

    #[track_caller]
    fn assert_clean(&self) {
        Self::assert_clean(self);
    }
}

impl TestDevice for FunctionDevice {
    fn make() -> Self {
        Self::model()
    }

    fn open(&self) -> Context<'static> {
        self.context()
    }

    #[track_caller]
    fn in_flight(&self, queue_pair: u32) -> (u32, u32) {
        self.outstanding(queue_pair)
    }

    #[track_caller]
    fn assert_clean(&self) {
        Self::assert_clean(self);
    }
}

pub(crate) const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC);

/// The channels come first, so that they are dropped first.
pub(crate) struct PairOn<D> {
    pub(crate) one: Channel<'static>,
    pub(crate) two: Channel<'static>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) device: D,
}

pub(crate) type Pair = PairOn<Software>;

/// A pair on the model, which alone can carry requests out one by one, write late, and put any completion into
/// a queue.
pub(crate) type ModelPair = PairOn<FunctionDevice>;

/// Ends the process if a test hangs: what a defect breaks is often that a wait ends.
fn watch() {
    static WATCHDOG: Once = Once::new();
    WATCHDOG.call_once(|| {
        thread::spawn(|| {
            thread::sleep(Duration::from_secs(600));
            eprintln!("a test hangs");
            std::process::abort();
        });
    });
}

pub(crate) fn domain(device: &impl TestDevice) -> Arc<ProtectionDomain<'static>> {
    watch();
    Arc::new(ProtectionDomain::new(Arc::new(device.open())).unwrap())
}

pub(crate) fn builder(domain: &Arc<ProtectionDomain<'static>>) -> ChannelBuilder<'static> {
    Channel::builder(domain)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_send_sge(3)
        .max_recv_sge(3)
        .max_inline_data(32)
        .access(ALL)
        // Time of a device flies while a thread polls, so a send waits without limit for its receive.
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .settle_timeout(Duration::from_millis(50))
}

pub(crate) fn connect(
    one: ChannelBuilder<'static>,
    two: ChannelBuilder<'static>,
) -> (Channel<'static>, Channel<'static>) {
    let (one, two) = (one.build().unwrap(), two.build().unwrap());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap())
}

impl<D: TestDevice> PairOn<D> {
    pub(crate) fn new() -> Self {
        Self::with(D::make(), |builder| builder)
    }

    pub(crate) fn with(
        device: D,
        set: impl Fn(ChannelBuilder<'static>) -> ChannelBuilder<'static>,
    ) -> Self {
        let domain = domain(&device);
        let (one, two) = connect(set(builder(&domain)), set(builder(&domain)));
        Self { one, two, domain, device }
    }

    /// A region of bytes that count from `first`.
    pub(crate) fn region(&self, len: usize, first: u8) -> MemoryRegion<'static, u8> {
        let mut region = MemoryRegion::new(&self.domain, len).unwrap();
        for (byte, n) in region.iter_mut().zip(0_usize..) {
            *byte = first.wrapping_add(n as u8);
        }
        region
    }

    pub(crate) fn shared(&self, len: usize) -> SharedMemoryRegion<'static, u64> {
        SharedMemoryRegion::new(&self.domain, len, ALL).unwrap()
    }

    /// Takes both channels back to RESET and connects them again.
    pub(crate) fn reconnect(self) -> Self {
        let (one, two) = (self.one.reset().unwrap(), self.two.reset().unwrap());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        Self { one, two, ..self }
    }

    /// Sends one message from each side to the other.
    pub(crate) fn exchange(&mut self) {
        let mut regions = [self.region(8, 1), self.region(8, 100), self.region(16, 0)];
        let [from_one, from_two, to] = &mut regions;
        let (at_one, at_two) = to.slice_mut(..).unwrap().split_at(8).unwrap();
        let (one, two) = (&mut self.one, &mut self.two);
        one.scope(|one| {
            two.scope(|two| {
                let at_one = one.post_receive(at_one)?;
                let at_two = two.post_receive(at_two)?;
                one.post_send(from_one.slice(..)?)?.wait()?;
                two.post_send(from_two.slice(..)?)?.wait()?;
                at_one.wait()?;
                at_two.wait()?;
                Ok::<_, ibverbs::TransportError>(())
            })
        })
        .unwrap();
        assert_eq!(to[..8], from_two[..]);
        assert_eq!(to[8..], from_one[..]);
    }

    /// Asserts that nothing is left of the pair, and that no memory was taken from the device too early.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { one, two, domain, device } = self;
        drop((one, two));
        drop(domain);
        device.assert_clean();
    }
}

pub(crate) fn queue(channel: &Channel<'_>) -> *mut ffi::ibv_cq {
    // SAFETY: the queue pair is live.
    unsafe { (*channel.as_raw()).send_cq }
}

/// The sends and receives of a channel that the device still owns.
#[track_caller]
pub(crate) fn outstanding(device: &impl TestDevice, channel: &Channel<'_>) -> (u32, u32) {
    device.in_flight(channel.number())
}

/// Moves the queue pair of a channel to ERR behind its back, as a device does after an error.
pub(crate) fn break_queue_pair(channel: &Channel<'_>) {
    let mut error =
        ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
    let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
    // SAFETY: the queue pair is live; what was posted is flushed.
    assert_eq!(unsafe { ffi::ibv_modify_qp(channel.as_raw(), &mut error, mask) }, 0);
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// The content of a region that is mutably borrowed.
pub(crate) fn peek(address: *const u8, len: usize) -> Vec<u8> {
    // SAFETY: the tests that use this keep the region alive.
    (0..len).map(|n| unsafe { address.add(n).read_volatile() }).collect()
}
