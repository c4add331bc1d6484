//! The operations of a channel, and how each is posted.
//!
//! Each kind of operation is a type, so the compiler makes a function for each, without branches on the kind.

use std::ffi::c_int;
use std::ptr::{self, NonNull};

use super::error::TransportResult;
use crate::base::{Error, debug, ffi};
use crate::verbs::operation::sealed::{Kind, Undirected};
use crate::verbs::operation::{
    Receive, SIGNALED, check, check_receive, count_filled, takes_receive, without_empty,
};
use crate::verbs::queue_pair::MessageLimits;

const OPCODES: [ffi::ibv_wr_opcode; 7] = {
    use ffi::ibv_wr_opcode as Opcode;

    [
        Opcode::IBV_WR_SEND,
        Opcode::IBV_WR_SEND_WITH_IMM,
        Opcode::IBV_WR_RDMA_WRITE,
        Opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::IBV_WR_RDMA_READ,
        Opcode::IBV_WR_ATOMIC_CMP_AND_SWP,
        Opcode::IBV_WR_ATOMIC_FETCH_AND_ADD,
    ]
};

/// The rare invalidations borrow the request of sends with an immediate, whose field they use: their own would cost
/// 128 bytes a channel. In a constant, a missing opcode does not compile.
const fn index_of(opcode: ffi::ibv_wr_opcode) -> usize {
    use ffi::ibv_wr_opcode as Opcode;

    let opcode = match opcode {
        Opcode::IBV_WR_SEND_WITH_INV | Opcode::IBV_WR_LOCAL_INV => Opcode::IBV_WR_SEND_WITH_IMM,
        own => own,
    };
    let mut index = 0;
    while OPCODES[index].0 != opcode.0 {
        index += 1;
    }
    index
}

/// A post then sets the opcode, and restores it.
const fn borrows<K: Kind>() -> bool {
    OPCODES[index_of(K::OPCODE)].0 != K::OPCODE.0
}

/// One of the two queues of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Queue {
    Send,
    Receive,
}

/// An operation that a channel can post.
pub trait Operation: Copy {
    const QUEUE: Queue;

    /// The device writes the memory.
    const WRITES: bool;

    /// It uses up a receive of the peer.
    const TAKES_RECEIVE: bool;

    fn check(&self, limits: &Limits, list: &[ffi::ibv_sge]) -> TransportResult<()>;

    fn explain_buffer(_limits: &Limits, error: Error) -> Error {
        error
    }

    /// # Safety
    ///
    /// The target is live, and nothing else accesses `prepared` meanwhile. Until the request has ended, the memory in
    /// `list` is valid, nothing writes it, and if the operation writes it, nothing reads it.
    unsafe fn post(
        self,
        target: &Target,
        prepared: *mut Templates,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int;

    const VERB: &'static str;
}

/// What every operation is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) messages: MessageLimits,
    pub(crate) reliable: bool,
    /// Reads may fill memory that peers may not write: not on iWARP.
    pub(crate) private_reads: bool,
}

/// One request of each of the [`OPCODES`], made once. A post changes only the fields that differ from one operation
/// to the next. Each is a list of one request: `next` is never set.
pub struct Templates {
    pub(super) sends: [ffi::ibv_send_wr; OPCODES.len()],
    receive: ffi::ibv_recv_wr,
    /// All requests point here.
    piece: ffi::ibv_sge,
    /// The provider sets it if a post fails.
    pub(super) bad_send: *mut ffi::ibv_send_wr,
    bad_receive: *mut ffi::ibv_recv_wr,
}

/// Where requests are posted to: the functions that post, and their first argument. It is live while the queue pair is,
/// whose provider's functions these are.
#[derive(Clone, Copy)]
pub struct Target {
    queue_pair: *mut ffi::ibv_qp,
    post_send: PostSend,
    post_recv: PostRecv,
}

debug! { Target, self, queue_pair: self.queue_pair, .. }

impl Target {
    /// # Safety
    ///
    /// The queue pair is live.
    pub(super) unsafe fn new(queue_pair: *mut ffi::ibv_qp) -> Self {
        // SAFETY: the caller vouches for the queue pair.
        let ops = unsafe { &(*(*queue_pair).context).ops };
        Self {
            queue_pair,
            // libibverbs sets all operations before it hands the context out, and none later.
            post_send: ops.post_send.expect("libibverbs sets it"),
            post_recv: ops.post_recv.expect("libibverbs sets it"),
        }
    }

