//! Batches of queue pairs without the extended posting interface: their requests are collected, and posted as
//! one list.
//!
//! A [`Batch`](super::Batch) adds requests by the functions in a C struct, `ibv_qp_ex`. Here that struct is the first field
//! of one of this module, and its functions collect `ibv_send_wr`. So there is one way to add a request, with
//! the same checks, and the provider's interface costs no branch.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::{self, NonNull};

use super::explain::explain_send;
use super::extended_operations::{SendOperations, function};
use super::remote;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::RemoteMemoryRegion;
use crate::queue_pair::QueuePair;

/// What `ibv_post_send` has too, and a batch without the extended interface can do.
const OPERATIONS: SendOperations = SendOperations::WRITE
    .union(SendOperations::WRITE_WITH_IMMEDIATE)
    .union(SendOperations::SEND)
    .union(SendOperations::SEND_WITH_IMMEDIATE)
    .union(SendOperations::SEND_WITH_INVALIDATE)
    .union(SendOperations::READ)
    .union(SendOperations::COMPARE_SWAP)
    .union(SendOperations::FETCH_ADD)
    .union(SendOperations::LOCAL_INVALIDATE)
    .union(SendOperations::BIND_MEMORY_WINDOW);

/// The data of a collected request, in vectors that may move until all requests are there.
enum Data {
    Elements(Range<usize>),
    Inline(Range<usize>),
}

#[repr(C)]
pub(super) struct Collector {
    /// The first field: its functions get a pointer to it, and cast it to one to the collector.
    extended: ffi::ibv_qp_ex,
    requests: Vec<ffi::ibv_send_wr>,
    data: Vec<Data>,
    elements: Vec<ffi::ibv_sge>,
    bytes: Vec<u8>,
    /// The depth of the send queue. Further requests are not collected.
    most: usize,
    /// The first error of a function, none of which can return it.
    errno: c_int,
}

