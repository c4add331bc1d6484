//! Memory of all kinds, on a device made of functions: what the provider is handed, what becomes of
//! its answers, and that the bytes get where they should.

mod one_sided;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ibverbs::*;
use ibverbs_test_device::{Builder, Kind, TestDevice};
use one_sided::{fetch_add, pair, read, send, status, to_itself, write};

const PAGE: usize = 4096;

fn context(device: &TestDevice) -> Context<'static> {
    // SAFETY: the context is live and handed over.
    unsafe { Context::from_raw(device.open().unwrap()) }.unwrap()
}

fn paging_device() -> TestDevice {
    Builder::model().limits(|limits| limits.on_demand = 1).build()
}

/// Asserts that a call fails with that errno and those words, without the verb being called.
#[track_caller]
fn refused<T: std::fmt::Debug>(device: &TestDevice, result: Result<T>, errno: i32, words: &str) {
    let calls = device.calls("reg_mr");
    let error = result.expect_err("it is refused");
    assert_eq!(error.raw_os_error(), errno, "{error}");
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(device.calls("reg_mr"), calls);
}

#[test]
fn options_arrive_at_the_provider() {
    let device = TestDevice::model();
    let context = context(&device);
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

    let options = RegionOptions::new().relaxed_ordering().memory_windows().alignment(1 << 16);
    let region = domain.allocate_shared::<u8>(10, options).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    let flags = AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING | AccessFlags::MW_BIND;
    assert_eq!((call.access, call.addr % (1 << 16)), (flags.bits(), 0));
    drop(region);

    let options = RegionOptions::new().page_aligned().relaxed_ordering();
    let region = domain.allocate_with::<u8>(10, options).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.addr as usize % PAGE, call.length), (0, 10));
    assert_eq!(call.addr, region.as_ptr() as u64);
    assert_eq!(region.access(), AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING);
}

#[test]
fn zero_based_regions_are_so_by_their_iova() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let local = domain.allocate::<u32>(4).unwrap();
    for (options, base) in [
        (RegionOptions::from(AccessFlags::REMOTE_WRITE).zero_based(), 0),
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
        // Nothing may be followed to where requests see it.
        assert!(region.gather_element(..).unwrap_err().to_string().contains("by_iova"));
        assert!(region.scatter_element(..).is_err() && region.as_slice().gather_element().is_err());
        // SAFETY: it is not sent inline.
        let from = unsafe { region.slice(2..4).unwrap().gather_element_by_iova() }.unwrap();
        let to = region.remote_range(..2).unwrap();
        assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
        assert_eq!(region.slice(..4).unwrap().to_vec(), [7, 8, 7, 8]);
    }
    drop(local);
}

#[test]
fn bad_options_do_not_reach_the_provider() {
    let device = TestDevice::model();
    let context = context(&device);
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
    refused(&device, shared(1, both), libc::EINVAL, "begin at 0, and elsewhere");
    refused(&device, shared(1, new().access(AccessFlags::HUGETLB)), libc::EINVAL, "huge pages");
    refused(&device, shared(1, new().on_demand()), libc::EOPNOTSUPP, "no on-demand paging");
    for access in [AccessFlags::REMOTE_READ, AccessFlags::REMOTE_WRITE, AccessFlags::MW_BIND] {
        let result = domain.allocate_with::<u8>(1, access.into());
        refused(&device, result, libc::EINVAL, "local access only");
    }
    let result = domain.allocate_with::<u8>(1, new().zero_based());
    refused(&device, result, libc::EINVAL, "its own address");
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_region_longer_than_the_device_allows_says_so() {
    let device = Builder::model().limits(|limits| limits.max_mr_size = 1 << 20).build();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let error = domain.allocate::<u8>((1 << 20) + 1).unwrap_err();
    assert!(error.to_string().contains("is 1048577, and must be within 1..=1048576"), "{error}");
    device.fail("reg_mr").errno(libc::ENOMEM).times(1);
    let error = domain.allocate::<u8>(1 << 20).unwrap_err();
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    domain.allocate::<u8>(1 << 20).unwrap();
    assert_eq!(device.live(Kind::MemoryRegion), 0);
}

#[test]
fn regions_of_more_than_4_gib_are_legal() {
    let device = TestDevice::model();
    let context = context(&device);
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
    // Its end is where it should be.
    region.write(8, b"the end").unwrap();
    let (from, to) = (region.gather_element(8..15).unwrap(), region.remote_range(size - 7..));
    assert_eq!(write(&mut queue_pair, &[from], to.unwrap()), WorkStatus::Success);
    assert_eq!(region.slice(size - 8..).unwrap().to_vec(), b"\0the end");
}

#[test]
fn what_cannot_be_deregistered_is_leaked() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let region = domain.allocate_shared::<u64>(4, AccessFlags::REMOTE_WRITE).unwrap();
    let address = region.as_slice().as_ptr();
    region.write_one(1, 17).unwrap();
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    let (region, error) = region.close().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Busy, "ibv_dereg_mr"));
    assert_eq!(region.to_vec(), [0, 17, 0, 0]);
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    drop(region);
    assert_eq!(device.live(Kind::MemoryRegion), 1);
    // SAFETY: the memory is leaked, not freed.
    assert_eq!(unsafe { address.add(1).read_volatile() }, 17);
    let (_, error) = domain.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
}