    /// For functions with the same contract, but their own first argument.
    pub(crate) fn with(
        queue_pair: *mut ffi::ibv_qp,
        post_send: PostSend,
        post_recv: PostRecv,
    ) -> Self {
        Self { queue_pair, post_send, post_recv }
    }

    pub(super) fn with_send(self, post_send: PostSend) -> Self {
        Self { post_send, ..self }
    }

    pub(super) fn queue_pair(self) -> *mut ffi::ibv_qp {
        self.queue_pair
    }
}

type PostSend = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_send_wr,
    *mut *mut ffi::ibv_send_wr,
) -> c_int;
type PostRecv = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_recv_wr,
    *mut *mut ffi::ibv_recv_wr,
) -> c_int;

debug! { Templates, self, piece: self.piece, .. }

impl Templates {
    pub(crate) fn new() -> Self {
        let mut send = ffi::ibv_send_wr {
            num_sge: 1,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        let sends = OPCODES.map(|opcode| {
            send.opcode = opcode;
            send
        });
        Self {
            sends,
            receive: ffi::ibv_recv_wr { num_sge: 1, ..Default::default() },
            piece: ffi::ibv_sge::default(),
            bad_send: ptr::null_mut(),
            bad_receive: ptr::null_mut(),
        }
    }

    /// Whether the device may have the request of a failed post.
    ///
    /// A provider names the request that it did not take. rxe and siw name none if only the system call that notifies
    /// the kernel failed, as it does after the process has changed its credentials. The request is in the queue, and
    /// the kernel may still find it.
    ///
    /// # Safety
    ///
    /// The pointer is valid, and nothing else accesses what is there meanwhile.
    #[cold]
    pub(crate) unsafe fn may_be_posted(this: *mut Self, queue: Queue) -> bool {
        // SAFETY: the caller vouches for the pointer.
        unsafe {
            let named = match queue {
                Queue::Send => !(*this).bad_send.is_null(),
                Queue::Receive => !(*this).bad_receive.is_null(),
            };
            ((*this).bad_send, (*this).bad_receive) = (ptr::null_mut(), ptr::null_mut());
            !named
        }
    }

    /// # Safety
    ///
    /// The pointer is valid. What is there does not move any more, and all later accesses go through copies of the
    /// pointer.
    pub(crate) unsafe fn set_piece_pointers(this: *mut Self) {
        // SAFETY: the caller vouches for the pointer.
        unsafe {
            let piece = &raw mut (*this).piece;
            for index in 0..OPCODES.len() {
                (*this).sends[index].sg_list = piece;
            }
            (*this).receive.sg_list = piece;
        }
    }
}

/// [`Templates`] with an owner.
pub(crate) struct OwnTemplates(NonNull<Templates>);

impl OwnTemplates {
    pub(crate) fn new() -> Self {
        let templates = NonNull::from(Box::leak(Box::new(Templates::new())));
        // SAFETY: the box does not move any more, and only copies of this pointer access it.
        unsafe { Templates::set_piece_pointers(templates.as_ptr()) };
        Self(templates)
    }

    /// Whether later sends have completions.
    pub(crate) fn set_signaled(&mut self, signaled: bool) {
        let flag = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        // SAFETY: it is borrowed exclusively, and `sends` is initialised.
        for send in unsafe { &mut (*self.0.as_ptr()).sends } {
            send.send_flags = if signaled { flag } else { 0 };
        }
    }

    /// Valid while the owner is.
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *mut Templates {
        self.0.as_ptr()
    }
}

impl Drop for OwnTemplates {
    fn drop(&mut self) {
        // SAFETY: `new` made it from a box, and nothing uses it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Operation for Receive {
    const QUEUE: Queue = Queue::Receive;
    const WRITES: bool = true;
    const TAKES_RECEIVE: bool = false;
    const VERB: &'static str = "ibv_post_recv";

    #[inline]
    fn check(&self, limits: &Limits, list: &[ffi::ibv_sge]) -> TransportResult<()> {
        elements(Self::VERB, list, limits.max_recv_sge)?;
        Ok(check_receive(&limits.messages, list)?)
    }

    #[inline(always)]
    unsafe fn post(
        self,
        target: &Target,
        prepared: *mut Templates,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        // SAFETY: the caller vouches for all pointers and the memory. The request is a well-formed list of one.
        unsafe {
            let request = &raw mut (*prepared).receive;
            (*request).wr_id = wr_id;
            // A post restores what it changes.
            if let [piece] = list {
                if piece.length == 0 {
                    return post_empty(self, target, prepared, wr_id);
                }
                (*prepared).piece = *piece;
            } else {
                // The pointer last: any later use of `list` would invalidate it.
                (*request).num_sge = without_empty(list) as c_int;
                (*request).sg_list = list.as_mut_ptr();
            }
            let returned =
                (target.post_recv)(target.queue_pair, request, &raw mut (*prepared).bad_receive);
            if list.len() != 1 {
                (*request).sg_list = &raw mut (*prepared).piece;
                (*request).num_sge = 1;
            }
            returned
        }
    }
}

#[diagnostic::do_not_recommend]
impl<K: Undirected> Operation for K {
    const QUEUE: Queue = Queue::Send;
    const WRITES: bool = <K as Kind>::WRITES;
    const TAKES_RECEIVE: bool = takes_receive(K::OPCODE);
    const VERB: &'static str = "ibv_post_send";

