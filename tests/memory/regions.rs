//! Regions that own or borrow their memory.

use std::sync::atomic::Ordering;

use ibverbs::memory::{BorrowedMemoryRegion, MAX_SGE_LENGTH, ReadOnlyMemoryRegion};
use ibverbs::*;
use ibverbs_function_device::{Builder, FunctionDevice, Kind};

use crate::one_sided::{fetch_add, send, to_itself, write};
use crate::{PAGE, refused};

#[test]
fn options_arrive_at_the_provider() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;

    let region = domain.allocate_shared::<u64>(100, access).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!(call.access, (access | AccessFlags::LOCAL_WRITE).bits());
    assert_eq!((call.length, call.iova), (800, call.addr));
    assert_eq!(call.addr, region.as_slice().as_ptr() as u64);
    assert_eq!(call.addr % 64, 0);
    assert_eq!(region.access(), access | AccessFlags::LOCAL_WRITE);
    let remote = region.remote_range(10..20).unwrap();
    assert_eq!((remote.address(), remote.length()), (call.addr + 80, 80));
    assert_eq!(remote.rkey(), region.rkey());

    let options = RegionOptions::new()
        .access(AccessFlags::RELAXED_ORDERING)
        .access(AccessFlags::MW_BIND)
        .alignment(1 << 16);
    let region = domain.allocate_shared::<u8>(10, options).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    let flags = AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING | AccessFlags::MW_BIND;
    assert_eq!((call.access, call.addr % (1 << 16)), (flags.bits(), 0));
    drop(region);

    let options = RegionOptions::new().page_aligned().access(AccessFlags::RELAXED_ORDERING);
    let region = MemoryRegion::<u8>::with_options(&domain, 10, options).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.addr as usize % PAGE, call.length), (0, 10));
    assert_eq!(call.addr, region.as_ptr() as u64);
    assert_eq!(region.access(), AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING);
}

#[test]
fn zero_based_regions_are_so_by_their_iova() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let local = domain.allocate::<u32>(4).unwrap();
    for (options, base) in [
        (RegionOptions::from(AccessFlags::REMOTE_WRITE).iova(0), 0),
        (RegionOptions::from(AccessFlags::REMOTE_WRITE | AccessFlags::ZERO_BASED), 0),
        (RegionOptions::from(AccessFlags::REMOTE_WRITE).iova(0x7000), 0x7000),
    ] {
        let region = domain.allocate_shared::<u32>(1000, options).unwrap();
        let call = device.last_call("reg_mr").unwrap();
        assert_eq!((call.iova, call.addr as usize % PAGE), (base, 0));
        assert_eq!(call.access & AccessFlags::ZERO_BASED.bits(), 0);
        let part = region.remote_range(2..4).unwrap();
        assert_eq!((part.address(), part.length()), (base + 8, 8));
        let mut source = [7, 8];
        let source = domain.register(&mut source).unwrap();
        let from = source.gather_element(..).unwrap();
        assert_eq!(write(&mut queue_pair, &[from], part), WorkStatus::Success);
        assert_eq!(region.slice(1..5).unwrap().to_vec(), [0, 7, 8, 0]);
        // A request with inline data must not refer to the region.
        assert!(region.gather_element(..).unwrap_err().to_string().contains("by_iova"));
        assert!(region.scatter_element(..).is_err() && region.as_slice().gather_element().is_err());
        // SAFETY: it is not sent inline.
        let from = unsafe { region.gather_element_by_iova(2..4) }.unwrap();
        let to = region.remote_range(..2).unwrap();
        assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
        assert_eq!(region.slice(..4).unwrap().to_vec(), [7, 8, 7, 8]);
    }
    drop(local);
}

