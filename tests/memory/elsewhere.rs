//! Memory that does not come from the allocator: raw, of files, of the device, or null regions.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use ibverbs::memory::{
    DeviceMemory, DeviceMemoryRegion, GatherBuffer, ImplicitMemoryRegion, MAX_SGE_LENGTH,
    MemoryAdvice, NullMemoryRegion, RawMemoryRange, RawMemoryRegion, ReregisteredState,
    Reregistration, ScatterBuffer,
};
use ibverbs::*;
use ibverbs_function_device::{Builder, FunctionDevice};

use crate::one_sided::{read, send, to_itself, write};
use crate::{PAGE, paging_device, refused, shared_file};

#[test]
fn raw_memory_is_registered_where_it_is() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let mut memory = vec![0_u64; 1024];
    let (address, bytes) = (memory.as_mut_ptr().cast::<u8>(), 8192);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;

    // SAFETY: the vector outlives the region, and is not touched meanwhile.
    let region = unsafe { RawMemoryRegion::new(&domain, address, bytes, access) }.unwrap();
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

    // SAFETY: the registered memory is not used.
    let raw = |address: *mut u8, bytes, access| unsafe {
        RawMemoryRegion::new(&domain, address, bytes, access)
    };
    let null = std::ptr::null_mut();
    refused(&device, raw(null, 1, access), libc::EINVAL, "null");
    refused(&device, raw(address, 0, access), libc::EINVAL, "empty");
    refused(&device, raw(address, usize::MAX, access), libc::EINVAL, "last address");
    refused(&device, raw(address, 1, AccessFlags::REMOTE_WRITE), libc::EINVAL, "LOCAL_WRITE");
    refused(&device, raw(address, 1, AccessFlags::REMOTE_ATOMIC), libc::EINVAL, "LOCAL_WRITE");
    let demand = AccessFlags::ON_DEMAND;
    refused(&device, raw(address, 1, demand), libc::EOPNOTSUPP, "no on-demand paging");
    drop(memory);
}

/// A region without local write access is refused wherever a request would write it, before the device
/// sees the request.
#[test]
fn raw_memory_without_write_access_is_only_read() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let shared_queue = SharedReceiveQueue::new(&domain, 1, 1).unwrap();
    let mut memory = vec![7_u64; 8];
    let (address, access) = (memory.as_mut_ptr().cast::<u8>(), AccessFlags::REMOTE_READ);
    // SAFETY: the vector outlives the region, and is not touched meanwhile.
    let mut region = unsafe { RawMemoryRegion::new(&domain, address, 64, access) }.unwrap();
    assert_eq!(device.last_call("reg_mr").unwrap().access, access.bits());

    let target = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    let from = region.gather_element(..).unwrap();
    assert_eq!(write(&mut queue_pair, &[from], target.remote()), WorkStatus::Success);
    assert_eq!(target.as_slice().read_one(7), Ok(7));

    let calls = (device.calls("post_send"), device.calls("post_recv"));
    let only_read = |what: &str, result: Result<()>| {
        let error = result.expect_err(what);
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{what}");
        assert!(error.to_string().contains("without LOCAL_WRITE"), "{what}: {error}");
    };
    only_read("scatter_element", region.scatter_element(..).map(drop));
    // SAFETY: nothing is posted.
    let by_iova = unsafe { region.scatter_element_by_iova(..) }.map(drop);
    only_read("scatter_element_by_iova", by_iova);
    let remote = target.remote();
    // SAFETY: all are refused, and the memory lives on anyway.
    unsafe {
        only_read("post_receive", queue_pair.post_receive(&mut region, .., 1));
        only_read("post_read", queue_pair.post_read(&mut region, .., remote, 1));
        only_read("shared receive", shared_queue.post_receive(&mut region, .., 1));
    }
    assert_eq!((device.calls("post_send"), device.calls("post_recv")), calls);
    drop((queue_pair, region, memory));
}

