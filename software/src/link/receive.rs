//! Receives packets by few system calls: several messages by one, and several datagrams as one message.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::neighbours::Inbox;
use super::udp::{Socket, Sockets, UDP_GRO, read_address};
use crate::wire::{PORT, Packet};

/// The longest packet: 4096 bytes, the longest headers, padding and CRC.
pub(crate) const LONGEST: usize = 4096 + 128;

/// How many messages one system call receives, and the room for each. The system gives the pages only when something
/// is written to them.
const BATCH: usize = 32;
const ROOM: usize = 1 << 16;

/// Room for the control messages of a message, aligned as C has them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    rest: [u64; 6],
}

/// How many times in a row the sockets may be left out.
const INBOX_ALONE: u32 = 16;

/// Receives from all sockets of a device, and from its inbox.
pub(crate) struct Receiver {
    inbox: Arc<Inbox>,
    /// Packets from the inbox.
    packets: VecDeque<Packet>,
    /// How many times in a row the sockets were left out, because there were packets in the inbox.
    inbox_alone: u32,
    all: Arc<Sockets>,
    version: u32,
    sockets: Vec<Arc<Socket>>,
    buffers: Box<[u8]>,
    headers: Box<[libc::mmsghdr; BATCH]>,
    // The headers point into these.
    parts: Box<[libc::iovec; BATCH]>,
    names: Box<[libc::sockaddr_storage; BATCH]>,
    controls: Box<[Control; BATCH]>,
}

// SAFETY: its pointers are into its own boxes.
unsafe impl Send for Receiver {}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}

impl Receiver {
    pub(crate) fn new(all: Arc<Sockets>, inbox: Arc<Inbox>) -> Self {
        // SAFETY: all zeros is a valid value of these C structures.
        let (headers, parts, names, controls) = unsafe { (zeroed(), zeroed(), zeroed(), zeroed()) };
        let mut receiver = Self {
            inbox,
            packets: VecDeque::new(),
            inbox_alone: 0,
            all,
            version: 0,
            sockets: Vec::new(),
            buffers: vec![0; BATCH * ROOM].into_boxed_slice(),
            headers: Box::new(headers),
            parts: Box::new(parts),
            names: Box::new(names),
            controls: Box::new(controls),
        };
        let start = receiver.buffers.as_mut_ptr();
        for i in 0..BATCH {
            let buffer = start.wrapping_add(i * ROOM);
            receiver.parts[i] = libc::iovec { iov_base: buffer.cast::<c_void>(), iov_len: ROOM };
        }
        let (parts, names) = (receiver.parts.as_mut_ptr(), receiver.names.as_mut_ptr());
        let controls = receiver.controls.as_mut_ptr();
        for (i, header) in receiver.headers.iter_mut().enumerate() {
            header.msg_hdr.msg_name = names.wrapping_add(i).cast();
            header.msg_hdr.msg_iov = parts.wrapping_add(i);
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = controls.wrapping_add(i).cast();
        }
        receiver
    }

    /// The current sockets.
    pub(crate) fn sockets(&mut self) -> &[Arc<Socket>] {
        if let Some((version, sockets)) = self.all.newer_than(self.version) {
            (self.version, self.sockets) = (version, sockets);
        }
        &self.sockets
    }

    /// Receives the packets that have arrived, without blocking, and passes on each with its source and
    /// destination address; returns their number.
    pub(crate) fn receive(&mut self, mut each: impl FnMut(SocketAddr, IpAddr, &[u8])) -> usize {
        self.sockets();
        let mut count = self.receive_from_inbox(&mut each);
        self.inbox_alone = if count > 0 { self.inbox_alone + 1 } else { 0 };
        if count > 0 && self.inbox_alone < INBOX_ALONE {
            return count;
        }
        self.inbox_alone = 0;
        for i in 0..self.sockets.len() {
            count += self.receive_from(i, &mut each);
        }
        count
    }

    fn receive_from_inbox(&mut self, each: &mut impl FnMut(SocketAddr, IpAddr, &[u8])) -> usize {
        self.inbox.take(&mut self.packets);
        for packet in &self.packets {
            if let Some((from, to)) = packet.addresses {
                each(SocketAddr::new(from, PORT), to, &packet.bytes);
            }
        }
        let count = self.packets.len();
        if count > 0 {
            self.inbox.give_back(&mut self.packets);
        }
        count
    }

    fn receive_from(
        &mut self,
        index: usize,
        each: &mut impl FnMut(SocketAddr, IpAddr, &[u8]),
    ) -> usize {
        let Socket { address, socket, .. } = &*self.sockets[index];
        for header in self.headers.iter_mut() {
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            header.msg_hdr.msg_controllen = size_of::<Control>() as _;
        }
        // SAFETY: the headers point to names, parts, controls and buffers, which are in boxes of ours.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                BATCH as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).unwrap_or(0);
        let headers = self.headers.iter().zip(self.names.iter());
        let messages = headers.zip(self.buffers.chunks_exact(ROOM)).take(received);
        let mut count = 0;
        for ((header, name), buffer) in messages {
            let message = &buffer[..ROOM.min(header.msg_len as usize)];
            let cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            count += 1;
            let (false, Some(from)) = (cut, read_address(name)) else { continue };
            let length = segment(&header.msg_hdr).unwrap_or(message.len()).max(1);
            let mut packets = 0;
            for packet in message.chunks(length).filter(|packet| packet.len() <= LONGEST) {
                each(from, *address, packet);
                packets += 1;
            }
            count += usize::saturating_sub(packets, 1);
        }
        count
    }
}

/// The length of the datagrams that a message holds, if it may hold several.
fn segment(header: &libc::msghdr) -> Option<usize> {
    // SAFETY: the header points to control messages that the kernel has written, and these functions stay within
    // their length; the kernel's has an integer, which may be unaligned.
    unsafe {
        let mut control = libc::CMSG_FIRSTHDR(header);
        while !control.is_null() {
            if (*control).cmsg_level == libc::IPPROTO_UDP && (*control).cmsg_type == UDP_GRO {
                let length = libc::CMSG_DATA(control).cast::<c_int>().read_unaligned();
                return usize::try_from(length).ok();
            }
            control = libc::CMSG_NXTHDR(header, control);
        }
    }
    None
}
