//! Every resource type is `Send`, is `Sync` if libibverbs locks it, and is covariant in its lifetimes.

use std::pin::Pin;

use ibverbs::channel::{AnyBuffer, CancelHandle, ChannelSet, PendingWork};
use ibverbs::completion::{CompletionCounter, CompletionEvent, ExtendedPoller};
use ibverbs::device::{AsyncEvent, AsyncEvents, DeviceList, DmaHandle};
use ibverbs::domain::{ThreadDomain, XrcDomain};
use ibverbs::flow::{Counters, EspAction, FlowId, Rule};
use ibverbs::future::{AsyncOperation, AsyncReceive, Locked, PreparedAsyncChannel, SharedReceives};
use ibverbs::memory::{
    BorrowedMemoryRegion, DeviceMemory, DeviceMemoryRegion, ImplicitMemoryRegion, MemoryKey,
    MemoryWindow, NullMemoryRegion, RawMemoryRegion, ReadOnlyMemoryRegion, ReregisterError,
    Reregistration,
};
use ibverbs::memory::{GatherElement, MemorySliceMut, ScatterElement, SharedMemorySlice};
use ibverbs::operation::{DatagramDestination, DatagramPeer, PreparedRequest};
use ibverbs::operation::{
    Immediate, PreparedReceive, ReceiveHalf, ReceiveList, SendHalf, SendList, To, WindowBinding,
};
use ibverbs::pool::{BufferCache, SharedMemoryRange};
use ibverbs::queue_pair::{
    DcStreams, DcTarget, OpenedQueuePair, QueuePairAttributes, SrdOptions, StateTransition,
};
use ibverbs::tcp::AsyncStream;
use ibverbs::work_queue::{IndirectionTable, ReceiveScalingQueuePair, WorkQueue};
use ibverbs::*;

fn send_and_sync<T: Send + Sync>() {}

#[test]
fn resources_cross_threads() {
    send_and_sync::<DeviceList>();
    send_and_sync::<Device<'_>>();
    send_and_sync::<Context<'_>>();
    send_and_sync::<ProtectionDomain<'_>>();
    send_and_sync::<AsyncEvents<'_>>();
    send_and_sync::<AsyncEvent>();
    send_and_sync::<CompletionChannel<'_>>();
    send_and_sync::<CompletionEvent>();
    send_and_sync::<CompletionQueue<'_>>();
    send_and_sync::<CompletionQueueBuilder<'_>>();
    send_and_sync::<ExtendedPoller<'_>>();
    send_and_sync::<MemoryRegion<'_, u8>>();
    send_and_sync::<SharedMemoryRegion<'_, u8>>();
    send_and_sync::<AddressHandle<'_>>();
    send_and_sync::<QueuePairBuilder<'_>>();
    send_and_sync::<PreparedQueuePair<'_>>();
    send_and_sync::<QueuePair<'_>>();
    send_and_sync::<SendHalf<'_, '_>>();
    send_and_sync::<ReceiveHalf<'_, '_>>();
    send_and_sync::<SendWorkRequest<GatherElement<'_>, Immediate>>();
    send_and_sync::<WriteWorkRequest<PooledBuffer>>();
    send_and_sync::<ReadWorkRequest<ScatterElement<'_>>>();
    send_and_sync::<To<SendWorkRequest<GatherElement<'_>>, DatagramPeer<'_>>>();
    send_and_sync::<ReceiveWorkRequest<MemorySliceMut<'_, u8>>>();
    send_and_sync::<PreparedRequest<'_>>();
    send_and_sync::<PreparedReceive<'_>>();
    send_and_sync::<SendList<'_>>();
    send_and_sync::<ReceiveList<'_>>();
    send_and_sync::<StateTransition>();
    send_and_sync::<QueuePairAttributes>();
    send_and_sync::<Channel<'_>>();
    send_and_sync::<ChannelBuilder<'_>>();
    send_and_sync::<PreparedChannel<'_>>();
    send_and_sync::<SharedReceives>();
    send_and_sync::<PendingWork>();
    send_and_sync::<WorkQueue<'_>>();
    send_and_sync::<IndirectionTable<'_>>();
    send_and_sync::<ReceiveScalingQueuePair<'_>>();
    send_and_sync::<OpenedQueuePair<'_>>();
    send_and_sync::<SharedReceiveQueue<'_>>();
    send_and_sync::<XrcDomain<'_>>();
    send_and_sync::<ThreadDomain<'_>>();
    send_and_sync::<Rule<'_>>();
    send_and_sync::<Counters<'_>>();
    send_and_sync::<EspAction<'_>>();
    send_and_sync::<FlowId>();
    send_and_sync::<ChannelSet<'_>>();
    send_and_sync::<BufferCache>();
    send_and_sync::<BufferPool>();
    send_and_sync::<CancelHandle>();
    send_and_sync::<PooledBuffer>();
    send_and_sync::<SharedMemoryRange<u8>>();
    send_and_sync::<ibverbs::memory::RawMemoryRange>();
    send_and_sync::<ibverbs::memory::SharedMemory>();
    send_and_sync::<TransportError>();
    send_and_sync::<WorkCompletion>();
    send_and_sync::<Error>();
}

