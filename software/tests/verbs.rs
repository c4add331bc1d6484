//! Verbs beyond reliable connections posted one by one: datagrams, batches, extended completion queues.

#[path = "support/patience.rs"]
mod patience;

use std::time::Instant;

use ibverbs::completion::CompletionFields;
use ibverbs::memory::{DeviceMemory, RawMemoryRegion};
use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    AccessFlags, CompletionQueue, Error, Inline, ProtectionDomain, Rc, SendWorkRequest, Ud,
    WorkCompletion, completion::WorkSuccess, operation::DatagramPeer, queue_pair::AddressVector,
    settings::MaximumTransferUnit,
};
use ibverbs_software::Device;

use patience::PATIENCE;

fn completions(queue: &CompletionQueue<'_>, count: usize) -> Vec<WorkCompletion> {
    let (start, mut all) = (Instant::now(), Vec::new());
    let mut slots = [WorkCompletion::default(); 16];
    while all.len() < count {
        assert!(start.elapsed() < PATIENCE, "{all:?}");
        all.extend_from_slice(queue.poll(&mut slots).unwrap());
    }
    all
}

fn success(completions: &[WorkCompletion], wr_id: u64) -> WorkSuccess {
    let completion = completions.iter().find(|completion| completion.wr_id() == wr_id);
    completion.expect("a completion").result().unwrap_or_else(|error| panic!("{wr_id}: {error}"))
}

#[test]
fn datagrams_go_where_each_says_in_requests_and_batches() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(64).unwrap());
    let new = |i: usize, qkey| {
        let kind = Ud;
        let builder = domains[i].create_qp(&queues[i], &queues[i], kind).qkey(qkey);
        let operations = SendOperations::SEND | SendOperations::SEND_WITH_IMMEDIATE;
        let builder = builder.max_send_wr(8).max_recv_wr(8).max_inline_data(16);
        builder.extended(operations).build().unwrap().activate().unwrap()
    };
    let (mut one, mut two) = (new(0, 5), new(1, 6));
    let text = domains[0].allocate::<u8>(8).unwrap();
    let mut there = domains[1].allocate::<u8>(256).unwrap();
    let path = AddressVector::new(1, 0).global(two.endpoint().gid(), 0);
    let path = domains[0].create_ah(&path).unwrap();
    let elements = [text.gather_element(..).unwrap()];
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        for n in 0..3 {
            let from = n as usize * 64;
            two.post_receive(&mut there, from..from + 64, 100 + n).unwrap();
        }
        let request = SendWorkRequest::new(&elements);
        let number = two.number();
        let to = |qkey| DatagramPeer { path: &path, number, qkey };
        one.post(request.immediate(1).to(to(6)), 1).unwrap();
        one.batch(|b| {
            b.add(SendWorkRequest::new(Inline(b"inline")).to(to(6)), 2)?;
            // With the wrong Q_Key, no queue pair takes it.
            b.add(SendWorkRequest::new(Inline(b"lost")).to(to(7)), 3)?;
            b.add(SendWorkRequest::new(&elements).immediate(2).to(to(6)), 4)
        })
        .unwrap();
    }
    let received = completions(&queues[1], 3);
    assert_eq!(completions(&queues[0], 4).iter().filter(|done| done.is_success()).count(), 4);
    let received = |wr_id| success(&received, wr_id);
    assert_eq!((received(100).byte_len(), received(100).immediate()), (48, Some(1)));
    assert_eq!((received(101).byte_len(), received(101).immediate()), (46, None));
    assert_eq!((received(102).byte_len(), received(102).immediate()), (48, Some(2)));
    assert_eq!(received(100).source_queue_pair(), one.number());
    assert!(received(100).has_global_route());
    assert_eq!(received(100).service_level(), 2, "IPv4, as mlx5 says it");
    assert_eq!(&there[64 + 40..64 + 46], b"inline");
    // The IPv4 header is in the last 20 of the 40 bytes.
    let std::net::IpAddr::V4(from) = address(&contexts[0]) else { panic!("IPv4") };
    assert_eq!(there[32..36], from.octets());
}

fn address(context: &ibverbs::Context<'_>) -> std::net::IpAddr {
    context.query_gid(1, 0).unwrap().gid.to_ipv4().unwrap().into()
}

