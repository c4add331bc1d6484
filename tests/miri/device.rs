//! An RDMA device in Rust, for Miri: it defines the C functions that the crate calls, in place of
//! libibverbs, so that Miri sees what the device reads and writes.
//!
//! A device knows memory by its address only. So it reaches the memory of a request by the address in the
//! request (`ptr::with_exposed_provenance`), and what a peer names by the address at which the region was
//! registered. Miri then allows an access only through a pointer that the crate has converted to an address
//! for the device, and that no later use of the memory has invalidated.
//!
//! Requests are executed by every poll of any completion queue, and with [`eager`] already when they are
//! posted.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use ibverbs::ffi::*;

static STATE: Mutex<State> = Mutex::new(State::new());
static EAGER: AtomicBool = AtomicBool::new(false);
static POLLS_FAIL: AtomicU32 = AtomicU32::new(0);

/// Sets whether a post executes what can be executed; otherwise only polls do.
pub(crate) fn eager(on: bool) {
    EAGER.store(on, Ordering::SeqCst);
}

pub(crate) fn fail_polls(count: u32) {
    POLLS_FAIL.store(count, Ordering::SeqCst);
}

/// The number of regions, queue pairs and completion queues.
pub(crate) fn live() -> (usize, usize, usize) {
    let state = lock();
    (state.regions.len(), state.queue_pairs.len(), state.queues.len())
}

fn lock() -> std::sync::MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

struct State {
    next: u32,
    regions: Vec<Region>,
    queue_pairs: Vec<QueuePair>,
    queues: Vec<Queue>,
}

// SAFETY: the pointers are used under the lock of `STATE` only.
unsafe impl Send for State {}

struct Region {
    key: u32,
    address: usize,
    iova: u64,
    length: usize,
    access: c_uint,
}

struct Queue {
    raw: *mut ibv_cq,
    completions: VecDeque<ibv_wc>,
}

struct QueuePair {
    raw: *mut ibv_qp,
    state: ibv_qp_state,
    peer: u32,
    signal_all: bool,
    cap: ibv_qp_cap,
    sends: VecDeque<SendRequest>,
    receives: VecDeque<(u64, Vec<ibv_sge>)>,
}

struct SendRequest {
    request: ibv_send_wr,
    list: Vec<ibv_sge>,
    inline: Option<Vec<u8>>,
}

/// A piece of memory as the device reaches it.
type Piece = (*mut u8, usize);

