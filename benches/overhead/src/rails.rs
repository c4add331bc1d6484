//! A write of many parts over two devices with two queue pairs each: `ibverbs-rails`, and in C.

use std::ffi::{c_int, c_void};
use std::net::{TcpListener, TcpStream};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ibverbs::provider::{self, DirectVerbs, Hooks};
use ibverbs::{
    AccessFlags, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair, Rc,
    SharedMemoryRegion, ffi,
};
use ibverbs_function_device::{Builder, FunctionDevice};
use ibverbs_rails::{Event, PeerId, Rails, RailsError, Transfer};

use crate::c;
use crate::rig::{LENGTH, WINDOW};

/// The values of `contenders.h`.
const RAILS: usize = 2;
const LANES: usize = 2;
const PARTS: usize = 512;
/// Requests of a queue pair.
const DEPTH: u32 = 32;

/// The devices of both sides: what is posted completes, and goes nowhere.
static DEVICES: OnceLock<[FunctionDevice; RAILS]> = OnceLock::new();

/// The hooks of the devices, which live as long as the program.
static HOOKS: Hooks = Hooks {
    list: || DEVICES.get().into_iter().flatten().map(FunctionDevice::listed).collect(),
    put: |_| {},
    ioctl: |_, _, _| None,
    query_pkey: |_, _, _| None,
    guid: |_| Some(1),
    virtual_time: |_, _| None,
    first_psn: |_| None,
    before_sleep: |_, _| {},
    sleep_for: |_, _, _| false,
    attend: |_| None,
    rest: |_| true,
    detach: |_, _| {},
    is_ended: |_| false,
    direct: DirectVerbs { efa_query_device, efa_create_qp, ..DirectVerbs::NONE },
    manager_open: || None,
    manager_write: |_, _, _| None,
    manager_close: |_| {},
};

/// The lean devices are those of EFA too: their datagrams go by the extended interface then.
unsafe fn efa_query_device(_: *mut ffi::ibv_context, attr: *mut c_void) -> Option<c_int> {
    let all = ffi::efadv_device_attr {
        max_sq_wr: 4096,
        max_rq_wr: 4096,
        max_sq_sge: 2,
        max_rq_sge: 2,
        inline_buf_size: 32,
        ..Default::default()
    };
    // SAFETY: by the hook's contract it is such a struct.
    unsafe { attr.cast::<ffi::efadv_device_attr>().write(all) };
    Some(0)
}

unsafe fn efa_create_qp(
    context: *mut ffi::ibv_context,
    attr: *mut ffi::ibv_qp_init_attr_ex,
    _: *mut c_void,
) -> Option<*mut ffi::ibv_qp> {
    // SAFETY: by the hook's contract both are as for the verb.
    unsafe {
        (*attr).qp_type = ffi::ibv_qp_type::IBV_QPT_UD;
        Some(ffi::ibv_create_qp_ex(context, attr))
    }
}

/// Installs the hooks of the devices.
pub(crate) fn install() {
    // SAFETY: the devices live as long as the process, and nothing else is answered.
    assert!(unsafe { provider::install(&HOOKS) }, "the only provider");
}

/// Two sides. Fields are dropped in order.
pub(crate) struct RailsRig {
    writer: Rails,
    reader: Rails,
    peer: PeerId,
    /// Transfers of [`PARTS`] parts, and of [`WINDOW`].
    transfers: [(u64, Transfer); 2],
    /// The time stands still: no speed is measured, so that the pieces of each device are the same in each run.
    now: Instant,
}

impl RailsRig {
    pub(crate) fn new(len: usize) -> Self {
        let held = 2 * 64 * LANES as u32;
        let device = || Builder::lean().held_receives(held).build();
        let devices = DEVICES.get_or_init(|| std::array::from_fn(|_| device()));
        install();
        let names = devices.each_ref().map(|device| device.context().name().to_owned());
        let build = || {
            let builder = names.iter().fold(Rails::builder(), |rails, name| rails.device(name));
            builder.queue_pairs(LANES as u8).peers(1).build().expect("rails")
        };
        let (mut writer, mut reader) = (build(), build());
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let streams = [TcpStream::connect(address), listener.accept().map(|accepted| accepted.0)];
        let [one, other] = streams.map(|stream| {
            let stream = stream.expect("a stream");
            stream.set_nonblocking(true).expect("it can");
            stream
        });
        let peer = writer.connect_over(one).expect("a peer");
        reader.accept_over(other).expect("a peer");
        let now = Instant::now();
        while !matches!(writer.next_event(), Some(Event::Connected(_))) {
            writer.turn(now);
            reader.turn(now);
        }
        let source = writer.allocate(len, AccessFlags::empty()).expect("memory");
        let sink = reader.allocate(len, AccessFlags::REMOTE_WRITE).expect("memory").remote();
        let transfer = |parts: usize| {
            let part = || (source.slice(..).expect("all"), sink.clone());
            (parts as u64, Transfer::write_list((0..parts).map(|_| part())))
        };
        let transfers = [transfer(PARTS), transfer(WINDOW)];
        let mut rig = Self { writer, reader, peer, transfers, now };
        // Lists grow to their size here.
        pieces(&mut rig, (PARTS + WINDOW) as u64).expect("it works");
        rig
    }
}