#[test]
fn an_extended_queue_tells_the_time_of_each_completion() {
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let fields = CompletionFields::STANDARD | CompletionFields::TIMESTAMP;
    let queue = CompletionQueue::builder(&context, 64).extended(fields).build().unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
        .max_send_wr(8)
        .max_recv_wr(8)
        .max_inline_data(16)
        .access(AccessFlags::REMOTE_WRITE)
        .extended(SendOperations::SEND | SendOperations::WRITE)
        .build()
        .unwrap();
    let itself = prepared.endpoint();
    let mut pair = prepared.path_mtu(MaximumTransferUnit::Mtu256).handshake(itself).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    // SAFETY: the region is not touched before the completions.
    unsafe {
        for n in 0..4 {
            pair.post_receive(&mut region, n * 16..n * 16 + 16, 100 + n as u64).unwrap();
        }
        pair.batch(|b| {
            (0..4).try_for_each(|n| b.add(SendWorkRequest::new(Inline(&[n as u8; 5])), n))
        })
        .unwrap();
    }
    let (start, mut seen) = (Instant::now(), Vec::new());
    let mut poller = queue.extended_poller().unwrap();
    while seen.len() < 8 {
        assert!(start.elapsed() < PATIENCE);
        poller
            .poll(|completions| {
                while let Some(completion) = completions.next()? {
                    assert!(completion.result().is_ok());
                    seen.push((completion.timestamp().unwrap(), completion.wr_id()));
                }
                Ok::<_, Error>(())
            })
            .unwrap();
    }
    assert!(seen.is_sorted_by_key(|seen| seen.0), "{seen:?}");
    assert!(seen[0].0 > 0);
    let mut ids: Vec<u64> = seen.iter().map(|seen| seen.1).collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2, 3, 100, 101, 102, 103]);
    assert_eq!((region[0], region[16], region[32 + 4], region[48 + 5]), (0, 1, 2, 0));
}

#[test]
#[cfg(rdma_core_65)]
fn a_port_has_a_speed() {
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    assert_eq!(context.query_port_speed(1).unwrap(), 1000, "100 Gb/s");
    assert_eq!(context.query_port_speed(2).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

type Imported<'a> = ibverbs::Result<RawMemoryRegion<'a>>;

/// A context uses, by its number, an object that another context of the device has made in this process.
#[test]
fn objects_are_imported_by_their_numbers() {
    let device = Device::new().unwrap();
    let (one, other) = (device.open().unwrap(), device.open().unwrap());
    let domain = one.alloc_pd().unwrap();
    let region = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ).unwrap();
    let imported = ProtectionDomain::import(&other, domain.handle()).unwrap();
    let (handle, base) = (region.handle(), region.remote().address());
    fn import<'a>(domain: &'a ProtectionDomain<'a>, handle: u32, base: u64) -> Imported<'a> {
        // SAFETY: the region outlives what is imported, and deregisters itself.
        unsafe { RawMemoryRegion::import(domain, handle, base, AccessFlags::REMOTE_READ) }
    }
    let found = import(&imported, handle, base).unwrap();
    assert_eq!((found.lkey(), found.rkey(), found.len()), (region.lkey(), region.rkey(), 64));
    let invalid = |result: ibverbs::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EINVAL))
    };
    invalid(import(&other.alloc_pd().unwrap(), handle, base).map(drop)); // it is of another domain
    invalid(import(&imported, !handle, base).map(drop));
    invalid(ProtectionDomain::import(&other, !domain.handle()).map(drop));
    drop(found);
    drop(imported);
    drop(region);
    domain.close().expect("what was imported is no user of it");

    let memory = one.alloc_dm(64).unwrap();
    let handle = memory.handle().unwrap();
    // SAFETY: the memory outlives what is imported, and frees itself.
    let import = |handle| unsafe { DeviceMemory::import(&other, handle, 64) };
    let found = import(handle).unwrap();
    found.write(8, &[7_u8; 8]).unwrap();
    drop(found);
    let mut bytes = [0_u8; 8];
    memory.read(8, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
    invalid(import(!handle).map(drop));
}

/// The device is not Soft-RoCE, whose faults would forbid it.
#[test]
fn queues_are_resized() {
    let context = Device::new().unwrap().open().unwrap();
    let attributes = context.query_device().unwrap();
    assert_ne!((attributes.vendor_id(), attributes.vendor_part_id()), (0xff_ffff, 0));
    let queue = context.create_cq(4).unwrap();
    queue.resize(100).unwrap();
    assert!(queue.capacity() >= 100);
    let domain = context.alloc_pd().unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    receives.resize(50).unwrap();
    assert!(receives.query().unwrap().max_wr >= 50);
}
