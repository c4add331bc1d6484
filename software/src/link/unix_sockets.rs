//! Sockets with an abstract name: the machine's, as the kernel lists them (`NETLINK_SOCK_DIAG`, what `ss -x` reads), and ours, to
//! which strangers can send nothing.

use std::io;
use std::mem::{offset_of, size_of, size_of_val};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::ptr::null_mut;

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const UDIAG_SHOW_NAME: u32 = 1;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_NAME: u16 = 0;
const UNIX_DIAG_PEER: u16 = 2;

/// A socket that has an abstract name.
#[derive(Debug)]
pub(crate) struct UnixSocket {
    pub(crate) inode: u32,
    /// Without the byte of zero that begins it.
    pub(crate) name: Vec<u8>,
    /// The inode of the socket that it is connected to.
    pub(crate) peer: Option<u32>,
}

/// A new socket with this abstract name, or with one that the kernel chooses if this is empty. Any user can send to a name: the
/// kernel drops what is sent to this socket, on the sender's side, until [`hear`]. A system without filters drops nothing.
///
/// # Errors
///
/// `EADDRINUSE`: another socket has the name. `EMFILE`, `ENFILE`, `ENOMEM`: no file or memory is left.
pub(crate) fn deaf(name: &[u8]) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    keep(&socket, 0)?;
    // SAFETY: all zeros is a valid address structure.
    let mut to: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    to.sun_family = libc::AF_UNIX as _;
    let path = to.sun_path.get_mut(1..=name.len()).ok_or(io::ErrorKind::InvalidInput)?;
    path.iter_mut().zip(name).for_each(|(to, &from)| *to = from as _);
    let length = if name.is_empty() { 0 } else { 1 + name.len() };
    let size = offset_of!(libc::sockaddr_un, sun_path) + length;
    // SAFETY: the address is live, and has that size at least.
    match unsafe { libc::bind(socket.as_raw_fd(), (&raw const to).cast(), size as _) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets a socket of [`deaf`] receive, which is connected: strangers can send to it no more.
pub(crate) fn hear(socket: &UnixDatagram) -> io::Result<()> {
    keep(socket, u32::MAX)?;
    // SAFETY: a plain system call without memory. It takes out what strangers have sent where there are no filters.
    while unsafe { libc::recv(socket.as_raw_fd(), null_mut(), 0, libc::MSG_DONTWAIT) } >= 0 {}
    Ok(())
}

/// Has the kernel keep so many bytes of each message, or drop it if that is 0. It does not drop the filter instead, as qemu's
/// emulation of Linux for another processor has no `SO_DETACH_FILTER`.
fn keep(socket: &UnixDatagram, bytes: u32) -> io::Result<()> {
    let code = (libc::BPF_RET | libc::BPF_K) as _;
    let mut keeps = libc::sock_filter { code, jt: 0, jf: 0, k: bytes };
    let filter = libc::sock_fprog { len: 1, filter: &mut keeps };
    let (fd, size) = (socket.as_raw_fd(), size_of_val(&filter) as libc::socklen_t);
    let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    // SAFETY: the value is live, of that size, and of the option's type.
    let status = unsafe { libc::setsockopt(fd, level, option, (&raw const filter).cast(), size) };
    match io::Error::last_os_error() {
        error if status != 0 && error.raw_os_error() != Some(libc::ENOPROTOOPT) => Err(error),
        _ => Ok(()),
    }
}

/// `struct nlmsghdr`, and `struct unix_diag_req` behind it.
#[repr(C)]
struct Request {
    length: u32,
    kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
    family: u8,
    protocol: u8,
    pad: u16,
    states: u32,
    inode: u32,
    show: u32,
    cookie: [u32; 2],
}

/// Splits off what begins with its length, of 16 or 32 bits, and is padded to four bytes.
fn split<'a>(from: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let first = from.get(..length)?;
    *from = from.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(first)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Reads the socket of a message: `struct unix_diag_msg`, and attributes.
fn read(message: &[u8], is_wanted: &impl Fn(&[u8]) -> bool) -> Option<UnixSocket> {
    let inode = u32_at(message, 4)?;
    let (mut rest, mut name, mut peer) = (message.get(16..)?, None, None);
    while let Some(length) = u16_at(rest, 0).filter(|length| *length >= 4) {
        let kind = u16_at(rest, 2)?;
        let value = &split(&mut rest, length.into())?[4..];
        match kind {
            UNIX_DIAG_NAME => name = value.strip_prefix(&[0]),
            UNIX_DIAG_PEER => peer = u32_at(value, 0),
            _ => {}
        }
    }
    let name = name.filter(|name| is_wanted(name))?.to_vec();
    Some(UnixSocket { inode, name, peer })
}

/// The sockets of this network namespace with an abstract name that is wanted.
///
/// # Errors
///
/// `EPROTONOSUPPORT`, `ENOENT`: the kernel has no such list. `EMFILE`, `ENFILE`, `ENOMEM`: no file or memory is left.
pub(crate) fn abstract_names(is_wanted: impl Fn(&[u8]) -> bool) -> io::Result<Vec<UnixSocket>> {
    let request = Request {
        length: size_of::<Request>() as u32,
        kind: SOCK_DIAG_BY_FAMILY,
        flags: NLM_F_REQUEST | NLM_F_DUMP,
        sequence: 1,
        port: 0,
        family: libc::AF_UNIX as u8,
        protocol: 0,
        pad: 0,
        states: u32::MAX,
        inode: 0,
        show: UDIAG_SHOW_NAME | UDIAG_SHOW_PEER,
        cookie: [0; 2],
    };
    let check = |returned: isize| usize::try_from(returned).map_err(|_| io::Error::last_os_error());
    // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
    let socket = unsafe {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        let fd = check(libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) as _)?;
        OwnedFd::from_raw_fd(fd as _)
    };
    // SAFETY: the request is live, and of that size.
    check(unsafe {
        let (bytes, size) = ((&raw const request).cast(), size_of::<Request>());
        libc::send(socket.as_raw_fd(), bytes, size, 0)
    })?;
    let (mut all, mut buffer) = (Vec::new(), vec![0_u8; 64 << 10]);
    loop {
        // SAFETY: the buffer has that size. The kernel has the next part ready when a part is read, or says that it was the last.
        let length = check(unsafe {
            libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0)
        })?;
        let mut messages = &buffer[..length];
        while let Some(length) = u32_at(messages, 0).filter(|length| *length >= 16) {
            let kind = u16_at(messages, 4).unwrap_or(NLMSG_DONE);
            let message = split(&mut messages, length as usize).map_or(&[][..], |all| &all[16..]);
            match kind {
                NLMSG_DONE => return Ok(all),
                NLMSG_ERROR => {
                    let errno = u32_at(message, 0).map_or(libc::EIO, |code| -(code as i32));
                    return Err(io::Error::from_raw_os_error(errno));
                }
                _ => all.extend(read(message, &is_wanted)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn sockets_have_names_and_peers() {
        // A child has the sockets too, until it starts its program.
        let _files = crate::link::no_process_starts();
        let begin = format!("ibverbs-software test {} ", std::process::id());
        let name = |end: u32| format!("{begin}{end}");
        let bind = |end| {
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name(end)).unwrap()).unwrap()
        };
        // More than one part of an answer.
        let sockets: Vec<_> = (0..500).map(bind).collect();
        sockets[7].connect_addr(&SocketAddr::from_abstract_name(name(8)).unwrap()).unwrap();
        let all = abstract_names(|name| name.starts_with(begin.as_bytes())).unwrap();
        assert_eq!(all.len(), sockets.len());
        let found =
            |end: u32| all.iter().find(|socket| socket.name == name(end).as_bytes()).unwrap();
        assert_eq!((found(7).peer, found(8).peer), (Some(found(8).inode), None));
        drop(sockets);
        assert!(abstract_names(|name| name.starts_with(begin.as_bytes())).unwrap().is_empty());
    }
}
