use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::batch::Batch;
use super::halves::SendHalf;
use super::prepared_request::RawRequest;
use crate::base::{Error, Leak, QueuePairType, Result, debug, ffi, setters};
use crate::verbs::memory::{
    AccessFlags, InMemory, MemoryWindow, MemoryWindowType, Peers, Region, RemoteMemoryRegion,
};
use crate::verbs::queue_pair::{QueuePair, Transport};

/// `struct ibv_mw_bind_info`: the memory that a window will be bound to, and the access it will allow.
///
/// The window cannot outlive a borrowed region (`'res`). It keeps shared regions alive: those of its current and its
/// previous binding, until it is deallocated.
#[must_use]
#[doc(alias = "ibv_mw_bind_info")]
pub struct WindowBinding<'res> {
    info: ffi::ibv_mw_bind_info,
    flags: u32,
    shared: Option<Arc<dyn Leak + Send + Sync + 'res>>,
    borrowed: PhantomData<&'res ()>,
}

// SAFETY: it refers to a region that is `Sync`, borrowed or shared.
unsafe impl Send for WindowBinding<'_> {}
// SAFETY: as above.
unsafe impl Sync for WindowBinding<'_> {}

const VERB: &str = "ibv_bind_mw";

impl<'res> WindowBinding<'res> {
    /// Binds `range` of `region` for `access`. The region is a [`SharedMemoryRegion`](crate::SharedMemoryRegion) or a
    /// [`RawMemoryRegion`](crate::memory::RawMemoryRegion), registered with [`AccessFlags::MW_BIND`].
    ///
    /// The range is in elements, or in bytes for a [`RawMemoryRegion`](crate::memory::RawMemoryRegion). The access is
    /// remote read, write and atomic, and [`ZERO_BASED`](AccessFlags::ZERO_BASED) if peers address the window from 0,
    /// which not all devices support. The region stays borrowed while the window lives; [`shared`](Self::shared) avoids
    /// that.
    ///
    /// ```compile_fail,E0505
    /// # use ibverbs::memory::MemoryWindow;
    /// # use ibverbs::operation::WindowBinding;
    /// # use ibverbs::{AccessFlags, QueuePair, Result, SharedMemoryRegion};
    /// # fn f<'w>(
    /// #     queue_pair: &mut QueuePair<'_>,
    /// #     region: SharedMemoryRegion<'w, u8>,
    /// #     mut window: MemoryWindow<'w>,
    /// # ) -> Result<()> {
    /// # let mut window = window;
    /// let binding = WindowBinding::new(&region, .., AccessFlags::REMOTE_READ)?;
    /// // SAFETY: the window lives until the completion of 1 was polled.
    /// unsafe { queue_pair.post_bind_mw(&mut window, binding, 1)? };
    /// drop(region); // the window is still bound to it
    /// drop(window);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// An empty range closes a window of type 1, but the region may count as bound until the window is deallocated.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds; `access` has other flags; or the region lacks
    ///    [`MW_BIND`](AccessFlags::MW_BIND), or [`LOCAL_WRITE`](AccessFlags::LOCAL_WRITE), which remote write and
    ///    atomic access require.
    pub fn new<M: InMemory + Peers + Sync>(
        region: &'res Region<'_, M>,
        range: impl RangeBounds<usize>,
        access: AccessFlags,
    ) -> Result<Self> {
        Self::of(region, range, access)
    }

    /// [`new`](Self::new), for a region that the window keeps alive.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub fn shared<M: InMemory + Peers + Send + Sync + 'res>(
        region: Arc<Region<'res, M>>,
        range: impl RangeBounds<usize>,
        access: AccessFlags,
    ) -> Result<Self> {
        let binding = Self::of(&region, range, access)?;
        Ok(Self { shared: Some(region), ..binding })
    }

    fn of<M: InMemory + Peers>(
        region: &Region<'_, M>,
        range: impl RangeBounds<usize>,
        access: AccessFlags,
    ) -> Result<Self> {
        const WRITE: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_ATOMIC);
        const ALLOWED: AccessFlags =
            WRITE.union(AccessFlags::REMOTE_READ).union(AccessFlags::ZERO_BASED);
        let part = region.remote_range(range)?;
        let reason = "a window is for remote read, write and atomic access";
        Error::invalid_if(!ALLOWED.contains(access), VERB, reason)?;
        let reason = "the region was not registered for windows: it needs MW_BIND";
        Error::invalid_if(!region.access().contains(AccessFlags::MW_BIND), VERB, reason)?;
        if access.intersects(WRITE) && !region.access().contains(AccessFlags::LOCAL_WRITE) {
            let reason = "remote write and remote atomic access need LOCAL_WRITE of the region";
            return Err(Error::invalid(VERB, reason));
        }
        let RemoteMemoryRegion { address: addr, length, .. } = part;
        let (mr, mw_access_flags) = (region.as_raw(), access.bits());
        let info = ffi::ibv_mw_bind_info { mr, addr, length, mw_access_flags };
        Ok(Self {
            info,
            flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            shared: None,
            borrowed: PhantomData,
        })
    }

    setters! { self,
        /// `IBV_SEND_FENCE`: the device begins the binding when all earlier reads and atomics have completed.
        #[doc(alias = "IBV_SEND_FENCE")]
        fence() => self.flags |= ffi::ibv_send_flags::IBV_SEND_FENCE.0;

        /// A successful binding has no completion, unless the queue pair signals all requests.
        unsignaled() => self.flags &= !ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }

    /// The C struct.
    pub fn as_raw(&self) -> &ffi::ibv_mw_bind_info {
        &self.info
    }
}