    #[inline]
    fn check(&self, limits: &Limits, list: &[ffi::ibv_sge]) -> TransportResult<()> {
        check_send(self, limits, list)
    }

    #[cold]
    fn explain_buffer(limits: &Limits, error: Error) -> Error {
        limits.messages.explain(K::OPCODE, error)
    }

    #[inline(always)]
    unsafe fn post(
        self,
        target: &Target,
        prepared: *mut Templates,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        // SAFETY: as for receives.
        unsafe {
            let request = &raw mut (*prepared).sends[const { index_of(K::OPCODE) }];
            (*request).wr_id = wr_id;
            if let [piece] = list {
                if piece.length == 0 {
                    return post_empty(self, target, prepared, wr_id);
                }
                (*prepared).piece = *piece;
            } else {
                (*request).num_sge = without_empty(list) as c_int;
                (*request).sg_list = list.as_mut_ptr();
            }
            let flags = (*request).send_flags;
            let changes = changes(&self);
            if changes != 0 {
                (*request).send_flags = flags ^ changes;
            }
            if const { borrows::<K>() } {
                (*request).opcode = K::OPCODE;
            }
            self.fill(request);
            let returned =
                (target.post_send)(target.queue_pair, request, &raw mut (*prepared).bad_send);
            if list.len() != 1 {
                (*request).sg_list = &raw mut (*prepared).piece;
                (*request).num_sge = 1;
            }
            if changes != 0 {
                (*request).send_flags = flags;
            }
            if const { borrows::<K>() } {
                (*request).opcode = const { OPCODES[index_of(K::OPCODE)] };
            }
            returned
        }
    }
}

#[inline]
pub(super) fn check_send<K: Kind>(
    kind: &K,
    limits: &Limits,
    list: &[ffi::ibv_sge],
) -> TransportResult<()> {
    if !kind.is_allowed(limits.reliable, limits.private_reads) {
        return Err(refused(limits).into());
    }
    elements("ibv_post_send", list, limits.max_send_sge)?;
    Ok(check(&limits.messages, kind, list)?)
}

/// Compared with the prepared request. `unsignaled` has no effect: only a completion tells the channel that a request
/// ended.
#[inline(always)]
fn changes<K: Kind>(kind: &K) -> u32 {
    kind.flags() & !SIGNALED
}

/// Posts without the empty piece: see [`without_empty`].
///
/// # Safety
///
/// As for [`post`](Operation::post).
#[cold]
#[inline(never)]
unsafe fn post_empty<O: Operation>(
    operation: O,
    target: &Target,
    prepared: *mut Templates,
    wr_id: u64,
) -> c_int {
    // SAFETY: the caller keeps the contract, and there is no memory.
    unsafe { operation.post(target, prepared, wr_id, &mut []) }
}

#[inline]
fn elements(verb: &'static str, list: &[ffi::ibv_sge], most: u32) -> TransportResult<()> {
    // Every channel has room for one piece. The compiler decides this for a list of known length.
    if list.len() > 1 && list.len() > most as usize && count_filled(list) > most as usize {
        return Err(too_many(verb, count_filled(list), most).into());
    }
    Ok(())
}

#[cold]
pub(super) fn too_many(verb: &'static str, count: usize, most: u32) -> Error {
    Error::out_of_range(verb, "the number of pieces", count as u64, 0, most.into())
}

#[cold]
fn refused(limits: &Limits) -> Error {
    const VERB: &str = "ibv_post_send";
    if limits.reliable {
        let reason = "on iWARP the peer answers a read by writing, so a read fills only memory that \
                      peers may write: read into a slice of a SharedMemoryRegion with \
                      AccessFlags::REMOTE_WRITE";
        return Error::invalid(VERB, reason);
    }
    let reason = "only a reliable connection has reads and atomics";
    Error::with_reason(VERB, libc::EOPNOTSUPP, reason)
}
