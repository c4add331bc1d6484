//! Packets between devices of different processes of one machine, which do not pass through the kernel's network.
//!
//! Each device has a listener at each of its addresses: a socket of the machine's abstract name space, whose name has the
//! address. That name space belongs to the network namespace, as addresses do. A process that wants to send to an address
//! connects to its listener, and hands over a ring (`ring`) that it writes to from then on. The answer is the device's
//! `wake_fd`, a file that wakes whoever waits for its packets. The connection ends with either process. Where there is no listener, and
//! where nobody is let in, packets go through the kernel's network.
//!
//! A device that lets its peers into its memory also hands over a table (`direct_access`).
//!
//! Both sides make sure that the other process is of the same user. They do not trust it otherwise (`ring`).

mod direct_access;
mod line;
mod receivers;
mod ring;
mod senders;

use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::files::Waker;

pub(super) use self::direct_access::let_in;
pub(crate) use self::direct_access::{DirectAccess, OneSided};
pub(super) use self::receivers::Receivers;
pub(super) use self::senders::Senders;

/// How many connections a device accepts, and opens. Packets of more processes go through the kernel's network.
const MOST: usize = 256;

/// The longest text of an address.
const TEXT: usize = 64;

/// What the kernel says instead of any user that this process's namespace does not have.
const NO_USER: libc::uid_t = 65_534;

fn check(returned: isize) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}

/// The name of the listener of an address. An address that is valid on one interface only has none: it can be there twice.
fn name(address: IpAddr) -> Option<(libc::sockaddr_un, libc::socklen_t)> {
    if matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()) || address.is_multicast() {
        return None;
    }
    // Changed whenever what is said there, or the ring, changes.
    let text = format!("\0ibverbs-software 4 {address}");
    // SAFETY: all zeros is a valid address structure.
    let mut name: libc::sockaddr_un = unsafe { zeroed() };
    name.sun_family = libc::AF_UNIX as _;
    for (to, from) in name.sun_path.iter_mut().zip(text.bytes()) {
        *to = from as _;
    }
    Some((name, (std::mem::offset_of!(libc::sockaddr_un, sun_path) + text.len()) as _))
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
    unsafe {
        let fd = check(libc::socket(libc::AF_UNIX, kind, 0) as _)?;
        Ok(OwnedFd::from_raw_fd(fd as _))
    }
}

/// Opens the listener of an address; without one, all packets come through the kernel's network.
pub(super) fn listener(address: IpAddr) -> Option<OwnedFd> {
    let (name, size) = name(address)?;
    let socket = socket().ok()?;
    // SAFETY: the address has that size; otherwise plain system calls for a socket of ours.
    let opened = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const name).cast(), size) == 0
            && libc::listen(socket.as_raw_fd(), MOST as _) == 0
    };
    opened.then_some(socket)
}

/// Connects to the listener of an address, if there is one, without blocking.
fn connect(to: IpAddr) -> Option<OwnedFd> {
    let (name, size) = name(to)?;
    let connection = socket().ok()?;
    // SAFETY: the address has that size.
    let status = unsafe { libc::connect(connection.as_raw_fd(), (&raw const name).cast(), size) };
    (status == 0).then_some(connection)
}

/// The next connection at a listener, if there is one.
fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a plain system call for a socket of ours; what it returns is a new descriptor, ours alone.
    unsafe {
        let null = std::ptr::null_mut();
        let fd = check(libc::accept4(listener.as_raw_fd(), null, null.cast(), flags) as _)?;
        Ok(OwnedFd::from_raw_fd(fd as _))
    }
}

/// The number of the process at the other end, if it is of this user.
fn own_process(connection: &OwnedFd) -> Option<libc::pid_t> {
    // SAFETY: the call fills in the structure, whose size it is told; all zeros is a valid value.
    unsafe {
        let mut other: libc::ucred = zeroed();
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        let (to, fd) = ((&raw mut other).cast(), connection.as_raw_fd());
        let is_known =
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut size) == 0;
        (is_known && other.uid == libc::geteuid() && other.uid != NO_USER).then_some(other.pid)
    }
}

#[derive(Debug)]
enum Heard {
    Nothing,
    /// The other side has let us in, and wants to be woken so. Whether a table follows.
    Answer(Waker, bool),
    /// It lets us into its memory, by a table in which we have a lease of this number.
    Table(OwnedFd, usize),
    /// The other end is gone, or says what nobody says.
    End,
}