debug! {
    WindowBinding<'_>, self,
    addr: format_args!("{:#x}", self.info.addr), length: self.info.length,
    access: AccessFlags::from_bits_retain(self.info.mw_access_flags), ..
}

fn check(window: &MemoryWindow<'_>, info: &ffi::ibv_mw_bind_info) -> Result<()> {
    // SAFETY: the binding holds the region.
    if unsafe { (*info.mr).pd } != window.protection_domain().as_raw() {
        let reason = "the window and the region are of different protection domains";
        return Err(Error::with_reason(VERB, libc::EPERM, reason));
    }
    if info.length == 0 && window.window_type() != MemoryWindowType::Type1 {
        let reason = "a window of type 2 is closed by an invalidation";
        return Err(Error::invalid(VERB, reason));
    }
    Ok(())
}

fn next_rkey(window: &MemoryWindow<'_>) -> u32 {
    // SAFETY: it only computes.
    unsafe { ffi::ibv_inc_rkey(window.rkey()) }
}

fn posted<'w>(window: &mut MemoryWindow<'w>, binding: WindowBinding<'w>) -> RemoteMemoryRegion {
    window.hold(binding.shared);
    let zero_based = AccessFlags::ZERO_BASED.bits() & binding.info.mw_access_flags != 0;
    let address = if zero_based { 0 } else { binding.info.addr };
    RemoteMemoryRegion { address, length: binding.info.length, rkey: window.rkey() }
}

/// [`QueuePair::post_bind_mw`].
///
/// # Safety
///
/// As there; and nothing else posts to the send queue meanwhile.
unsafe fn bind<'w>(
    queue_pair: &QueuePair<'_, QueuePairType>,
    window: &mut MemoryWindow<'w>,
    binding: WindowBinding<'w>,
    wr_id: u64,
) -> Result<RemoteMemoryRegion> {
    if queue_pair.queue_pair_type() == QueuePairType::UnreliableDatagram {
        return Err(Error::invalid(VERB, "a UD queue pair cannot bind windows"));
    }
    let bind_info = binding.info;
    check(window, &bind_info)?;
    if window.window_type() == MemoryWindowType::Type1 {
        let mut bind = ffi::ibv_mw_bind { wr_id, send_flags: binding.flags, bind_info };
        // SAFETY: queue pair, window and region are live. The provider sets the new key.
        let returned = unsafe { ffi::ibv_bind_mw(queue_pair.as_raw(), window.as_raw(), &mut bind) };
        ffi::status(VERB, returned)?;
        return Ok(posted(window, binding));
    }
    let rkey = next_rkey(window);
    let mut request = ffi::ibv_send_wr {
        wr_id,
        opcode: ffi::ibv_wr_opcode::IBV_WR_BIND_MW,
        send_flags: binding.flags,
        ..Default::default()
    };
    request.__bindgen_anon_2.bind_mw =
        ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: window.as_raw(), rkey, bind_info };
    // SAFETY: queue pair, window and region are live; the request has no memory.
    let returned = unsafe { request.post(queue_pair.as_raw()) };
    ffi::status("ibv_post_send", returned)?;
    window.set_rkey(rkey);
    Ok(posted(window, binding))
}