#[test]
fn raw_memory_can_be_seen_elsewhere() {
    let device = FunctionDevice::model();
    let context = device.context();
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
    // At its own address it is like any other region.
    let same = at(address as u64, access).unwrap();
    assert_eq!(same.gather_element(1..).unwrap().as_raw().addr, address as u64 + 1);

    refused(&device, at(0x10_0000, access), libc::EINVAL, "same offset in a page");
    refused(&device, at(u64::MAX - 4055, access), libc::EINVAL, "last iova");
    let zero = access | AccessFlags::ZERO_BASED;
    refused(&device, at(0x28, zero), libc::EINVAL, "ZERO_BASED and another iova");
    refused(&device, at(0, access), libc::EINVAL, "same offset in a page");
    // SAFETY: as above.
    let region = unsafe { RawMemoryRegion::new(&domain, address.sub(40), PAGE, zero) }.unwrap();
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.iova, call.access, region.remote().address()), (0, access.bits(), 0));
    assert_eq!(region.access(), access);
}

#[test]
fn dma_bufs_are_registered_by_descriptor() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let file = shared_file(4 * PAGE as u64);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let (offset, iova) = (PAGE as u64 + 16, 16);
    let dmabuf = |offset, bytes, iova, access| {
        RawMemoryRegion::from_dmabuf(&domain, file.as_fd(), offset, bytes, iova, access)
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

/// Requests of this program name the memory by addresses that nothing else has.
#[test]
fn a_mapped_dma_buf_is_a_buffer_of_operations() {
    let device = FunctionDevice::model();
    let domain = Arc::new(ProtectionDomain::new(device.context()).unwrap());
    let file = shared_file(4 * PAGE as u64);
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    let map = |file: &File, offset, access| {
        RawMemoryRegion::map_dmabuf(&domain, file.as_fd(), offset, 100, access)
    };
    let region = map(&file, PAGE as u64 + 16, access).unwrap();
    let (address, call) = (region.as_ptr() as u64, device.last_call("reg_dmabuf_mr").unwrap());
    assert_eq!((call.addr, call.length, call.iova), (PAGE as u64 + 16, 100, address));
    std::os::unix::fs::FileExt::write_all_at(&file, b"of the GPU", PAGE as u64 + 16).unwrap();
    // SAFETY: the mapping is there while the region is, and nobody writes it.
    assert_eq!(unsafe { region.as_ptr().cast::<[u8; 10]>().read_volatile() }, *b"of the GPU");
    let range = RawMemoryRange::new(Arc::new(region), 10..20).unwrap();
    assert_eq!(range.remote().address(), address + 10);
    let queue = domain.context().create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let inline = WriteWorkRequest::new(&range, range.remote()).inline();
    // SAFETY: the device does not get the request, which has no room for its bytes.
    let error = unsafe { queue_pair.post(inline, 1) }.unwrap_err();
    assert!(error.to_string().contains("inline"), "{error}");
    assert_eq!(range.clone().scatter().unwrap()[0].addr, address + 10);
    assert!(RawMemoryRange::new(range.region().clone(), ..101).is_err());

    // The region is not made, and its addresses are free again.
    device.fail("reg_dmabuf_mr").errno(libc::EINVAL).times(1);
    assert!(map(&file, 0, access).is_err());
    // Another dma-buf's addresses are its iova, which may be anybody's.
    let elsewhere =
        RawMemoryRegion::from_dmabuf(&domain, file.as_fd(), 16, 64, address, access).unwrap();
    assert!(elsewhere.as_ptr().is_null());
}

#[test]
fn a_dma_buf_that_cannot_be_mapped_has_addresses_where_nobody_looks() {
    for (vendor, delivers) in [(0x1234, false), (0x02c9, true), (0x19e5, true)] {
        let device = Builder::model().limits(|limits| limits.vendor_id = vendor).build();
        let domain = Arc::new(ProtectionDomain::new(device.context()).unwrap());
        // It is not open for writing, so it cannot be mapped.
        let file = shared_file(PAGE as u64);
        let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let region = RawMemoryRegion::map_dmabuf(&domain, read_only.as_fd(), 0, PAGE, access);
        let region = Arc::new(region.unwrap());
        assert!(region.as_ptr().is_null() && region.gather_element(..).is_err());
        let iova = device.last_call("reg_dmabuf_mr").unwrap().iova;
        let mut range = RawMemoryRange::new(region.clone(), 8..16).unwrap();
        assert_eq!((range.gather().unwrap()[0].addr, range.is_in_reach()), (iova + 8, false));
        match range.scatter() {
            Ok([element]) => assert_eq!((element.addr, delivers), (iova + 8, false)),
            Err(error) => {
                assert!(error.to_string().contains("MLX5_SCATTER_TO_CQE") && delivers, "{error}");
            }
        }
        let queue = domain.context().create_cq(8).unwrap();
        let mut queue_pair = to_itself(&domain, &queue);
        let inline = WriteWorkRequest::new(&range, range.remote()).inline();
        // SAFETY: the range lives until the completion.
        unsafe { queue_pair.post(inline, 1) }.expect("it is not inline");
        let mut completion = [WorkCompletion::default()];
        assert_eq!(queue.poll(&mut completion).unwrap()[0].result().map(drop), Ok(()));
        let [both, tuple] = [[range.clone(), range.clone()].is_in_reach(), (range,).is_in_reach()];
        assert!(!both && !tuple);
    }
}

#[test]
fn the_null_region_reads_as_zeros_and_swallows() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let null = NullMemoryRegion::new(&domain).unwrap();
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
    assert_eq!(null.close().unwrap_err().kind(), ErrorKind::Busy);
    device.fail("alloc_null_mr").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(NullMemoryRegion::new(&domain).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn memory_is_paged_on_demand_where_the_device_can() {
    let device = paging_device();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let options = RegionOptions::new().access(AccessFlags::ON_DEMAND);
    let mut region = MemoryRegion::<u8>::with_options(&domain, 100, options).unwrap();
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

    // A region that is paged on demand stays so.
    let change = Reregistration::new().access(AccessFlags::LOCAL_WRITE);
    let error = region.rereg(change).unwrap_err();
    assert_eq!(error.state, ReregisteredState::Unchanged);
    assert_eq!(device.calls("rereg_mr"), 0);
}

#[test]
fn the_whole_address_space_is_one_region() {
    let device = paging_device();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let everything = ImplicitMemoryRegion::new(&domain).unwrap();
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
    let plain = FunctionDevice::model();
    let other = plain.context();
    let domain = other.alloc_pd().unwrap();
    let error = ImplicitMemoryRegion::new(&domain).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(plain.calls("reg_mr"), 0);
}

#[test]
fn device_memory_is_allocated_copied_and_registered() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let memory = DeviceMemory::with_alignment(&context, 4096, 64).unwrap();
    let attributes = device.last_call("alloc_dm").unwrap().dm_attr;
    assert_eq!((attributes.length, attributes.log_align_req, attributes.comp_mask), (4096, 6, 0));
    assert_eq!(memory.len(), 4096);

    // The pattern is longer than what is copied at a time, and unaligned on our side.
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
    let region = DeviceMemoryRegion::new(&domain, &memory, 1000..2000, access).unwrap();
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
    // SAFETY: the request is not inline, and the region lives until its completion.
    unsafe { queue_pair.post_write(&region, 10..23, region.remote_range(40..53).unwrap(), 1) }
        .unwrap();
    let mut completion = [WorkCompletion::default()];
    assert_eq!(queue.poll(&mut completion).unwrap()[0].wr_id(), 1);
    memory.read(1040, &mut seen).unwrap();
    assert_eq!(seen, *b"to the device");
    // The provider would look for the bytes at the address 0.
    let inline = WriteWorkRequest::new(&region, region.remote()).inline();
    // SAFETY: the region lives until the completion.
    unsafe { queue_pair.post(inline, 2) }.expect("it is not inline");
    assert_eq!(queue.poll(&mut completion).unwrap()[0].result().map(drop), Ok(()));
    // SAFETY: the function device copies nothing by address.
    let to = unsafe { region.scatter_element_by_iova(13..23) }.unwrap();
    let from = region.remote_range(10..20).unwrap();
    assert_eq!(to.as_raw().addr, 13);
    assert_eq!(read(&mut queue_pair, from, &[to]), WorkStatus::Success);
    memory.read(1010, &mut seen).unwrap();
    assert_eq!(seen, *b"to to the dev");

    let (memory_pointer, error) = (memory.as_raw(), {
        let other = device.context();
        let domain = other.alloc_pd().unwrap();
        DeviceMemoryRegion::new(&domain, &memory, .., access).unwrap_err()
    });
    assert!(error.to_string().contains("different contexts"), "{error}");
    let error = DeviceMemoryRegion::new(&domain, &memory, 10..10, access).unwrap_err();
    assert!(error.to_string().contains("empty"), "{error}");
    assert!(DeviceMemoryRegion::new(&domain, &memory, ..4097, access).is_err());
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    assert_eq!(region.device_memory().as_raw(), memory_pointer);
    assert_eq!(region.close().unwrap_err().verb(), "ibv_dereg_mr");
    // The device memory under the region is leaked too.
    let error = memory.close().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Busy, "ibv_free_dm"));
    assert!(error.to_string().contains("leaked"), "{error}");
    let memory = context.alloc_dm(64).unwrap();
    device.fail("free_dm").errno(libc::EINVAL).times(1);
    let error = memory.close().unwrap_err();
    assert_eq!((error.raw_os_error(), error.verb()), (Some(libc::EINVAL), "ibv_free_dm"));
    assert_eq!(device.calls("free_dm"), 1);
}