#[test]
fn direct_objects_cross_threads() {
    #[cfg(feature = "mlx5")]
    send_and_sync::<MemoryKey<'_>>();
    #[cfg(rdma_core_65)]
    send_and_sync::<DmaHandle<'_>>();
    #[cfg(rdma_core_65)]
    send_and_sync::<CompletionCounter<'_>>();
    #[cfg(feature = "mlx5")]
    send_and_sync::<DcTarget<'_>>();
    #[cfg(feature = "mlx5")]
    send_and_sync::<DcStreams>();
    #[cfg(feature = "efa")]
    send_and_sync::<SrdOptions>();
}

/// Futures of a reactor may run on a runtime that moves tasks from thread to thread.
#[test]
fn futures_cross_threads() {
    send_and_sync::<Reactor>();
    send_and_sync::<PreparedAsyncChannel>();
    send_and_sync::<AsyncChannel>();
    send_and_sync::<AsyncChannel<Locked<AnyBuffer>>>();
    send_and_sync::<AsyncDatagrams>();
    send_and_sync::<AsyncOperation<'_, SendWorkRequest<PooledBuffer>, Locked<PooledBuffer>>>();
    send_and_sync::<AsyncReceive<'_, PooledBuffer, Locked<PooledBuffer>>>();
    #[expect(dead_code, reason = "compiling is the test")]
    fn run(reactor: &Reactor) -> impl Send {
        reactor.run(|_| std::task::Poll::Pending)
    }
    #[expect(dead_code, reason = "compiling is the test")]
    fn wait(channel: &AsyncChannel) -> (impl Send, impl Send, impl Send) {
        (channel.shutdown(), channel.next_message(), channel.keep_alive(|| async {}))
    }
}

#[expect(dead_code, reason = "compiling is the test")]
fn datagrams_cross_threads(
    end: &AsyncDatagrams,
    buffers: [PooledBuffer; 2],
    to: DatagramDestination,
) -> [Pin<Box<dyn Send + '_>>; 2] {
    let [message, room] = buffers;
    [
        Box::pin(async move { end.send_to(message, &to).await.is_ok() }),
        Box::pin(end.recv_from(room)),
    ]
}

/// A connection that is being made reads from a stream, which need not be `Sync`.
#[test]
fn connecting_futures_are_sent() {
    fn send<T: Send>() {}
    // A loop has one owner at a time.
    send::<Loop<'_, PooledBuffer>>();
    send::<Ended<AnyBuffer>>();
    #[expect(dead_code, reason = "compiling is the test")]
    fn connect<S: AsyncStream + Send>(prepared: PreparedAsyncChannel, stream: &mut S) -> impl Send {
        prepared.connect(stream, b"")
    }
}

/// Each function compiles only if the type is covariant in its lifetime.
#[expect(dead_code, reason = "compiling is the test")]
mod covariant {
    use super::*;

