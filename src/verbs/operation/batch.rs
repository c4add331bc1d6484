//! Batches: requests that are posted together by the extended interface (`ibv_wr_start` ..).
//!
//! Most providers lock the send queue between `ibv_wr_start` and `ibv_wr_complete` or `ibv_wr_abort`. A forgotten guard
//! object would block later posts for ever. So [`QueuePair::batch`] calls a closure, and ends the bracket however that
//! returns.
//!
//! The setters (`ibv_wr_set_sge` ..) change the request that was added last: no method calls a setter alone. A function
//! that a provider lacks is a null pointer: each request is checked against the queue pair's set of functions.
//!
//! Without the interface, requests go to the [`Collector`].

#[cfg(feature = "channel")]
use std::ffi::c_int;
use std::marker::PhantomData;
use std::{mem, ptr};

use super::encode::Collector;
use super::explain::explain_batch;
use crate::base::{Error, QueuePairType, Result, debug, err_from_call, ffi};
use crate::verbs::memory::Gathered;
use crate::verbs::operation::sealed::{Kind, Request};
#[cfg(feature = "channel")]
use crate::verbs::operation::without_empty;
use crate::verbs::operation::{Adds, INLINE, SIGNALED, check};
use crate::verbs::queue_pair::{MessageLimits, QueuePair, Rc, SendOperations, Transport, function};

/// Requests that are posted together: see [`QueuePair::batch`].
pub struct Batch<'q, T = Rc> {
    raw: *mut ffi::ibv_qp_ex,
    /// 0 if there is a collector, and then `raw` is null.
    available: u64,
    flags: u32,
    max_sge: u32,
    limits: &'q MessageLimits,
    collector: Option<&'q mut Collector>,
    queue_pair: PhantomData<(&'q mut (), T)>,
}

struct Abort(*mut ffi::ibv_qp_ex);

impl Drop for Abort {
    #[inline]
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the queue pair is live and in a batch, so it has the function.
            unsafe { (*self.0).wr_abort.unwrap_unchecked()(self.0) }
        }
    }
}

