//! Posting with pieces, typed remote memory, read-only memory and owned parents, batches with and without the
//! extended interface, and requests in one statement, to a queue pair that is its own peer.

#[path = "support/patience.rs"]
mod patience;

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::memory::{InlineList, ReadOnlyMemoryRegion, RemoteRegion, Reregistration};
use ibverbs::operation::{AtomicWriteWorkRequest, Batch};
use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, CompletionQueue, Error, ErrorKind,
    FetchAddWorkRequest, Inline, MemoryRegion, ProtectionDomain, QueuePair, Rc, ReadWorkRequest,
    ReceiveWorkRequest, RegionOptions, RemoteMemoryRegion, Result, SendWorkRequest,
    SharedMemoryRegion, Ud, WorkCompletion, WriteWorkRequest, completion::WorkSuccess, field,
    operation::DatagramPeer, queue_pair::AddressVector,
};
use ibverbs_software::Device;

use patience::PATIENCE;

/// Waits for that many completions, which all succeed, in the order of their numbers.
fn successes(queue: &CompletionQueue<'_>, count: usize) -> Vec<(u64, WorkSuccess)> {
    let (start, mut all) = (Instant::now(), Vec::new());
    let mut slots = [WorkCompletion::default(); 16];
    while all.len() < count {
        assert!(start.elapsed() < PATIENCE, "{all:?}");
        for completion in queue.poll(&mut slots).unwrap() {
            let success = completion.result();
            let success = success.unwrap_or_else(|e| panic!("{}: {e}", completion.wr_id()));
            all.push((completion.wr_id(), success));
        }
    }
    all.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    all
}

/// The numbers of this many successes.
fn succeeded(queue: &CompletionQueue<'_>, count: usize) -> Vec<u64> {
    successes(queue, count).into_iter().map(|(wr_id, _)| wr_id).collect()
}

/// A queue pair, its memory and its completion queue, which own all that they were made from.
struct Loopback {
    queue_pair: QueuePair<'static>, // dropped before the memory
    queue: Arc<CompletionQueue<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
}

impl Loopback {
    fn new() -> Self {
        Self::with(SendOperations::empty())
    }

