//! Batches of the extended posting interface: many requests with one doorbell, or none of them.
//!
//! C brackets a batch between `ibv_wr_start` and `ibv_wr_complete` or `ibv_wr_abort`, and most providers
//! hold the lock of the send queue in between. A guard object could be forgotten, and every later post
//! would wait for ever. So there is no guard: [`QueuePair::batch`] calls a closure with a [`Batch`] that
//! lives only during the call, and ends the bracket however the closure returns.
//!
//! The module avoids two more traps of C. The setters (`ibv_wr_set_sge` ..) change the request that was
//! added last, so no method calls a setter alone. And a function that a provider lacks is a null pointer in
//! C. So the set of available functions is determined once, when the queue pair is built, and each request
//! checks its functions against this set before it calls any of them.
//!
//! A queue pair without the interface has a batch too: see `batch_list`.

use std::fmt;
use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::ptr::{self, NonNull};

use super::batch_data::private::Data;
use super::batch_list::Collector;
use super::explain::explain_batch;
use super::extended_operations::function;
use super::extended_operations::{SendFlags, SendOperations};
use super::send::check_number;
use crate::error::{Error, Result};
use crate::ffi;
use crate::queue_pair::{AddressHandle, QueuePair};

/// Requests that are about to be posted together: see [`QueuePair::batch`].
///
/// Each method adds one request, under its number and with its flags. It has a completion unless the flags
/// contain [`SendFlags::UNSIGNALED`]. A method that fails adds nothing; the other requests can still be
/// posted.
pub struct Batch<'q> {
    raw: *mut ffi::ibv_qp_ex,
    /// The functions that are available, and [`function::READY`].
    available: u64,
    /// The current value of `wr_flags`.
    flags: u32,
    max_sge: u32,
    max_inline_data: u32,
    destination: Option<(*mut ffi::ibv_ah, u32, u32)>,
    #[cfg(feature = "mlx5")]
    dc_target: Option<DcDestination>,
    shared_receive_queue: Option<u32>,
    queue_pair: PhantomData<&'q mut ()>,
}

/// The target of the requests of a DC initiator.
#[cfg(feature = "mlx5")]
#[derive(Clone, Copy)]
struct DcDestination {
    queue_pair: *mut ffi::mlx5dv_qp_ex,
    path: *mut ffi::ibv_ah,
    number: u32,
    access_key: u64,
    stream: Option<u16>,
}

/// Aborts a batch unless it is forgotten, or drops its collector.
struct Abort {
    raw: *mut ffi::ibv_qp_ex,
    is_list: bool,
}

impl Drop for Abort {
    #[inline]
    fn drop(&mut self) {
        if self.is_list {
            // SAFETY: the collector is live, and nothing uses it any more.
            unsafe { ptr::drop_in_place(self.raw.cast::<Collector>()) }
        } else {
            // SAFETY: the queue pair is live and in a batch, and a queue pair of this interface has the
            // function.
            unsafe { (*self.raw).wr_abort.unwrap_unchecked()(self.raw) }
        }
    }
}