impl<T: Transport> Batch<'_, T> {
    /// # Safety
    ///
    /// Nothing else posts sends to `queue_pair`, and the caller keeps the contract of `QueuePair::post`.
    #[inline]
    pub(super) unsafe fn run<V, E: From<Error>>(
        queue_pair: &QueuePair<'_, QueuePairType>,
        build: impl FnOnce(&mut Batch<'_, T>) -> Result<V, E>,
    ) -> Result<V, E> {
        let mut collector = None;
        let (raw, available) = match queue_pair.as_raw_extended() {
            Some(extended) => (extended.as_ptr(), queue_pair.extended_functions()),
            None => {
                collector = Some(Collector::new(queue_pair));
                (ptr::null_mut(), 0)
            }
        };
        // One call for both cases: the compiler inlines it.
        let mut batch = Batch::<'_, T> {
            raw,
            available,
            flags: SIGNALED,
            max_sge: queue_pair.max_send_sge(),
            limits: queue_pair.message_limits(),
            collector: collector.as_deref_mut(),
            queue_pair: PhantomData,
        };
        let abort = Abort(raw);
        if !raw.is_null() {
            // SAFETY: the queue pair is live and has the interface.
            unsafe {
                (*raw).wr_start.unwrap_unchecked()(raw);
                (*raw).wr_flags = batch.flags;
            }
        }
        let value = build(&mut batch)?;
        if let Some(collector) = &mut collector {
            // SAFETY: the caller vouches for it.
            unsafe { collector.post(queue_pair)? };
            return Ok(value);
        }
        mem::forget(abort);
        // SAFETY: as above.
        let returned = unsafe { (*raw).wr_complete.unwrap_unchecked()(raw) };
        if returned == 0 { Ok(value) } else { Err(explain_batch(queue_pair, returned).into()) }
    }

    /// `ibv_wr_send`, `ibv_wr_rdma_write` .., `ibv_wr_set_sge` ..: adds a request under the number `wr_id`.
    ///
    /// It has a completion unless it is [`unsignaled`](crate::SendWorkRequest::unsignaled). If this fails, nothing is added,
    /// and the other requests can still be posted.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the queue pair was not built for the operation; its provider takes no data in that form; or, on
    ///    Soft-RoCE, the pieces of a list differ in length (rxe of v55.0 would send a wrong length).
    ///  - `EINVAL`: there are more pieces or more inline data than the queue pair was built for, or more bytes than the
    ///    port sends as one message; the peer's memory is too short, or not aligned for an atomic; the
    ///    [destination](crate::SendWorkRequest::to) is missing.
    ///  - `ENOMEM`, without the extended interface: the send queue is full
    ///    ([`QueueFull`](crate::ErrorKind::QueueFull)), or there is no memory.
    #[doc(alias = "ibv_wr_send")]
    #[doc(alias = "ibv_wr_rdma_write")]
    #[doc(alias = "ibv_wr_rdma_read")]
    #[doc(alias = "ibv_wr_atomic_cmp_swp")]
    #[doc(alias = "ibv_wr_atomic_fetch_add")]
    #[doc(alias = "ibv_wr_local_inv")]
    #[doc(alias = "ibv_wr_set_sge")]
    #[doc(alias = "ibv_wr_set_sge_list")]
    #[inline(always)]
    pub fn add<R: Adds<T>>(&mut self, request: R, wr_id: u64) -> Result<()> {
        let (kind, mut buffer) = request.split();
        let mut list = match <R as Request>::list(&mut buffer) {
            Ok(list) => list,
            Err(error) => {
                let opcode = <R::Operation as Kind>::OPCODE;
                return err_from_call(self.limits.explain(opcode, error));
            }
        };
        let list = list.as_mut();
        check(self.limits, &kind, list)?;
        let functions = functions_of(&kind, list);
        if self.available & functions != functions {
            let missing = functions & !self.available;
            return add_otherwise(
                self.collector.as_deref_mut(),
                missing,
                self.max_sge,
                kind,
                wr_id,
                list,
            );
        }
        if list.len() > 1 {
            self.check_list(&kind, list)?;
        }
        let flags = SIGNALED ^ kind.flags();
        self.begin(wr_id, flags);
        let raw = self.raw;
        // SAFETY: the queue pair is live, in a batch, and has the functions. The buffer lives until this returns; the
        // caller of `run` vouches for later.
        unsafe {
            kind.emit(raw);
            kind.emit_destination(raw);
            match list {
                _ if !R::Operation::HAS_DATA => {}
                [one] if flags & INLINE == 0 => {
                    // Keeping the first list across the calls would store it in memory.
                    let mut again = <R as Request>::list(&mut buffer);
                    let one = again
                        .as_mut()
                        .ok()
                        .and_then(|list| list.as_mut().first().copied())
                        .unwrap_or(*one);
                    (*raw).wr_set_sge.unwrap_unchecked()(raw, one.lkey, one.addr, one.length);
                }
                list => set_data(raw, flags & INLINE != 0, list),
            }
        }
        Ok(())
    }

    #[inline]
    fn check_list<K: Kind>(&self, kind: &K, list: &[ffi::ibv_sge]) -> Result<()> {
        if kind.flags() & INLINE != 0 {
            return Ok(());
        }
        check_count(list, self.max_sge)?;
        let needs_one_length = self.available & function::ONE_LENGTH != 0;
        if needs_one_length && list.iter().any(|element| element.length != list[0].length) {
            return err_from_call(different_lengths());
        }
        Ok(())
    }

    /// `ibv_wr_bind_mw`. The flags are C's.
    ///
    /// # Safety
    ///
    /// The window and the region in `info` are of the queue pair's domain, and live until the completion was polled.
    pub(super) unsafe fn bind_raw(
        &mut self,
        wr_id: u64,
        flags: u32,
        window: *mut ffi::ibv_mw,
        rkey: u32,
        info: &ffi::ibv_mw_bind_info,
    ) -> Result<()> {
        let operation = SendOperations::BIND_MEMORY_WINDOW.bits();
        if let Some(collector) = &mut self.collector {
            need(collector.available(), operation)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_BIND_MW;
            let mut request =
                ffi::ibv_send_wr { wr_id, opcode, send_flags: flags, ..Default::default() };
            request.__bindgen_anon_2.bind_mw =
                ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_1 { mw: window, rkey, bind_info: *info };
            return collector.add_raw(request);
        }
        need(self.available, operation)?;
        self.begin(wr_id, flags);
        // SAFETY: the queue pair is live, in a batch, and has the function.
        unsafe { (*self.raw).wr_bind_mw.unwrap_unchecked()(self.raw, window, rkey, info) };
        Ok(())
    }

    /// `mlx5dv_wr_mr_list`: lets `key` name these pieces, one behind the other from address 0, with this access.
    ///
    /// Later requests of this queue pair can use the key. The queue pair was built [for
    /// it](crate::QueuePairBuilder::extended_with_memory_keys).
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the queue pair was not built for it.
    ///  - `EINVAL`: no pieces, or more than the key can name.
    ///
    /// # Safety
    ///
    /// While the key names the pieces, they stay registered, and their memory fulfils the conditions of
    /// [`RawMemoryRegion::new`](crate::memory::RawMemoryRegion::new) under this access. The key lives until the
    /// completion was polled.
    #[cfg(feature = "mlx5")]
    #[doc(alias = "mlx5dv_wr_mr_list")]
    pub unsafe fn set_memory_key(
        &mut self,
        key: &crate::verbs::memory::MemoryKey<'_>,
        access: crate::verbs::memory::AccessFlags,
        pieces: &[crate::verbs::memory::GatherElement<'_>],
        wr_id: u64,
    ) -> Result<()> {
        const VERB: &str = "mlx5dv_wr_mr_list";
        need(self.available, function::SET_MEMORY_KEY)?;
        let most = key.max_entries();
        let Some(count) =
            u16::try_from(pieces.len()).ok().filter(|count| (1..=most).contains(count))
        else {
            let (what, count) = ("the number of pieces", pieces.len() as u64);
            return Err(Error::out_of_range(VERB, what, count, 1, most.into()));
        };
        self.begin(wr_id, SIGNALED | INLINE);
        // SAFETY: the queue pair is live, in a batch, and of mlx5, as it has the function. The caller vouches for key
        // and pieces, which are only read.
        unsafe {
            let direct = ffi::mlx5dv_qp_ex_from_ibv_qp_ex(self.raw);
            let set = (*direct).wr_mr_list.unwrap_unchecked();
            set(direct, key.as_raw(), access.bits(), count, pieces.as_ptr().cast_mut().cast());
        }
        Ok(())
    }

    #[inline(always)]
    fn begin(&mut self, wr_id: u64, flags: u32) {
        // SAFETY: the queue pair is live, and in this batch.
        unsafe { (*self.raw).wr_id = wr_id };
        // With the same flags throughout, the compiler stores them once.
        if self.flags != flags {
            self.flags = flags;
            // SAFETY: as above.
            unsafe { (*self.raw).wr_flags = flags };
        }
    }
}