#[test]
fn bad_options_do_not_reach_the_provider() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let shared = |len, options: RegionOptions| domain.allocate_shared::<u64>(len, options);
    let new = RegionOptions::new;

    refused(&device, shared(0, new()), libc::EINVAL, "empty");
    refused(&device, domain.allocate::<[u8; 0]>(10), libc::EINVAL, "empty");
    refused(&device, shared(usize::MAX, new()), libc::EINVAL, "longer than memory");
    refused(&device, shared(1 << 46, new()), libc::ENOMEM, "no memory");
    refused(&device, shared(1, new().alignment(48)), libc::EINVAL, "power of 2");
    refused(&device, shared(1, new().alignment(0)), libc::EINVAL, "power of 2");
    refused(&device, shared(1, new().alignment(1 << 63)), libc::EINVAL, "longer than memory");
    refused(&device, shared(1, new().iova(8)), libc::EINVAL, "same offset in a page");
    refused(&device, shared(1 << 10, new().iova(u64::MAX - 4095)), libc::EINVAL, "last iova");
    let both = new().access(AccessFlags::ZERO_BASED).iova(4096);
    refused(&device, shared(1, both), libc::EINVAL, "ZERO_BASED and another iova");
    refused(&device, shared(1, new().access(AccessFlags::HUGETLB)), libc::EINVAL, "huge pages");
    refused(
        &device,
        shared(1, new().access(AccessFlags::ON_DEMAND)),
        libc::EOPNOTSUPP,
        "no on-demand paging",
    );
    for access in [AccessFlags::REMOTE_READ, AccessFlags::REMOTE_WRITE, AccessFlags::MW_BIND] {
        let result = MemoryRegion::<u8>::with_options(&domain, 1, access.into());
        refused(&device, result, libc::EINVAL, "local access only");
    }
    let result = MemoryRegion::<u8>::with_options(&domain, 1, new().iova(0));
    refused(&device, result, libc::EINVAL, "its own address");
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_region_longer_than_the_device_allows_says_so() {
    let device = Builder::model().limits(|limits| limits.max_mr_size = 1 << 20).build();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let error = domain.allocate::<u8>((1 << 20) + 1).unwrap_err();
    assert!(error.to_string().contains("is 1048577, and must be within 1..=1048576"), "{error}");
    device.fail("reg_mr").errno(libc::ENOMEM).times(1);
    let error = domain.allocate::<u8>(1 << 20).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    // The kernel returns EPERM if the limit is 0.
    device.fail("reg_mr").errno(libc::EPERM).times(1);
    let error = domain.allocate::<u8>(1 << 20).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_MEMLOCK may be 0 (ulimit -l)"), "{error}");
    domain.allocate::<u8>(1 << 20).unwrap();
    assert_eq!(device.live(Kind::MemoryRegion), 0);
}

#[test]
fn regions_of_more_than_4_gib_are_legal() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let size = (5 << 30) + 8;
    let region = domain.allocate_shared::<u8>(size, AccessFlags::REMOTE_WRITE).unwrap();
    assert_eq!(device.last_call("reg_mr").unwrap().length, size as u64);
    assert_eq!(region.remote().length(), size as u64);
    let error = region.gather_element(..).unwrap_err();
    assert!(error.to_string().contains("must be within 0..=4294967295"), "{error}");
    assert!(region.gather_element(..MAX_SGE_LENGTH + 1).is_err());
    assert_eq!(region.gather_element(7..MAX_SGE_LENGTH + 7).unwrap().len(), u32::MAX);
    // The written bytes end where the region does.
    region.write(8, b"the end").unwrap();
    let (from, to) = (region.gather_element(8..15).unwrap(), region.remote_range(size - 7..));
    assert_eq!(write(&mut queue_pair, &[from], to.unwrap()), WorkStatus::Success);
    assert_eq!(region.slice(size - 8..).unwrap().to_vec(), b"\0the end");
}

#[test]
fn what_cannot_be_deregistered_is_leaked() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let region = domain.allocate_shared::<u64>(4, AccessFlags::REMOTE_WRITE).unwrap();
    let address = region.as_slice().as_ptr();
    region.write_one(1, 17).unwrap();
    let dropped = domain.allocate::<u64>(4).unwrap();
    device.fail("dereg_mr").errno(libc::EBUSY).times(2);
    drop(dropped);
    let error = region.close().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Busy, "ibv_dereg_mr"));
    assert_eq!((device.live(Kind::MemoryRegion), device.calls("dereg_mr")), (2, 2));
    // SAFETY: the memory is leaked, not freed.
    assert_eq!(unsafe { address.add(1).read_volatile() }, 17);
    let error = domain.close().unwrap_err();
    assert_eq!((error.kind(), device.calls("dealloc_pd")), (ErrorKind::Busy, 0));
    assert!(error.to_string().contains("could not be destroyed"), "{error}");
    drop(context);
    assert_eq!(device.calls("free_context"), 0);
}

