//! Whether a connection is established, for loops that watch their peers.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{QueuePairState, Result, ffi, linux};
use crate::channel::parts::PeerSign;
use crate::verbs::device::event_file;

/// The C object of a connection, for loops that ask whether it has ended: null before it is destroyed.
#[derive(Clone, Debug)]
pub(super) struct Established(Arc<Shared>);

#[derive(Debug)]
struct Shared(Mutex<*mut ffi::rdma_cm_id>);

// SAFETY: librdmacm's functions may be called on any thread.
unsafe impl Send for Shared {}
// SAFETY: as above; the lock guards the pointer.
unsafe impl Sync for Shared {}

impl Established {
    /// # Safety
    ///
    /// The identifier is live until [`end`](Self::end) has returned.
    pub(super) unsafe fn new(raw: *mut ffi::rdma_cm_id) -> Self {
        Self(Arc::new(Shared(Mutex::new(raw))))
    }

    /// The identifier is about to be destroyed.
    pub(super) fn end(&self) {
        *self.lock() = ptr::null_mut();
    }

    fn lock(&self) -> MutexGuard<'_, *mut ffi::rdma_cm_id> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kernel says whether the connection is established, and reads no event: those are the program's.
impl PeerSign for Established {
    fn watch(&self, peers: BorrowedFd<'_>, number: u64) -> Result<()> {
        let raw = self.lock();
        // SAFETY: a live identifier has a live channel, which is closed after it is destroyed; that waits for the lock.
        let file = unsafe {
            let Some(id) = raw.as_ref() else { return Ok(()) };
            BorrowedFd::borrow_raw((*id.channel).fd)
        };
        event_file::watch(peers, file, linux::EPOLLIN | linux::EPOLLET, number)
    }

    /// Holds the lock over the question, for which only the end of the connection's own object waits.
    fn is_gone(&self) -> bool {
        let raw = self.lock();
        let state = QueuePairState::ReadyToSend.into();
        let mut attributes = ffi::ibv_qp_attr { qp_state: state, ..Default::default() };
        // SAFETY: an identifier that is not null is live while the lock is held; both others are ours.
        raw.is_null() || unsafe { ffi::rdma_init_qp_attr(*raw, &mut attributes, &mut 0) } != 0
    }
}
