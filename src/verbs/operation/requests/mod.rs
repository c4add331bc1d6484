use super::destination::{Destination, To, atomic, check_atomic, check_remote, rdma};
use super::extra::{Extra, Immediate, Invalidate, WriteExtra};
use super::sealed::{AddedOn, Kind, Posted, PostedOn, Request, Undirected};
use super::{Adds, INLINE, Posts, SIGNALED};
use crate::base::ffi::ibv_wr_opcode as Opcode;
use crate::base::{Error, Result, ffi, setters};
use crate::verbs::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::verbs::queue_pair::{
    Atomics, FixedPeer, FlushPlacement, PostsRdma, Reads, SendOperations as Extended, Sends,
    Transport, Writes,
};

/// For `Kind::emit` only, whose caller vouches for the queue pair and the function.
macro_rules! call {
    ($queue_pair:ident.$function:ident($($argument:expr),*)) => {
        (*$queue_pair).$function.unwrap_unchecked()($queue_pair $(, $argument)*)
    };
}

/// The table of operations. An entry has, in this order:
///
///  - the request, and its fields other than the buffer;
///  - the opcode, and the operation in the extended interface;
///  - whether it has data, needs a fixed peer, lets the device write the buffer, needs a reliable connection;
///  - `posted` if `ibv_post_send` has it, `batch` if only the extended interface does;
///  - the transports on which it needs no destination, those that have it, and those whose `ibv_post_send` has it;
///  - its checks, and how both interfaces write it.
macro_rules! work_requests {
    ($(
        $(#[$meta:meta])*
        $name:ident<$d:ident: $bound:ident $(, $x:ident: $xbound:ident = $xdefault:ty)?>
            { $($field:ident: $type:ty),* } as $operation:ident:
            $opcode:expr, $extended:expr, data $data:literal, peer $peer:literal, writes $writes:literal,
            reliable $reliable:literal, $direction:ident, $posted:ident,
            on $peer_trait:ident, $has:ident $(+ $posts:ident)?,
            $(allowed |$athis:ident, $areliable:ident, $aprivate:ident| $allowed:expr,)?
            fits |$this:ident, $bytes:ident| $fits:expr,
            fill |$fthis:ident, $request:ident| $fill:expr,
            emit |$ethis:ident, $queue_pair:ident| $emit:expr;
    )+) => {$(
        $(#[$meta])*
        #[doc(alias = "ibv_send_wr")]
        #[must_use = "a request does nothing until it is posted"]
        #[derive(Clone, Copy, Debug)]
        pub struct $name<$d $(, $x = $xdefault)?> {
            buffer: $d,
            operation: op::$operation $(<$x>)?,
        }

        impl<$d $(, $x)?> $name<$d $(, $x)?> {
            /// On a queue pair, success has no completion, unless the queue pair was built with
            /// [`signal_all`](crate::QueuePairBuilder::signal_all). The request holds its place in the queue until a
            /// later one completes. On a channel this has no effect; a loop has `post_unsignaled`.
            #[doc(alias = "IBV_SEND_SIGNALED")]
            #[inline(always)]
            pub fn unsignaled(mut self) -> Self {
                self.operation.flags |= SIGNALED;
                self
            }

            /// The device begins it only when all earlier reads and atomics have completed.
            #[doc(alias = "IBV_SEND_FENCE")]
            #[inline(always)]
            pub fn fence(mut self) -> Self {
                self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_FENCE.0;
                self
            }

            /// Where it goes, on a queue pair without a fixed peer: a [`DatagramPeer`](crate::operation::DatagramPeer)
            /// on UD and SRD, an [`XrcPeer`](crate::operation::XrcPeer) on a sending XRC queue pair, a `DcPeer` on a DC
            /// initiator. Call this last.
            #[inline(always)]
            pub fn to<A: Destination>(self, destination: A) -> To<Self, A> {
                To::new(self, destination)
            }
        }

        impl $(<$x: $xbound>)? Kind for op::$operation $(<$x>)? {
            const OPCODE: Opcode = $opcode;
            const EXTENDED: Extended = $extended;
            const HAS_DATA: bool = $data;
            const NEEDS_PEER: bool = $peer;
            const WRITES: bool = $writes;
            const RELIABLE: bool = $reliable;

            #[inline(always)]
            fn flags(&self) -> u32 {
                self.flags
            }

            $(
            #[inline(always)]
            fn is_allowed(&self, $areliable: bool, $aprivate: bool) -> bool {
                let $athis = self;
                $allowed
            }
            )?

            #[inline(always)]
            fn fits(&self, $bytes: u64) -> Result<()> {
                let ($this, _) = (self, $bytes);
                let _ = $this;
                $fits
            }

            #[inline(always)]
            unsafe fn fill(&self, $request: *mut ffi::ibv_send_wr) {
                let $fthis = self;
                // SAFETY: the caller vouches for the pointer.
                unsafe { $fill }
            }

            #[inline(always)]
            unsafe fn emit(&self, $queue_pair: *mut ffi::ibv_qp_ex) {
                let $ethis = self;
                // SAFETY: the caller vouches for queue pair and function.
                unsafe { $emit }
            }
        }

        impl<$d: $bound $(, $x: $xbound)?> Request for $name<$d $(, $x)?> {
            type Operation = op::$operation $(<$x>)?;
            type Buffer = $d;

            #[inline(always)]
            fn split(self) -> (Self::Operation, $d) {
                let mut operation = self.operation;
                if <$d as GatherBuffer>::INLINE {
                    operation.flags |= INLINE;
                }
                (operation, self.buffer)
            }

            #[inline(always)]
            fn join(operation: Self::Operation, buffer: $d) -> Self {
                Self { buffer, operation }
            }

            #[inline(always)]
            fn list(buffer: &mut $d) -> Result<<$d as GatherBuffer>::List> {
                buffer.$direction()
            }
        }

        posted! { $posted $operation [$($x: $xbound)?] [$(<$x>)?] }
        posted_by! { $posted [$d: $bound $(, $x: $xbound)?] $name<$d $(, $x)?>: $peer_trait, $has $(+ $posts)? }

        impl<$d: $bound $(, $x: $xbound)?, T: $has> AddedOn<T> for $name<$d $(, $x)?> {}

        impl<$d: $bound $(, $x: $xbound)?, T: $has + $peer_trait> Adds<T> for $name<$d $(, $x)?> {}
    )+

    #[cfg(test)]
    pub(super) fn for_each_operation(compared: &mut super::agreement::Compared) {
        $(compare! { compared $operation [$($field)*] $($xbound)? })+
    }

    pub(crate) mod op {
        use super::*;

        $(
            #[derive(Clone, Copy, Debug)]
            pub struct $operation $(<$x>)? {
                pub(super) flags: u32,
                $(pub(super) $field: $type,)*
            }
        )+
    }};
}

#[cfg(test)]
macro_rules! compare {
    // Only the extended interface has it.
    ($compared:ident $operation:ident $fields:tt SegmentHeader) => {};
    ($compared:ident $operation:ident $fields:tt Extra) => {
        compare! { $compared $operation $fields WriteExtra }
        compare! { @ $compared $operation <crate::verbs::operation::Invalidate> $fields }
    };
    ($compared:ident $operation:ident $fields:tt WriteExtra) => {
        compare! { @ $compared $operation <()> $fields }
        compare! { @ $compared $operation <crate::verbs::operation::Immediate> $fields }
    };
    ($compared:ident $operation:ident $fields:tt) => {
        compare! { @ $compared $operation <> $fields }
    };
    (@ $compared:ident $operation:ident <$($x:ty)?> [$($field:ident)*]) => {
        let mut at = 0..;
        $compared.check(op::$operation $(::<$x>)? {
            flags: 0,
            $($field: super::agreement::Sample::sample(at.next().unwrap_or_default()),)*
        });
        let _ = at;
    };
}

macro_rules! posted {
    (batch $($rest:tt)*) => {};
    (posted $operation:ident [$($generics:tt)*] [$($arguments:tt)*]) => {
        impl<$($generics)*> Posted for op::$operation $($arguments)* {}
        impl<$($generics)*> Undirected for op::$operation $($arguments)* {}
    };
}

macro_rules! posted_by {
    (batch $($rest:tt)*) => {};
    (posted [$($generics:tt)*] $request:ty: $peer_trait:ident, $has:ident $(+ $posts:ident)?) => {
        impl<$($generics)*, T: $has $(+ $posts)?> PostedOn<T> for $request {}

        impl<$($generics)*, T: $has $(+ $posts)? + $peer_trait> Posts<T> for $request {}
    };
}

work_requests! {
    /// `struct ibv_send_wr`: sends one message to a receive of the peer. On a reliable connection it ends when the peer
    /// acknowledges it.
    ///
    /// The same request goes to everything that posts. These differ in who keeps the buffer, and who waits:
    ///
    /// ```
    /// use std::time::Instant;
    /// use ibverbs::channel::OwnedResult;
    /// use ibverbs::operation::PreparedRequest;
    /// use ibverbs::{AsyncChannel, Channel, ChannelId, Inline, Loop, MemoryRegion, PooledBuffer, QueuePair, Rc};
    /// use ibverbs::{Result, SendWorkRequest, TransportResult};
    ///
    /// /// Posts, and waits until it has ended. The buffer is lent.
    /// fn blocking(channel: &mut Channel<'_>, region: &MemoryRegion<'_, u8>) -> TransportResult<()> {
    ///     let message = region.slice(..5)?;
    ///     channel.run(SendWorkRequest::new(&message).immediate(7))?;
    ///     channel.send(&message)?; // the same without options
    ///     channel.send(Inline(b"bytes that are not registered"))?;
    ///     Ok(())
    /// }
    ///
    /// /// As above, and gives up at a time.
    /// fn deadline(channel: &mut Channel<'_>, deadline: Instant) -> TransportResult<()> {
    ///     channel.until(deadline).run(SendWorkRequest::new(Inline(b"hello")).solicited())?;
    ///     Ok(())
    /// }
    ///
    /// /// Several at a time. The handle gives the slice back.
    /// fn scope(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    ///     let (one, two) = region.slice_mut(..)?.split_at(5)?;
    ///     channel.manual_scope(|scope| {
    ///         let first = scope.post(SendWorkRequest::new(one).immediate(1))?;
    ///         let second = scope.post(SendWorkRequest::new(two).immediate(2))?;
    ///         let (mut one, _) = first.wait()?;
    ///         one.fill(0);
    ///         second.wait()?;
    ///         Ok(())
    ///     })
    /// }
    ///
    /// /// The operation owns its buffer. On a loop of one channel or many, which says what has ended, and gives the buffer back with it.
    /// fn server(
    ///     server: &mut Loop<'_, PooledBuffer>,
    ///     channel: ChannelId,
    ///     buffer: PooledBuffer,
    /// ) -> TransportResult<PooledBuffer> {
    ///     server.post(channel, SendWorkRequest::new(buffer).immediate(7), 1)?;
    ///     Ok(server.wait_ended()?.buffer)
    /// }
    ///
    /// /// The same as a future.
    /// async fn future(channel: &AsyncChannel, buffer: PooledBuffer) -> OwnedResult<PooledBuffer> {
    ///     channel.run(SendWorkRequest::new(buffer).immediate(7)).await
    /// }
    ///
    /// /// Without a scope: the program keeps the region until the work was waited for.
    /// unsafe fn unpolled(channel: &mut Channel<'_>, region: &MemoryRegion<'_, u8>) -> TransportResult<()> {
    ///     let request = SendWorkRequest::new(region.slice(..5)?).immediate(7);
    ///     // SAFETY: the region stays until the work was waited for.
    ///     let work = unsafe { channel.post_unpolled(request)? };
    ///     work.wait(channel)?;
    ///     Ok(())
    /// }
    ///
    /// /// On a queue pair: the program polls the completions of these numbers, and until then keeps the region.
    /// unsafe fn verbs(queue_pair: &mut QueuePair<'_, Rc>, region: &MemoryRegion<'_, u8>) -> Result<()> {
    ///     let elements = [region.gather_element(..5)?, region.gather_element(8..)?];
    ///     let request = SendWorkRequest::new(&elements).fence();
    ///     let mut prepared = PreparedRequest::new(request, queue_pair.max_inline_data())?;
    ///     // SAFETY: the caller keeps the region.
    ///     unsafe {
    ///         queue_pair.post(request, 1)?;
    ///         queue_pair.post_prepared(&mut prepared, 2)?; // the cheapest, to be repeated
    ///         queue_pair.batch(|batch| {
    ///             batch.add(SendWorkRequest::new(elements[0]).unsignaled(), 3)?;
    ///             batch.add(request.immediate(7), 4)
    ///         })
    ///     }
    /// }
    /// ```
    SendWorkRequest<D: GatherBuffer, X: Extra = ()> { extra: X } as Send:
        X::SEND, X::EXTENDED_SEND, data true, peer true, writes false, reliable false, gather, posted,
        on FixedPeer, Sends,
        fits |_this, bytes| Ok(()),
        fill |this, request| this.extra.fill(request),
        emit |this, queue_pair| this.extra.send(queue_pair);

    /// `struct ibv_send_wr`: an RDMA write: copies to the peer's memory without notifying the peer.
    ///
    /// With an [`immediate`](Self::immediate) it consumes a receive of the peer, and so notifies it.
    WriteWorkRequest<D: GatherBuffer, X: WriteExtra = ()> { remote: RemoteMemoryRegion, extra: X } as Write:
        X::WRITE, X::EXTENDED_WRITE, data true, peer true, writes false, reliable false, gather, posted,
        on FixedPeer, Writes + PostsRdma,
        fits |this, bytes| check_remote(&this.remote, bytes),
        fill |this, request| {
            (*request).wr.rdma = rdma(&this.remote);
            this.extra.fill(request)
        },
        emit |this, queue_pair| this.extra.write(queue_pair, &this.remote);

    /// `struct ibv_send_wr`: an RDMA read: copies from the peer's memory without notifying the peer. On reliable
    /// connections only.
    ///
    /// If the answer is lost, the device reads again. It may then find what later requests of this queue pair have
    /// written, unless they carry a [fence](WriteWorkRequest::fence).
    ///
    /// On iWARP the peer answers a read by writing, so the buffer must be memory that peers may write: a slice of a
    /// [`SharedMemoryRegion`](crate::SharedMemoryRegion) with [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE).
    ReadWorkRequest<D: ScatterBuffer> { remote: RemoteMemoryRegion, shared: bool } as Read:
        Opcode::IBV_WR_RDMA_READ, Extended::READ, data true, peer true, writes true, reliable true, scatter, posted,
        on FixedPeer, Reads + PostsRdma,
        allowed |this, reliable, private_reads| if this.shared { reliable } else { private_reads },
        fits |this, bytes| check_remote(&this.remote, bytes),
        fill |this, request| (*request).wr.rdma = rdma(&this.remote),
        emit |this, queue_pair| call!(queue_pair.wr_rdma_read(this.remote.rkey, this.remote.address));

    /// `struct ibv_send_wr`: a compare-and-swap: atomically replaces an aligned 64-bit number of the peer if it equals
    /// a given value, and returns its previous value. On reliable connections only.
    ///
    /// It is atomic with respect to other atomics of the same device, and to the peer's CPU only where
    /// [`AtomicCapability`](crate::device::AtomicCapability) says so.
    CompareSwapWorkRequest<D: ScatterBuffer> { remote: RemoteMemoryRegion, compare: u64, swap: u64 } as CompareSwap:
        Opcode::IBV_WR_ATOMIC_CMP_AND_SWP, Extended::COMPARE_SWAP, data true, peer true, writes true, reliable true,
        scatter, posted,
        on FixedPeer, Atomics + PostsRdma,
        fits |this, bytes| check_atomic(&this.remote, bytes),
        fill |this, request| (*request).wr.atomic = atomic(&this.remote, this.compare, this.swap),
        emit |this, queue_pair| call!(queue_pair.wr_atomic_cmp_swp(
            this.remote.rkey, this.remote.address, this.compare, this.swap
        ));

    /// `struct ibv_send_wr`: a fetch-and-add: adds to an aligned 64-bit number of the peer, and returns its previous
    /// value. It has the limits of [`CompareSwapWorkRequest`].
    FetchAddWorkRequest<D: ScatterBuffer> { remote: RemoteMemoryRegion, add: u64 } as FetchAdd:
        Opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, Extended::FETCH_ADD, data true, peer true, writes true, reliable true,
        scatter, posted,
        on FixedPeer, Atomics + PostsRdma,
        fits |this, bytes| check_atomic(&this.remote, bytes),
        fill |this, request| (*request).wr.atomic = atomic(&this.remote, this.add, 0),
        emit |this, queue_pair| call!(queue_pair.wr_atomic_fetch_add(this.remote.rkey, this.remote.address, this.add));

    /// `ibv_wr_send_tso`: sends data as several messages, each after a copy of a header that the device updates. [In
    /// batches](crate::operation::Batch::add) only.
    #[doc(alias = "ibv_wr_send_tso")]
    SegmentedSendWorkRequest<D: GatherBuffer, X: SegmentHeader = &'static [u8]> { header: X, segment: u16 } as SegmentedSend:
        Opcode::IBV_WR_TSO, Extended::TSO, data true, peer true, writes false, reliable false, gather, batch,
        on FixedPeer, Sends,
        fits |this, bytes| {
            let length = this.header.as_ref().len() as u64;
            Error::within("ibv_wr_send_tso", "the length of the header", length, 0, u16::MAX)
        },
        fill |this, request| (*request).__bindgen_anon_2.tso = tso(this.header.as_ref(), this.segment),
        emit |this, queue_pair| {
            let tso = tso(this.header.as_ref(), this.segment);
            call!(queue_pair.wr_send_tso(tso.hdr, tso.hdr_sz, tso.mss))
        };

    /// `ibv_wr_atomic_write`: sets 8 bytes of the peer's memory at once. [In batches](crate::operation::Batch::add)
    /// only.
    #[doc(alias = "ibv_wr_atomic_write")]
    AtomicWriteWorkRequest<D: GatherBuffer> { remote: RemoteMemoryRegion, value: u64 } as AtomicWrite:
        Opcode::IBV_WR_ATOMIC_WRITE, Extended::ATOMIC_WRITE, data false, peer true, writes false, reliable true,
        gather, batch,
        on FixedPeer, Atomics,
        fits |this, bytes| check_atomic(&this.remote, 8),
        fill |this, request| (*request).wr.rdma = rdma(&this.remote),
        emit |this, queue_pair| call!(queue_pair.wr_atomic_write(
            this.remote.rkey, this.remote.address, (&raw const this.value).cast()
        ));

    /// `ibv_wr_flush`: completes when earlier writes to the peer's memory are visible or persistent. [In
    /// batches](crate::operation::Batch::add) only.
    #[doc(alias = "ibv_wr_flush")]
    FlushWorkRequest<D: GatherBuffer>
        { remote: RemoteMemoryRegion, placement: FlushPlacement, whole_region: bool } as Flush:
        Opcode::IBV_WR_FLUSH, Extended::FLUSH, data false, peer true, writes false, reliable true, gather, batch,
        on FixedPeer, Atomics,
        fits |this, bytes| check_flush(&this.remote),
        fill |this, request| (*request).wr.rdma = rdma(&this.remote),
        emit |this, queue_pair| call!(queue_pair.wr_flush(
            this.remote.rkey, this.remote.address, this.remote.length as usize, this.placement.bits(),
            u8::from(this.whole_region)
        ));

    /// `struct ibv_send_wr`: invalidates a local key, of a type 2 memory window or of a region registered by a request.
    /// Neither this program nor peers can use the key after that.
    LocalInvalidateWorkRequest<D: GatherBuffer> { rkey: u32 } as LocalInvalidate:
        Opcode::IBV_WR_LOCAL_INV, Extended::LOCAL_INVALIDATE, data false, peer false, writes false, reliable false,
        gather, posted,
        on Transport, Writes + PostsRdma,
        fits |_this, bytes| Ok(()),
        fill |this, request| (*request).__bindgen_anon_1.invalidate_rkey = this.rkey,
        emit |this, queue_pair| call!(queue_pair.wr_local_inv(this.rkey));
}

/// What [`SegmentedSendWorkRequest`] sends before each segment. The device only reads it.
pub trait SegmentHeader: Copy + AsRef<[u8]> {}

impl SegmentHeader for &[u8] {}

fn tso(header: &[u8], mss: u16) -> ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_2 {
    let (hdr, hdr_sz) = (header.as_ptr().cast_mut().cast(), header.len() as u16);
    ffi::ibv_send_wr__bindgen_ty_4__bindgen_ty_2 { hdr, hdr_sz, mss }
}

/// C's length is a `size_t`.
#[inline]
fn check_flush(remote: &RemoteMemoryRegion) -> Result<()> {
    if usize::try_from(remote.length).is_err() {
        return Err(Error::invalid("ibv_wr_flush", "the remote region is too long"));
    }
    Ok(())
}

impl<D: GatherBuffer> SendWorkRequest<D> {
    /// Sends `message`; `()` is a message without data.
    #[inline(always)]
    pub fn new(message: D) -> Self {
        Self { buffer: message, operation: op::Send { flags: 0, extra: () } }
    }
}

// No bounds on the modifiers: `new` already reports a wrong buffer.
impl<D, X> SendWorkRequest<D, X> {
    #[inline(always)]
    fn with<Y>(self, extra: Y) -> SendWorkRequest<D, Y> {
        let flags = self.operation.flags;
        SendWorkRequest { buffer: self.buffer, operation: op::Send { flags, extra } }
    }

    /// Sends 32 bits for the completion of the receive
    /// ([`WorkSuccess::immediate`](crate::completion::WorkSuccess::immediate)). Replaces
    /// [`invalidate`](Self::invalidate).
    #[doc(alias = "ibv_wr_send_imm")]
    #[inline(always)]
    pub fn immediate(self, immediate: u32) -> SendWorkRequest<D, Immediate> {
        self.with(Immediate(immediate))
    }

    /// Invalidates the peer's rkey of a type 2 memory window, which must be bound again to be used. Replaces
    /// [`immediate`](Self::immediate).
    #[doc(alias = "ibv_wr_send_inv")]
    #[inline(always)]
    pub fn invalidate(self, rkey: u32) -> SendWorkRequest<D, Invalidate> {
        self.with(Invalidate(rkey))
    }

    setters! { self,
        /// Raises an event at a peer that waits for solicited events only.
        #[doc(alias = "IBV_SEND_SOLICITED")]
        #[inline(always)]
        solicited() => self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_SOLICITED.0;

        /// Makes the device compute the checksums of IPv4, TCP and UDP, on UD and raw packet queue pairs of devices
        /// that can.
        #[doc(alias = "IBV_SEND_IP_CSUM")]
        #[inline(always)]
        ip_checksum() => self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_IP_CSUM.0;
    }
}

macro_rules! inline_methods {
    ($($name:ident),+) => {$(
        impl<D: GatherBuffer, X> $name<D, X> {
            /// Makes the post copy the registered memory, as [`Inline`](crate::Inline) does. The memory may be reused
            /// immediately. It has no effect on memory that this program cannot read: the device's, and most dma-bufs.
            #[doc(alias = "IBV_SEND_INLINE")]
            #[inline(always)]
            pub fn inline(mut self) -> Self {
                if self.buffer.is_in_reach() {
                    self.operation.flags |= INLINE;
                }
                self
            }
        }
    )+};
}

inline_methods!(SendWorkRequest, WriteWorkRequest);

impl<D: GatherBuffer> WriteWorkRequest<D> {
    /// Writes `data` to the beginning of `remote`, which is at least as long.
    #[inline(always)]
    pub fn new(data: D, remote: impl Into<RemoteMemoryRegion>) -> Self {
        Self { buffer: data, operation: op::Write { flags: 0, remote: remote.into(), extra: () } }
    }
}

impl<D, X> WriteWorkRequest<D, X> {
    /// Consumes a receive of the peer, whose completion carries these 32 bits
    /// ([`WorkSuccess::immediate`](crate::completion::WorkSuccess::immediate)).
    #[doc(alias = "ibv_wr_rdma_write_imm")]
    #[inline(always)]
    pub fn immediate(self, immediate: u32) -> WriteWorkRequest<D, Immediate> {
        let op::Write { flags, remote, .. } = self.operation;
        let operation = op::Write { flags, remote, extra: Immediate(immediate) };
        WriteWorkRequest { buffer: self.buffer, operation }
    }
}

impl<D> WriteWorkRequest<D, Immediate> {
    /// Raises an event at a peer that waits for solicited events only. Needs an immediate: other writes have no
    /// completion there.
    #[doc(alias = "IBV_SEND_SOLICITED")]
    #[inline(always)]
    pub fn solicited(mut self) -> Self {
        self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_SOLICITED.0;
        self
    }
}

impl<'h, D: GatherBuffer> SegmentedSendWorkRequest<D, &'h [u8]> {
    /// Sends `data` in messages of at most `segment` bytes after the header, which has at most 65535.
    pub fn new(data: D, header: &'h [u8], segment: u16) -> Self {
        Self { buffer: data, operation: op::SegmentedSend { flags: 0, header, segment } }
    }
}

impl<D, X> SegmentedSendWorkRequest<D, X> {
    /// As [`SendWorkRequest::ip_checksum`].
    pub fn ip_checksum(mut self) -> Self {
        self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_IP_CSUM.0;
        self
    }
}

impl<D: ScatterBuffer> ReadWorkRequest<D> {
    /// Fills `buffer` from the beginning of `remote`, which is at least as long.
    #[inline(always)]
    pub fn new(buffer: D, remote: impl Into<RemoteMemoryRegion>) -> Self {
        let operation = op::Read { flags: 0, remote: remote.into(), shared: D::PEERS_MAY_WRITE };
        Self { buffer, operation }
    }
}

impl<D: ScatterBuffer> CompareSwapWorkRequest<D> {
    /// Sets the first 8 bytes of `remote`, whose address is a multiple of 8, to `swap` if they equal `compare`. Stores
    /// their previous value, in this machine's byte order, in the 8 bytes of `result`.
    #[inline(always)]
    pub fn new(result: D, remote: impl Into<RemoteMemoryRegion>, compare: u64, swap: u64) -> Self {
        let operation = op::CompareSwap { flags: 0, remote: remote.into(), compare, swap };
        Self { buffer: result, operation }
    }
}

impl<D: ScatterBuffer> FetchAddWorkRequest<D> {
    /// Adds `add`, wrapping around, to the first 8 bytes of `remote`, whose address is a multiple of 8. Stores their
    /// previous value, in this machine's byte order, in the 8 bytes of `result`.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::operation::agreement::Compared;

    #[test]
    fn both_interfaces_say_the_same_of_each_operation_of_the_table() {
        let mut compared = Compared::default();
        for_each_operation(&mut compared);
        let mut opcodes: Vec<_> = compared.0.iter().map(|opcode| opcode.0).collect();
        opcodes.sort_unstable();
        opcodes.dedup();
        assert_eq!(opcodes.len(), compared.0.len(), "each once: {opcodes:?}");
        assert!(opcodes.contains(&Opcode::IBV_WR_SEND_WITH_INV.0), "{opcodes:?}");
        assert!(opcodes.contains(&Opcode::IBV_WR_RDMA_WRITE_WITH_IMM.0), "{opcodes:?}");
    }
}