#[test]
fn the_memory_of_a_region_outlives_it() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let mut region = domain.allocate::<u64>(4).unwrap();
    region[1] = 17;
    let shared = domain.allocate_shared::<u64>(4, AccessFlags::REMOTE_WRITE).unwrap();
    shared.write_one(2, 18).unwrap();
    let addresses = [region.as_ptr(), shared.as_slice().as_ptr()];
    let mut inner = [region.into_inner().unwrap(), shared.into_inner().unwrap()];
    assert_eq!(device.live(Kind::MemoryRegion), 0);

    // If deregistering fails, the device may still use the memory, so it does not come back.
    let refused = domain.allocate::<u64>(4).unwrap();
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    assert_eq!(refused.into_inner().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!((device.live(Kind::MemoryRegion), device.calls("dereg_mr")), (1, 3));
    drop(domain);
    drop(context);

    assert_eq!(inner.each_ref().map(|inner| inner.as_ptr()), addresses);
    inner[0][3] = 19;
    assert_eq!((&inner[0][..], &inner[1][..]), (&[0, 17, 0, 19][..], &[0, 0, 18, 0][..]));
}

#[test]
fn shared_memory_is_copied_while_the_device_writes_it() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let region = domain.allocate_shared::<u64>(64, access).unwrap();
    region.fill(3);
    let (source, target) = region.as_slice().split_at(32).unwrap();
    source.write(4, &[10, 20, 30]).unwrap();
    let from = source.slice(4..7).unwrap().gather_element().unwrap();
    let to = target.slice(1..4).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], to.remote()), WorkStatus::Success);
    assert_eq!(target.slice(..5).unwrap().to_vec(), [3, 10, 20, 30, 3]);
    let counter = target.slice(9..10).unwrap();
    let old = target.slice(11..12).unwrap();
    let element = old.scatter_element().unwrap();
    assert_eq!(fetch_add(&mut queue_pair, 5, counter.remote(), element), WorkStatus::Success);
    assert_eq!((counter.read_one(0), old.read_one(0)), (Ok(8), Ok(3)));
    assert_eq!(region.atomic(32 + 9).unwrap().fetch_sub(8, Ordering::AcqRel), 8);
    assert_eq!(region.read_one(41), Ok(0));
    region.zero();
    assert!(region.to_vec().iter().all(|&element| element == 0));
    // By the name of the region, too.
    // SAFETY: both completions are polled below.
    unsafe {
        let mut part = target;
        queue_pair.post_receive(&mut part, ..4, 1).unwrap();
        region.write(0, &[5; 4]).unwrap();
        queue_pair.post_send(&source, ..4, 2).unwrap();
    }
    let mut polled = Vec::new();
    while polled.len() < 2 {
        let mut slots = [Default::default(); 2];
        polled.extend(
            queue.poll(&mut slots).unwrap().iter().map(|c| (c.wr_id(), c.result().is_ok())),
        );
    }
    polled.sort_unstable();
    assert_eq!(polled, [(1, true), (2, true)]);
    assert_eq!(target.slice(..5).unwrap().to_vec(), [5, 5, 5, 5, 0]);
}

