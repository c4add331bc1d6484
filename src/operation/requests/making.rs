//! How requests are made, and what can be said about one kind alone.

use super::{
    AtomicWriteWorkRequest, CompareSwapWorkRequest, FetchAddWorkRequest, FlushWorkRequest,
    LocalInvalidateWorkRequest, ReadWorkRequest, SendWorkRequest, WriteWorkRequest, op,
};
use crate::ffi;
use crate::fields::setters;
use crate::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::operation::{INLINE, Immediate, Invalidate};
use crate::queue_pair::FlushPlacement;

impl<D: GatherBuffer> SendWorkRequest<D> {
    /// Sends `message`, which may be `()`, for a message without data.
    #[inline(always)]
    pub fn new(message: D) -> Self {
        Self { buffer: message, operation: op::Send { flags: 0, extra: () } }
    }
}

// The modifiers have no bounds: what is wrong with a buffer was said at `new`.
impl<D, X> SendWorkRequest<D, X> {
    #[inline(always)]
    fn with<Y>(self, extra: Y) -> SendWorkRequest<D, Y> {
        let flags = self.operation.flags;
        SendWorkRequest { buffer: self.buffer, operation: op::Send { flags, extra } }
    }

    /// Sends 32 bits for the completion of the receive
    /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)). Replaces
    /// [`invalidate`](Self::invalidate).
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline(always)]
    pub fn immediate(self, immediate: u32) -> SendWorkRequest<D, Immediate> {
        self.with(Immediate(immediate))
    }

    /// Invalidates an rkey of the peer: that of a type 2 memory window, which must then be bound again.
    /// Replaces [`immediate`](Self::immediate).
    #[doc(alias = "ibv_wr_send_inv")]
    #[inline(always)]
    pub fn invalidate(self, rkey: u32) -> SendWorkRequest<D, Invalidate> {
        self.with(Invalidate(rkey))
    }

    setters! { self,
        /// Raises an event at the peer, if the peer waits for solicited events only.
        #[doc(alias = "IBV_SEND_SOLICITED")]
        #[inline(always)]
        solicited() => self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_SOLICITED.0;

        /// Makes the device compute the checksums of IPv4 and of TCP or UDP, on UD and raw packet queue pairs
        /// of devices that support it.
        #[doc(alias = "IBV_SEND_IP_CSUM")]
        #[inline(always)]
        ip_checksum() => self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_IP_CSUM.0;
    }
}

macro_rules! inline {
    ($($name:ident),+) => {$(
        impl<D, X> $name<D, X> {
            /// The post copies the data, as of [`Inline`](crate::Inline), although the buffer is registered memory. The
            /// memory may then be reused immediately.
            #[doc(alias = "IBV_SEND_INLINE")]
            #[inline(always)]
            pub fn inline(mut self) -> Self {
                self.operation.flags |= INLINE;
                self
            }
        }
    )+};
}

inline!(SendWorkRequest, WriteWorkRequest);

impl<D: GatherBuffer> WriteWorkRequest<D> {
    /// Writes `data` to the beginning of `remote`, which has at least as many bytes.
    #[inline(always)]
    pub fn new(data: D, remote: impl Into<RemoteMemoryRegion>) -> Self {
        Self { buffer: data, operation: op::Write { flags: 0, remote: remote.into(), extra: () } }
    }
}

impl<D, X> WriteWorkRequest<D, X> {
    /// Consumes a receive of the peer, whose completion carries these 32 bits
    /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)).
    #[doc(alias = "ibv_wr_rdma_write_imm")]
    #[inline(always)]
    pub fn immediate(self, immediate: u32) -> WriteWorkRequest<D, Immediate> {
        let op::Write { flags, remote, .. } = self.operation;
        let operation = op::Write { flags, remote, extra: Immediate(immediate) };
        WriteWorkRequest { buffer: self.buffer, operation }
    }
}

impl<D> WriteWorkRequest<D, Immediate> {
    /// Raises an event at the peer, if the peer waits for solicited events only. Only a write with an immediate has a
    /// completion there.
    #[doc(alias = "IBV_SEND_SOLICITED")]
    #[inline(always)]
    pub fn solicited(mut self) -> Self {
        self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_SOLICITED.0;
        self
    }
}

impl<D: ScatterBuffer> ReadWorkRequest<D> {
    /// Fills `buffer` from the beginning of `remote`, which has at least as many bytes.
    #[inline(always)]
    pub fn new(buffer: D, remote: impl Into<RemoteMemoryRegion>) -> Self {
        let operation = op::Read { flags: 0, remote: remote.into(), shared: D::PEERS_MAY_WRITE };
        Self { buffer, operation }
    }
}

impl<D: ScatterBuffer> CompareSwapWorkRequest<D> {
    /// Sets the first 8 bytes of `remote`, whose address is a multiple of 8, to `swap` if they equal `compare`. Stores
    /// their previous value in `result`, which has 8 bytes, in the byte order of this machine.
    #[inline(always)]
    pub fn new(result: D, remote: impl Into<RemoteMemoryRegion>, compare: u64, swap: u64) -> Self {
        let operation = op::CompareSwap { flags: 0, remote: remote.into(), compare, swap };
        Self { buffer: result, operation }
    }
}

impl<D: ScatterBuffer> FetchAddWorkRequest<D> {
    /// Adds `add` to the first 8 bytes of `remote`, whose address is a multiple of 8, wrapping around. Stores their
    /// previous value in `result`, which has 8 bytes, in the byte order of this machine.
    #[inline(always)]
    pub fn new(result: D, remote: impl Into<RemoteMemoryRegion>, add: u64) -> Self {
        Self { buffer: result, operation: op::FetchAdd { flags: 0, remote: remote.into(), add } }
    }
}

impl AtomicWriteWorkRequest<()> {
    /// Sets the first 8 bytes of `remote`, whose address is a multiple of 8, to `value`.
    #[inline(always)]
    pub fn new(remote: impl Into<RemoteMemoryRegion>, value: u64) -> Self {
        let operation = op::AtomicWrite { flags: 0, remote: remote.into(), value };
        Self { buffer: (), operation }
    }
}

impl FlushWorkRequest<()> {
    /// Flushes earlier writes to `remote`.
    #[inline(always)]
    pub fn new(remote: impl Into<RemoteMemoryRegion>, placement: FlushPlacement) -> Self {
        let remote = remote.into();
        let operation = op::Flush { flags: 0, remote, placement, whole_region: false };
        Self { buffer: (), operation }
    }

    /// Flushes earlier writes to the whole memory region that contains `remote`.
    #[inline(always)]
    pub fn whole_region(mut self) -> Self {
        self.operation.whole_region = true;
        self
    }
}

impl LocalInvalidateWorkRequest<()> {
    /// Invalidates the rkey.
    #[inline(always)]
    pub fn new(rkey: u32) -> Self {
        Self { buffer: (), operation: op::LocalInvalidate { flags: 0, rkey } }
    }
}
