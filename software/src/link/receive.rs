//! Receives packets by few system calls: several messages by one, and several datagrams as one message.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::neighbours::Inbox;
use super::same_host::{DirectAccess, Receivers};
use super::socket::{Socket, UDP_GRO, read_address};
use super::udp::Sockets;
use crate::files::{Epoll, WakeFd, wait_for};
use crate::foreign::Foreign;
use crate::wire::{LONGEST, PORT, Packet};

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
const WITHOUT_SOCKETS: u32 = 16;

/// Tokens of what [`Receiver::waits`] has, beside the numbers of a helper's own files, which are less.
pub(crate) const PACKETS: u64 = u64::MAX;
pub(crate) const DATAGRAMS: u64 = u64::MAX - 1;

/// For how many turns without any packet the sockets are left out as often, after there was one elsewhere.
const EMPTY_TURNS: u32 = 4096;

/// Where a packet comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) address: SocketAddr,
    /// Whether it has its invariant CRC. A packet without one comes from this machine's memory.
    pub(crate) is_sealed: bool,
}

/// Receives from all sockets of a device, from its inbox, and from other processes' rings.
pub(crate) struct Receiver {
    inbox: Arc<Inbox>,
    /// Packets from the inbox.
    packets: VecDeque<Packet>,
    receivers: Receivers,
    /// Readable when another process has ended that sends to this device.
    ends: Arc<Epoll>,
    /// What a helper waits for, beside files of its own.
    waits: Arc<Epoll>,
    /// The sockets are all in `waits`.
    are_watched: bool,
    /// How many times in a row the sockets were left out, because there were packets elsewhere.
    without_sockets: u32,
    /// The thread that waits was told that it may sleep, and no packet was received since then.
    told_to_sleep: bool,
    /// `wake_fd` may have wake-ups that [`may_sleep`](Self::may_sleep) has to clear.
    has_left_some: bool,
    /// How many turns without any packet followed the last packet of this machine's memory, up to `EMPTY_TURNS`. A packet of a
    /// socket sets it to `EMPTY_TURNS`.
    empty_turns: u32,
    all: Arc<Sockets>,
    version: u32,
    sockets: Vec<Arc<Socket>>,
    buffers: Box<[u8]>,
    /// How many messages the next call of the kernel asks for: more than the last one found. To find that there is no
    /// second one takes as long as to find none.
    asked: usize,
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
    pub(crate) fn new(all: Arc<Sockets>, inbox: Arc<Inbox>) -> io::Result<Self> {
        // SAFETY: all zeros is a valid value of these C structures.
        let (headers, parts, names, controls) = unsafe { (zeroed(), zeroed(), zeroed(), zeroed()) };
        let wake_fd = inbox.wake_fd().clone();
        let (ends, waits) = (Arc::new(Epoll::new()?), Arc::new(Epoll::new()?));
        waits.add(wake_fd.fd(), libc::EPOLLIN | libc::EPOLLET, PACKETS)?;
        let mut receiver = Self {
            inbox,
            packets: VecDeque::new(),
            receivers: Receivers::new(wake_fd, ends.clone()),
            ends,
            waits,
            are_watched: false,
            without_sockets: 0,
            told_to_sleep: false,
            has_left_some: false,
            empty_turns: EMPTY_TURNS,
            all,
            version: 0,
            sockets: Vec::new(),
            buffers: vec![0; BATCH * ROOM].into_boxed_slice(),
            asked: 1,
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
        Ok(receiver)
    }

    /// Peers of this machine may use this process's memory.
    pub(crate) fn set_direct_access(&mut self, direct_access: Arc<DirectAccess>) {
        self.receivers.set_direct_access(direct_access);
    }

    /// The eventfd that wakes a thread which waits for packets of this machine.
    pub(crate) fn wake_fd(&self) -> &Arc<WakeFd> {
        self.inbox.wake_fd()
    }

    /// What a thread of the program waits for that receives, in one set: `wake_fd` and the sockets have the tokens [`PACKETS`] and
    /// [`DATAGRAMS`].
    pub(crate) fn waits(&self) -> &Arc<Epoll> {
        &self.waits
    }

    /// Whether all sockets are in [`waits`](Self::waits).
    pub(crate) fn are_watched(&self) -> bool {
        self.are_watched
    }

    /// The current sockets.
    pub(crate) fn sockets(&mut self) -> &[Arc<Socket>] {
        if let Some((version, sockets)) = self.all.newer_than(self.version) {
            // Children of this process may have them open.
            self.sockets.iter().for_each(|socket| self.waits.remove(socket.socket.as_raw_fd()));
            (self.version, self.sockets) = (version, sockets);
            let mut sockets = self.sockets.iter().map(|socket| socket.socket.as_raw_fd());
            self.are_watched =
                sockets.all(|fd| self.waits.add(fd, libc::EPOLLIN, DATAGRAMS).is_ok());
            let sockets = &self.sockets;
            self.receivers.keep(|address| sockets.iter().any(|socket| socket.address == address));
        }
        &self.sockets
    }

    /// The descriptors to wait for, beside [`wake_fd`](Self::wake_fd).
    pub(crate) fn sources(&mut self) -> Sources {
        let sockets = self.sockets().to_vec();
        let listeners = self.receivers.looks_at_listeners();
        let pending = self.receivers.pending().cloned().collect();
        Sources { sockets, listeners, pending, ends: self.ends.clone() }
    }

    /// Makes the next packet of this machine wake those that wait for `wake_fd`. Returns false if there are packets already. The
    /// caller then receives afterwards, or waits for `wake_fd`, which this has cleared.
    pub(crate) fn may_sleep(&mut self) -> bool {
        self.may_have_rung();
        if std::mem::take(&mut self.has_left_some) {
            self.wake_fd().clear();
        }
        self.ask_to_ring()
    }

    /// As [`may_sleep`](Self::may_sleep), for a thread that waits for [`waits`](Self::waits), which learns of each wake-up once.
    pub(crate) fn may_wait(&mut self) -> bool {
        self.sockets();
        self.may_have_rung();
        self.ask_to_ring()
    }

    /// Notes whether there may be wake-ups to clear. If all are to ring, none has rung, and nothing need be cleared. But a sender
    /// decides to ring first and rings then: if it was interrupted in between, `wake_fd` is readable for a packet that was received
    /// long ago. The thread that was to sleep then comes here again, without a packet.
    fn may_have_rung(&mut self) {
        self.has_left_some |=
            self.told_to_sleep || !self.inbox.is_rung() || !self.receivers.all_ring();
    }

    fn ask_to_ring(&mut self) -> bool {
        self.told_to_sleep = self.receivers.may_sleep() & self.inbox.may_sleep();
        self.told_to_sleep
    }

    /// Attends to other processes that come; `ready` are the files of `Sources` that are readable.
    pub(crate) fn attend(&mut self, ready: &[c_int]) {
        let all_listeners = self.receivers.stop_waiting();
        if ready.is_empty() && !all_listeners {
            return;
        }
        for socket in &self.sockets {
            if let Some(listener) = &socket.listener
                && (all_listeners || ready.contains(&listener.as_raw_fd()))
            {
                self.receivers.open(socket.address, listener);
            }
        }
        self.receivers.attend(|fd| ready.contains(&fd));
    }

    /// Whether [`take_gone`](Self::take_gone) has something.
    pub(crate) fn has_gone(&self) -> bool {
        self.receivers.has_gone()
    }

    /// The addresses of other processes that have ended since the last call.
    pub(crate) fn take_gone(&mut self) -> Vec<IpAddr> {
        self.receivers.take_gone()
    }

    /// Receives the packets that have arrived, without blocking, and passes on each with its source and
    /// destination address; returns their number.
    pub(crate) fn receive(&mut self, each: impl FnMut(Source, IpAddr, &[u8])) -> usize {
        self.receive_some(false, each)
    }

    /// Receives for a thread that will soon call it again: if packets come from elsewhere, it leaves the sockets out,
    /// but for each 16th time.
    pub(crate) fn poll(&mut self, each: impl FnMut(Source, IpAddr, &[u8])) -> usize {
        self.receive_some(true, each)
    }

    /// The caller has found the sockets empty: the next turns may leave them out.
    pub(crate) fn expect_no_datagrams(&mut self) {
        self.without_sockets = 0;
    }

    /// The caller has found a packet in a socket, or may have: the next turns without packets look into the sockets.
    pub(crate) fn expect_datagrams(&mut self) {
        self.empty_turns = EMPTY_TURNS;
    }

    fn receive_some(
        &mut self,
        is_poll: bool,
        mut each: impl FnMut(Source, IpAddr, &[u8]),
    ) -> usize {
        self.sockets();
        let mut count = self.receive_from_inbox(&mut each);
        count += self.receivers.receive(|(from, is_sealed), to, packet| {
            each(Source { address: SocketAddr::new(from, PORT), is_sealed }, to, packet);
        });
        self.empty_turns = if count > 0 { 0 } else { (self.empty_turns + 1).min(EMPTY_TURNS) };
        if count > 0 {
            self.told_to_sleep = false;
        }
        self.without_sockets += 1;
        let may_leave_out = count > 0 || is_poll && self.empty_turns < EMPTY_TURNS;
        if may_leave_out && self.without_sockets < WITHOUT_SOCKETS {
            return count;
        }
        self.without_sockets = 0;
        for i in 0..self.sockets.len() {
            let received = self.receive_from(i, &mut each);
            if received > 0 {
                // The sockets are in use.
                self.expect_datagrams();
            }
            count += received;
        }
        count
    }

    fn receive_from_inbox(&mut self, each: &mut impl FnMut(Source, IpAddr, &[u8])) -> usize {
        self.inbox.take(&mut self.packets);
        for packet in &self.packets {
            if let Some((from, to)) = packet.addresses {
                let address = SocketAddr::new(from, PORT);
                each(Source { address, is_sealed: packet.is_sealed }, to, &packet.bytes);
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
        each: &mut impl FnMut(Source, IpAddr, &[u8]),
    ) -> usize {
        let Socket { address, socket, .. } = &*self.sockets[index];
        let asked = self.asked;
        for header in &mut self.headers[..asked] {
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            header.msg_hdr.msg_controllen = size_of::<Control>() as _;
        }
        // SAFETY: the headers point to names, parts, controls and buffers, which are in boxes of ours.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                asked as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).unwrap_or(0);
        self.asked = (2 * received + 1).min(BATCH);
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
                each(Source { address: from, is_sealed: true }, *address, packet);
                packets += 1;
            }
            count += usize::saturating_sub(packets, 1);
        }
        count
    }
}

/// Files to wait for. They stay open for the wait, even if they are removed meanwhile.
#[derive(Debug)]
pub(crate) struct Sources {
    sockets: Vec<Arc<Socket>>,
    listeners: bool,
    pending: Vec<Arc<Foreign>>,
    ends: Arc<Epoll>,
}

impl Sources {
    /// The sockets at which processes announce themselves, and what tells of their end.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = libc::pollfd> {
        let listeners = self.sockets.iter().filter_map(|socket| socket.listener.as_ref());
        let listeners = listeners.filter(|_| self.listeners).map(AsRawFd::as_raw_fd);
        let pending = self.pending.iter().map(|connection| connection.as_raw_fd());
        listeners.chain(pending).chain([self.ends.fd()]).map(wait_for)
    }

    /// The sockets that packets are received from.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = libc::pollfd> {
        self.sockets.iter().map(|socket| socket.socket.as_raw_fd()).map(wait_for)
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