#[test]
fn shared_memory_is_copied_while_the_device_writes_it() {
    let device = TestDevice::model();
    let context = context(&device);
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
    let device = TestDevice::model();
    let context = context(&device);
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
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let mut memory = vec![1_u32; 8];
    let region = domain.register(&mut memory).unwrap();
    std::mem::forget(region);
    memory[0] = 2;
    drop(memory);
    assert_eq!(device.live(Kind::MemoryRegion), 1);
    assert_eq!(domain.close().unwrap_err().1.kind(), ErrorKind::Busy);
}

/// Anonymous shared memory as a file, which the test device takes for a dma-buf.
fn shared_file(bytes: u64) -> File {
    // SAFETY: the name is a C string; the descriptor that comes back is ours.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"memory".as_ptr(), 0)) };
    file.set_len(bytes).unwrap();
    file
}

#[test]
fn raw_memory_is_registered_where_it_is() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let mut memory = vec![0_u64; 1024];
    let (address, bytes) = (memory.as_mut_ptr().cast::<u8>(), 8192);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;

    // SAFETY: the vector outlives the region, and is not touched meanwhile.
    let region = unsafe { domain.register_raw(address, bytes, access) }.unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.addr, call.iova, call.length), (address as u64, address as u64, 8192));
    assert_eq!((call.access, region.access()), (access.bits(), access));
    assert_eq!((region.as_ptr(), region.len()), (address, bytes));
    // SAFETY: the memory is ours; the device does nothing at present.
    unsafe { address.write_volatile(7) };
    let from = region.gather_element(..1).unwrap();
    let to = region.remote_range(100..101).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
    // SAFETY: as above.
    assert_eq!(unsafe { address.add(100).read_volatile() }, 7);
    assert!(region.gather_element(8192..8193).is_err() && region.remote_range(..8193).is_err());
    region.close().unwrap();

    // SAFETY: what is registered is not used.
    let raw =
        |address: *mut u8, bytes, access| unsafe { domain.register_raw(address, bytes, access) };
    let null = std::ptr::null_mut();
    refused(&device, raw(null, 1, access), libc::EINVAL, "null");
    refused(&device, raw(address, 0, access), libc::EINVAL, "empty");
    refused(&device, raw(address, usize::MAX, access), libc::EINVAL, "last address");
    refused(&device, raw(address, 1, AccessFlags::REMOTE_WRITE), libc::EINVAL, "LOCAL_WRITE");
    refused(&device, raw(address, 1, AccessFlags::REMOTE_ATOMIC), libc::EINVAL, "LOCAL_WRITE");
    let demand = AccessFlags::ON_DEMAND;
    refused(&device, raw(address, 1, demand), libc::EOPNOTSUPP, "no on-demand paging");
    // Without write access it is as little as that.
    drop(raw(address, 1, AccessFlags::REMOTE_READ).unwrap());
    assert_eq!(device.last_call("reg_mr").unwrap().access, AccessFlags::REMOTE_READ.bits());
    drop(memory);
}

#[test]
fn raw_memory_can_be_seen_elsewhere() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let mut memory = vec![0_u8; 3 * PAGE];
    let lead = memory.as_ptr().align_offset(PAGE) + 40;
    let address = memory[lead..].as_mut_ptr();
    let access = AccessFlags::LOCAL_WRITE;
    // SAFETY: the vector outlives the regions, and is not touched meanwhile.
    let at =
        |iova, access| unsafe { RawMemoryRegion::with_iova(&domain, address, PAGE, iova, access) };
    let region = at(0x10_0028, access).unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.addr, call.iova, call.length), (address as u64, 0x10_0028, PAGE as u64));
    assert_eq!(region.remote_range(8..).unwrap().address(), 0x10_0030);
    assert!(region.gather_element(..).unwrap_err().to_string().contains("by_iova"));
    assert!(region.scatter_element(..).is_err());
    // SAFETY: they are not posted.
    let element = *unsafe { region.gather_element_by_iova(8..16) }.unwrap().as_raw();
    assert_eq!((element.addr, element.length, element.lkey), (0x10_0030, 8, region.lkey()));
    // SAFETY: as above.
    assert_eq!(unsafe { region.scatter_element_by_iova(9..) }.unwrap().as_raw().addr, 0x10_0031);
    // At its own address it is like any other.
    let same = at(address as u64, access).unwrap();
    assert_eq!(same.gather_element(1..).unwrap().as_raw().addr, address as u64 + 1);

    refused(&device, at(0x10_0000, access), libc::EINVAL, "same offset in a page");
    refused(&device, at(u64::MAX - 4055, access), libc::EINVAL, "last iova");
    let zero = access | AccessFlags::ZERO_BASED;
    refused(&device, at(0x28, zero), libc::EINVAL, "begin at 0, and elsewhere");
    refused(&device, at(0, access), libc::EINVAL, "same offset in a page");
    // SAFETY: as above.
    let region = unsafe { domain.register_raw(address.sub(40), PAGE, zero) }.unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.iova, call.access, region.remote().address()), (0, access.bits(), 0));
    assert_eq!(region.access(), access);
}