    /// With these operations of the extended interface, or without it.
    fn with(operations: SendOperations) -> Self {
        let context = Device::new().unwrap().open().unwrap();
        let domain = Arc::new(ProtectionDomain::new(context).unwrap());
        let queue = Arc::new(CompletionQueue::new(domain.context_parent(), 64).unwrap());
        let kind = Rc;
        let prepared = QueuePair::builder(&domain, &queue, &queue, kind)
            .access(
                AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC,
            )
            .max_send_wr(16)
            .max_recv_wr(16)
            .max_send_sge(2)
            .max_recv_sge(2)
            .max_inline_data(64)
            .extended(operations)
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
    let error = target.slices_mut([0..8, 4..12]).unwrap_err();
    assert!(error.to_string().contains("two of the ranges overlap"), "{error}");
    let mut elements = target.slices_mut([0..4, 32..36]).unwrap();
    let receive = ReceiveWorkRequest::new(&mut elements);
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        pair.queue_pair.post(receive, 1).unwrap();
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

/// Adds a request of every kind that both interfaces have. Those of odd numbers have completions.
fn every_kind(
    batch: &mut Batch<'_>,
    (source, target): (&MemoryRegion<'_, u64>, &mut MemoryRegion<'_, u64>),
    remote: RemoteMemoryRegion,
) -> Result<()> {
    let part = |from: u64| remote.sub_region(from * 8, remote.length() - from * 8);
    let [mut a, mut b, c] = target.slices_mut([0..1, 1..2, 2..4])?;
    let two = [source.gather_element(0..1)?, source.gather_element(2..3)?];
    batch.add(WriteWorkRequest::new(&two, part(0)?).unsignaled(), 10)?;
    batch.add(WriteWorkRequest::new(Inline(&7_u64.to_ne_bytes()), part(2)?).unsignaled(), 12)?;
    let pieces = [IoSlice::new(b"pie"), IoSlice::new(b""), IoSlice::new(b"ces!!")];
    batch.add(WriteWorkRequest::new(InlineList(&pieces), part(3)?).unsignaled(), 14)?;
    batch.add(WriteWorkRequest::new((), remote).immediate(0xabcd), 15)?;
    batch.add(CompareSwapWorkRequest::new(&mut a, part(2)?, 7, 8).unsignaled(), 16)?;
    batch.add(FetchAddWorkRequest::new(&mut b, part(2)?, 5).unsignaled(), 18)?;
    batch.add(SendWorkRequest::new(&[source.gather_element(1..2)?]).unsignaled(), 20)?;
    batch.add(SendWorkRequest::new(Inline(b"")).immediate(0x1234), 21)?;
    batch.add(ReadWorkRequest::new(&mut [c], part(2)?).fence(), 23)
}

#[test]
fn a_batch_does_the_same_with_and_without_the_extended_interface() {
    for operations in [SendOperations::empty(), EXTENDED] {
        let mut pair = Loopback::with(operations);
        assert_eq!(pair.queue_pair.as_raw_extended().is_some(), !operations.is_empty());
        let access =
            AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        let shared = SharedMemoryRegion::<u64>::new(&pair.domain, 8, access).unwrap();
        let mut source = MemoryRegion::<u64>::new(&pair.domain, 4).unwrap();
        let mut target = MemoryRegion::<u64>::new(&pair.domain, 8).unwrap();
        source.copy_from_slice(&[1, 2, 3, 4]);
        let mut received = MemoryRegion::<u64>::new(&pair.domain, 4).unwrap();
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            for n in 0..3 {
                pair.queue_pair.post_receive(&mut received, n..=n, n as u64).unwrap();
            }
            pair.queue_pair
                .batch(|batch| every_kind(batch, (&source, &mut target), shared.remote()))
                .unwrap();
        }
        let done = successes(&pair.queue, 6);
        let numbers: Vec<_> = done.iter().map(|(wr_id, _)| *wr_id).collect();
        assert_eq!(numbers, [0, 1, 2, 15, 21, 23], "{operations:?}");
        let immediate = |n: usize| done[n].1.immediate();
        assert_eq!([0, 1, 2].map(immediate), [Some(0xabcd), None, Some(0x1234)]);
        let mut there = [0; 8];
        shared.read(0, &mut there).unwrap();
        assert_eq!(there[..4], [1, 3, 13, u64::from_ne_bytes(*b"pieces!!")]);
        assert_eq!(target[..4], [7, 8, 13, u64::from_ne_bytes(*b"pieces!!")]);
        assert_eq!((received[1], received[2]), (2, 0));
    }
}

const EXTENDED: SendOperations = SendOperations::WRITE
    .union(SendOperations::WRITE_WITH_IMMEDIATE)
    .union(SendOperations::SEND)
    .union(SendOperations::SEND_WITH_IMMEDIATE)
    .union(SendOperations::READ)
    .union(SendOperations::COMPARE_SWAP)
    .union(SendOperations::FETCH_ADD);

#[test]
fn a_batch_without_the_extended_interface_is_posted_whole_or_not_at_all() {
    let mut pair = Loopback::new();
    let access = AccessFlags::REMOTE_WRITE;
    let shared = SharedMemoryRegion::<u8>::new(&pair.domain, 8, access).unwrap();
    let remote = shared.remote();
    let write = |batch: &mut Batch<'_>, byte: u8| {
        batch.add(WriteWorkRequest::new(Inline(&[byte; 8]), remote), byte.into())
    };
    // SAFETY: inline data is copied.
    unsafe {
        let full = pair.queue_pair.batch(|b| (1..100).try_for_each(|n| write(b, n)));
        assert_eq!(full.unwrap_err().kind(), ErrorKind::QueueFull);
        let own = pair.queue_pair.batch(|batch| {
            write(batch, 1)?;
            Err::<(), _>(Box::<dyn std::error::Error>::from("an error of the program"))
        });
        assert_eq!(own.unwrap_err().to_string(), "an error of the program");
        let refused = pair.queue_pair.batch(|batch| {
            write(batch, 1)?;
            batch.add(WriteWorkRequest::new(Inline(&[2; 65]), remote), 2)
        });
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
        let flush =
            pair.queue_pair.batch(|batch| batch.add(AtomicWriteWorkRequest::new(remote, 3), 3));
        assert_eq!(flush.unwrap_err().kind(), ErrorKind::Unsupported);
        pair.queue_pair.batch(|_| Ok::<_, Error>(())).unwrap();
        pair.queue_pair.split().0.batch(|batch| write(batch, 9)).unwrap();
    }
    assert_eq!(succeeded(&pair.queue, 1), [9]);
    let mut there = [0; 8];
    shared.read(0, &mut there).unwrap();
    assert_eq!(there, [9; 8], "only the last batch was posted");
    assert_eq!(pair.queue.poll(&mut [WorkCompletion::default(); 4]).unwrap().len(), 0);
}