#[test]
fn a_slice_is_registered_for_as_long_as_it_is_borrowed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let text = *b"read-only";
    let mut memory = [0_u8; 16];
    let address = memory.as_ptr() as u64;
    {
        let source = domain.register_read_only(&text).unwrap();
        let call = device.last_call("reg_mr").unwrap();
        assert_eq!((call.addr, call.length, call.access), (text.as_ptr() as u64, 9, 0));
        let mut target = domain.register(&mut memory).unwrap();
        let call = device.last_call("reg_mr").unwrap();
        assert_eq!((call.addr, call.length), (address, 16));
        assert_eq!(call.access, AccessFlags::LOCAL_WRITE.bits());
        target[0] = b'>';
        let from = source.gather_element(..4).unwrap();
        send(&mut queue_pair, &[from], &[target.scatter_element(2..6).unwrap()]);
        assert_eq!((&source[..4], &target[..7]), (&b"read"[..], &b">\0read\0"[..]));
        let (head, mut tail) = target.slice_mut(..).unwrap().split_at(8).unwrap();
        send(
            &mut queue_pair,
            &[head.as_slice().slice(2..6).unwrap().gather_element().unwrap()],
            &[tail.scatter_element().unwrap()],
        );
        assert_eq!(target.slice(8..12).unwrap()[..], *b"read");
        assert_eq!(device.live(Kind::MemoryRegion), 2);
        target.close().unwrap();
        source.close().unwrap();
    }
    assert_eq!(device.live(Kind::MemoryRegion), 0);
    assert_eq!(memory[..6], *b">\0read");

    let result = BorrowedMemoryRegion::with_access(&domain, &mut memory, AccessFlags::REMOTE_READ);
    refused(&device, result, libc::EINVAL, "local access only");
    let result = BorrowedMemoryRegion::with_access(&domain, &mut memory, AccessFlags::ZERO_BASED);
    refused(&device, result, libc::EINVAL, "its own address");
    let result = ReadOnlyMemoryRegion::with_access(&domain, &text, AccessFlags::LOCAL_WRITE);
    refused(&device, result, libc::EINVAL, "cannot be written");
    let result = ReadOnlyMemoryRegion::with_access(&domain, &text, AccessFlags::ON_DEMAND);
    refused(&device, result, libc::EOPNOTSUPP, "no on-demand paging");
    refused(&device, domain.register::<u8>(&mut []), libc::EINVAL, "empty");
    refused(&device, domain.register_read_only::<u64>(&[]), libc::EINVAL, "empty");
    let relaxed = AccessFlags::RELAXED_ORDERING;
    drop(BorrowedMemoryRegion::with_access(&domain, &mut memory, relaxed).unwrap());
    let access = AccessFlags::LOCAL_WRITE | relaxed;
    assert_eq!(device.last_call("reg_mr").unwrap().access, access.bits());
}

#[test]
fn a_forgotten_borrow_costs_a_region_and_nothing_else() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let mut memory = vec![1_u32; 8];
    let region = domain.register(&mut memory).unwrap();
    std::mem::forget(region);
    memory[0] = 2;
    drop(memory);
    assert_eq!(device.live(Kind::MemoryRegion), 1);
    assert_eq!(domain.close().unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn memory_of_several_domains_is_freed_with_the_last_region() {
    let device = Builder::model().build();
    let contexts = [device.context(), device.context()];
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let access = AccessFlags::REMOTE_WRITE;
    let first = domains[0].allocate_shared::<u32>(100, access).unwrap();
    let other = first.register_in(&domains[1], access).unwrap();
    assert_eq!(device.live(Kind::MemoryRegion), 2);
    assert_eq!(other.protection_domain().as_raw(), domains[1].as_raw());
    assert_eq!((other.len(), other.access()), (100, first.access()));
    first.write(7, &[17]).unwrap();
    assert_eq!(other.read_one(7).unwrap(), 17);
    // The other still has it.
    let error = first.into_inner().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("region in another domain"), "{error}");
    other.write(8, &[18]).unwrap();
    assert_eq!(other.into_inner().unwrap()[7..9], [17, 18]);
    assert_eq!(device.live(Kind::MemoryRegion), 0);
    // One region that cannot be deregistered keeps the memory, whatever becomes of the others.
    let first = domains[0].allocate_shared::<u32>(100, access).unwrap();
    let other = first.register_in(&domains[1], access).unwrap();
    device.fail("dereg_mr").errno(libc::EIO).times(1);
    first.close().unwrap_err();
    assert_eq!(other.into_inner().unwrap_err().kind(), ErrorKind::Busy);
    let zero_based = domains[0].allocate_shared::<u8>(100, RegionOptions::new().page_aligned());
    let zero_based = zero_based.unwrap();
    let other = zero_based.register_in(&domains[1], access | AccessFlags::ZERO_BASED).unwrap();
    assert_eq!(other.remote().address(), 0);
}