impl State {
    const fn new() -> Self {
        Self { next: 1, regions: Vec::new(), queue_pairs: Vec::new(), queues: Vec::new() }
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn piece(
        &self,
        key: u32,
        address: u64,
        length: usize,
        access: ibv_access_flags,
    ) -> Option<Piece> {
        let region = self.regions.iter().find(|region| region.key == key)?;
        let offset = usize::try_from(address.checked_sub(region.iova)?).ok()?;
        let fits =
            offset.checked_add(length)? <= region.length && region.access & access.0 == access.0;
        fits.then(|| (ptr::with_exposed_provenance_mut(region.address + offset), length))
    }

    fn pieces(&self, list: &[ibv_sge], access: ibv_access_flags) -> Option<Vec<Piece>> {
        list.iter().map(|sge| self.piece(sge.lkey, sge.addr, sge.length as usize, access)).collect()
    }

    fn complete(&mut self, cq: *mut ibv_cq, completion: ibv_wc) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.raw == cq) {
            queue.completions.push_back(completion);
        }
    }

    fn index(&self, number: u32) -> Option<usize> {
        // SAFETY: the list holds live queue pairs.
        self.queue_pairs.iter().position(|pair| unsafe { (*pair.raw).qp_num } == number)
    }

    /// Executes what can be executed.
    fn run(&mut self) {
        while (0..self.queue_pairs.len()).any(|index| self.step(index)) {}
    }

    /// Executes the first send of a queue pair, if there is one and its peer is ready.
    fn step(&mut self, index: usize) -> bool {
        let pair = &self.queue_pairs[index];
        if pair.state != ibv_qp_state::IBV_QPS_RTS || pair.sends.is_empty() {
            return false;
        }
        let (raw, signal_all) = (pair.raw, pair.signal_all);
        let Some(peer) = self.index(pair.peer) else { return false };
        let target = &self.queue_pairs[peer];
        if target.state != ibv_qp_state::IBV_QPS_RTR && target.state != ibv_qp_state::IBV_QPS_RTS {
            return false;
        }
        let send = &self.queue_pairs[index].sends[0];
        let opcode = send.request.opcode;
        let takes_receive = matches!(
            opcode,
            ibv_wr_opcode::IBV_WR_SEND
                | ibv_wr_opcode::IBV_WR_SEND_WITH_IMM
                | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
        );
        if takes_receive && target.receives.is_empty() {
            return false;
        }
        let Some(send) = self.queue_pairs[index].sends.pop_front() else { return false };
        let bytes = send.list.iter().map(|sge| sge.length).sum::<u32>();
        let status = self.execute(&send, peer, bytes);
        let signaled = signal_all
            || send.request.send_flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0
            || status != ibv_wc_status::IBV_WC_SUCCESS;
        if signaled {
            // SAFETY: the queue pair is live while it is in the list.
            let (cq, number) = unsafe { ((*raw).send_cq, (*raw).qp_num) };
            let completion = ibv_wc {
                wr_id: send.request.wr_id,
                status,
                opcode: completion_opcode(opcode),
                byte_len: bytes,
                qp_num: number,
                ..Default::default()
            };
            self.complete(cq, completion);
        }
        if status != ibv_wc_status::IBV_WC_SUCCESS {
            self.fail(index);
            self.fail(peer);
        }
        true
    }

    fn execute(&mut self, send: &SendRequest, peer: usize, bytes: u32) -> ibv_wc_status {
        let SendRequest { request, list, inline } = send;
        let local = |state: &Self, access| state.pieces(list, access);
        let none = ibv_access_flags(0);
        let write = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
        let remote = |state: &Self, access| {
            // SAFETY: the opcode says that this is the member in use, and all bytes of it are set.
            let rdma = unsafe { request.wr.rdma };
            state.piece(rdma.rkey, rdma.remote_addr, bytes as usize, access)
        };
        let protection = ibv_wc_status::IBV_WC_LOC_PROT_ERR;
        let access = ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
        match request.opcode {
            ibv_wr_opcode::IBV_WR_SEND | ibv_wr_opcode::IBV_WR_SEND_WITH_IMM => {
                let Some(data) = gathered(inline, || local(self, none)) else { return protection };
                self.receive(peer, Some(data), request)
            }
            ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
                let Some(data) = gathered(inline, || local(self, none)) else { return protection };
                let right = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
                let Some(target) = remote(self, right) else { return access };
                store(&data, &[target]);
                if request.opcode == ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM {
                    return self.receive(peer, None, request);
                }
                ibv_wc_status::IBV_WC_SUCCESS
            }
            ibv_wr_opcode::IBV_WR_RDMA_READ => {
                let Some(target) = local(self, write) else { return protection };
                let right = ibv_access_flags::IBV_ACCESS_REMOTE_READ;
                let Some(source) = remote(self, right) else { return access };
                store(&load(&[source]), &target);
                ibv_wc_status::IBV_WC_SUCCESS
            }
            ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP
            | ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let Some(target) = local(self, write) else { return protection };
                // SAFETY: the opcode says that this is the member in use.
                let atomic = unsafe { request.wr.atomic };
                let right = ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC;
                let Some(word) = self.piece(atomic.rkey, atomic.remote_addr, 8, right) else {
                    return access;
                };
                let mut old = [0; 8];
                old.copy_from_slice(&load(&[word]));
                let old = u64::from_ne_bytes(old);
                let new = if request.opcode == ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD {
                    old.wrapping_add(atomic.compare_add)
                } else if old == atomic.compare_add {
                    atomic.swap
                } else {
                    old
                };
                store(&new.to_ne_bytes(), &[word]);
                store(&old.to_ne_bytes(), &target);
                ibv_wc_status::IBV_WC_SUCCESS
            }
            _ => ibv_wc_status::IBV_WC_LOC_QP_OP_ERR,
        }
    }

    /// Delivers a message, or just the immediate of a write, to the peer's first receive.
    fn receive(
        &mut self,
        peer: usize,
        data: Option<Vec<u8>>,
        request: &ibv_send_wr,
    ) -> ibv_wc_status {
        let Some((wr_id, list)) = self.queue_pairs[peer].receives.pop_front() else {
            return ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR;
        };
        let target = self.pieces(&list, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE);
        let room: usize = list.iter().map(|sge| sge.length as usize).sum();
        let length = data.as_ref().map_or(0, Vec::len);
        let status = match target {
            None => ibv_wc_status::IBV_WC_LOC_PROT_ERR,
            Some(_) if length > room => ibv_wc_status::IBV_WC_LOC_LEN_ERR,
            Some(target) => {
                store(data.as_deref().unwrap_or_default(), &target);
                ibv_wc_status::IBV_WC_SUCCESS
            }
        };
        let raw = self.queue_pairs[peer].raw;
        // SAFETY: the queue pair is live while it is in the list.
        let (cq, qp_num) = unsafe { ((*raw).recv_cq, (*raw).qp_num) };
        let mut completion = ibv_wc {
            wr_id,
            status,
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            byte_len: length as u32,
            qp_num,
            ..Default::default()
        };
        if data.is_none() {
            completion.opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        }
        if request.opcode != ibv_wr_opcode::IBV_WR_SEND {
            completion.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
            // SAFETY: the opcode says that the request has an immediate.
            completion.__bindgen_anon_1.imm_data = unsafe { request.__bindgen_anon_1.imm_data };
        }
        self.complete(cq, completion);
        if status == ibv_wc_status::IBV_WC_SUCCESS {
            status
        } else {
            ibv_wc_status::IBV_WC_REM_OP_ERR
        }
    }

    /// Moves a queue pair to ERR, and flushes what is posted.
    fn fail(&mut self, index: usize) {
        let pair = &mut self.queue_pairs[index];
        pair.state = ibv_qp_state::IBV_QPS_ERR;
        let raw = pair.raw;
        // SAFETY: the queue pair is live while it is in the list.
        let (send_cq, recv_cq, qp_num) = unsafe { ((*raw).send_cq, (*raw).recv_cq, (*raw).qp_num) };
        let sends: Vec<_> = pair.sends.drain(..).map(|send| send.request.wr_id).collect();
        let receives: Vec<_> = pair.receives.drain(..).map(|(wr_id, _)| wr_id).collect();
        let flushed = |wr_id| ibv_wc {
            wr_id,
            status: ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
            qp_num,
            ..Default::default()
        };
        for wr_id in sends {
            self.complete(send_cq, flushed(wr_id));
        }
        for wr_id in receives {
            self.complete(recv_cq, flushed(wr_id));
        }
    }
}