#[test]
fn a_request_is_one_statement() {
    let mut pair = Loopback::new();
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
    let shared = SharedMemoryRegion::<u64>::new(&pair.domain, 4, access).unwrap();
    let remote: RemoteRegion<u64> = shared.remote().typed().unwrap();
    let at = |n| remote.element(n).unwrap();
    let mut region = MemoryRegion::<u64>::new(&pair.domain, 8).unwrap();
    region[0] = 5;
    let mut received = MemoryRegion::<u8>::new(&pair.domain, 64).unwrap();
    let queue_pair = &mut pair.queue_pair;
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        for n in 0..3 {
            queue_pair.post_receive(&mut received, n * 8..n * 8 + 8, n as u64).unwrap();
        }
        let first = region.gather_element(..1).unwrap();
        queue_pair.post(WriteWorkRequest::new(first, at(0)).immediate(11), 10).unwrap();
        queue_pair.post(SendWorkRequest::new(first).immediate(12), 11).unwrap();
        queue_pair.post(WriteWorkRequest::new(Inline(&6_u64.to_ne_bytes()), at(1)), 12).unwrap();
        let pieces = [IoSlice::new(b"in"), IoSlice::new(b"line")];
        queue_pair.post(SendWorkRequest::new(InlineList(&pieces)), 13).unwrap();
        let swapped = region.scatter_element(1..2).unwrap();
        queue_pair.post(CompareSwapWorkRequest::new(swapped, at(0), 5, 7), 14).unwrap();
        let added = region.scatter_element(2..3).unwrap();
        queue_pair.post(FetchAddWorkRequest::new(added, at(1), 2), 15).unwrap();
        // Inline data that does not fit is refused before anything is posted.
        assert!(queue_pair.post(WriteWorkRequest::new(Inline(&[0; 9]), at(1)), 16).is_err());
        assert!(
            queue_pair.post(WriteWorkRequest::new(Inline(&[0; 65]), shared.remote()), 16).is_err()
        );
        assert!(
            queue_pair
                .post(SendWorkRequest::new(InlineList(&[IoSlice::new(&[0; 40]); 2])), 16)
                .is_err()
        );
        let two = region.scatter_element(2..4).unwrap();
        assert!(queue_pair.post(FetchAddWorkRequest::new(two, at(1), 2), 16).is_err());
        let two = region.gather_element(..2).unwrap();
        let write = WriteWorkRequest::new(two, at(0)).immediate(1);
        assert!(queue_pair.post(write, 16).is_err());
    }
    let done = successes(&pair.queue, 9);
    let numbers: Vec<_> = done.iter().map(|(wr_id, _)| *wr_id).collect();
    assert_eq!(numbers, [0, 1, 2, 10, 11, 12, 13, 14, 15]);
    assert_eq!([0, 1, 2].map(|n| done[n].1.immediate()), [Some(11), Some(12), None]);
    assert_eq!(&received[16..22], b"inline");
    let mut there = [0; 4];
    shared.read(0, &mut there).unwrap();
    assert_eq!((there, region[1], region[2]), ([7, 8, 0, 0], 5, 6));
}