#[test]
fn bad_device_memory_is_a_typed_error() {
    let device = FunctionDevice::model();
    let context = device.context();
    for (bytes, alignment, errno, words) in [
        (0, 1, libc::EINVAL, "empty"),
        (8, 3, libc::EINVAL, "power of 2"),
        (8, 0, libc::EINVAL, "power of 2"),
        ((1 << 20) + 1, 1, libc::ENOMEM, "less memory"),
    ] {
        let error = DeviceMemory::with_alignment(&context, bytes, alignment).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(device.calls("alloc_dm"), 0);
    device.fail("alloc_dm").errno(libc::ENOMEM).times(1);
    assert_eq!(context.alloc_dm(64).unwrap_err().kind(), ErrorKind::Resource);
}

#[test]
fn domains_regions_and_device_memory_are_imported() {
    let device = FunctionDevice::model();
    let (owner, user) = (device.context(), device.context());
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
    owned.close().unwrap();
    assert_eq!((device.calls("unimport_mr"), device.calls("dereg_mr")), (2, 1));
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

/// A provider that delivers short messages by the address that a request names would write them to addresses of the
/// program.
#[test]
fn device_memory_is_not_written_by_a_provider_that_copies() {
    for (vendor, copies) in [(0x2c9, true), (0x1dd8, false)] {
        let device = ibverbs_function_device::Builder::model()
            .limits(|limits| limits.vendor_id = vendor)
            .build();
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(4).unwrap();
        let mut queue_pair = to_itself(&domain, &queue);
        let memory = DeviceMemory::new(&context, 64).unwrap();
        let mut region =
            DeviceMemoryRegion::new(&domain, &memory, .., AccessFlags::empty()).unwrap();
        // SAFETY: the region outlives the queue pair's requests.
        let posted = unsafe { queue_pair.post_receive(&mut region, .., 1) };
        match posted {
            Ok(()) => assert!(!copies),
            Err(error) => {
                assert_eq!((copies, error.raw_os_error()), (true, Some(libc::EOPNOTSUPP)));
                assert_eq!(device.calls("post_recv"), 0);
            }
        }
        queue_pair.close().unwrap();
    }
}