#[test]
fn dma_bufs_are_registered_by_descriptor() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let file = shared_file(4 * PAGE as u64);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let (offset, iova) = (PAGE as u64 + 16, 16);
    let dmabuf = |offset, bytes, iova, access| {
        domain.register_dmabuf(file.as_fd(), offset, bytes, iova, access)
    };
    let region = dmabuf(offset, 100, iova, access).unwrap();
    let call = device.last_call("reg_dmabuf_mr").unwrap();
    assert_eq!((call.addr, call.length, call.iova), (offset, 100, iova));
    assert_eq!((call.fd, call.access), (file.as_raw_fd(), access.bits()));
    assert!(region.as_ptr().is_null());

    let mut memory = *b"over the wire";
    let local = domain.register(&mut memory).unwrap();
    let to = region.remote_range(5..18).unwrap();
    assert_eq!(to.address(), iova + 5);
    assert_eq!(
        write(&mut queue_pair, &[local.gather_element(..).unwrap()], to),
        WorkStatus::Success
    );
    let mut seen = [0; 13];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, offset + 5).unwrap();
    assert_eq!(seen, *b"over the wire");
    assert!(region.gather_element(..).is_err());
    let at_zero = dmabuf(0, 16, 0, access).unwrap();
    assert!(at_zero.gather_element(..).is_err(), "address 0 is nobody's");

    let calls = device.calls("reg_dmabuf_mr");
    refused(&device, dmabuf(0, 0, 0, access), libc::EINVAL, "empty");
    refused(&device, dmabuf(1, 10, 0, access), libc::EINVAL, "same offset in a page");
    refused(&device, dmabuf(u64::MAX, 10, 0, access), libc::EINVAL, "last offset");
    let last = u64::MAX - 4095;
    refused(&device, dmabuf(0, PAGE, last, access), libc::EINVAL, "last iova");
    for flag in [AccessFlags::MW_BIND, AccessFlags::ON_DEMAND, AccessFlags::ZERO_BASED] {
        refused(&device, dmabuf(0, 10, 0, access | flag), libc::EINVAL, "a dma-buf can be");
    }
    let write = AccessFlags::REMOTE_WRITE;
    refused(&device, dmabuf(0, 10, 0, write), libc::EINVAL, "LOCAL_WRITE");
    assert_eq!(device.calls("reg_dmabuf_mr"), calls);
    device.fail("reg_dmabuf_mr").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(dmabuf(0, 10, 0, access).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn the_null_region_reads_as_zeros_and_swallows() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let null = domain.alloc_null_mr().unwrap();
    assert_eq!(device.calls("alloc_null_mr"), 1);
    let (text, mut memory) = (*b"abcdef", [0xff_u8; 8]);
    let source = domain.register_read_only(&text).unwrap();
    let mut target = domain.register(&mut memory).unwrap();
    // "ab", zeros, "cdef"; of which the first goes nowhere.
    let from = [
        source.gather_element(..2).unwrap(),
        null.gather_element(3).unwrap(),
        source.gather_element(2..).unwrap(),
    ];
    let (nowhere, to) = (null.scatter_element(1).unwrap(), target.scatter_element(..).unwrap());
    send(&mut queue_pair, &from, &[nowhere, to]);
    assert_eq!(target[..], *b"b\0\0\0cdef");
    assert!(null.gather_element(MAX_SGE_LENGTH + 1).is_err());
    assert_eq!(null.scatter_element(MAX_SGE_LENGTH).unwrap().len(), u32::MAX);
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    let (null, _) = null.close().unwrap_err();
    null.close().unwrap();
    device.fail("alloc_null_mr").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(domain.alloc_null_mr().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn memory_is_paged_on_demand_where_the_device_can() {
    let device = paging_device();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let options = RegionOptions::new().on_demand();
    let mut region = domain.allocate_with::<u8>(100, options).unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::ON_DEMAND;
    assert_eq!(device.last_call("reg_mr").unwrap().access, access.bits());

    let list = [region.gather_element(..10).unwrap(), region.gather_element(20..).unwrap()];
    for (advice, flush, raw) in [
        (MemoryAdvice::Prefetch, true, (0, 1)),
        (MemoryAdvice::PrefetchWrite, false, (1, 0)),
        (MemoryAdvice::PrefetchNoFault, false, (2, 0)),
        (MemoryAdvice::Unknown(77), true, (77, 1)),
    ] {
        domain.advise_mr(advice, flush, &list).unwrap();
        let call = device.last_call("advise_mr").unwrap();
        assert_eq!((call.access, call.mask), raw, "{advice:?}");
    }
    let error = domain.advise_mr(MemoryAdvice::Prefetch, true, &[]).unwrap_err();
    assert!(error.to_string().contains("nothing to give advice about"), "{error}");
    let pinned = domain.allocate::<u8>(100).unwrap();
    let list = [pinned.gather_element(..).unwrap()];
    let error = domain.advise_mr(MemoryAdvice::Prefetch, true, &list).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    device.fail("advise_mr").errno(libc::EOPNOTSUPP).times(1);
    let list = [region.gather_element(..).unwrap()];
    let error = domain.advise_mr(MemoryAdvice::Prefetch, true, &list).unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_advise_mr"));

    // What is paged stays paged.
    let change = Reregistration::new().access(AccessFlags::LOCAL_WRITE);
    let error = region.rereg(change).unwrap_err();
    assert_eq!(error.state(), ReregisteredState::Unchanged);
    assert_eq!(device.calls("rereg_mr"), 0);
}

#[test]
fn the_whole_address_space_is_one_region() {
    let device = paging_device();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let everything = domain.register_address_space().unwrap();
    let call = device.last_call("reg_mr").unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::ON_DEMAND;
    assert_eq!((call.addr, call.length, call.iova), (0, u64::MAX, 0));
    assert_eq!(call.access, access.bits());
    let (text, mut memory) = (String::from("anything"), [0_u8; 8]);
    let from = everything.slice(text.as_bytes());
    let mut to = everything.slice_mut(&mut memory[..]);
    send(&mut queue_pair, &[from.gather_element().unwrap()], &[to.scatter_element().unwrap()]);
    assert_eq!(memory, *b"anything");
    everything.close().unwrap();
    let plain = TestDevice::model();
    let other = self::context(&plain);
    let domain = other.alloc_pd().unwrap();
    let error = domain.register_address_space().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(plain.calls("reg_mr"), 0);
}

#[test]
fn device_memory_is_allocated_copied_and_registered() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let memory = DeviceMemory::with_alignment(&context, 4096, 64).unwrap();
    let attributes = device.last_call("alloc_dm").unwrap().dm_attr;
    assert_eq!((attributes.length, attributes.log_align_req, attributes.comp_mask), (4096, 6, 0));
    assert_eq!(memory.len(), 4096);

    // More than is copied at a time, and not aligned on our side.
    let pattern: Vec<u8> = (0..4001_u32).map(|i| (i * 7 % 251) as u8).collect();
    memory.write(4, &pattern[1..]).unwrap();
    let mut back = vec![0_u8; 4001];
    memory.read(4, &mut back[1..]).unwrap();
    assert_eq!(back[1..], pattern[1..]);
    memory.write(8, &[0x0102_0304_u32, 5]).unwrap();
    let mut words = [0_u32; 2];
    memory.read(8, &mut words).unwrap();
    assert_eq!(words, [0x0102_0304, 5]);
    for (offset, len) in [(4096, 1), (4097, 0), (0, 4097), (usize::MAX, 1), (1, usize::MAX)] {
        let mut buffer = vec![0_u8; len.min(5000)];
        let error = memory.read(offset, &mut buffer).err();
        let expected = offset > 4096 || buffer.len() > 4096 - offset;
        assert_eq!(error.is_some(), expected, "{offset} {len}");
        assert_eq!(memory.write(offset, &buffer).is_err(), expected, "{offset} {len}");
    }

    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let region = memory.register(&domain, 1000..2000, access).unwrap();
    let call = device.last_call("reg_dm_mr").unwrap();
    let all = access | AccessFlags::LOCAL_WRITE | AccessFlags::ZERO_BASED;
    assert_eq!((call.addr, call.length, call.access), (1000, 1000, all.bits()));
    assert_eq!((region.remote().address(), region.remote().length()), (0, 1000));
    let local = domain.register_read_only(b"to the device").unwrap();
    let to = region.remote_range(10..23).unwrap();
    let from = local.gather_element(..).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
    let mut seen = [0_u8; 13];
    memory.read(1010, &mut seen).unwrap();
    assert_eq!(seen, *b"to the device");
    // SAFETY: the test device copies nothing by address.
    let to = unsafe { region.scatter_element_by_iova(13..23) }.unwrap();
    let from = region.remote_range(10..20).unwrap();
    assert_eq!(to.as_raw().addr, 13);
    assert_eq!(read(&mut queue_pair, from, &[to]), WorkStatus::Success);
    memory.read(1010, &mut seen).unwrap();
    assert_eq!(seen, *b"to to the dev");

    let (memory_pointer, error) = (memory.as_raw(), {
        let other = self::context(&device);
        let domain = other.alloc_pd().unwrap();
        memory.register(&domain, .., access).unwrap_err()
    });
    assert!(error.to_string().contains("different contexts"), "{error}");
    let error = memory.register(&domain, 10..10, access).unwrap_err();
    assert!(error.to_string().contains("empty"), "{error}");
    assert!(memory.register(&domain, ..4097, access).is_err());
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    let (region, _) = region.close().unwrap_err();
    assert_eq!(region.device_memory().as_raw(), memory_pointer);
    region.close().unwrap();
    device.fail("free_dm").errno(libc::EBUSY).times(1);
    let (memory, error) = memory.close().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Busy, "ibv_free_dm"));
    memory.close().unwrap();
}