#[test]
fn a_message_that_is_too_long_is_refused_with_the_limit() {
    let mut loopback = Loopback::new();
    // The region gets pages when the device needs them, which is never.
    let on_demand = RegionOptions::new().access(AccessFlags::ON_DEMAND);
    let long =
        MemoryRegion::<u8>::with_options(&loopback.domain, (2 << 30) + 1, on_demand).unwrap();
    // SAFETY: nothing is posted.
    let error = unsafe { loopback.queue_pair.post_send(&long, .., 1) }.unwrap_err();
    let text = "the length of the message is 2147483649, and must be within 0..=2147483648";
    assert!(error.to_string().contains(text), "{error}");

    let (context, domain) = (loopback.domain.context(), &loopback.domain);
    let datagrams = domain.create_qp(&loopback.queue, &loopback.queue, Ud);
    let mut datagrams = datagrams.qkey(1).build().unwrap().activate().unwrap();
    let to_itself = AddressVector::to_peer(context, 1, &datagrams.endpoint()).unwrap();
    let path = domain.create_ah(&to_itself).unwrap();
    let mtu = context.query_port(1).unwrap().active_mtu().unwrap().bytes() as usize;
    let mut send = |length| {
        let peer = DatagramPeer { path: &path, number: datagrams.number(), qkey: 1 };
        let request = SendWorkRequest::new(long.gather_element(..length).unwrap()).to(peer);
        // SAFETY: the memory lives on, and nobody writes it.
        unsafe { datagrams.post(request, 2) }
    };
    let error = send(mtu + 1).unwrap_err().to_string();
    assert!(
        error.contains(&format!("message is {}, and must be within 0..={mtu}", mtu + 1)),
        "{error}"
    );
    send(mtu).unwrap();
    assert_eq!(succeeded(&loopback.queue, 1), [2]);
}

#[test]
fn an_atomic_write_writes_eight_bytes() {
    let mut pair = Loopback::with(EXTENDED | SendOperations::ATOMIC_WRITE);
    let shared =
        SharedMemoryRegion::<u64>::new(&pair.domain, 2, AccessFlags::REMOTE_WRITE).unwrap();
    let remote = shared.remote().sub_region(8, 8).unwrap();
    let value = 0x0102_0304_0506_0708;
    // SAFETY: there is no buffer.
    unsafe {
        pair.queue_pair
            .batch(|batch| batch.add(AtomicWriteWorkRequest::new(remote, value), 1))
            .unwrap();
    }
    assert_eq!(succeeded(&pair.queue, 1), [1]);
    let mut there = [0; 2];
    shared.read(0, &mut there).unwrap();
    assert_eq!(there, [0, value]);
}

#[test]
fn a_region_has_the_access_that_it_was_registered_with_again() {
    let mut pair = Loopback::new();
    let domain = pair.domain.clone();
    let mut shared = SharedMemoryRegion::<u8>::new(&domain, 8, AccessFlags::REMOTE_READ).unwrap();
    shared.rereg(Reregistration::new().access(AccessFlags::REMOTE_WRITE)).unwrap();
    // SAFETY: inline data is copied.
    unsafe {
        pair.queue_pair.post(WriteWorkRequest::new(Inline(&[7; 8]), shared.remote()), 1).unwrap();
    }
    assert_eq!(succeeded(&pair.queue, 1), [1]);
    let mut there = [0; 8];
    shared.read(0, &mut there).unwrap();
    assert_eq!(there, [7; 8]);
}