fn completion_opcode(opcode: ibv_wr_opcode) -> ibv_wc_opcode {
    match opcode {
        ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
            ibv_wc_opcode::IBV_WC_RDMA_WRITE
        }
        ibv_wr_opcode::IBV_WR_RDMA_READ => ibv_wc_opcode::IBV_WC_RDMA_READ,
        ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP => ibv_wc_opcode::IBV_WC_COMP_SWAP,
        ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD => ibv_wc_opcode::IBV_WC_FETCH_ADD,
        _ => ibv_wc_opcode::IBV_WC_SEND,
    }
}

fn gathered(
    inline: &Option<Vec<u8>>,
    local: impl FnOnce() -> Option<Vec<Piece>>,
) -> Option<Vec<u8>> {
    match inline {
        Some(data) => Some(data.clone()),
        None => local().map(|pieces| load(&pieces)),
    }
}

fn load(pieces: &[Piece]) -> Vec<u8> {
    let mut data = Vec::new();
    for &(address, length) in pieces {
        for offset in 0..length {
            // SAFETY: the piece is within a live registration.
            data.push(unsafe { address.add(offset).read_volatile() });
        }
    }
    data
}

fn store(data: &[u8], pieces: &[Piece]) {
    let places =
        pieces.iter().flat_map(|&(address, length)| (0..length).map(move |n| (address, n)));
    for (&byte, (address, offset)) in data.iter().zip(places) {
        // SAFETY: the piece is within a live registration.
        unsafe { address.add(offset).write_volatile(byte) };
    }
}

/// A C object of the given type, zeroed, that `free` frees.
unsafe fn zeroed<T>() -> *mut T {
    // SAFETY: the layout is that of a C struct, hence not empty.
    unsafe {
        let object = alloc(Layout::new::<T>()).cast::<T>();
        object.write_bytes(0, 1);
        object
    }
}

unsafe fn free<T>(object: *mut T) {
    // SAFETY: the caller passes what `zeroed` returned, once.
    unsafe { dealloc(object.cast(), Layout::new::<T>()) }
}

