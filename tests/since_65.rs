//! Verbs that rdma-core has since v65, on a device of functions.
#![cfg(rdma_core_65)]

use std::io::{Read, Seek};
use std::sync::Arc;

use ibverbs::completion::{CompletionCounter, CompletionCounterUnit, CountedOperations};
use ibverbs::device::{DmaHandle, DmaHints, HintedMemory};
use ibverbs::memory::RawMemoryRegion;
use ibverbs::{AccessFlags, QueuePairType, Result};
use ibverbs_function_device::FunctionDevice;

#[track_caller]
fn errno<T>(result: Result<T>) -> i32 {
    result.map(drop).expect_err("it is refused").raw_os_error().expect("it has an errno value")
}

#[test]
fn the_speed_of_a_port() {
    let device = FunctionDevice::model();
    let context = device.context();
    assert_eq!(context.query_port_speed(1), Ok(4001));
    assert_eq!(errno(context.query_port_speed(0)), libc::EINVAL);
    assert_eq!(errno(context.query_port_speed(200)), libc::EINVAL);
    assert_eq!(device.calls("query_port_speed"), 3);
}

#[test]
fn a_region_with_a_dma_handle() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let hints =
        DmaHints { cpu: Some(5), processing_hint: Some(2), memory: Some(HintedMemory::Persistent) };
    let handle = DmaHandle::new(&context, hints).unwrap();
    let call = device.last_call("alloc_dmah").unwrap();
    assert_eq!((call.dmah_mask, call.dmah_cpu, call.dmah_hint, call.dmah_memory), (7, 5, 2, 1));
    let bare = DmaHandle::new(&context, DmaHints::default()).unwrap();
    assert_eq!(device.last_call("alloc_dmah").unwrap().dmah_mask, 0);
    bare.close().unwrap();

    let mut memory = vec![0_u64; 64];
    let (address, access) = (memory.as_mut_ptr().cast::<u8>(), AccessFlags::LOCAL_WRITE);
    // SAFETY: the memory outlives the region, and nothing is posted.
    let register = |bytes, access, handle| unsafe {
        RawMemoryRegion::with_dma_handle(&domain, address, bytes, access, handle)
    };
    let region = register(512, access, &handle).unwrap();
    let call = device.last_call("reg_mr_ex").unwrap();
    assert_eq!((call.mask, call.dmah), (1 | 2 | 16, handle.as_raw().cast_const().cast()));
    let call = device.last_call("reg_mr").unwrap();
    assert_eq!((call.addr, call.iova, call.length), (address as u64, address as u64, 512));
    assert_eq!((call.access, region.len()), (access.bits(), 512));
    region.close().unwrap();

    let calls = device.calls("reg_mr_ex");
    assert_eq!(errno(register(0, access, &handle)), libc::EINVAL);
    assert_eq!(errno(register(512, AccessFlags::REMOTE_WRITE, &handle)), libc::EINVAL);
    assert_eq!(errno(register(512, access | AccessFlags::ZERO_BASED, &handle)), libc::EINVAL);
    let foreign = DmaHandle::new(&other, DmaHints::default()).unwrap();
    assert_eq!(errno(register(512, access, &foreign)), libc::EINVAL);
    assert_eq!(
        device.calls("reg_mr_ex"),
        calls,
        "all of that is refused before the device sees it"
    );

    device.fail("reg_mr_ex").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(errno(register(512, access, &handle)), libc::EOPNOTSUPP);
    handle.close().unwrap();
    drop(memory);
}

#[test]
fn device_memory_becomes_a_dma_buf() {
    let device = FunctionDevice::model();
    let context = device.context();
    let memory = context.alloc_dm(64).unwrap();
    memory.write(0, &[7_u8; 64]).unwrap();
    let mut file = std::fs::File::from(memory.export_dmabuf().unwrap());
    let mut contents = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut contents).unwrap();
    assert_eq!(contents, [7; 64]);
    device.fail("dm_export_dmabuf_fd").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(errno(memory.export_dmabuf()), libc::EOPNOTSUPP);
}

#[test]
fn completion_counters_count_and_are_attached() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let can = context.query_completion_counters().unwrap();
    assert_eq!((can.max_value(), can.max_counters()), ((1 << 40) - 1, 16));
    assert_eq!(can.operations(), CountedOperations::SEND | CountedOperations::REMOTE_WRITE);

    let bytes = CompletionCounter::new(&context, CompletionCounterUnit::Bytes).unwrap();
    assert_eq!(device.last_call("create_comp_cntr").unwrap().counter_type, 1);
    bytes.close().unwrap();
    let counter = CompletionCounter::new(&context, CompletionCounterUnit::Requests).unwrap();
    assert_eq!(device.last_call("create_comp_cntr").unwrap().counter_type, 0);
    counter.set_value(40).unwrap();
    counter.add_value(2).unwrap();
    counter.set_errors(6).unwrap();
    counter.add_errors(1).unwrap();
    assert_eq!((counter.value(), counter.errors()), (Ok(42), Ok(7)));
    assert_eq!(errno(counter.set_value(1 << 40)), libc::EINVAL);

    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let pair = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected).build().unwrap();
    let mut pair = pair.into_queue_pair();
    pair.attach_completion_counter(&counter, CountedOperations::SEND).unwrap();
    assert_eq!(device.last_call("qp_attach_comp_cntr").unwrap().counted_ops, 1);
    let unknown = pair.attach_completion_counter(&counter, CountedOperations::READ);
    assert_eq!(errno(unknown), libc::EOPNOTSUPP);
    let calls = device.calls("qp_attach_comp_cntr");
    let nothing = pair.attach_completion_counter(&counter, CountedOperations::empty());
    assert_eq!(errno(nothing), libc::EINVAL);
    let foreign = CompletionCounter::new(&other, CompletionCounterUnit::Requests).unwrap();
    let elsewhere = pair.attach_completion_counter(foreign, CountedOperations::SEND);
    assert_eq!(errno(elsewhere), libc::EINVAL);
    assert_eq!(device.calls("qp_attach_comp_cntr"), calls);
    drop(pair);
    counter.close().unwrap();
}