    fn device<'a>(x: Device<'static>) -> Device<'a> {
        x
    }
    fn context<'a>(x: Context<'static>) -> Context<'a> {
        x
    }
    fn domain<'a>(x: ProtectionDomain<'static>) -> ProtectionDomain<'a> {
        x
    }
    fn async_events<'a>(x: AsyncEvents<'static>) -> AsyncEvents<'a> {
        x
    }
    fn completion_channel<'a>(x: CompletionChannel<'static>) -> CompletionChannel<'a> {
        x
    }
    fn completion_queue_builder<'a>(
        x: CompletionQueueBuilder<'static>,
    ) -> CompletionQueueBuilder<'a> {
        x
    }
    fn extended_poller<'a>(x: ExtendedPoller<'static>) -> ExtendedPoller<'a> {
        x
    }
    fn completion_queue<'a>(x: CompletionQueue<'static>) -> CompletionQueue<'a> {
        x
    }
    fn region<'a>(x: MemoryRegion<'static, u8>) -> MemoryRegion<'a, u8> {
        x
    }
    fn shared_region<'a>(x: SharedMemoryRegion<'static, u8>) -> SharedMemoryRegion<'a, u8> {
        x
    }
    fn address_handle<'a>(x: AddressHandle<'static>) -> AddressHandle<'a> {
        x
    }
    fn builder<'a>(x: QueuePairBuilder<'static>) -> QueuePairBuilder<'a> {
        x
    }
    fn prepared<'a>(x: PreparedQueuePair<'static>) -> PreparedQueuePair<'a> {
        x
    }
    fn send_half<'a>(x: SendHalf<'a, 'static>) -> SendHalf<'a, 'a> {
        x
    }
    fn receive_half<'a>(x: ReceiveHalf<'a, 'static>) -> ReceiveHalf<'a, 'a> {
        x
    }
    fn datagram_peer<'a>(x: DatagramPeer<'static>) -> DatagramPeer<'a> {
        x
    }
    fn prepared_request<'a>(x: PreparedRequest<'static>) -> PreparedRequest<'a> {
        x
    }
    fn channel<'a>(x: Channel<'static>) -> Channel<'a> {
        x
    }
    fn channel_builder<'a>(x: ChannelBuilder<'static>) -> ChannelBuilder<'a> {
        x
    }
    fn prepared_channel<'a>(x: PreparedChannel<'static>) -> PreparedChannel<'a> {
        x
    }
    fn queue_pair<'a>(x: QueuePair<'static>) -> QueuePair<'a> {
        x
    }
    fn opened_queue_pair<'a>(x: OpenedQueuePair<'static>) -> OpenedQueuePair<'a> {
        x
    }
    fn xrc_domain<'a>(x: XrcDomain<'static>) -> XrcDomain<'a> {
        x
    }
    fn thread_domain<'a>(x: ThreadDomain<'static>) -> ThreadDomain<'a> {
        x
    }
    fn work_queue<'a>(x: WorkQueue<'static>) -> WorkQueue<'a> {
        x
    }
    fn indirection_table<'a>(x: IndirectionTable<'static>) -> IndirectionTable<'a> {
        x
    }
    fn scaling_queue_pair<'a>(x: ReceiveScalingQueuePair<'static>) -> ReceiveScalingQueuePair<'a> {
        x
    }
    fn flow_rule<'a>(x: Rule<'static>) -> Rule<'a> {
        x
    }
    fn flow_counters<'a>(x: Counters<'static>) -> Counters<'a> {
        x
    }
    fn esp_action<'a>(x: EspAction<'static>) -> EspAction<'a> {
        x
    }
    fn channel_set<'a>(x: ChannelSet<'static>) -> ChannelSet<'a> {
        x
    }
    #[cfg(feature = "mlx5")]
    fn dc_target<'a>(x: DcTarget<'static>) -> DcTarget<'a> {
        x
    }
}

/// Memory of all kinds.
mod memory {
    use super::*;

    #[test]
    fn memory_crosses_threads() {
        send_and_sync::<BorrowedMemoryRegion<'_, '_, u8>>();
        send_and_sync::<ReadOnlyMemoryRegion<'_, '_, u8>>();
        send_and_sync::<RawMemoryRegion<'_>>();
        send_and_sync::<NullMemoryRegion<'_>>();
        send_and_sync::<ImplicitMemoryRegion<'_>>();
        send_and_sync::<DeviceMemory<'_>>();
        send_and_sync::<DeviceMemoryRegion<'_>>();
        send_and_sync::<SharedMemorySlice<'_, u8>>();
        send_and_sync::<MemoryWindow<'_>>();
        send_and_sync::<WindowBinding<'_>>();
        send_and_sync::<Reregistration<'_>>();
        send_and_sync::<RemoteMemoryRegion>();
        send_and_sync::<RegionOptions>();
        send_and_sync::<ReregisterError>();
    }

    fn copy<T: Copy>() {}

    #[test]
    fn what_only_names_memory_is_copied() {
        copy::<SharedMemorySlice<'_, String>>();
        copy::<RemoteMemoryRegion>();
        copy::<RegionOptions>();
        assert!(!std::mem::needs_drop::<SharedMemorySlice<'_, u8>>());
    }

    /// Each function compiles only if the type is covariant in its lifetimes.
    #[expect(dead_code, reason = "compiling is the test")]
    mod covariant {
        use super::*;

        fn borrowed<'a, 'b>(
            x: BorrowedMemoryRegion<'static, 'static, u8>,
        ) -> BorrowedMemoryRegion<'a, 'b, u8> {
            x
        }
        fn read_only<'a, 'b>(
            x: ReadOnlyMemoryRegion<'static, 'static, u8>,
        ) -> ReadOnlyMemoryRegion<'a, 'b, u8> {
            x
        }
        fn raw<'a>(x: RawMemoryRegion<'static>) -> RawMemoryRegion<'a> {
            x
        }
        fn null<'a>(x: NullMemoryRegion<'static>) -> NullMemoryRegion<'a> {
            x
        }
        fn implicit<'a>(x: ImplicitMemoryRegion<'static>) -> ImplicitMemoryRegion<'a> {
            x
        }
        fn device_memory<'a>(x: DeviceMemory<'static>) -> DeviceMemory<'a> {
            x
        }
        fn device_region<'a>(x: DeviceMemoryRegion<'static>) -> DeviceMemoryRegion<'a> {
            x
        }
        fn slice<'a>(x: SharedMemorySlice<'static, u8>) -> SharedMemorySlice<'a, u8> {
            x
        }
        fn window<'a>(x: MemoryWindow<'static>) -> MemoryWindow<'a> {
            x
        }
        fn binding<'a>(x: WindowBinding<'static>) -> WindowBinding<'a> {
            x
        }
    }
}