/// Takes no reference to the batch, which would then be kept in memory.
#[cold]
#[inline(never)]
fn add_otherwise<K: Kind>(
    collector: Option<&mut Collector>,
    functions: u64,
    max_sge: u32,
    kind: K,
    wr_id: u64,
    list: &[ffi::ibv_sge],
) -> Result<()> {
    let Some(collector) = collector else { return Err(function::unsupported(functions)) };
    need(collector.available(), functions)?;
    if kind.flags() & INLINE == 0 {
        check_count(list, max_sge)?;
    }
    collector.add(&kind, wr_id, list)
}

#[inline(always)]
fn functions_of<K: Kind>(kind: &K, list: &[ffi::ibv_sge]) -> u64 {
    let data = match list.len() {
        _ if !K::HAS_DATA => 0,
        _ if kind.flags() & INLINE != 0 => function::SET_INLINE,
        1 => function::SET_SGE,
        _ => function::SET_SGE_LIST,
    };
    K::EXTENDED.bits() | kind.destination_function() | data
}

#[inline]
fn need(available: u64, functions: u64) -> Result<()> {
    if available & functions != functions {
        return Err(function::unsupported(functions & !available));
    }
    Ok(())
}

#[inline]
fn check_count(list: &[ffi::ibv_sge], most: u32) -> Result<()> {
    if list.len() > most as usize {
        let about = &["ibv_wr_set_sge_list", "the number of elements"];
        return err_from_call(Error::beyond(about, list.len() as u64, most.into()));
    }
    Ok(())
}

