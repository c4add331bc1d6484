//! An RDMA device made of software: RDMA code runs, and is tested, on any machine.
//!
//! No root, no kernel module, no device file: a [`Device`] is a provider behind rdma-core's own interface,
//! in this process, so that a program takes the very path through `ibverbs` and libibverbs that it takes on
//! hardware. On the wire it speaks RoCE v2 over an ordinary UDP socket, with other devices of this process
//! or machine, and with real ones and the kernel's Soft-RoCE elsewhere.
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
//! # What differs from hardware
//!
//! - A READ that is sent again, since its answer was lost, is carried out again and sees what is in the
//!   memory by then, as the InfiniBand specification allows. So it may see what later requests of the same
//!   queue pair have written meanwhile, unless they carry a fence. Atomic operations are never carried
//!   out twice.
//! - Places of a send queue become free when the completion that covers them is polled, as on most
//!   hardware; the kernel's Soft-RoCE gives them back before.
//! - Registered memory is not pinned: if it is unmapped before it is deregistered, the process gets
//!   SIGSEGV, where hardware goes on with the old pages.
//! - On a socket, an answer is waited for at least 20 ms, however short the timeout is.
//! - On IPv4, the invariant CRC covers a field that sockets do not show (the identification). Packets
//!   of a sender that counts it up, as Soft-RoCE does, are checked by 16 bits instead of 32.
//! - There are one partition, no service levels, no alternate paths and no flow labels.
//! - A process that forks leaves the device to the parent: the child has a copy without the thread, of which
//!   it may close the context, and should do nothing else.
//! - Locked memory is not counted: `RLIMIT_MEMLOCK` does not matter.
//! - There are no XRC queue pairs, no device memory, no on-demand paging and no raw packets.
//! - A READ or an atomic operation on an unreliable connection is refused when it is posted (`EINVAL`), as is one
//!   on a connection that may have none on the way.
//! - A region that a window is bound to is not deregistered: `EBUSY`.
//!
//! `software/README.md` in the repository tells how it works inside.

mod builder;
mod device;
mod fallback;
mod ffi;
mod link;
mod provider;
mod register;
mod transport;
mod wire;

pub use builder::Builder;
pub use device::Device;
pub use fallback::register_if_none;
pub use transport::core::Counters;