#[test]
fn a_queue_pair_holds_its_counters() {
    for fails in [false, true] {
        let device = FunctionDevice::model();
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let counter = CompletionCounter::new(&context, CompletionCounterUnit::Requests).unwrap();
        let pair =
            domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected).build().unwrap();
        let mut pair = pair.into_queue_pair();
        let counter = Arc::new(counter);
        pair.attach_completion_counter(&counter, CountedOperations::SEND).unwrap();
        drop(counter);
        assert_eq!(device.calls("destroy_comp_cntr"), 0);
        if fails {
            device.fail("destroy_qp").errno(libc::EBUSY).times(1);
        }
        assert_eq!(pair.close().is_err(), fails);
        // A counter that the device may still use is leaked.
        assert_eq!(device.calls("destroy_comp_cntr"), u64::from(!fails));
    }
}

#[test]
fn memory_that_the_provider_allocates() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    let allocate = |bytes, access| RawMemoryRegion::allocate_by_provider(&domain, bytes, access);
    let region = allocate(5000, access).unwrap();
    let call = device.last_call("reg_dmabuf_mr").unwrap();
    assert_eq!(
        (call.iova, call.length, call.access),
        (region.as_ptr() as u64, 5000, access.bits())
    );
    assert_eq!((region.len(), region.remote().address()), (5000, region.as_ptr() as u64));
    // SAFETY: the memory is there, and no request uses it.
    unsafe {
        assert_eq!(*region.as_ptr().add(4999), 0);
        region.as_ptr().write_bytes(7, 5000);
    }
    let mut contents = Vec::new();
    std::fs::File::from(region.export_dmabuf().unwrap()).read_to_end(&mut contents).unwrap();
    assert!(contents == [7; 5000]);
    assert_eq!(device.calls("free_buf"), 0);
    region.close().unwrap();
    assert_eq!(device.calls("free_buf"), 1);

    let calls = device.calls("alloc_buf");
    assert_eq!(errno(allocate(0, access)), libc::EINVAL);
    assert_eq!(errno(allocate(8, AccessFlags::REMOTE_WRITE)), libc::EINVAL);
    assert_eq!(errno(allocate(8, access | AccessFlags::ZERO_BASED)), libc::EINVAL);
    assert_eq!(
        device.calls("alloc_buf"),
        calls,
        "all of that is refused before the device sees it"
    );
    device.fail("alloc_buf").errno(libc::ENOMEM).times(1);
    assert_eq!(errno(allocate(8, access)), libc::ENOMEM);
    device.fail("reg_mr_ex").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(errno(allocate(8, access)), libc::EOPNOTSUPP);
    assert_eq!(device.calls("free_buf"), 2, "what could not be registered is freed");

    // The region's domain is another one, and the buffer's is still there when it is freed.
    let second = context.alloc_pd().unwrap();
    let first = context.alloc_pd().unwrap();
    let mut region =
        RawMemoryRegion::allocate_by_provider(std::sync::Arc::new(first), 8, access).unwrap();
    let change = ibverbs::memory::Reregistration::new().protection_domain(&second);
    // SAFETY: no request is outstanding.
    let moved = unsafe { region.rereg(change) };
    drop(region);
    assert_eq!(device.calls("free_buf"), 3, "{moved:?}");

    // Memory that the device may still access is not freed.
    let region = allocate(8, access).unwrap();
    device.fail("dereg_mr").errno(libc::EBUSY).times(1);
    assert_eq!(errno(region.close()), libc::EBUSY);
    assert_eq!(device.calls("free_buf"), 3);
}

/// libibverbs' own allocation, for providers without one.
#[test]
fn memory_of_libibverbs() {
    let context = ibverbs_software::Network::new().device().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let region =
        RawMemoryRegion::allocate_by_provider(&domain, 100, AccessFlags::REMOTE_READ).unwrap();
    assert_eq!(region.as_ptr() as usize % 4096, 0, "{region:?}");
    assert_eq!(errno(region.export_dmabuf()), libc::ENODATA);
    region.close().unwrap();
    let mut own = [0_u8; 8];
    // SAFETY: the memory outlives the region, and nothing is posted.
    let other =
        unsafe { RawMemoryRegion::new(&domain, own.as_mut_ptr(), 8, AccessFlags::REMOTE_READ) };
    assert_eq!(errno(other.unwrap().export_dmabuf()), libc::ENODATA);
}