fn copy_list(list: *const ibv_sge, count: c_int) -> Vec<ibv_sge> {
    // SAFETY: the caller of the verb passes a list of that length.
    (0..count as usize).map(|n| unsafe { *list.add(n) }).collect()
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut state = lock();
    // SAFETY: the crate posts to live queue pairs, lists that are linked and end in null.
    unsafe {
        let Some(index) = state.index((*qp).qp_num) else { return libc::EINVAL };
        while !request.is_null() {
            let pair = &mut state.queue_pairs[index];
            let posting =
                pair.state == ibv_qp_state::IBV_QPS_RTS || pair.state == ibv_qp_state::IBV_QPS_ERR;
            if !posting || pair.sends.len() >= pair.cap.max_send_wr as usize {
                *bad = request;
                return if posting { libc::ENOMEM } else { libc::EINVAL };
            }
            let list = copy_list((*request).sg_list, (*request).num_sge);
            let inline = (*request).send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0;
            let inline = inline.then(|| {
                let of = |sge: &ibv_sge| {
                    let from = ptr::with_exposed_provenance::<u8>(sge.addr as usize);
                    (0..sge.length as usize).map(|n| from.add(n).read()).collect::<Vec<_>>()
                };
                list.iter().flat_map(of).collect()
            });
            pair.sends.push_back(SendRequest { request: *request, list, inline });
            request = (*request).next;
        }
        if state.queue_pairs[index].state == ibv_qp_state::IBV_QPS_ERR {
            state.fail(index);
        }
    }
    if EAGER.load(Ordering::SeqCst) {
        state.run();
    }
    0
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut request: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut state = lock();
    // SAFETY: as for sends.
    unsafe {
        let Some(index) = state.index((*qp).qp_num) else { return libc::EINVAL };
        while !request.is_null() {
            let pair = &mut state.queue_pairs[index];
            if pair.receives.len() >= pair.cap.max_recv_wr as usize {
                *bad = request;
                return libc::ENOMEM;
            }
            let list = copy_list((*request).sg_list, (*request).num_sge);
            pair.receives.push_back(((*request).wr_id, list));
            request = (*request).next;
        }
        if state.queue_pairs[index].state == ibv_qp_state::IBV_QPS_ERR {
            state.fail(index);
        }
    }
    if EAGER.load(Ordering::SeqCst) {
        state.run();
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, completions: *mut ibv_wc) -> c_int {
    if POLLS_FAIL.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
        return -1;
    }
    let mut state = lock();
    state.run();
    let Some(queue) = state.queues.iter_mut().find(|queue| queue.raw == cq) else { return -1 };
    let mut count = 0;
    while count < room {
        let Some(completion) = queue.completions.pop_front() else { break };
        // SAFETY: the caller has room for that many.
        unsafe { completions.add(count as usize).write(completion) };
        count += 1;
    }
    count
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

/// The functions of libibverbs that the crate calls.
mod exported {
    use super::*;

    const NAME: [u8; 6] = *b"miri0\0";

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
        // SAFETY: the list has room for the device and null; the count is writable.
        unsafe {
            let device = zeroed::<ibv_device>();
            for (index, byte) in NAME.iter().enumerate() {
                (*device).name[index] = *byte as c_char;
            }
            (*device).node_type = ibv_node_type::IBV_NODE_CA;
            (*device).transport_type = ibv_transport_type::IBV_TRANSPORT_IB;
            let list = zeroed::<[*mut ibv_device; 2]>();
            (*list)[0] = device;
            *count = 1;
            list.cast()
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
        // SAFETY: the list is that of `ibv_get_device_list`.
        unsafe {
            free(*list);
            free(list.cast::<[*mut ibv_device; 2]>());
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
        // SAFETY: the device is live.
        unsafe { (&raw const (*device).name).cast() }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_open_device(listed: *mut ibv_device) -> *mut ibv_context {
        // SAFETY: a context of zeros is valid; the operations that the crate calls are set.
        unsafe {
            let context = zeroed::<ibv_context>();
            // The list may be freed first.
            (*context).device = zeroed::<ibv_device>();
            *(*context).device = *listed;
            (*context).cmd_fd = -1;
            (*context).async_fd = -1;
            (*context).num_comp_vectors = 1;
            (*context).ops.post_send = Some(post_send);
            (*context).ops.post_recv = Some(post_recv);
            (*context).ops.poll_cq = Some(poll_cq);
            (*context).ops.req_notify_cq = Some(req_notify_cq);
            context
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
        // SAFETY: the context is given back once.
        unsafe {
            free((*context).device);
            free(context);
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_query_device_ex__bundled(
        _: *mut ibv_context,
        _: *const ibv_query_device_ex_input,
        attributes: *mut ibv_device_attr_ex,
    ) -> c_int {
        // SAFETY: the attributes are writable.
        let device = unsafe { &mut (*attributes).orig_attr };
        device.phys_port_cnt = 1;
        device.max_qp = 64;
        device.max_qp_wr = 64;
        device.max_sge = 4;
        device.max_cq = 64;
        device.max_cqe = 1024;
        device.max_mr = 64;
        device.max_mr_size = u64::MAX;
        device.max_pd = 64;
        device.max_qp_rd_atom = 4;
        device.max_qp_init_rd_atom = 4;
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ___ibv_query_port__bundled(
        _: *mut ibv_context,
        port: u8,
        attributes: *mut ibv_port_attr,
    ) -> c_int {
        if port != 1 {
            return libc::EINVAL;
        }
        // SAFETY: the attributes are writable.
        let attributes = unsafe { &mut *attributes };
        attributes.state = ibv_port_state::IBV_PORT_ACTIVE;
        attributes.max_mtu = ibv_mtu::IBV_MTU_4096;
        attributes.active_mtu = ibv_mtu::IBV_MTU_1024;
        attributes.gid_tbl_len = 1;
        attributes.pkey_tbl_len = 1;
        attributes.max_msg_sz = 1 << 30;
        attributes.link_layer = 2; // IBV_LINK_LAYER_ETHERNET
        0
    }

    fn gid() -> ibv_gid_entry {
        // ::ffff:127.0.0.1, RoCE v2
        let mut entry = ibv_gid_entry { port_num: 1, gid_type: 2, ..Default::default() };
        entry.gid.raw = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1];
        entry
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn _ibv_query_gid_ex(
        _: *mut ibv_context,
        _: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
        _: u32,
        _: usize,
    ) -> c_int {
        if index != 0 {
            return libc::ENODATA;
        }
        // SAFETY: the entry is writable.
        unsafe { *entry = gid() };
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn _ibv_query_gid_table(
        _: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        _: usize,
        _: u32,
        _: usize,
    ) -> isize {
        // SAFETY: the table has room for the port's one entry.
        unsafe { *entries = gid() };
        1
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_query_pkey(
        _: *mut ibv_context,
        _: u8,
        _: c_int,
        pkey: *mut u16,
    ) -> c_int {
        // SAFETY: the key is writable.
        unsafe { *pkey = u16::MAX };
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        // SAFETY: the object is new.
        unsafe {
            let domain = zeroed::<ibv_pd>();
            (*domain).context = context;
            domain
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
        // SAFETY: the domain is given back once.
        unsafe { free(domain) };
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_reg_mr_iova2(
        domain: *mut ibv_pd,
        address: *mut c_void,
        length: usize,
        iova: u64,
        access: c_uint,
    ) -> *mut ibv_mr {
        let mut state = lock();
        let key = state.number();
        state.regions.push(Region {
            key,
            address: address.expose_provenance(),
            iova,
            length,
            access,
        });
        // SAFETY: the object is new, and the domain live.
        unsafe {
            let region = zeroed::<ibv_mr>();
            (*region).context = (*domain).context;
            (*region).pd = domain;
            ((*region).addr, (*region).length) = (address, length);
            ((*region).lkey, (*region).rkey) = (key, key);
            region
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_dereg_mr(region: *mut ibv_mr) -> c_int {
        // SAFETY: the region is given back once.
        unsafe {
            lock().regions.retain(|known| known.key != (*region).lkey);
            free(region);
        }
        0
    }

    /// A channel without events: what sleeps on it is not tested here.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_create_comp_channel(
        context: *mut ibv_context,
    ) -> *mut ibv_comp_channel {
        // SAFETY: the object is new, and the descriptor its own.
        unsafe {
            let channel = zeroed::<ibv_comp_channel>();
            (*channel).context = context;
            let mut ends = [0; 2];
            assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
            // The crate does not look at the counter, so it can have the other end.
            [(*channel).fd, (*channel).refcnt] = ends;
            channel
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
        // SAFETY: the channel is given back once.
        unsafe {
            libc::close((*channel).fd);
            libc::close((*channel).refcnt);
            free(channel);
        }
        0
    }

    /// Miri has no timers: this one never rings, and nothing here waits for it.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn timerfd_create(_: c_int, _: c_int) -> c_int {
        // SAFETY: this makes a new descriptor; no memory is involved.
        unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn timerfd_settime(
        _: c_int,
        _: c_int,
        _: *const libc::itimerspec,
        _: *mut libc::itimerspec,
    ) -> c_int {
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        _: *mut *mut ibv_cq,
        _: *mut *mut c_void,
    ) -> c_int {
        let mut nothing = 0_u8;
        // SAFETY: the channel is live. The read fails, and sets `errno`.
        unsafe { libc::read((*channel).fd, (&raw mut nothing).cast(), 1) };
        -1
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_create_cq(
        context: *mut ibv_context,
        depth: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        _: c_int,
    ) -> *mut ibv_cq {
        // SAFETY: the object is new.
        unsafe {
            let raw = zeroed::<ibv_cq>();
            (*raw).context = context;
            (*raw).channel = channel;
            (*raw).cq_context = cq_context;
            (*raw).cqe = depth;
            lock().queues.push(Queue { raw, completions: VecDeque::new() });
            raw
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
        lock().queues.retain(|queue| queue.raw != cq);
        // SAFETY: the queue is given back once.
        unsafe { free(cq) };
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_create_qp_ex__bundled(
        context: *mut ibv_context,
        attributes: *mut ibv_qp_init_attr_ex,
    ) -> *mut ibv_qp {
        let mut state = lock();
        // SAFETY: the object is new, and the attributes are those of the crate.
        unsafe {
            let raw = zeroed::<ibv_qp>();
            (*raw).context = context;
            (*raw).pd = (*attributes).pd;
            ((*raw).send_cq, (*raw).recv_cq) = ((*attributes).send_cq, (*attributes).recv_cq);
            (*raw).qp_type = (*attributes).qp_type;
            (*raw).qp_num = state.number();
            (*attributes).cap.max_inline_data = (*attributes).cap.max_inline_data.max(16);
            state.queue_pairs.push(QueuePair {
                raw,
                state: ibv_qp_state::IBV_QPS_RESET,
                peer: 0,
                signal_all: (*attributes).sq_sig_all != 0,
                cap: (*attributes).cap,
                sends: VecDeque::new(),
                receives: VecDeque::new(),
            });
            raw
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_modify_qp(
        qp: *mut ibv_qp,
        attributes: *mut ibv_qp_attr,
        mask: c_int,
    ) -> c_int {
        let mut state = lock();
        // SAFETY: the queue pair is live, and the attributes are those of the crate.
        unsafe {
            let Some(index) = state.index((*qp).qp_num) else { return libc::EINVAL };
            let pair = &mut state.queue_pairs[index];
            let mask = mask as u32;
            if mask & ibv_qp_attr_mask::IBV_QP_DEST_QPN.0 != 0 {
                pair.peer = (*attributes).dest_qp_num;
            }
            if mask & ibv_qp_attr_mask::IBV_QP_STATE.0 != 0 {
                pair.state = (*attributes).qp_state;
                (*qp).state = pair.state;
                match pair.state {
                    ibv_qp_state::IBV_QPS_RESET => {
                        pair.sends.clear();
                        pair.receives.clear();
                    }
                    ibv_qp_state::IBV_QPS_ERR => state.fail(index),
                    _ => {}
                }
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_query_qp(
        qp: *mut ibv_qp,
        attributes: *mut ibv_qp_attr,
        _: c_int,
        _: *mut ibv_qp_init_attr,
    ) -> c_int {
        let state = lock();
        // SAFETY: the queue pair is live, and the attributes are writable.
        unsafe {
            let Some(index) = state.index((*qp).qp_num) else { return libc::EINVAL };
            (*attributes).qp_state = state.queue_pairs[index].state;
            (*attributes).cap = state.queue_pairs[index].cap;
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
        let mut state = lock();
        // SAFETY: the queue pair is given back once.
        unsafe {
            let number = (*qp).qp_num;
            for queue in &mut state.queues {
                queue.completions.retain(|completion| completion.qp_num != number);
            }
            state.queue_pairs.retain(|pair| pair.raw != qp);
            free(qp);
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_qp_to_qp_ex(_: *mut ibv_qp) -> *mut ibv_qp_ex {
        ptr::null_mut()
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
        ibv_fork_status::IBV_FORK_UNNEEDED
    }
}