impl Drop for RailsRig {
    /// No receive is in flight any more when its queue pair is destroyed.
    fn drop(&mut self) {
        self.writer.turn(self.now);
        self.reader.turn(self.now);
        for device in DEVICES.get().into_iter().flatten() {
            device.deliver(u32::MAX);
        }
    }
}

/// Writes this many parts. Returns what the bytes of as many messages are.
#[inline(never)]
pub(crate) fn pieces(rig: &mut RailsRig, operations: u64) -> Result<u64, RailsError> {
    let RailsRig { writer, peer, transfers, now, .. } = rig;
    let mut done = 0;
    while done < operations {
        let fits = transfers.iter().find(|(parts, _)| *parts <= operations - done);
        let (parts, transfer) = fits.expect("a multiple of the shortest");
        writer.post(*peer, transfer.clone())?;
        loop {
            writer.turn(*now);
            match writer.next_event() {
                Some(Event::Ended { result, .. }) => break result?,
                Some(event) => panic!("{event:?}"),
                None => {}
            }
        }
        done += parts;
    }
    Ok(done * LENGTH as u64)
}

/// The objects of the rails in C. Fields are dropped in order.
pub(crate) struct CRig {
    rails: NonNull<c::Rails>,
    _queue_pairs: Vec<QueuePair<'static>>,
    _queues: Vec<Arc<CompletionQueue<'static>>>,
    _region: MemoryRegion<'static, u8>,
    _remote: SharedMemoryRegion<'static, u8>,
}

impl CRig {
    pub(crate) fn new(len: usize) -> Self {
        let context = crate::rig::context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let queue = |_| CompletionQueue::new(&context, LANES as u32 * DEPTH);
        let queues: Vec<_> =
            (0..RAILS).map(|rail| Arc::new(queue(rail).expect("a completion queue"))).collect();
        let queue_pair = |lane: usize| {
            let queue = &queues[lane / LANES];
            let builder = QueuePair::builder(&domain, queue, queue, Rc).max_send_wr(DEPTH);
            let prepared = builder.build().expect("a queue pair");
            let itself = prepared.endpoint();
            prepared.handshake(itself).expect("a connection")
        };
        let queue_pairs: Vec<_> = (0..RAILS * LANES).map(queue_pair).collect();
        let mut region = MemoryRegion::new(&domain, len).expect("a region");
        let remote = SharedMemoryRegion::new(&domain, len, AccessFlags::REMOTE_WRITE);
        let remote = remote.expect("a region");
        let raw_queues: Vec<_> = queues.iter().map(|queue| queue.as_raw()).collect();
        let raw: Vec<_> = queue_pairs.iter().map(|queue_pair| queue_pair.as_raw()).collect();
        let handles = c::Handles::of_memory(&mut region, &remote.remote());
        // SAFETY: all objects are valid, as many as it says, and live longer than what is opened.
        let rails =
            unsafe { c::rails_open(&handles, raw_queues.as_ptr(), raw.as_ptr(), len as u32) };
        Self {
            rails: NonNull::new(rails).expect("rails"),
            _queue_pairs: queue_pairs,
            _queues: queues,
            _region: region,
            _remote: remote,
        }
    }

    pub(crate) fn run(
        &mut self,
        function: unsafe extern "C" fn(*mut c::Rails, u64) -> i64,
        operations: u64,
    ) -> u64 {
        // SAFETY: the rig keeps all that it uses.
        unsafe { function(self.rails.as_ptr(), operations) }.cast_unsigned()
    }
}

impl Drop for CRig {
    fn drop(&mut self) {
        // SAFETY: `new` opened it; it is not used any more.
        unsafe { c::rails_close(self.rails.as_ptr()) }
    }
}
