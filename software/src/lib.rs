//! An RDMA device made of software, to run and test RDMA code on any machine.
//!
//! It needs no root, no kernel module and no device file: a [`Device`] is a provider behind rdma-core's own
//! interface, in this process, so a program takes the same path through `ibverbs` and libibverbs as on
//! hardware. On the wire it speaks RoCE v2 over an ordinary UDP socket, with hardware and the kernel's Soft-RoCE on other
//! machines. The same packets go to other software devices of this machine without the kernel's network, unless
//! [`Builder::through_kernel`] is set.
//!
//! ```
//! use ibverbs_software::Device;
//!
//! let device = Device::new()?; // soft0, at a free address of 127.0.0.0/8
//! device.register(); // for ibverbs::devices() and ibverbs::open("soft0")
//! let context = ibverbs::open(&device.name())?;
//! assert_eq!(context.query_gid(1, 0)?.gid.to_string(), format!("::ffff:{}", device.address()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Networks and faults for tests
//!
//! The page [Testing RDMA code without RDMA][page] shows tests with them, and a workflow for CI.
//!
//! - [`Network`] simulates a network between devices of this process, in virtual time: a seed decides which
//!   packets are lost, duplicated, reordered, delayed or corrupted.
//! - [`Device::fail`] makes any verb fail with any errno, before or after it took effect.
//! - Completions can be [held](Device::hold_completions), [shuffled](Device::shuffle_completions),
//!   [dropped](Device::drop_completions) and [made up](Device::make_up_completion), and
//!   asynchronous events [made up](Device::make_up_event).
//! - [`Device::live_objects`] tells what was not given back, [`Device::calls`] which verbs were called, and
//!   [`Device::early_deregistrations`] whether memory was deregistered under a request.
//! - Ports [go down and up](Device::set_port_active), [addresses move](Device::set_addresses), and a device is
//!   [removed](Device::remove). [`Builder`] limits numbers of objects and registered memory.
//!
//! # What differs from hardware
//!
//! - A READ whose answer was lost is sent and carried out again, and reads the memory as it is at that
//!   time, as the InfiniBand specification allows. So it may see data that later requests of the same
//!   queue pair have written, unless they carry a fence. Atomic operations are never carried
//!   out twice.
//! - Places of a send queue become free when the completion that covers them is polled, as on most
//!   hardware; with the kernel's Soft-RoCE they become free earlier.
//! - Registered memory is not pinned: if it is unmapped before it is deregistered, the process gets
//!   SIGSEGV, where hardware goes on with the old pages.
//! - The device waits at least 20 ms for an answer, even if the timeout is shorter. Once it has waited in vain, it waits
//!   four times as long until an answer comes, which is the most that the InfiniBand specification allows: on a busy
//!   machine, the peer may have to wait for a processor. On a simulated network all times are exact.
//! - A thread that polls, or sleeps until a completion, does the device's work meanwhile. If it then turns to something
//!   else, requests of peers may wait before the device's own thread takes over, for up to 2 ms if it has polled, and 8 ms if
//!   it has slept; and so may the acknowledgement of a message that the thread has received: it goes with the next request
//!   that the program posts.
//! - A peer on the same machine that receives nothing, since its threads have no processor, is waited for without retries,
//!   for a minute at most, in which only time counts that this device had a processor for.
//! - On IPv4, the invariant CRC covers a field that a socket cannot read (the identification). If the
//!   sender increments that field, as Soft-RoCE does, the check has a strength of 16 bits instead of 32.
//! - From other machines, what does not fit into the buffer of the receiving socket is lost. A reliable connection sends it
//!   again; unreliable messages of more than some 100 KiB may need a larger `net.core.rmem_max` there. What the sending
//!   socket has no room for waits, up to 4,096 packets.
//! - There is only one partition. There are no service levels, alternate paths or flow labels.
//! - After a fork, the device belongs to the parent: the child has a copy without the thread. The child may
//!   close the context, and should do nothing else with it.
//! - The device locks no memory: `RLIMIT_MEMLOCK` has no effect.
//! - There are no raw packets. A flush has nothing to do, since what was written is where all see it; memory that outlasts a
//!   loss of power (`IBV_ACCESS_FLUSH_PERSISTENT`) is refused.
//! - Each access to on-demand memory asks the kernel, by `madvise`, whether it is there. Before Linux 5.14 it is taken to be.
//! - GUIDs follow from the first address, as locally administered ones. libibverbs itself reads them from files of the
//!   kernel, so `ibv_get_device_guid` returns 0 for a device of this process; `ibv_query_device`, the crate `ibverbs` and the
//!   library of `script/libibverbs` tell them.
//! - GID 0 is the first address. Hardware and Soft-RoCE have a link-local GID there, and IPv4 ones behind it: see
//!   [`Builder::adapter_gids`] for a device with such a table, and [`Builder::port`] for one on a simulated network.
//! - Unreliable messages to a device of this machine wait for a reader that is slower than the sender, and none is lost while it
//!   makes room within two seconds.
//! - "Receiver not ready" does not renew the retries of lost packets, as in Soft-RoCE: only what acknowledges a packet
//!   does. So a message that waits for its receive on a lossy network fails after its seventh loss, however many "receiver
//!   not ready" are allowed. A retry count of 7 means seven, as in the InfiniBand specification; in Soft-RoCE it means for
//!   ever.
//! - A datagram that does not fit into its receive is lost, and the receive is for the next one, as in Soft-RoCE. Some
//!   hardware ends the queue pair.
//! - A peer with more READ and atomic requests outstanding than `max_dest_rd_atomic` is refused if that is certain: if
//!   their answers have not left, or have been under way for less time than a simulated network takes. Soft-RoCE refuses none,
//!   hardware those that it has no room for.
//! - In [strict mode](Builder::strict), a send whose data the program changes before its completion fails. Hardware sends
//!   the old data or the new. And what the device drops without an answer, for a reason that a program can mend, is told on
//!   standard error.
//! - Connecting a queue pair looks for no route: that the peer cannot be reached shows when a request gets no answer.
//! - The XRC domain of a file is shared by the contexts of one device, and not with other processes, which have
//!   devices of their own. It holds the file open by a descriptor of its own.
//! - A request that names a shared receive queue that does not exist, or is of another XRC domain, is refused as an
//!   invalid request, and the receiving queue pair gets `IBV_EVENT_QP_ACCESS_ERR`. Completions of such a queue
//!   stay when the receiving queue pair is destroyed. Memory windows of type 2 cannot be reached over XRC.
//! - Posting a READ or an atomic operation fails with `EINVAL` on an unreliable connection, and on one whose
//!   `max_rd_atomic` is 0.
//! - Deregistering a region fails with `EBUSY` while a window is bound to it.
//!
//! `software/README.md` in the repository describes the implementation.
//!
//! [page]: https://github.com/ibverbs-bundled/ibverbs-bundled/blob/main/docs/testing.md

#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

mod backoff;
mod builder;
mod causes;
mod device;
mod driver;
mod environment;
mod event_files;
mod faults;
mod ffi;
mod files;
mod foreign;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod harness;
mod inspect;
mod link;
mod manager;
mod network;
mod partitions;
mod port;
mod provider;
mod random;
mod register;
mod settings;
#[cfg(any(test, feature = "tokio"))]
mod simulate;
mod threads;
mod transport;
mod wire;

pub use builder::Builder;
pub use device::Device;
pub use environment::{RegisteredDevices, register_if_none};
pub use faults::{EventSubject, MadeUpCompletion, Verb, When};
pub use inspect::LiveObjects;
pub use network::{
    BackgroundDriver, Conditions, Network, NetworkBuilder, PacketFate, Trace, TracedPacket,
};
#[cfg(any(test, feature = "tokio"))]
pub use simulate::{Host, SimulatedListener, SimulatedStream, World, simulate};
pub use transport::counters::{Counters, PortCounters};

/// Writes a line to standard error. `eprintln!` would panic if that is closed.
fn say(text: std::fmt::Arguments<'_>) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{text}");
}