#[cold]
fn different_lengths() -> Error {
    let reason = "the provider rxe would take the first element's length for all elements: give them one \
                  length, or use post, which is not affected";
    Error::with_reason("ibv_wr_set_sge_list", libc::EOPNOTSUPP, reason)
}

/// Posts by the extended interface, which alone has all operations of SRD, and those of DC. Nothing is posted if it fails.
///
/// # Safety
///
/// As for `ibv_post_send`. The functions are those of this queue pair.
#[cfg(feature = "channel")]
#[inline(never)]
pub(crate) unsafe fn post_by_functions<K: Kind>(
    queue_pair: *mut ffi::ibv_qp,
    kind: K,
    functions: u64,
    wr_id: u64,
    list: &mut [ffi::ibv_sge],
) -> c_int {
    let filled = without_empty(list);
    let list = &list[..filled];
    let needed = functions_of(&kind, list);
    if functions & needed != needed {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: the caller vouches for the queue pair and the memory; the functions are there, and with any of them those that
    // begin and complete a batch.
    unsafe {
        let raw = ffi::ibv_qp_to_qp_ex(queue_pair);
        (*raw).wr_start.unwrap_unchecked()(raw);
        (*raw).wr_id = wr_id;
        (*raw).wr_flags = SIGNALED | kind.flags() & !INLINE;
        kind.emit(raw);
        kind.emit_destination(raw);
        if K::HAS_DATA {
            set_data(raw, kind.flags() & INLINE != 0, list);
        }
        (*raw).wr_complete.unwrap_unchecked()(raw)
    }
}

/// # Safety
///
/// The queue pair is live, in a batch, and has the function. The pieces are as for `ibv_post_send`.
#[inline(always)]
unsafe fn set_data(raw: *mut ffi::ibv_qp_ex, is_inline: bool, list: &[ffi::ibv_sge]) {
    // SAFETY: the caller vouches for everything.
    unsafe {
        match list {
            [one] if is_inline => set_inline(raw, one),
            list if is_inline => set_inline_list(raw, list),
            [one] => (*raw).wr_set_sge.unwrap_unchecked()(raw, one.lkey, one.addr, one.length),
            list => (*raw).wr_set_sge_list.unwrap_unchecked()(raw, list.len(), list.as_ptr()),
        }
    }
}

/// # Safety
///
/// The queue pair is live, in a batch, and has the function. The bytes can be read.
#[inline(always)]
unsafe fn set_inline(raw: *mut ffi::ibv_qp_ex, bytes: &ffi::ibv_sge) {
    let address = ptr::with_exposed_provenance_mut(bytes.addr as usize);
    // SAFETY: the caller vouches for the queue pair and the function, which only reads the bytes.
    unsafe {
        (*raw).wr_set_inline_data.unwrap_unchecked()(raw, address, bytes.length as usize);
    }
}

/// `ibv_wr_set_inline_data_list` is not used: rxe sends nothing with it before rdma-core 64.
///
/// # Safety
///
/// As for [`set_inline`].
#[cold]
unsafe fn set_inline_list(raw: *mut ffi::ibv_qp_ex, list: &[ffi::ibv_sge]) {
    let pieces = list.iter().map(|piece| {
        let bytes = ptr::with_exposed_provenance::<u8>(piece.addr as usize);
        // SAFETY: the caller vouches for the bytes.
        unsafe { std::slice::from_raw_parts(bytes, piece.length as usize) }
    });
    // `check` has compared the length with the queue pair's limit; no device has a higher one.
    if let Ok(mut gathered) = Gathered::new(pieces) {
        for bytes in gathered.as_mut() {
            // SAFETY: the caller vouches for the queue pair; the bytes are here.
            unsafe { set_inline(raw, bytes) };
        }
    }
}

debug! { impl[T] Batch<'_, T>, self, collected: self.collector, .. }
