//! Blocking operations: each method posts one operation and waits until it has ended.

use std::time::Instant;

use super::Channel;
use super::error::TransportResult;
use super::kinds::{
    CompareSwap, FetchAdd, Kind, Read, Send, SendWithImmediate, Write, WriteWithImmediate,
};
use super::operation::{Operation, Receive, Request, inline_element};
use crate::completion::WorkSuccess;
use crate::memory::RemoteMemoryRegion;
use crate::memory::{GatherBuffer, ScatterBuffer};

/// # Blocking operations
///
/// Each posts one operation and waits until it has ended, successfully or not. The buffer is borrowed for
/// the duration of the call only. Errors are
///
///  - [`Work`](crate::TransportError::Work): it was posted and failed.
///  - [`QueueFull`](crate::TransportError::QueueFull): unpolled work takes up the queue.
///  - [`Verbs`](crate::TransportError::Verbs): an argument is wrong; or the device has refused the
///    request; or completions could not be polled, or the provider cannot tell whether the device has
///    the request, and the channel was stopped.
///  - [`UnknownCompletion`](crate::TransportError::UnknownCompletion): the completion queue holds a
///    completion that belongs to no operation of this channel, and the channel was stopped.
///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): an
///    earlier failure has stopped the channel.
///  - [`TimedOut`](crate::TransportError::TimedOut): the deadline has passed, where there is one. The
///    channel was stopped, and must be [reset](Self::reset).
///  - [`NoCredit`](crate::TransportError::NoCredit): the channel has
///    [flow control](crate::ChannelBuilder::flow_control), and the deadline has passed before the peer has
///    posted a receive. Nothing was posted, and the channel was not stopped.
impl Channel<'_> {
    /// `ibv_post_send`: sends one message and waits until the peer has it (on a reliable
    /// connection: until it has acknowledged it).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn send(&mut self, buffer: &impl GatherBuffer) -> TransportResult<WorkSuccess> {
        self.gather(buffer, Send {}, None)
    }

    /// As [`send`](Self::send), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn send_deadline(
        &mut self,
        buffer: &impl GatherBuffer,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        self.gather(buffer, Send {}, Some(deadline))
    }

    /// `ibv_post_send`: sends one message with 32 further bits, which the receiver finds in its
    /// completion ([`WorkSuccess::immediate`]). The buffer may be `()`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn send_with_immediate(
        &mut self,
        buffer: &impl GatherBuffer,
        immediate: u32,
    ) -> TransportResult<WorkSuccess> {
        self.gather(buffer, SendWithImmediate { immediate }, None)
    }

    /// As [`send_with_immediate`](Self::send_with_immediate), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn send_with_immediate_deadline(
        &mut self,
        buffer: &impl GatherBuffer,
        immediate: u32,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        self.gather(buffer, SendWithImmediate { immediate }, Some(deadline))
    }

    /// `ibv_post_send`: sends a short message from memory that need not be registered. The bytes
    /// are copied into the request, which has room for
    /// [`max_inline_data`](crate::ChannelBuilder::max_inline_data).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn send_inline(&mut self, bytes: &[u8]) -> TransportResult<WorkSuccess> {
        self.inline(bytes, Send {}, None)
    }

    /// As [`send_inline`](Self::send_inline), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn send_inline_deadline(
        &mut self,
        bytes: &[u8],
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        self.inline(bytes, Send {}, Some(deadline))
    }

    /// `ibv_post_recv`: receives one message, whose length is [`WorkSuccess::byte_len`]. A longer
    /// message than the buffer is an error on both sides.
    ///
    /// If the peer may write ([`access`](crate::ChannelBuilder::access)), a write with an immediate also
    /// completes a receive: check the [opcode](WorkSuccess::opcode). The buffer is then unchanged, and the
    /// length is that of the write, which can exceed the buffer.
    ///
    /// If the peer sends before the receive is posted, the peer's device retries up to its
    /// [`max_rnr_retries`](crate::ChannelBuilder::max_rnr_retries). To avoid retries, post receives ahead,
    /// in a [`scope`](Self::scope).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub fn receive(&mut self, buffer: &mut impl ScatterBuffer) -> TransportResult<WorkSuccess> {
        self.scatter(buffer, Receive, None)
    }

    /// As [`receive`](Self::receive), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn receive_deadline(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        self.scatter(buffer, Receive, Some(deadline))
    }

    /// `ibv_post_send`: writes to the peer's memory. The peer does not notice.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn write(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.gather(buffer, Write { remote }, None)
    }

    /// As [`write`](Self::write), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn write_deadline(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.gather(buffer, Write { remote }, Some(deadline))
    }

    /// `ibv_post_send`: writes to the peer's memory and consumes one of its receives, whose completion
    /// carries 32 bits ([`WorkSuccess::immediate`]).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn write_with_immediate(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.gather(buffer, WriteWithImmediate { remote, immediate }, None)
    }

    /// As [`write_with_immediate`](Self::write_with_immediate), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn write_with_immediate_deadline(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.gather(buffer, WriteWithImmediate { remote, immediate }, Some(deadline))
    }

    /// `ibv_post_send`: writes a few bytes, from memory that need not be registered, to the peer's
    /// memory. See [`send_inline`](Self::send_inline).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn write_inline(
        &mut self,
        bytes: &[u8],
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.inline(bytes, Write { remote }, None)
    }

    /// As [`write_inline`](Self::write_inline), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn write_inline_deadline(
        &mut self,
        bytes: &[u8],
        remote: impl Into<RemoteMemoryRegion>,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.inline(bytes, Write { remote }, Some(deadline))
    }

    /// `ibv_post_send`: fills the buffer from the peer's memory, which must have at least that many bytes.
    /// Reliable connections only.
    ///
    /// On iWARP the buffer must be memory that peers may write (a slice of a
    /// [`SharedMemoryRegion`](crate::SharedMemoryRegion) with
    /// [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE)), because the peer answers a read by writing.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations), and on iWARP:
    ///
    ///  - `EINVAL`: the buffer is of a region that peers may never write. A shared region without
    ///    `REMOTE_WRITE` is not noticed: most devices then fail the read or end the connection.
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn read<B: ScatterBuffer>(
        &mut self,
        buffer: &mut B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }), None)
    }

    /// As [`read`](Self::read), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn read_deadline<B: ScatterBuffer>(
        &mut self,
        buffer: &mut B,
        remote: impl Into<RemoteMemoryRegion>,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(
            buffer,
            Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }),
            Some(deadline),
        )
    }

    /// `ibv_post_send`: replaces the aligned 64-bit number in the peer's memory by `swap` if it equals
    /// `compare`, atomically, and stores the previous value in the buffer of 8 bytes. Reliable connections
    /// only.
    ///
    /// It is atomic with respect to other atomics of the same device. It is atomic with respect to the
    /// peer's CPU only on devices that report so: see [`AtomicCapability`](crate::AtomicCapability).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn compare_swap(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(CompareSwap { remote, compare, swap }), None)
    }

    /// As [`compare_swap`](Self::compare_swap), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn compare_swap_deadline(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(CompareSwap { remote, compare, swap }), Some(deadline))
    }

    /// `ibv_post_send`: adds to the aligned 64-bit number in the peer's memory, atomically, and stores the
    /// previous value in the buffer of 8 bytes. See [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub fn fetch_add(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(FetchAdd { remote, add }), None)
    }

    /// As [`fetch_add`](Self::fetch_add), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// [Those of blocking operations](Self#blocking-operations).
    #[inline]
    pub fn fetch_add_deadline(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        let remote = remote.into();
        self.scatter(buffer, Request::new(FetchAdd { remote, add }), Some(deadline))
    }

    /// Runs an operation whose buffer the device reads.
    #[inline(always)]
    fn gather(
        &mut self,
        buffer: &impl GatherBuffer,
        kind: impl Kind,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let mut list = buffer.gather()?;
        // SAFETY: the buffer is borrowed for the duration of the call, and its type keeps its memory valid
        // and exclusive while it is borrowed.
        unsafe { self.core().run(Request::new(kind), list.as_mut(), deadline) }
    }

    /// Runs an operation whose buffer the device writes.
    #[inline(always)]
    fn scatter(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        operation: impl Operation,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let mut list = buffer.scatter()?;
        // SAFETY: as in `gather`.
        unsafe { self.core().run(operation, list.as_mut(), deadline) }
    }

    /// Runs an operation whose data the post itself copies.
    #[inline(always)]
    fn inline(
        &mut self,
        bytes: &[u8],
        kind: impl Kind,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let mut list = [inline_element(bytes)?];
        // SAFETY: the bytes are borrowed for the duration of the call.
        unsafe { self.core().run(Request::inline(kind), &mut list, deadline) }
    }
}