impl Collector {
    #[cold]
    pub(super) fn new(most: u32) -> Self {
        let extended = ffi::ibv_qp_ex {
            wr_atomic_cmp_swp: Some(atomic_cmp_swp),
            wr_atomic_fetch_add: Some(atomic_fetch_add),
            wr_bind_mw: Some(bind_mw),
            wr_local_inv: Some(local_inv),
            wr_rdma_read: Some(rdma_read),
            wr_rdma_write: Some(rdma_write),
            wr_rdma_write_imm: Some(rdma_write_imm),
            wr_send: Some(send),
            wr_send_imm: Some(send_imm),
            wr_send_inv: Some(send_inv),
            wr_set_ud_addr: Some(set_ud_addr),
            wr_set_xrc_srqn: Some(set_xrc_srqn),
            wr_set_inline_data: Some(set_inline_data),
            wr_set_sge: Some(set_sge),
            wr_set_sge_list: Some(set_sge_list),
            wr_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        Self {
            extended,
            requests: Vec::new(),
            data: Vec::new(),
            elements: Vec::new(),
            bytes: Vec::new(),
            most: most as usize,
            errno: 0,
        }
    }

    /// Adds a request with the number and the flags in the C struct.
    fn add(&mut self, opcode: ffi::ibv_wr_opcode, set: impl FnOnce(&mut ffi::ibv_send_wr)) {
        if self.requests.len() == self.most
            || self.requests.try_reserve(1).is_err()
            || self.data.try_reserve(1).is_err()
        {
            self.errno = libc::ENOMEM;
        }
        if self.errno != 0 {
            return;
        }
        let mut request = ffi::ibv_send_wr {
            wr_id: self.extended.wr_id,
            send_flags: self.extended.wr_flags,
            opcode,
            ..Default::default()
        };
        set(&mut request);
        self.requests.push(request);
        self.data.push(Data::Elements(0..0));
    }

    /// Changes the request that was added last.
    fn change(&mut self, set: impl FnOnce(&mut ffi::ibv_send_wr)) {
        if self.errno == 0
            && let Some(request) = self.requests.last_mut()
        {
            set(request);
        }
    }

    fn set_elements(&mut self, elements: &[ffi::ibv_sge]) {
        if self.errno != 0 {
            return;
        }
        if self.elements.try_reserve(elements.len()).is_err() {
            self.errno = libc::ENOMEM;
            return;
        }
        let start = self.elements.len();
        // Some devices take a length of 0 for 2 GiB.
        self.elements.extend(elements.iter().filter(|element| element.length != 0));
        if let Some(data) = self.data.last_mut() {
            *data = Data::Elements(start..self.elements.len());
        }
    }

    fn set_inline(&mut self, bytes: &[u8]) {
        if self.errno != 0 {
            return;
        }
        if self.bytes.try_reserve(bytes.len()).is_err() {
            self.errno = libc::ENOMEM;
            return;
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        if let Some(data) = self.data.last_mut() {
            *data = Data::Inline(start..self.bytes.len());
        }
    }

    /// The functions that a batch of the queue pair can use.
    #[cold]
    pub(super) fn functions(collector: NonNull<Self>, queue_pair: &QueuePair<'_>) -> u64 {
        let (kind, max_sge) = (queue_pair.object.properties.kind, queue_pair.max_send_sge());
        // A DC initiator has the interface: it is not built without. SRD reads and writes by the interface
        // alone.
        let driver = queue_pair.object.properties.driver.filter(|driver| !driver.is_dc());
        let operations = match driver {
            Some(_) => SendOperations::SEND | SendOperations::SEND_WITH_IMMEDIATE,
            None => OPERATIONS,
        };
        // SAFETY: the struct is live, and has the functions of the operations.
        unsafe { function::of(collector.cast(), operations, (kind, driver), max_sge) }
    }

    /// Posts all that was collected.
    ///
    /// # Safety
    ///
    /// Nothing else posts sends to the queue pair meanwhile, and the caller keeps the contract of
    /// `QueuePair::post`.
    #[cold]
    pub(super) unsafe fn post(&mut self, queue_pair: &QueuePair<'_>) -> Result<()> {
        if self.errno != 0 {
            return Err(explain_send(queue_pair, &ffi::ibv_send_wr::default(), self.errno));
        }
        let mut inline = Vec::new();
        if inline.try_reserve_exact(self.requests.len()).is_err() {
            return Err(Error::with_reason("ibv_post_send", libc::ENOMEM, "there is no memory"));
        }
        for data in &self.data {
            let Data::Inline(range) = data else { continue };
            let addr = self.bytes[range.clone()].as_ptr() as u64;
            inline.push(ffi::ibv_sge { addr, length: range.len() as u32, lkey: 0 });
        }
        let mut next_inline = inline.iter_mut();
        for (request, data) in self.requests.iter_mut().zip(&self.data) {
            let elements = match data {
                Data::Elements(range) => &mut self.elements[range.clone()],
                Data::Inline(range) => match next_inline.next() {
                    Some(one) if !range.is_empty() => std::slice::from_mut(one),
                    _ => &mut [],
                },
            };
            (request.sg_list, request.num_sge) = (elements.as_mut_ptr(), elements.len() as c_int);
        }
        let (first, count) = (self.requests.as_mut_ptr(), self.requests.len());
        if count == 0 {
            return Ok(());
        }
        for n in 1..count {
            // SAFETY: both are within the vector.
            unsafe { (*first.add(n - 1)).next = first.add(n) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the list and its elements live until the call returns; the caller vouches for the rest.
        let returned = unsafe { ffi::ibv_post_send(queue_pair.as_raw(), first, &mut bad) };
        if returned == 0 {
            return Ok(());
        }
        let refused = self.requests.iter().find(|request| ptr::eq(*request, bad));
        let refused = refused.unwrap_or(&self.requests[0]);
        Err(explain_send(queue_pair, refused, returned))
    }
}

/// The collector that a function was called for.
///
/// # Safety
///
/// `raw` is that of a batch that has a collector, and nothing else accesses it during the function.
unsafe fn collector<'a>(raw: *mut ffi::ibv_qp_ex) -> &'a mut Collector {
    // SAFETY: the pointer was made from one to the whole collector, whose first field this is.
    unsafe { &mut *raw.cast::<Collector>() }
}

fn remote_of(remote_addr: u64, rkey: u32) -> RemoteMemoryRegion {
    // Its length was checked before.
    RemoteMemoryRegion { address: remote_addr, length: 0, rkey }
}

/// Defines a function of the C struct.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) |$collector:ident| $body:expr;)+) => {$(
        unsafe extern "C" fn $name(raw: *mut ffi::ibv_qp_ex, $($argument: $type),*) {
            // SAFETY: only a batch calls it, with its own pointer.
            let $collector = unsafe { collector(raw) };
            $body
        }
    )+};
}

use ffi::ibv_wr_opcode as Op;

functions! {
    send() |c| c.add(Op::IBV_WR_SEND, |_| ());
    send_imm(immediate: ffi::__be32) |c| c.add(Op::IBV_WR_SEND_WITH_IMM, |request| {
        request.__bindgen_anon_1.imm_data = immediate;
    });
    send_inv(rkey: u32) |c| c.add(Op::IBV_WR_SEND_WITH_INV, |request| {
        request.__bindgen_anon_1.invalidate_rkey = rkey;
    });
    local_inv(rkey: u32) |c| c.add(Op::IBV_WR_LOCAL_INV, |request| {
        request.__bindgen_anon_1.invalidate_rkey = rkey;
    });
    rdma_write(rkey: u32, address: u64) |c| c.add(Op::IBV_WR_RDMA_WRITE, |request| {
        request.wr.rdma = remote::rdma(&remote_of(address, rkey));
    });
    rdma_write_imm(rkey: u32, address: u64, immediate: ffi::__be32)
        |c| c.add(Op::IBV_WR_RDMA_WRITE_WITH_IMM, |request| {
            request.wr.rdma = remote::rdma(&remote_of(address, rkey));
            request.__bindgen_anon_1.imm_data = immediate;
        });
    rdma_read(rkey: u32, address: u64) |c| c.add(Op::IBV_WR_RDMA_READ, |request| {
        request.wr.rdma = remote::rdma(&remote_of(address, rkey));
    });
    atomic_cmp_swp(rkey: u32, address: u64, compare: u64, swap: u64)
        |c| c.add(Op::IBV_WR_ATOMIC_CMP_AND_SWP, |request| {
            request.wr.atomic = remote::atomic(&remote_of(address, rkey), compare, swap);
        });
    atomic_fetch_add(rkey: u32, address: u64, add: u64)
        |c| c.add(Op::IBV_WR_ATOMIC_FETCH_AND_ADD, |request| {
            request.wr.atomic = remote::atomic(&remote_of(address, rkey), add, 0);
        });
    bind_mw(window: *mut ffi::ibv_mw, rkey: u32, info: *const ffi::ibv_mw_bind_info)
        |c| c.add(Op::IBV_WR_BIND_MW, |request| {
            // SAFETY: it was made from a reference that is still there.
            let bind_info = unsafe { *info };
            request.__bindgen_anon_2.bind_mw =
                ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: window, rkey, bind_info };
        });
    set_ud_addr(ah: *mut ffi::ibv_ah, remote_qpn: u32, remote_qkey: u32) |c| c.change(|request| {
        request.wr.ud =
            ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 { ah, remote_qpn, remote_qkey };
    });
    set_xrc_srqn(number: u32) |c| c.change(|request| request.qp_type.xrc.remote_srqn = number);
    set_sge(lkey: u32, addr: u64, length: u32)
        |c| c.set_elements(&[ffi::ibv_sge { addr, length, lkey }]);
    set_sge_list(count: usize, elements: *const ffi::ibv_sge) |c| {
        // SAFETY: they are a slice that is still borrowed.
        c.set_elements(unsafe { std::slice::from_raw_parts(elements, count) })
    };
    set_inline_data(bytes: *mut c_void, length: usize) |c| {
        // SAFETY: as above.
        c.set_inline(unsafe { std::slice::from_raw_parts(bytes.cast(), length) })
    };
}
