//! The contenders in C: `contenders.c`.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

use ibverbs::{MemoryRegion, RemoteMemoryRegion, ffi};
use ibverbs_function_device::raw;

use crate::rig::Rig;

/// `struct handles` of `contenders.h`.
#[repr(C)]
pub(crate) struct Handles {
    qp: *mut ffi::ibv_qp,
    qp_ex: *mut ffi::ibv_qp_ex,
    cq: *mut ffi::ibv_cq,
    channel: *mut ffi::ibv_comp_channel,
    address: u64,
    remote_address: u64,
    lkey: u32,
    rkey: u32,
    epoll: c_int,
}

impl Handles {
    /// The objects that a server uses; valid as long as they are.
    pub(crate) fn of_server(
        queue: *mut ffi::ibv_cq,
        channel: *mut ffi::ibv_comp_channel,
        region: &mut MemoryRegion<'static, u8>,
        epoll: &OwnedFd,
    ) -> Self {
        Self {
            qp: null_mut(),
            qp_ex: null_mut(),
            cq: queue,
            channel,
            address: region.as_mut_ptr() as u64,
            remote_address: 0,
            lkey: region.lkey(),
            rkey: 0,
            epoll: epoll.as_raw_fd(),
        }
    }

    /// A completion queue, and memory; valid as long as they are.
    pub(crate) fn of_queue(
        queue: *mut ffi::ibv_cq,
        region: &mut MemoryRegion<'static, u8>,
    ) -> Self {
        Self {
            qp: null_mut(),
            qp_ex: null_mut(),
            cq: queue,
            channel: null_mut(),
            address: region.as_mut_ptr() as u64,
            remote_address: 0,
            lkey: region.lkey(),
            rkey: 0,
            epoll: -1,
        }
    }

    /// The memory alone; valid as long as it is.
    pub(crate) fn of_memory(
        region: &mut MemoryRegion<'static, u8>,
        remote: &RemoteMemoryRegion,
    ) -> Self {
        Self {
            qp: null_mut(),
            qp_ex: null_mut(),
            cq: null_mut(),
            channel: null_mut(),
            address: region.as_mut_ptr() as u64,
            remote_address: remote.address(),
            lkey: region.lkey(),
            rkey: remote.rkey(),
            epoll: -1,
        }
    }

    /// The objects of the rig; valid as long as the rig is.
    pub(crate) fn of(rig: &mut Rig) -> Self {
        let remote = rig.remote();
        Self {
            qp: rig.queue_pair.as_raw(),
            qp_ex: rig.queue_pair.as_raw_extended().map_or(null_mut(), NonNull::as_ptr),
            cq: rig.queue.as_raw(),
            channel: rig.channel.as_ref().map_or(null_mut(), |channel| channel.as_raw()),
            address: rig.region.as_mut_ptr() as u64,
            remote_address: remote.address(),
            lkey: rig.region.lkey(),
            rkey: remote.rkey(),
            epoll: rig.epoll.as_ref().map_or(-1, |epoll| epoll.as_raw_fd()),
        }
    }
}

/// `struct server` of `server.c`.
#[repr(C)]
pub(crate) struct Server {
    _private: [u8; 0],
}

unsafe extern "C" {
    /// The connections of the server use the queue pairs, and the server the other objects. Null: it failed.
    pub(crate) fn server_open(
        handles: *const Handles,
        device: *mut raw::function_device,
        queue_pairs: *const *mut ffi::ibv_qp,
        count: u32,
    ) -> *mut Server;
    pub(crate) fn server_close(server: *mut Server);
    pub(crate) fn c_plain_server(server: *mut Server, operations: u64) -> i64;
    pub(crate) fn c_tuned_server(server: *mut Server, operations: u64) -> i64;
}

/// `struct rpc` of `rpc.c`.
#[repr(C)]
pub(crate) struct Rpc {
    _private: [u8; 0],
}

unsafe extern "C" {
    /// Like `server_open`, with this many receives for each connection.
    pub(crate) fn rpc_open(
        handles: *const Handles,
        device: *mut raw::function_device,
        queue_pairs: *const *mut ffi::ibv_qp,
        count: u32,
        receives: u32,
    ) -> *mut Rpc;
    pub(crate) fn rpc_close(rpc: *mut Rpc);
    pub(crate) fn c_tuned_rpc(rpc: *mut Rpc, operations: u64) -> i64;
}

/// `struct many` of `senders.c`.
#[repr(C)]
pub(crate) struct Many {
    _private: [u8; 0],
}

unsafe extern "C" {
    /// It uses the queue pairs and the completion queue. Null: it failed.
    pub(crate) fn many_open(
        handles: *const Handles,
        queue_pairs: *const *mut ffi::ibv_qp,
        count: u32,
    ) -> *mut Many;
    pub(crate) fn many_close(many: *mut Many);
    pub(crate) fn c_tuned_many(many: *mut Many, operations: u64) -> i64;
    pub(crate) fn c_locked_many(many: *mut Many, operations: u64) -> i64;
}

/// `struct rails` of `rails.c`.
#[repr(C)]
pub(crate) struct Rails {
    _private: [u8; 0],
}

unsafe extern "C" {
    /// Two completion queues, and two queue pairs of each. It uses them. Null: it failed.
    pub(crate) fn rails_open(
        handles: *const Handles,
        queues: *const *mut ffi::ibv_cq,
        queue_pairs: *const *mut ffi::ibv_qp,
        length: u32,
    ) -> *mut Rails;
    pub(crate) fn rails_close(rails: *mut Rails);
    pub(crate) fn c_plain_rails(rails: *mut Rails, operations: u64) -> i64;
    pub(crate) fn c_tuned_rails(rails: *mut Rails, operations: u64) -> i64;
    pub(crate) fn c_same_rails(rails: *mut Rails, operations: u64) -> i64;
}

macro_rules! contenders {
    ($($name:ident)+) => {
        unsafe extern "C" {
            $(pub(crate) fn $name(handles: *mut Handles, operations: u64) -> i64;)+
        }
    };
}

contenders!(c_plain_w1 c_plain_w2 c_plain_w3 c_plain_w4 c_plain_w5 c_plain_w5_ex);
contenders!(c_plain_w7 c_plain_w8);
contenders!(c_tuned_w1 c_tuned_w2 c_tuned_w3 c_tuned_w4 c_tuned_w5 c_tuned_w5_ex);
contenders!(c_tuned_w7 c_tuned_w8 c_tuned_w13 c_tuned_w17 c_tuned_w18 c_tuned_w19);
contenders!(c_plain_w21 c_tuned_w21 c_tuned_w22 c_tuned_w24 c_tuned_w26);

unsafe extern "C" {
    /// Runs two threads, each with handles of its own.
    pub(crate) fn c_tuned_w23(one: *mut Handles, two: *mut Handles, operations: u64) -> i64;
}
