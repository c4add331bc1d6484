//! The requests of a batch.

use super::batch::Batch;
use super::batch_data::BatchData;
use super::batch_data::private::Data;
use super::extended_operations::function;
use super::extended_operations::{FlushPlacement, SendFlags, SendOperations as Op};
use super::remote::{check_atomic, check_remote};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{RemoteMemoryRegion, ScatterElement};

/// Calls a function of the queue pair.
macro_rules! call {
    ($function:ident $(, $argument:expr)*) => {
        // SAFETY: the queue pair is live, and `add` has checked that it has the function.
        |raw: *mut ffi::ibv_qp_ex| unsafe { (*raw).$function.unwrap_unchecked()(raw $(, $argument)*) }
    };
}

/// The requests. Each fails with `EOPNOTSUPP` if the queue pair was not built for the operation, or its
/// provider does not support data in that form; and with `EINVAL` if there are more elements or more inline
/// data than the queue pair was built for, or no destination was set although one is needed. On Soft-RoCE, a
/// list whose elements differ in length fails with `EOPNOTSUPP` too: rxe of v55.0 would send a wrong length.
impl Batch<'_> {
    /// `ibv_wr_send`: sends one message.
    ///
    /// # Errors
    ///
    /// Those above.
    #[doc(alias = "ibv_wr_send")]
    #[inline]
    pub fn send(&mut self, wr_id: u64, flags: SendFlags, data: impl BatchData) -> Result<()> {
        self.add(wr_id, flags, Op::SEND, data, call!(wr_send))
    }

    /// `ibv_wr_send_imm`: sends one message, with 32 bits for the completion of the receive.
    ///
    /// # Errors
    ///
    /// Those above.
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline]
    pub fn send_with_immediate(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        data: impl BatchData,
        immediate: u32,
    ) -> Result<()> {
        let operation = Op::SEND_WITH_IMMEDIATE;
        self.add(wr_id, flags, operation, data, call!(wr_send_imm, immediate.to_be()))
    }

    /// `ibv_wr_send_inv`: sends one message, and invalidates one of the peer's rkeys.
    ///
    /// # Errors
    ///
    /// Those above.
    #[doc(alias = "ibv_wr_send_inv")]
    #[inline]
    pub fn send_with_invalidate(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        data: impl BatchData,
        rkey: u32,
    ) -> Result<()> {
        self.add(wr_id, flags, Op::SEND_WITH_INVALIDATE, data, call!(wr_send_inv, rkey))
    }

    /// `ibv_wr_send_tso`: sends data as several messages of at most `segment` bytes. Each begins with a
    /// copy of `header`, which the device updates.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if the header is longer than 65535 bytes.
    #[doc(alias = "ibv_wr_send_tso")]
    pub fn send_segmented(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        data: impl BatchData,
        header: &[u8],
        segment: u16,
    ) -> Result<()> {
        let Ok(length) = u16::try_from(header.len()) else {
            let (what, value) = ("the length of the header", header.len() as u64);
            return Err(Error::out_of_range("ibv_wr_send_tso", what, value, 0, u16::MAX.into()));
        };
        let header = header.as_ptr().cast_mut().cast();
        self.add(wr_id, flags, Op::TSO, data, call!(wr_send_tso, header, length, segment))
    }

    /// `ibv_wr_rdma_write`: writes to the beginning of `remote`.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if the remote region is shorter than the data.
    #[doc(alias = "ibv_wr_rdma_write")]
    #[inline]
    pub fn write(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        data: impl BatchData,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<()> {
        let remote = remote.into();
        check_remote(&remote, data.length())?;
        let (rkey, address) = (remote.rkey(), remote.address());
        self.add(wr_id, flags, Op::WRITE, data, call!(wr_rdma_write, rkey, address))
    }

    /// `ibv_wr_rdma_write_imm`: writes to the beginning of `remote`, and consumes a receive of the peer,
    /// whose completion carries these 32 bits.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if the remote region is shorter than the data.
    #[doc(alias = "ibv_wr_rdma_write_imm")]
    #[inline]
    pub fn write_with_immediate(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        data: impl BatchData,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> Result<()> {
        let remote = remote.into();
        check_remote(&remote, data.length())?;
        let (rkey, address, immediate) = (remote.rkey(), remote.address(), immediate.to_be());
        let call = call!(wr_rdma_write_imm, rkey, address, immediate);
        self.add(wr_id, flags, Op::WRITE_WITH_IMMEDIATE, data, call)
    }

    /// `ibv_wr_rdma_read`: reads from the beginning of `remote` into `elements`, one after the other. On iWARP
    /// their region must allow [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE), because the peer answers
    /// by writing.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if the remote region is shorter than the elements.
    #[doc(alias = "ibv_wr_rdma_read")]
    #[inline]
    pub fn read(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        elements: &mut [ScatterElement<'_>],
        remote: impl Into<RemoteMemoryRegion>,
    ) -> Result<()> {
        let remote = remote.into();
        let data = ScatterElement::raw_list(elements);
        check_remote(&remote, data.length())?;
        let (rkey, address) = (remote.rkey(), remote.address());
        self.add(wr_id, flags, Op::READ, data, call!(wr_rdma_read, rkey, address))
    }

    /// `ibv_wr_atomic_cmp_swp`: sets the first 8 bytes of `remote` to `swap` if they equal `compare`.
    /// Stores their previous value in `result`.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if `result` is not 8 bytes, `remote` has fewer than 8, or its address is
    /// not a multiple of 8.
    #[doc(alias = "ibv_wr_atomic_cmp_swp")]
    #[inline]
    pub fn compare_swap(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        result: &mut ScatterElement<'_>,
        remote: impl Into<RemoteMemoryRegion>,
        (compare, swap): (u64, u64),
    ) -> Result<()> {
        let remote = remote.into();
        check_atomic(&remote, result.len().into())?;
        let (rkey, address) = (remote.rkey(), remote.address());
        let call = call!(wr_atomic_cmp_swp, rkey, address, compare, swap);
        self.add(
            wr_id,
            flags,
            Op::COMPARE_SWAP,
            ScatterElement::raw_list(std::slice::from_ref(result)),
            call,
        )
    }

    /// `ibv_wr_atomic_fetch_add`: adds `add` to the first 8 bytes of `remote`. Stores their previous value
    /// in `result`.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if `result` is not 8 bytes, `remote` has fewer than 8, or its address is
    /// not a multiple of 8.
    #[doc(alias = "ibv_wr_atomic_fetch_add")]
    #[inline]
    pub fn fetch_add(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        result: &mut ScatterElement<'_>,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> Result<()> {
        let remote = remote.into();
        check_atomic(&remote, result.len().into())?;
        let call = call!(wr_atomic_fetch_add, remote.rkey(), remote.address(), add);
        self.add(
            wr_id,
            flags,
            Op::FETCH_ADD,
            ScatterElement::raw_list(std::slice::from_ref(result)),
            call,
        )
    }

    /// `ibv_wr_atomic_write`: sets the first 8 bytes of `remote` to `value`, all at once.
    ///
    /// # Errors
    ///
    /// Those above; `EINVAL` if `remote` has fewer than 8 bytes, or its address is not a multiple of
    /// 8.
    #[doc(alias = "ibv_wr_atomic_write")]
    #[inline]
    pub fn atomic_write(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        remote: impl Into<RemoteMemoryRegion>,
        value: u64,
    ) -> Result<()> {
        let remote = remote.into();
        check_atomic(&remote, 8)?;
        self.need(Op::ATOMIC_WRITE.bits() | function::READY)?;
        self.begin(wr_id, flags, 0);
        let value = (&raw const value).cast();
        call!(wr_atomic_write, remote.rkey(), remote.address(), value)(self.as_raw());
        self.set_peer();
        Ok(())
    }

    /// `ibv_wr_flush`: makes earlier writes to the peer's memory in `remote` visible or persistent before
    /// it completes. With `whole_region`, this applies to the whole memory region that contains `remote`.
    ///
    /// # Errors
    ///
    /// Those above.
    #[doc(alias = "ibv_wr_flush")]
    pub fn flush(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        remote: impl Into<RemoteMemoryRegion>,
        placement: FlushPlacement,
        whole_region: bool,
    ) -> Result<()> {
        let remote = remote.into();
        let Ok(length) = usize::try_from(remote.length()) else {
            return Err(Error::invalid("ibv_wr_flush", "the remote region is too long"));
        };
        self.need(Op::FLUSH.bits() | function::READY)?;
        self.begin(wr_id, flags, 0);
        let (rkey, address) = (remote.rkey(), remote.address());
        let level = u8::from(whole_region);
        call!(wr_flush, rkey, address, length, placement.bits(), level)(self.as_raw());
        self.set_peer();
        Ok(())
    }

    /// `ibv_wr_local_inv`: invalidates a local key.
    ///
    /// # Errors
    ///
    /// Those above.
    #[doc(alias = "ibv_wr_local_inv")]
    #[inline]
    pub fn local_invalidate(&mut self, wr_id: u64, flags: SendFlags, rkey: u32) -> Result<()> {
        self.need(Op::LOCAL_INVALIDATE.bits())?;
        self.begin(wr_id, flags, 0);
        call!(wr_local_inv, rkey)(self.as_raw());
        Ok(())
    }

    /// `ibv_wr_bind_mw`: binds a type 2 memory window to a part of a region, under a new rkey.
    ///
    /// # Errors
    ///
    /// Those above.
    ///
    /// # Safety
    ///
    /// The window and the region in `info` are live and of the domain of the queue pair, and stay live
    /// until the completion was polled.
    #[doc(alias = "ibv_wr_bind_mw")]
    pub unsafe fn bind_raw(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        window: *mut ffi::ibv_mw,
        rkey: u32,
        info: &ffi::ibv_mw_bind_info,
    ) -> Result<()> {
        self.need(Op::BIND_MEMORY_WINDOW.bits())?;
        self.begin(wr_id, flags, 0);
        call!(wr_bind_mw, window, rkey, info)(self.as_raw());
        Ok(())
    }
}
