//! Opening and closing the device, and the table of its functions.

use std::ffi::{c_int, c_void};
use std::mem::{offset_of, size_of};
use std::ptr::null_mut;

use super::context::{OpenContext, SoftContext, files, number, soft};
use super::device::RawDevice;
use super::{device_memory, faulty, memory, pd, set_errno, shared};
use crate::event_files;
use crate::faults::Verb;
use crate::ffi::{
    ibv_context, ibv_device, init_and_alloc_context, verbs_context, verbs_context_ops,
    verbs_device, verbs_device_ops, verbs_set_ops, verbs_uninit_context,
};
use crate::settings::Settings;
use crate::transport::events;

struct Operations(verbs_device_ops);

// SAFETY: nobody changes it; its pointers are to constants, or null.
unsafe impl Sync for Operations {}

pub(crate) fn device_operations() -> *const verbs_device_ops {
    static OPERATIONS: Operations = Operations(verbs_device_ops {
        name: c"software".as_ptr(),
        match_min_abi_version: 0,
        match_max_abi_version: 0,
        match_table: null_mut(),
        static_providers: null_mut(),
        match_device: None,
        alloc_context: Some(alloc_context),
        import_context: None,
        alloc_device: None,
        uninit_device: Some(uninit_device),
    });
    &OPERATIONS.0
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: libibverbs calls it when the last reference is gone.
    unsafe { RawDevice::free(device) };
}

/// # Safety
///
/// `device` is live, of whichever provider.
pub(super) unsafe fn settings(device: *mut ibv_device) -> Option<Settings> {
    // SAFETY: every provider's device is the first member of a `verbs_device`.
    let operations = unsafe { (*device.cast::<verbs_device>()).ops };
    if !std::ptr::eq(operations, device_operations()) {
        return None;
    }
    // SAFETY: it is one of ours.
    Some(unsafe { (*device.cast::<RawDevice>()).shared() }.lock().core.settings.clone())
}

/// # Safety
///
/// As above.
pub(crate) unsafe fn guid(device: *mut ibv_device) -> Option<u64> {
    // SAFETY: as the caller says.
    Some(unsafe { settings(device) }?.guid())
}

unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut verbs_context {
    // SAFETY: the device is one of ours. The functions of libibverbs get what they ask for: the file is open
    // and becomes the context's; the offset is that of the C structure in ours.
    unsafe {
        let shared_state = (*device.cast::<RawDevice>()).shared();
        // A file of its own, by which requests to the kernel are recognised. A shared libibverbs has opened it already.
        let fd = if cmd_fd >= 0 { cmd_fd } else { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return null_mut();
        }
        let fail = |errno| {
            libc::close(fd);
            set_errno(errno);
            null_mut()
        };
        if let Some((errno, _)) = shared_state.failures().of(Verb::OpenDevice) {
            return fail(errno);
        }
        let events = match events::create() {
            Ok(events) => events,
            Err(e) => return fail(e.raw_os_error().unwrap_or(libc::EIO)),
        };
        // libibverbs already sends a request during the creation, to test whether requests work.
        files().insert(fd, OpenContext(null_mut()));
        let offset = offset_of!(SoftContext, verbs) as *mut verbs_context;
        let context = init_and_alloc_context(device, fd, size_of::<SoftContext>(), offset, 0);
        let context = context.cast::<SoftContext>();
        if context.is_null() {
            files().remove(&fd);
            libc::close(events);
            return null_mut();
        }
        let verbs = &raw mut (*context).verbs;
        let plain = &raw mut (*verbs).context;
        verbs_set_ops(verbs, &OPERATIONS);
        (*plain).async_fd = events;
        // On a network, something must happen while a thread waits for these. Elsewhere a thread that waits for
        // completions receives packets in the meantime; these events are rare, and it would be in its way.
        if shared(plain).driver().membership().is_some() {
            event_files::add(events, shared(plain));
        }
        let mut engine = shared(plain).lock();
        (*plain).num_comp_vectors = engine.core.settings.completion_vectors as c_int;
        engine.core.next_context += 1;
        (*context).number = engine.core.next_context;
        engine.core.contexts.insert((*context).number, events);
        drop(engine);
        files().insert(fd, OpenContext(plain));
        verbs
    }
}

unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: libibverbs closes a live context, once. What it does closes both files.
    unsafe {
        files().remove(&(*context).cmd_fd);
        if shared(context).is_of_this_process() {
            let mut engine = shared(context).lock();
            engine.core.contexts.remove(&number(context));
            engine.core.forget_file((*context).async_fd);
        }
        let soft = soft(context);
        verbs_uninit_context(&raw mut (*soft).verbs);
        libc::free(soft.cast());
    }
}

/// All other functions are libibverbs' defaults, which return `EOPNOTSUPP`.
static OPERATIONS: verbs_context_ops = verbs_context_ops {
    free_context: Some(free_context),
    query_device_ex: Some(faulty::query_device_ex),
    query_port: Some(faulty::query_port),
    #[cfg(rdma_core_65)]
    query_port_speed: Some(super::query::query_port_speed),
    query_rt_values: Some(faulty::query_rt_values),
    open_xrcd: Some(faulty::open_xrcd),
    close_xrcd: Some(faulty::close_xrcd),
    alloc_pd: Some(faulty::alloc_pd),
    dealloc_pd: Some(faulty::dealloc_pd),
    import_pd: Some(pd::import_pd),
    unimport_pd: Some(pd::unimport_pd),
    import_mr: Some(memory::import_mr),
    unimport_mr: Some(memory::unimport_mr),
    import_dm: Some(device_memory::import_dm),
    unimport_dm: Some(device_memory::unimport_dm),
    alloc_td: Some(faulty::alloc_td),
    dealloc_td: Some(faulty::dealloc_td),
    alloc_parent_domain: Some(faulty::alloc_parent_domain),
    reg_dmabuf_mr: Some(faulty::reg_dmabuf_mr),
    reg_mr: Some(faulty::reg_mr),
    rereg_mr: Some(faulty::rereg_mr),
    dereg_mr: Some(faulty::dereg_mr),
    advise_mr: Some(memory::advise_mr),
    alloc_null_mr: Some(faulty::alloc_null_mr),
    alloc_dm: Some(faulty::alloc_dm),
    free_dm: Some(faulty::free_dm),
    reg_dm_mr: Some(faulty::reg_dm_mr),
    alloc_mw: Some(faulty::alloc_mw),
    dealloc_mw: Some(faulty::dealloc_mw),
    bind_mw: Some(faulty::bind_mw),
    create_cq: Some(faulty::create_cq),
    create_cq_ex: Some(faulty::create_cq_ex),
    modify_cq: Some(faulty::modify_cq),
    resize_cq: Some(faulty::resize_cq),
    destroy_cq: Some(faulty::destroy_cq),
    poll_cq: Some(faulty::poll_cq),
    req_notify_cq: Some(faulty::req_notify_cq),
    create_srq: Some(faulty::create_srq),
    create_srq_ex: Some(faulty::create_srq_ex),
    modify_srq: Some(faulty::modify_srq),
    query_srq: Some(faulty::query_srq),
    get_srq_num: Some(faulty::get_srq_num),
    destroy_srq: Some(faulty::destroy_srq),
    post_srq_recv: Some(faulty::post_srq_recv),
    create_qp: Some(faulty::create_qp),
    create_qp_ex: Some(faulty::create_qp_ex),
    open_qp: Some(faulty::open_qp),
    modify_qp: Some(faulty::modify_qp),
    query_qp: Some(faulty::query_qp),
    destroy_qp: Some(faulty::destroy_qp),
    post_send: Some(faulty::post_send),
    post_recv: Some(faulty::post_recv),
    create_ah: Some(faulty::create_ah),
    destroy_ah: Some(faulty::destroy_ah),
    attach_mcast: Some(faulty::attach_mcast),
    detach_mcast: Some(faulty::detach_mcast),
    ..NO_OPERATIONS
};

/// A table in which all functions are absent.
const NO_OPERATIONS: verbs_context_ops = {
    // SAFETY: absent functions are null pointers, which all zeros are.
    unsafe { std::mem::zeroed() }
};