#[test]
fn bad_device_memory_is_a_typed_error() {
    let device = TestDevice::model();
    let context = context(&device);
    for (bytes, alignment, errno, words) in [
        (0, 1, libc::EINVAL, "empty"),
        (8, 3, libc::EINVAL, "power of 2"),
        (8, 0, libc::EINVAL, "power of 2"),
        ((1 << 20) + 1, 1, libc::ENOMEM, "less memory"),
    ] {
        let error = DeviceMemory::with_alignment(&context, bytes, alignment).unwrap_err();
        assert_eq!(error.raw_os_error(), errno, "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(device.calls("alloc_dm"), 0);
    device.fail("alloc_dm").errno(libc::ENOMEM).times(1);
    assert_eq!(context.alloc_dm(64).unwrap_err().kind(), ErrorKind::Resource);
}

#[test]
fn rereg_changes_access_and_domain() {
    let device = TestDevice::model();
    let context = context(&device);
    let (first, second) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let mut region = first.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    region.write(0, b"stays").unwrap();

    region.rereg(Reregistration::new().access(AccessFlags::REMOTE_READ)).unwrap();
    let call = device.last_call("rereg_mr").unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::LOCAL_WRITE;
    assert_eq!((call.mask, call.access, call.addr, call.length), (4, access.bits(), 0, 0));
    assert_eq!(region.access(), access);

    region.rereg(Reregistration::new().protection_domain(&second)).unwrap();
    let call = device.last_call("rereg_mr").unwrap();
    assert_eq!((call.mask, call.access), (2, 0));
    assert_eq!(region.protection_domain().as_raw(), second.as_raw());
    assert_eq!(region.access(), access);

    let both = Reregistration::new().protection_domain(&first).access(AccessFlags::REMOTE_ATOMIC);
    region.rereg(both).unwrap();
    assert_eq!(device.last_call("rereg_mr").unwrap().mask, 6);
    assert_eq!(region.protection_domain().as_raw(), first.as_raw());
    assert_eq!(region.read_one(0), Ok(b's'));

    let calls = device.calls("rereg_mr");
    let foreign = self::context(&device);
    let foreign = Arc::new(ProtectionDomain::new(Arc::new(foreign)).unwrap());
    for (change, words) in [
        (Reregistration::new(), "nothing is to be changed"),
        (Reregistration::new().access(AccessFlags::ZERO_BASED), "cannot be changed"),
        (Reregistration::new().access(AccessFlags::ON_DEMAND), "cannot be changed"),
        (Reregistration::new().protection_domain(&foreign), "another context"),
    ] {
        let error = region.rereg(change).unwrap_err();
        assert_eq!(error.state(), ReregisteredState::Unchanged);
        assert!(error.to_string().contains(words), "{error}");
    }
    let mut local = first.allocate::<u8>(1).unwrap();
    let error = local.rereg(Reregistration::new().access(AccessFlags::REMOTE_READ)).unwrap_err();
    assert!(error.error().to_string().contains("local access only"), "{error}");
    assert_eq!(device.calls("rereg_mr"), calls);
    local.rereg(Reregistration::new().access(AccessFlags::RELAXED_ORDERING)).unwrap();
    assert_eq!(local.access(), AccessFlags::RELAXED_ORDERING | AccessFlags::LOCAL_WRITE);
}

#[test]
fn a_failed_rereg_says_what_became_of_the_region() {
    let device = TestDevice::model();
    let context = context(&device);
    let (first, second) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let mut region = first.allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    let change = || Reregistration::new().protection_domain(&second);
    device.fail("rereg_mr").errno(libc::EOPNOTSUPP).times(1);
    let error = region.rereg(change()).unwrap_err();
    assert_eq!(error.state(), ReregisteredState::Unchanged);
    device.fail("rereg_mr").errno(libc::EIO).times(1);
    let error = region.rereg(change()).unwrap_err();
    assert_eq!(error.state(), ReregisteredState::Lost);
    assert_eq!(region.protection_domain().as_raw(), first.as_raw());
    assert!(std::io::Error::from(error).to_string().contains("no request can use"));
    region.close().unwrap();
    assert_eq!(device.live(Kind::MemoryRegion), 0);
    drop(second);
    // The region of device memory and of dma-bufs are refused by libibverbs itself.
    let file = shared_file(PAGE as u64);
    let access = AccessFlags::LOCAL_WRITE;
    let mut region = first.register_dmabuf(file.as_fd(), 0, PAGE, 0, access).unwrap();
    let calls = device.calls("rereg_mr");
    // SAFETY: nothing names the region.
    let error = unsafe { region.rereg(Reregistration::new().access(access)) }.unwrap_err();
    assert_eq!(error.state(), ReregisteredState::Unchanged);
    assert_eq!((error.error().raw_os_error(), device.calls("rereg_mr")), (libc::EINVAL, calls));
}

#[test]
fn rereg_moves_a_raw_region_to_other_memory() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let (mut old, mut new) = (vec![1_u8; 100], vec![2_u8; 50]);
    let (from, to) = (old.as_mut_ptr(), new.as_mut_ptr());
    // SAFETY: both vectors outlive the region, and are not touched meanwhile.
    unsafe {
        let mut region = domain.register_raw(from, 100, AccessFlags::LOCAL_WRITE).unwrap();
        for (address, bytes) in [(std::ptr::null_mut(), 1), (to, 0), (to, usize::MAX)] {
            let error = region.rereg_memory(address, bytes, Reregistration::new()).unwrap_err();
            assert_eq!(error.state(), ReregisteredState::Unchanged);
        }
        assert_eq!(device.calls("rereg_mr"), 0);
        region.rereg_memory(to, 50, Reregistration::new()).unwrap();
        let call = device.last_call("rereg_mr").unwrap();
        assert_eq!((call.mask, call.addr, call.length), (1, to as u64, 50));
        assert_eq!((region.as_ptr(), region.len()), (to, 50));
        assert_eq!(region.gather_element(..).unwrap().as_raw().addr, to as u64);
        device.fail("rereg_mr").errno(libc::EFAULT).times(1);
        let error = region.rereg_memory(from, 100, Reregistration::new()).unwrap_err();
        assert_eq!(error.state(), ReregisteredState::Lost);
        assert_eq!((region.as_ptr(), region.len()), (to, 50));
    }
    drop((old, new));
}

#[test]
fn a_window_of_type_1_opens_what_it_is_bound_to() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let region = domain.allocate_shared::<u8>(64, RegionOptions::new().memory_windows()).unwrap();
    let source = domain.allocate::<u8>(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let mut window = domain.alloc_mw(MemoryWindowType::Type1).unwrap();
    assert_eq!(device.last_call("alloc_mw").unwrap().mw_type, 1);
    let first_key = window.rkey();

    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let binding = WindowBinding::new(&region, 16..24, access).unwrap().fence();
    // SAFETY: no other request has that number.
    let remote = unsafe { queue_pair.post_bind_mw(&mut window, binding, 1) }.unwrap();
    let bind = device.last_call("bind_mw").unwrap().mw_bind;
    assert_eq!((bind.wr_id, bind.bind_info.mr), (1, region.as_raw()));
    let start = region.as_slice().as_ptr() as u64;
    assert_eq!((bind.bind_info.addr, bind.bind_info.length), (start + 16, 8));
    assert_eq!(bind.bind_info.mw_access_flags, access.bits());
    let flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED | ffi::ibv_send_flags::IBV_SEND_FENCE;
    assert_eq!(bind.send_flags, flags.0);
    assert_eq!((remote.address(), remote.length()), (start + 16, 8));
    assert_eq!(remote.rkey(), window.rkey());
    assert_eq!(
        (remote.rkey() & !0xff, remote.rkey() & 0xff),
        (first_key & !0xff, (first_key + 1) & 0xff)
    );
    assert_eq!(status(&queue, 1), WorkStatus::Success);

    let from = source.gather_element(..).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], remote), WorkStatus::Success);
    // Bound elsewhere, the old key opens nothing.
    let binding = WindowBinding::new(&region, ..8, access).unwrap().unsignaled();
    // SAFETY: as above.
    let moved = unsafe { queue_pair.post_bind_mw(&mut window, binding, 2) }.unwrap();
    assert_ne!(moved.rkey(), remote.rkey());
    assert_eq!(write(&mut queue_pair, &[from], moved), WorkStatus::Success);
    let binding = WindowBinding::new(&region, ..0, access).unwrap();
    // SAFETY: as above.
    let closed = unsafe { queue_pair.post_bind_mw(&mut window, binding, 3) }.unwrap();
    assert_eq!((status(&queue, 3), closed.length()), (WorkStatus::Success, 0));
    // SAFETY: as above.
    let error = unsafe { queue_pair.post_invalidate_mw(&mut window, 4) }.unwrap_err();
    assert!(error.to_string().contains("type 1"), "{error}");
    assert_eq!(write(&mut queue_pair, &[from], remote), WorkStatus::RemoteAccess);
    drop(window);
    assert_eq!(device.live(Kind::MemoryWindow), 0);
}