/// What the answer says beside the wake-up descriptor, without a table and before one.
const WELCOME: [&[u8]; 2] = [b"!", b"!="];

/// The first byte of a message with a table, before the lease's number.
const TABLE: u8 = b'=';

/// Looks for a message, which stays, without blocking.
fn peek(connection: &OwnedFd) -> io::Result<usize> {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let mut first = 0_u8;
    // SAFETY: one byte is written to a live variable at most.
    check(unsafe { libc::recv(connection.as_raw_fd(), (&raw mut first).cast(), 1, flags) })
}

/// Whether the other end says nothing, and is there.
fn is_quiet(connection: &OwnedFd) -> bool {
    peek(connection).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock)
}

/// Whether the other end is gone.
fn is_hung_up(connection: &OwnedFd) -> bool {
    match peek(connection) {
        Ok(length) => length == 0,
        Err(e) => !matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    }
}

/// Receives one message, without blocking.
fn listen(connection: &OwnedFd) -> Heard {
    let mut text = [0; TEXT];
    match receive(connection, &mut text) {
        Ok((length @ 1.., Some(file))) => match std::str::from_utf8(&text[1..length]) {
            Ok(lease) if text[0] == TABLE => {
                lease.parse().map_or(Heard::End, |lease| Heard::Table(file, lease))
            }
            _ => {
                let before_table = &text[..length] == WELCOME[1];
                Waker::of_other(file)
                    .map_or(Heard::End, |wake_fd| Heard::Answer(wake_fd, before_table))
            }
        },
        Ok(_) => Heard::End,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Heard::Nothing,
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Heard::Nothing,
        Err(_) => Heard::End,
    }
}

/// A control message with room for a descriptor, aligned as C has it.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    file: [c_int; 2],
}

/// Says who we are, and hands over the ring.
fn introduce(connection: &OwnedFd, from: IpAddr, ring: &OwnedFd) -> io::Result<()> {
    send(connection, from.to_string().as_bytes(), ring)
}

/// Lets the other side in, and hands over the wake-up descriptor.
fn answer(connection: &OwnedFd, wake_fd: &Waker, before_table: bool) -> io::Result<()> {
    send(connection, WELCOME[usize::from(before_table)], wake_fd.file())
}

/// Sends a message with a file, without blocking.
fn send(connection: &OwnedFd, text: &[u8], file: &OwnedFd) -> io::Result<()> {
    // SAFETY: all zeros is a valid value of these C structures; the message points to live variables of the sizes
    // that it names. The arithmetic of `CMSG_LEN` is that of the structure.
    unsafe {
        let mut control: Control = zeroed();
        control.header.cmsg_len = libc::CMSG_LEN(size_of::<c_int>() as _) as _;
        control.header.cmsg_level = libc::SOL_SOCKET;
        control.header.cmsg_type = libc::SCM_RIGHTS;
        control.file[0] = file.as_raw_fd();
        let mut part =
            libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<c_int>() as _) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        check(libc::sendmsg(connection.as_raw_fd(), &message, flags)).map(drop)
    }
}

/// Receives what [`introduce`] sent, if it is there.
fn meet(connection: &OwnedFd) -> io::Result<(IpAddr, OwnedFd)> {
    let mut text = [0_u8; TEXT];
    let (length, file) = receive(connection, &mut text)?;
    let text = std::str::from_utf8(&text[..length]).ok();
    match (text.and_then(|text| text.parse().ok()), file) {
        (Some(from), Some(file)) => Ok((from, file)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Receives a message, and the file that came with it, without blocking.
fn receive(connection: &OwnedFd, text: &mut [u8; TEXT]) -> io::Result<(usize, Option<OwnedFd>)> {
    // SAFETY: as in `send`. The control message is read if the kernel has written one; there is room for one
    // descriptor only, which is ours from here on.
    unsafe {
        let mut control: Control = zeroed();
        let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = libc::CMSG_LEN(size_of::<c_int>() as _) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let length = check(libc::recvmsg(connection.as_raw_fd(), &mut message, flags))?;
        let (mut file, header) = (None, libc::CMSG_FIRSTHDR(&message));
        if let Some(header) = header.as_ref()
            && (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS)
            && header.cmsg_len >= libc::CMSG_LEN(size_of::<c_int>() as _) as _
        {
            file = Some(OwnedFd::from_raw_fd(control.file[0]));
        }
        Ok((length, file))
    }
}

#[cfg(test)]
mod tests;