/// [`QueuePair::post_invalidate_mw`].
///
/// # Safety
///
/// As there; and nothing else posts to the send queue meanwhile.
unsafe fn invalidate(
    queue_pair: &QueuePair<'_, QueuePairType>,
    window: &mut MemoryWindow<'_>,
    wr_id: u64,
) -> Result<()> {
    const VERB: &str = "ibv_post_send";
    let reason = "a window of type 1 is not invalidated, but bound to something else";
    Error::invalid_if(window.window_type() == MemoryWindowType::Type1, VERB, reason)?;
    if queue_pair.queue_pair_type() == QueuePairType::UnreliableDatagram {
        return Err(Error::invalid(VERB, "a UD queue pair has no windows"));
    }
    let mut request = ffi::ibv_send_wr {
        wr_id,
        opcode: ffi::ibv_wr_opcode::IBV_WR_LOCAL_INV,
        send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
        ..Default::default()
    };
    request.__bindgen_anon_1.invalidate_rkey = window.rkey();
    // SAFETY: the queue pair is live; the request has no memory.
    ffi::status(VERB, unsafe { request.post(queue_pair.as_raw()) })
}

macro_rules! window_methods {
    () => {
        /// `ibv_bind_mw` (type 1), `ibv_post_send` with `IBV_WR_BIND_MW` (type 2): posts a request to bind `window`.
        /// Returns the remote region that a peer needs to access it.
        ///
        /// The result may be sent over this queue pair immediately, since the device carries out later requests after
        /// this one; by other means, once the completion was polled. A failed binding leaves the window unchanged: [set
        /// its key back](MemoryWindow::set_rkey) before you bind it again.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: queue pairs of this type cannot bind; the window is of type 2, and the range empty; or the
        ///    device does not support that access for windows.
        ///  - `EPERM`: window and region are of different protection domains.
        ///  - `EOPNOTSUPP`: the device has no windows, or none of this length (mlx5: 2 GiB).
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///
        /// # Safety
        ///
        /// `wr_id` differs from the numbers of all other outstanding requests. Otherwise this completion could be taken
        /// for that of another request, whose memory the device still uses.
        #[doc(alias = "ibv_bind_mw")]
        #[doc(alias = "ibv_mw_bind")]
        #[doc(alias = "ibv_inc_rkey")]
        #[doc(alias = "IBV_WR_BIND_MW")]
        pub unsafe fn post_bind_mw<'w>(
            &mut self,
            window: &mut MemoryWindow<'w>,
            binding: WindowBinding<'w>,
            wr_id: u64,
        ) -> Result<RemoteMemoryRegion> {
            // SAFETY: the caller vouches for the number. The queue pair, or its send half, is borrowed exclusively.
            unsafe { bind(self.queue_pair().erased(), window, binding, wr_id) }
        }

        /// `ibv_post_send` with `IBV_WR_LOCAL_INV`: posts a request to close a window of type 2.
        ///
        /// After its completion the peer has no access, and the window can be bound again. To close a window of type 1,
        /// bind it to other memory or deallocate it.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the window is of type 1; or queue pairs of this type have no windows.
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///
        /// # Safety
        ///
        /// As [`post_bind_mw`](Self::post_bind_mw).
        #[doc(alias = "IBV_WR_LOCAL_INV")]
        pub unsafe fn post_invalidate_mw(
            &mut self,
            window: &mut MemoryWindow<'_>,
            wr_id: u64,
        ) -> Result<()> {
            // SAFETY: as in `post_bind_mw`.
            unsafe { invalidate(self.queue_pair().erased(), window, wr_id) }
        }
    };
}

impl<T: Transport> QueuePair<'_, T> {
    window_methods!();
}

impl<T: Transport> SendHalf<'_, '_, T> {
    window_methods!();
}

impl<T: Transport> Batch<'_, T> {
    /// `ibv_wr_bind_mw`: binds a window of type 2: see [`QueuePair::post_bind_mw`].
    ///
    /// If the batch is not posted in the end, [set the window's key back](MemoryWindow::set_rkey).
    ///
    /// # Errors
    ///
    /// Those of [`add`](Self::add), and:
    ///
    ///  - `EINVAL`: the window is of type 1, or the range empty.
    ///  - `EPERM`: window and region are of different protection domains.
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post_bind_mw`]; and the window is not deallocated before the batch is posted.
    #[doc(alias = "ibv_wr_bind_mw")]
    pub unsafe fn bind_mw<'w>(
        &mut self,
        window: &mut MemoryWindow<'w>,
        binding: WindowBinding<'w>,
        wr_id: u64,
    ) -> Result<RemoteMemoryRegion> {
        if window.window_type() == MemoryWindowType::Type1 {
            let reason = "a window of type 1 cannot be bound in a batch";
            return Err(Error::invalid("ibv_wr_bind_mw", reason));
        }
        check(window, &binding.info)?;
        let rkey = next_rkey(window);
        // SAFETY: the binding holds the region, and the caller the window, both of one domain. The device checks the
        // queue pair's.
        unsafe { self.bind_raw(wr_id, binding.flags, window.as_raw(), rkey, &binding.info) }?;
        window.set_rkey(rkey);
        Ok(posted(window, binding))
    }
}