impl Batch<'_> {
    /// A batch whose requests are added by the functions of `raw`. `wr_flags` there must be `SIGNALED`.
    #[inline]
    fn new(raw: *mut ffi::ibv_qp_ex, available: u64, queue_pair: &QueuePair<'_>) -> Self {
        Self {
            raw,
            available,
            flags: SendFlags::empty().to_c(),
            max_sge: queue_pair.max_send_sge(),
            max_inline_data: queue_pair.max_inline_data(),
            destination: None,
            #[cfg(feature = "mlx5")]
            dc_target: None,
            shared_receive_queue: None,
            queue_pair: PhantomData,
        }
    }

    /// Posts the requests that `build` adds.
    ///
    /// # Safety
    ///
    /// Nothing else posts sends to `queue_pair` meanwhile, and the caller keeps the contract of
    /// `QueuePair::post`.
    #[inline]
    pub(in crate::queue_pair) unsafe fn run<T, E: From<Error>>(
        queue_pair: &QueuePair<'_>,
        build: impl FnOnce(&mut Batch<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut collector = MaybeUninit::uninit();
        let (raw, available, is_list) = match queue_pair.as_raw_extended() {
            Some(extended) => (extended.as_ptr(), queue_pair.extended_functions(), false),
            None => {
                let collector = collector.write(Collector::new(queue_pair.max_send_wr()));
                let collector = NonNull::from(collector);
                let available = Collector::functions(collector, queue_pair);
                (collector.cast().as_ptr(), available, true)
            }
        };
        // One call of `build` for both, so that the compiler inlines it.
        let mut batch = Batch::new(raw, available, queue_pair);
        let abort = Abort { raw, is_list };
        if !is_list {
            // SAFETY: the queue pair is live, and one of this interface has the function.
            unsafe {
                (*raw).wr_start.unwrap_unchecked()(raw);
                (*raw).wr_flags = batch.flags;
            }
        }
        let value = build(&mut batch)?;
        if is_list {
            // SAFETY: it was written above, and `batch`, which has a pointer to it too, is not used any more.
            // The caller vouches for the rest. `abort` drops it.
            unsafe { (*raw.cast::<Collector>()).post(queue_pair)? };
            return Ok(value);
        }
        mem::forget(abort);
        // SAFETY: as above.
        let returned = unsafe { (*raw).wr_complete.unwrap_unchecked()(raw) };
        if returned == 0 { Ok(value) } else { Err(explain_batch(queue_pair, returned).into()) }
    }

    /// The destination of the datagrams that are added from here on: the path, and the number and the Q_Key
    /// of the peer's queue pair. A UD queue pair needs it before its first request. The contract of
    /// [`QueuePair::batch`] covers the address handle too.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    ///  - `EOPNOTSUPP`: the queue pair does not send datagrams.
    #[doc(alias = "ibv_wr_set_ud_addr")]
    #[inline]
    pub fn to(&mut self, path: &AddressHandle<'_>, number: u32, qkey: u32) -> Result<()> {
        check_number(number)?;
        self.need(function::SET_UD_ADDRESS)?;
        self.destination = Some((path.as_raw(), number, qkey));
        self.available |= function::READY;
        Ok(())
    }

    /// The number of the peer's shared receive queue for the requests that are added from here on. A
    /// sending XRC queue pair needs it before its first request.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the queue pair is not of that type.
    #[doc(alias = "ibv_wr_set_xrc_srqn")]
    #[inline]
    pub fn shared_receive_queue(&mut self, number: u32) -> Result<()> {
        self.need(function::SET_XRC_SRQ)?;
        self.shared_receive_queue = Some(number);
        self.available |= function::READY;
        Ok(())
    }

    /// `mlx5dv_wr_set_dc_addr`: the destination of the requests that are added from here on, on a DC initiator
    /// ([`dc_initiator`](crate::QueuePairBuilder::dc_initiator)), which needs it before its first request:
    /// the path, and the number and the access key of a [`DcTarget`](crate::DcTarget) of the peer. The
    /// contract of [`QueuePair::batch`] covers the address handle too.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    ///  - `EOPNOTSUPP`: the queue pair is not a DC initiator.
    #[cfg(feature = "mlx5")]
    #[doc(alias = "mlx5dv_wr_set_dc_addr")]
    #[inline]
    pub fn to_dc(&mut self, path: &AddressHandle<'_>, number: u32, access_key: u64) -> Result<()> {
        self.set_dc_target(function::SET_DC_ADDRESS, path, number, access_key, None)
    }

    /// `mlx5dv_wr_set_dc_addr_stream`: as [`to_dc`](Self::to_dc), on one of the initiator's streams, whose
    /// requests the device carries out in order.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    ///  - `EOPNOTSUPP`: the queue pair is not a DC initiator with [streams](crate::DcStreams).
    #[cfg(feature = "mlx5")]
    #[doc(alias = "mlx5dv_wr_set_dc_addr_stream")]
    #[inline]
    pub fn to_dc_on_stream(
        &mut self,
        path: &AddressHandle<'_>,
        number: u32,
        access_key: u64,
        stream: u16,
    ) -> Result<()> {
        self.set_dc_target(function::SET_DC_STREAM, path, number, access_key, Some(stream))
    }

    #[cfg(feature = "mlx5")]
    #[inline]
    fn set_dc_target(
        &mut self,
        function: u64,
        path: &AddressHandle<'_>,
        number: u32,
        access_key: u64,
        stream: Option<u16>,
    ) -> Result<()> {
        check_number(number)?;
        self.need(function)?;
        // SAFETY: the queue pair is live, and one with this function is a DC initiator of mlx5.
        let queue_pair = unsafe { ffi::mlx5dv_qp_ex_from_ibv_qp_ex(self.raw) };
        let path = path.as_raw();
        self.dc_target = Some(DcDestination { queue_pair, path, number, access_key, stream });
        self.available |= function::READY;
        Ok(())
    }

    /// Whether all these functions are available.
    #[inline]
    pub(super) fn need(&self, functions: u64) -> Result<()> {
        if self.available & functions != functions {
            return Err(function::lacking(functions & !self.available));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut ffi::ibv_qp_ex {
        self.raw
    }

    #[inline]
    pub(super) fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Whether the elements of a list must all have one length.
    #[inline]
    pub(super) fn needs_one_length(&self) -> bool {
        self.available & function::ONE_LENGTH != 0
    }

    #[inline]
    pub(super) fn max_inline_data(&self) -> u32 {
        self.max_inline_data
    }

    /// Stores the number and the flags of the next request.
    #[inline]
    pub(super) fn begin(&mut self, wr_id: u64, flags: SendFlags, of_the_data: u32) {
        // SAFETY: the queue pair is live, and nothing else accesses it during a batch.
        unsafe { (*self.raw).wr_id = wr_id };
        self.set_flags(flags.to_c() | of_the_data);
    }

    /// Stores the flags, if they have changed. Mostly all requests have the same flags, and then the
    /// compiler stores them only once.
    #[inline]
    fn set_flags(&mut self, flags: u32) {
        if self.flags != flags {
            self.flags = flags;
            // SAFETY: as above.
            unsafe { (*self.raw).wr_flags = flags };
        }
    }

    /// Adds a request with data. Checks everything before the first call.
    #[inline]
    pub(super) fn add(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        operation: SendOperations,
        data: impl Data,
        call: impl FnOnce(*mut ffi::ibv_qp_ex),
    ) -> Result<()> {
        self.need(operation.bits() | data.function() | function::READY)?;
        data.check(self)?;
        self.begin(wr_id, flags, flags_of(&data));
        call(self.raw);
        self.set_peer();
        // SAFETY: a request was just added, and the function is there.
        unsafe { data.set(self.raw) };
        Ok(())
    }

    /// Sets the destination of the request that was just added, on queue pairs without a fixed peer.
    #[inline]
    pub(super) fn set_peer(&mut self) {
        let raw = self.raw;
        // SAFETY: the functions are there, or neither would be set; the caller of `run` keeps the
        // address handle.
        unsafe {
            if let Some((ah, number, qkey)) = self.destination {
                (*raw).wr_set_ud_addr.unwrap_unchecked()(raw, ah, number, qkey);
            }
            if let Some(number) = self.shared_receive_queue {
                (*raw).wr_set_xrc_srqn.unwrap_unchecked()(raw, number);
            }
            #[cfg(feature = "mlx5")]
            if let Some(to) = self.dc_target {
                let qp = to.queue_pair;
                match to.stream {
                    None => {
                        let set = (*qp).wr_set_dc_addr.unwrap_unchecked();
                        set(qp, to.path, to.number, to.access_key);
                    }
                    Some(stream) => {
                        let set = (*qp).wr_set_dc_addr_stream.unwrap_unchecked();
                        set(qp, to.path, to.number, to.access_key, stream);
                    }
                }
            }
        }
    }
}

#[inline]
fn flags_of<D: Data>(_: &D) -> u32 {
    D::FLAGS
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").finish_non_exhaustive()
    }
}
