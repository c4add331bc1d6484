//! Posting with pieces, typed remote memory, read-only memory and owned parents, to a queue pair that is its
//! own peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairType, ReadOnlyMemoryRegion, ReceiveWorkRequest, RemoteRegion, SharedMemoryRegion,
    WorkCompletion, field,
};
use ibverbs_software::Device;

/// A long time, for hosts that do something else.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for that many completions, which all succeed, and returns their numbers in order.
fn succeeded(queue: &CompletionQueue<'_>, count: usize) -> Vec<u64> {
    let (start, mut all) = (Instant::now(), Vec::new());
    let mut slots = [WorkCompletion::default(); 16];
    while all.len() < count {
        assert!(start.elapsed() < PATIENCE, "{all:?}");
        for completion in queue.poll(&mut slots).unwrap() {
            completion.result().unwrap_or_else(|error| panic!("{}: {error}", completion.wr_id()));
            all.push(completion.wr_id());
        }
    }
    all.sort_unstable();
    all
}

/// A queue pair, its memory and its completion queue, which own all that they were made from.
struct Loopback {
    queue_pair: QueuePair<'static>, // dropped before the memory
    queue: Arc<CompletionQueue<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
}

impl Loopback {
    fn new() -> Self {
        let context = Device::new().unwrap().open().unwrap();
        let domain = Arc::new(ProtectionDomain::new(context).unwrap());
        let queue = Arc::new(CompletionQueue::new(domain.context_parent(), 64).unwrap());
        let kind = QueuePairType::ReliableConnected;
        let prepared = QueuePair::builder(&domain, &queue, &queue, kind)
            .access(
                AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC,
            )
            .max_send_wr(16)
            .max_recv_wr(16)
            .max_send_sge(2)
            .max_recv_sge(2)
            .max_inline_data(64)
            .build()
            .unwrap();
        let own = prepared.endpoint();
        Self { queue_pair: prepared.handshake(own).unwrap(), queue, domain }
    }
}

#[test]
fn a_message_from_read_only_memory_is_spread_over_pieces_of_a_region() {
    let text = *b"headbody";
    let mut pair = Loopback::new();
    let source = ReadOnlyMemoryRegion::new(&pair.domain, &text).unwrap();
    let mut target = MemoryRegion::<u8>::new(&pair.domain, 64).unwrap();
    let error = target.scatter_elements([0..8, 4..12]).unwrap_err();
    assert!(error.to_string().contains("two of the ranges overlap"), "{error}");
    let mut elements = target.scatter_elements([0..4, 32..36]).unwrap();
    let mut receive = ReceiveWorkRequest::new(&mut elements).unwrap();
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        pair.queue_pair.post(&mut receive, 1).unwrap();
        pair.queue_pair.post_send(&source, .., 2).unwrap();
    }
    assert_eq!(succeeded(&pair.queue, 2), [1, 2]);
    assert_eq!((&target[..4], &target[32..36]), (b"head".as_slice(), b"body".as_slice()));
}

#[test]
fn a_slice_is_posted_as_a_region_is() {
    let mut pair = Loopback::new();
    let mut region = MemoryRegion::<u32>::new(&pair.domain, 8).unwrap();
    region[..4].copy_from_slice(&[1, 2, 3, 4]);
    let (source, mut target) = region.slice_mut(..).unwrap().split_at(4).unwrap();
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        pair.queue_pair.post_receive(&mut target, 1.., 1).unwrap();
        pair.queue_pair.post_send(&source.as_slice(), 1..3, 2).unwrap();
    }
    assert_eq!(succeeded(&pair.queue, 2), [1, 2]);
    assert_eq!(region[4..], [0, 2, 3, 0]);
}

#[test]
fn a_channel_receives_into_pieces_and_owns_all() {
    let domain = ProtectionDomain::new(Device::new().unwrap().open().unwrap()).unwrap();
    let domain = Arc::new(domain);
    let mut region = MemoryRegion::<u8>::new(&domain, 64).unwrap();
    let prepared = Channel::builder(domain).max_send_sge(2).max_recv_sge(2).build().unwrap();
    let own = prepared.endpoint();
    let mut channel = prepared.handshake(own).unwrap();
    region[..8].copy_from_slice(b"headbody");
    let [source, a, b] = region.slices_mut([0..8, 16..20, 40..44]).unwrap();
    channel
        .scope(|scope| {
            scope.post_receive([a, b])?;
            scope.post_send(source)?;
            Ok::<_, ibverbs::TransportError>(())
        })
        .unwrap();
    assert_eq!((&region[16..20], &region[40..44]), (b"head".as_slice(), b"body".as_slice()));
}

#[derive(Clone, Copy, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
#[repr(C)]
struct Entry {
    key: u64,
    lock: u64,
    value: [u8; 16],
}

#[test]
fn a_field_of_remote_memory_is_written_by_its_name() {
    let mut pair = Loopback::new();
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let table = SharedMemoryRegion::<Entry>::new(&pair.domain, 4, access).unwrap();
    let remote: RemoteRegion<Entry> = table.remote().typed().unwrap();
    let source = MemoryRegion::<u8>::new(&pair.domain, 16).unwrap();
    let entry = remote.element(2).unwrap();
    let mut source = source;
    source.fill(7);
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        pair.queue_pair.post_write(&source, .., entry.field(field!(Entry, value)), 1).unwrap();
        pair.queue_pair.post_write(&source, ..8, entry.field(field!(Entry, lock)), 2).unwrap();
        let small = entry.field(field!(Entry, key));
        assert!(pair.queue_pair.post_write(&source, .., small, 3).is_err());
    }
    assert_eq!(succeeded(&pair.queue, 2), [1, 2]);
    let mut entries = [Entry { key: 1, lock: 1, value: [1; 16] }; 4];
    table.read(0, &mut entries).unwrap();
    assert_eq!((entries[2].key, entries[2].lock), (0, u64::from_ne_bytes([7; 8])));
    assert_eq!((entries[2].value, entries[1].value, entries[3].key), ([7; 16], [0; 16], 0));
}

#[test]
fn an_owned_parent_is_closed_after_its_children() {
    let Loopback { queue_pair, queue, domain } = Loopback::new();
    let region = MemoryRegion::<u64>::new(domain, 8).unwrap();
    // Everything may move to another thread, and be dropped in any order that keeps memory after requests.
    std::thread::spawn(move || {
        drop(queue);
        queue_pair.close().unwrap();
        region.close().unwrap();
    })
    .join()
    .unwrap();
}
