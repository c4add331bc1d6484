//! Memory windows.

use std::sync::Arc;

use ibverbs::memory::{MemoryWindow, MemoryWindowType, RawMemoryRegion};
use ibverbs::operation::WindowBinding;
use ibverbs::queue_pair::SendOperations;
use ibverbs::*;
use ibverbs_function_device::{FunctionDevice, Kind};

use crate::one_sided::{pair, status, to_itself, write};

#[test]
fn a_window_of_type_1_opens_what_it_is_bound_to() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let region = domain.allocate_shared::<u8>(64, AccessFlags::MW_BIND).unwrap();
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
    // Bound to another range: the old key opens nothing.
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
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let region = domain.allocate_shared::<u8>(64, AccessFlags::MW_BIND).unwrap();
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
    assert_eq!(window.close().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(device.calls("dealloc_mw"), 1);
}

#[test]
fn windows_are_bound_by_halves_and_in_batches() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let options = RegionOptions::new().access(AccessFlags::MW_BIND);
    let region = domain.allocate_shared::<u8>(64, options).unwrap();
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    let mut first_type = domain.alloc_mw(MemoryWindowType::Type1).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
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
            let error = batch.bind_mw(&mut first_type, binding(8), 3).unwrap_err();
            assert!(error.to_string().contains("type 1"), "{error}");
            let error = batch.bind_mw(&mut window, binding(0), 3).unwrap_err();
            assert!(error.to_string().contains("by an invalidation"), "{error}");
            batch.bind_mw(&mut window, binding(16), 4)
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
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let source = domain.register_read_only(b"123456789").unwrap();
    let options = RegionOptions::new().access(AccessFlags::MW_BIND);
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
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(CompletionQueue::new(&context, 8).unwrap());
    let mut window: MemoryWindow<'static> =
        MemoryWindow::new(&domain, MemoryWindowType::Type1).unwrap();
    let mut queue_pair = to_itself(&domain, &queue);
    let options = RegionOptions::new().access(AccessFlags::MW_BIND);
    let mut bind = |window: &mut MemoryWindow<'static>| {
        let region = Arc::new(SharedMemoryRegion::<u32>::new(&domain, 8, options).unwrap());
        let binding =
            WindowBinding::shared(Arc::clone(&region), 2.., AccessFlags::REMOTE_READ).unwrap();
        // SAFETY: no other request has that number.
        let remote = unsafe { queue_pair.post_bind_mw(window, binding, 1) }.unwrap();
        assert_eq!((remote.length(), status(&queue, 1)), (24, WorkStatus::Success));
    };
    // Two regions: that of the first binding, and the present one.
    for live in [1, 2, 2] {
        bind(&mut window);
        assert_eq!(device.live(Kind::MemoryRegion), live);
    }
    drop(window);
    assert_eq!(device.live(Kind::MemoryRegion), 0);

    // A binding by reference does not keep the region: the device refuses to deregister it while
    // the forgotten window lives, and its memory stays allocated.
    let region = SharedMemoryRegion::<u8>::new(&domain, 8, options).unwrap();
    let region = std::mem::ManuallyDrop::new(region);
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    let binding = WindowBinding::new(&*region, .., AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: as above.
    unsafe { queue_pair.post_bind_mw(&mut window, binding, 2) }.unwrap();
    assert_eq!(status(&queue, 2), WorkStatus::Success);
    std::mem::forget(window);
    let error = std::mem::ManuallyDrop::into_inner(region).close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(device.live(Kind::MemoryRegion), 1);

    // A region to which a window is bound is leaked with the window.
    let region = Arc::new(SharedMemoryRegion::<u8>::new(&domain, 8, options).unwrap());
    let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
    let binding = WindowBinding::shared(region, .., AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: as above.
    unsafe { queue_pair.post_bind_mw(&mut window, binding, 3) }.unwrap();
    assert_eq!(status(&queue, 3), WorkStatus::Success);
    let before = device.calls("dereg_mr");
    device.fail("dealloc_mw").errno(libc::EIO).times(1);
    drop(window);
    assert_eq!((device.live(Kind::MemoryRegion), device.calls("dereg_mr")), (2, before));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn bad_bindings_are_typed_errors() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let plain = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    let options = RegionOptions::new().access(AccessFlags::MW_BIND);
    let region = domain.allocate_shared::<u64>(8, options).unwrap();
    let mut memory = [0_u8; 8];
    // SAFETY: the array outlives the region, and is not touched meanwhile.
    let read_only =
        unsafe { RawMemoryRegion::new(&domain, memory.as_mut_ptr(), 8, AccessFlags::MW_BIND) }
            .unwrap();
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
    let datagram = domain.create_qp(&queue, &queue, Ud);
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