#[test]
fn a_window_of_type_2_is_bound_and_invalidated() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let region = domain.allocate_shared::<u8>(64, RegionOptions::new().memory_windows()).unwrap();
    let mut source = domain.allocate::<u8>(8).unwrap();
    source.fill(7);
    let mut queue_pair = to_itself(&domain, &queue);
    let mut window = MemoryWindow::new(&domain, MemoryWindowType::Type2).unwrap();
    assert_eq!(
        (device.last_call("alloc_mw").unwrap().mw_type, window.window_type()),
        (2, MemoryWindowType::Type2)
    );
    let mut key = window.rkey();
    for round in 0..3 {
        let zero_based = round == 1;
        let mut access = AccessFlags::REMOTE_WRITE;
        access.set(AccessFlags::ZERO_BASED, zero_based);
        let binding = WindowBinding::new(&region, 16..24, access).unwrap();
        // SAFETY: no other request has that number.
        let remote = unsafe { queue_pair.post_bind_mw(&mut window, binding, 10) }.unwrap();
        let posted = device.posted(0).unwrap();
        assert_eq!((posted.wr_id, posted.send.opcode), (10, ffi::ibv_wr_opcode::IBV_WR_BIND_MW));
        // SAFETY: the opcode says which of the members is set.
        let bind = unsafe { posted.send.__bindgen_anon_2.bind_mw };
        let start = region.as_slice().as_ptr() as u64;
        assert_eq!((bind.mw, bind.bind_info.mr), (window.as_raw(), region.as_raw()));
        assert_eq!((bind.bind_info.addr, bind.bind_info.length), (start + 16, 8));
        assert_eq!(bind.bind_info.mw_access_flags, access.bits());
        assert_eq!(bind.rkey, key & !0xff | (key + 1) & 0xff);
        assert_eq!((remote.rkey(), window.rkey()), (bind.rkey, bind.rkey));
        assert_eq!(remote.address(), if zero_based { 0 } else { start + 16 });
        assert_eq!(status(&queue, 10), WorkStatus::Success);
        key = bind.rkey;

        region.zero();
        let from = source.gather_element(..).unwrap();
        assert_eq!(write(&mut queue_pair, &[from], remote), WorkStatus::Success);
        assert_eq!(region.slice(15..25).unwrap().to_vec(), [0, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
        // SAFETY: as above.
        unsafe { queue_pair.post_invalidate_mw(&mut window, 11) }.unwrap();
        let posted = device.posted(0).unwrap();
        assert_eq!(posted.send.opcode, ffi::ibv_wr_opcode::IBV_WR_LOCAL_INV);
        // SAFETY: the opcode says which of the members is set.
        assert_eq!(unsafe { posted.send.__bindgen_anon_1.invalidate_rkey }, key);
        assert_eq!(status(&queue, 11), WorkStatus::Success);
        if round == 2 {
            let outcome = write(&mut queue_pair, &[from], remote);
            assert_eq!(outcome, WorkStatus::RemoteAccess);
        }
    }
    let binding = WindowBinding::new(&region, ..0, AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: as above.
    let error = unsafe { queue_pair.post_bind_mw(&mut window, binding, 12) }.unwrap_err();
    assert!(error.to_string().contains("by an invalidation"), "{error}");
    assert_eq!(window.rkey(), key);
    window.set_rkey(key + 0x100);
    assert_eq!(window.rkey(), key + 0x100);
    window.set_rkey(key);
    device.fail("dealloc_mw").errno(libc::EBUSY).times(1);
    let (window, _) = window.close().unwrap_err();
    window.close().unwrap();
}

#[test]
fn windows_are_bound_by_halves_and_in_batches() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let options = RegionOptions::new().memory_windows();
    let region = domain.allocate_shared::<u8>(64, options).unwrap();
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    let mut first_type = domain.alloc_mw(MemoryWindowType::Type1).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, QueuePairType::ReliableConnected)
        .max_send_wr(8)
        .access(AccessFlags::REMOTE_WRITE)
        .extended(SendOperations::BIND_MEMORY_WINDOW | SendOperations::LOCAL_INVALIDATE)
        .build()
        .unwrap();
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint).unwrap();
    let binding = |len| WindowBinding::new(&region, ..len, AccessFlags::REMOTE_WRITE).unwrap();

    let (mut half, _receives) = queue_pair.split();
    // SAFETY: no other request has these numbers.
    unsafe {
        let remote = half.post_bind_mw(&mut window, binding(8), 1).unwrap();
        assert_eq!((remote.length(), remote.rkey()), (8, window.rkey()));
        assert_eq!(status(&queue, 1), WorkStatus::Success);
        half.post_invalidate_mw(&mut window, 2).unwrap();
        assert_eq!(status(&queue, 2), WorkStatus::Success);
        half.post_bind_mw(&mut first_type, binding(4), 3).unwrap();
        assert_eq!(status(&queue, 3), WorkStatus::Success);
    }

    let key = window.rkey();
    // SAFETY: as above; the window outlives the batch.
    let remote = unsafe {
        queue_pair.batch(|batch| {
            let error = batch.bind_mw(3, &mut first_type, binding(8)).unwrap_err();
            assert!(error.to_string().contains("type 1"), "{error}");
            let error = batch.bind_mw(3, &mut window, binding(0)).unwrap_err();
            assert!(error.to_string().contains("by an invalidation"), "{error}");
            batch.bind_mw(4, &mut window, binding(16))
        })
    }
    .unwrap();
    assert_eq!((remote.length(), remote.rkey()), (16, key & !0xff | (key + 1) & 0xff));
    assert_eq!(window.rkey(), remote.rkey());
    let posted = device.posted(0).unwrap();
    assert_eq!((posted.wr_id, posted.send.opcode), (4, ffi::ibv_wr_opcode::IBV_WR_BIND_MW));
    // SAFETY: the opcode says which of the members is set.
    let bind = unsafe { posted.send.__bindgen_anon_2.bind_mw };
    assert_eq!((bind.rkey, bind.bind_info.length), (remote.rkey(), 16));
    assert_eq!(status(&queue, 4), WorkStatus::Success);
}

#[test]
fn a_window_is_closed_beyond_its_bounds_and_access() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let source = domain.register_read_only(b"123456789").unwrap();
    let options = RegionOptions::new().memory_windows();
    let region = domain.allocate_shared::<u8>(64, options).unwrap();
    for (access, bytes, outcome) in [
        (AccessFlags::REMOTE_WRITE, 8, WorkStatus::Success),
        (AccessFlags::REMOTE_WRITE, 9, WorkStatus::RemoteAccess),
        (AccessFlags::REMOTE_READ, 8, WorkStatus::RemoteAccess),
    ] {
        region.zero();
        let [mut peer, mut queue_pair] = pair(&domain, &queue);
        let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
        let binding = WindowBinding::new(&region, 16..24, access).unwrap();
        // SAFETY: no other request has that number.
        let remote = unsafe { queue_pair.post_bind_mw(&mut window, binding, 1) }.unwrap();
        assert_eq!(status(&queue, 1), WorkStatus::Success);
        let from = source.gather_element(..bytes).unwrap();
        assert_eq!(write(&mut peer, &[from], remote), outcome);
        let written = region.to_vec().iter().any(|&byte| byte != 0);
        assert_eq!(written, outcome == WorkStatus::Success);
    }
}

#[test]
fn a_window_keeps_what_it_is_bound_to() {
    let device = TestDevice::model();
    let context = Arc::new(context(&device));
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(CompletionQueue::new(&context, 8).unwrap());
    let mut window: MemoryWindow<'static> =
        MemoryWindow::new(&domain, MemoryWindowType::Type1).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let options = RegionOptions::new().memory_windows();
    let mut bind = |window: &mut MemoryWindow<'static>| {
        let region = Arc::new(SharedMemoryRegion::<u32>::new(&domain, 8, options).unwrap());
        let binding =
            WindowBinding::shared(Arc::clone(&region), 2.., AccessFlags::REMOTE_READ).unwrap();
        // SAFETY: no other request has that number.
        let remote = unsafe { queue_pair.post_bind_mw(window, binding, 1) }.unwrap();
        assert_eq!((remote.length(), status(&queue, 1)), (24, WorkStatus::Success));
    };
    // The region and the one before.
    for live in [1, 2, 2] {
        bind(&mut window);
        assert_eq!(device.live(Kind::MemoryRegion), live);
    }
    drop(window);
    assert_eq!(device.live(Kind::MemoryRegion), 0);

    // Without that, the device is asked, and nothing is freed that it still knows.
    let region = SharedMemoryRegion::<u8>::new(&domain, 8, options).unwrap();
    let region = std::mem::ManuallyDrop::new(region);
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    let binding = WindowBinding::new(&*region, .., AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: as above.
    unsafe { queue_pair.post_bind_mw(&mut window, binding, 2) }.unwrap();
    assert_eq!(status(&queue, 2), WorkStatus::Success);
    std::mem::forget(window);
    let (region, error) = std::mem::ManuallyDrop::into_inner(region).close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    drop(region);
    assert_eq!(device.live(Kind::MemoryRegion), 1);
}

#[test]
fn bad_bindings_are_typed_errors() {
    let device = TestDevice::model();
    let context = context(&device);
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let plain = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    let options = RegionOptions::new().memory_windows();
    let region = domain.allocate_shared::<u64>(8, options).unwrap();
    let mut memory = [0_u8; 8];
    // SAFETY: the array outlives the region, and is not touched meanwhile.
    let read_only =
        unsafe { domain.register_raw(memory.as_mut_ptr(), 8, AccessFlags::MW_BIND) }.unwrap();
    for (result, words) in [
        (WindowBinding::new(&plain, .., AccessFlags::REMOTE_READ), "needs MW_BIND"),
        (WindowBinding::new(&region, ..9, AccessFlags::REMOTE_READ), "end of the range is 9"),
        (WindowBinding::new(&region, .., AccessFlags::LOCAL_WRITE), "a window is for"),
        (WindowBinding::new(&read_only, .., AccessFlags::REMOTE_WRITE), "need LOCAL_WRITE"),
        (WindowBinding::new(&read_only, .., AccessFlags::REMOTE_ATOMIC), "need LOCAL_WRITE"),
    ] {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    let binding = WindowBinding::new(&read_only, 2..4, AccessFlags::REMOTE_READ).unwrap();
    assert_eq!((binding.as_raw().addr, binding.as_raw().length), (memory.as_ptr() as u64 + 2, 2));

    let other = context.alloc_pd().unwrap();
    let mut foreign = other.alloc_mw(MemoryWindowType::Type2).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let whole = || WindowBinding::new(&region, .., AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: no other request has that number.
    let error = unsafe { queue_pair.post_bind_mw(&mut foreign, whole(), 1) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission);
    for window_type in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
        let mut window = domain.alloc_mw(window_type).unwrap();
        let key = window.rkey();
        let verb = if window_type == MemoryWindowType::Type1 { "bind_mw" } else { "post_send" };
        device.fail(verb).errno(libc::ENOMEM).times(1);
        // SAFETY: as above.
        let error = unsafe { queue_pair.post_bind_mw(&mut window, whole(), 1) }.unwrap_err();
        assert_eq!((error.kind(), window.rkey()), (ErrorKind::QueueFull, key));
    }
    let datagram = domain.create_qp(&queue, &queue, QueuePairType::UnreliableDatagram);
    let mut datagram = datagram.build().unwrap().into_queue_pair();
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    // SAFETY: as above.
    let errors = unsafe {
        let bind = datagram.post_bind_mw(&mut window, whole(), 1).unwrap_err();
        [bind, datagram.post_invalidate_mw(&mut window, 1).unwrap_err()]
    };
    for error in errors {
        assert!(error.to_string().contains("UD"), "{error}");
    }
    let error = domain.alloc_mw(MemoryWindowType::Unknown(9)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn domains_regions_and_device_memory_are_imported() {
    let device = TestDevice::model();
    let (owner, user) = (context(&device), context(&device));
    let domain = owner.alloc_pd().unwrap();
    let other = ProtectionDomain::import(&user, domain.handle()).unwrap();
    assert_eq!(device.last_call("import_pd").unwrap().mask as u32, domain.handle());
    assert_eq!(other.handle(), domain.handle());
    let queue = user.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&other, &queue);
    let access = AccessFlags::REMOTE_WRITE;
    let region = domain.allocate_shared::<u8>(64, access).unwrap();
    let number = region.handle();

    // SAFETY: the region outlives the import, and is shared memory.
    let import = |number| unsafe {
        RawMemoryRegion::import(&other, number, region.remote().address(), region.access())
    };
    let imported = import(number).unwrap();
    assert_eq!(device.last_call("import_mr").unwrap().mask as u32, number);
    assert_eq!((imported.len(), imported.rkey()), (64, region.rkey()));
    assert!(imported.gather_element(..).is_err(), "it is not our address");
    let local = other.register_read_only(b"hello").unwrap();
    let to = imported.remote_range(2..7).unwrap();
    let from = local.gather_element(..).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
    assert_eq!(region.slice(2..7).unwrap().to_vec(), b"hello");
    imported.close().unwrap();
    drop(import(number).unwrap());
    assert_eq!((device.calls("unimport_mr"), device.calls("dereg_mr")), (2, 0));
    let mut owned = import(number).unwrap();
    owned.own();
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    let (owned, _) = owned.close().unwrap_err();
    drop(owned);
    assert_eq!((device.calls("unimport_mr"), device.calls("dereg_mr")), (2, 2));
    assert_eq!(import(12345).unwrap_err().kind(), ErrorKind::NotFound);
    // SAFETY: as above.
    let result = unsafe { RawMemoryRegion::import(&other, number, u64::MAX, access) };
    assert!(result.unwrap_err().to_string().contains("last address"));
    assert_eq!(device.calls("unimport_mr"), 3);

    let memory = owner.alloc_dm(64).unwrap();
    memory.write(0, b"on the device").unwrap();
    let number = memory.handle().unwrap();
    // SAFETY: the memory is that long, and outlives the import.
    let imported = unsafe { DeviceMemory::import(&user, number, 64) }.unwrap();
    assert_eq!(device.last_call("import_dm").unwrap().mask as u32, number);
    let mut seen = [0_u8; 13];
    imported.read(0, &mut seen).unwrap();
    assert_eq!(seen, *b"on the device");
    drop(imported);
    assert_eq!((device.calls("unimport_dm"), device.calls("free_dm")), (1, 0));
    // SAFETY: there is none.
    let error = unsafe { DeviceMemory::import(&user, 1, 64) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);

    drop(local);
    drop(queue_pair);
    other.close().unwrap();
    assert_eq!((device.calls("unimport_pd"), device.calls("dealloc_pd")), (1, 0));
    let mut owned = ProtectionDomain::import(&user, domain.handle()).unwrap();
    owned.own();
    drop(owned);
    assert_eq!((device.calls("unimport_pd"), device.calls("dealloc_pd")), (1, 1));
    device.fail("import_pd").errno(libc::EOPNOTSUPP).times(1);
    let error = ProtectionDomain::import(&user, domain.handle()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
