//! Packets between devices of different processes of one machine, which do not pass through the kernel's network.
//!
//! Each device has a listener at each of its addresses: a socket of the machine's abstract name space, whose name has the
//! address. That name space belongs to the network namespace, as addresses do. A process that wants to send to an address
//! connects to its listener, and hands over a ring (`ring`) that it writes to from then on. The answer has a bell, by which it wakes
//! the thread that waits for its packets. The connection ends with either process. Where there is no listener, and
//! where nobody is let in, packets go through the kernel's network.
//!
//! A device that lets its peers into its memory also hands over a table (`direct_access`).
//!
//! Both sides make sure that the other process is of the same user. They do not trust it otherwise: what two processes share is
//! theirs alone, is checked whenever it is read (`ring`), and never makes one wait for the other. Only with
//! [`Builder::one_sided`](crate::Builder::one_sided) may one wait: for pages that the other process's program brings. A device
//! proves that an address is its own ([`Listener`]).

mod direct_access;
mod line;
mod receivers;
mod ring;
mod senders;

use std::ffi::c_int;
use std::io;
use std::mem::{ManuallyDrop, size_of, zeroed};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) use self::direct_access::let_in;
pub(crate) use self::direct_access::{DirectAccess, OneSided};
pub(super) use self::receivers::Receivers;
pub(super) use self::senders::Senders;
use crate::files::{Bell, MOST_BELLS};
use crate::foreign::Foreign;

/// How many connections a device accepts, and opens. Packets of more processes go through the kernel's network.
const MOST: usize = MOST_BELLS;

/// The longest text of an address.
const TEXT: usize = 64;

/// The kernel's value for any user that this process's namespace does not have.
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
    let text = format!("\0ibverbs-software 8 {address}");
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

/// The name of an address, which one device of the machine has, and what proves it.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: ManuallyDrop<OwnedFd>,
    /// A connection to this listener that the listener itself has accepted. The kernel says of it whose address it has, and
    /// which process has connected: this one, so that nobody else can use it as a proof. `None`: this process introduces itself
    /// to nobody.
    proof: Option<OwnedFd>,
    /// Other processes have it too.
    is_sent: AtomicBool,
}

impl Listener {
    /// Whether a file proves that the process at the other end of a connection has an address.
    fn is_proof(proof: &OwnedFd, of: IpAddr, connection: &OwnedFd) -> bool {
        // Only a Unix socket tells a process. To ask another file for its name may wait.
        let process = own_process(connection);
        if process.is_none() || own_process(proof) != process {
            return false;
        }
        // SAFETY: the call fills in the structure, whose size it is told; all zeros is a valid value.
        let (found, size) = unsafe {
            let mut found: libc::sockaddr_un = zeroed();
            let mut size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            let to = (&raw mut found).cast();
            let is_known = libc::getsockname(proof.as_raw_fd(), to, &mut size) == 0;
            (found, if is_known { size } else { 0 })
        };
        name(of).is_some_and(|(name, length)| {
            length == size && found.sun_family == name.sun_family && found.sun_path == name.sun_path
        })
    }
}

impl Drop for Listener {
    /// Refuses the processes that wait there: who closes the socket closes what they have sent.
    fn drop(&mut self) {
        // SAFETY: it is used no more.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        self.proof.take().filter(|_| *self.is_sent.get_mut()).map(Foreign::file);
        // SAFETY: no memory is involved. From here on no process comes.
        unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
        loop {
            match accept(&socket) {
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // Without a descriptor for them, its name is free a little later.
                Err(_) => return drop(Foreign::file(socket)),
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> c_int {
        self.socket.as_raw_fd()
    }
}

/// Takes the name of an address, which belongs to the process that has its UDP socket. `None`: addresses of this kind have no name.
///
/// # Errors
///
/// `EADDRINUSE`: another process has it. `EMFILE`, `ENFILE`, `ENOMEM`: no file or memory is left.
pub(super) fn reserve(address: IpAddr) -> io::Result<Option<OwnedFd>> {
    let Some((name, size)) = name(address) else { return Ok(None) };
    let socket = socket()?;
    // SAFETY: the address has that size.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), size) } as _)?;
    Ok(Some(socket))
}

/// Listens at the name of an address. Without that, all packets come through the kernel's network.
pub(super) fn listener(address: IpAddr) -> io::Result<Option<Listener>> {
    let Some(socket) = reserve(address)? else { return Ok(None) };
    // SAFETY: a plain system call for a socket of ours.
    check(unsafe { libc::listen(socket.as_raw_fd(), MOST as _) } as _)?;
    let (socket, is_sent) = (ManuallyDrop::new(socket), AtomicBool::new(false));
    let mut listener = Listener { socket, proof: None, is_sent };
    let own = Some(std::process::id() as libc::pid_t);
    // Others may connect before this process does. They come again, and send packets through the kernel's network until then.
    for _ in 0..8 {
        let _connection = connect(address);
        for _ in 0..MOST {
            let Ok(proof) = accept(&listener) else { break };
            if own_process(&proof) == own {
                listener.proof = Some(proof.into_own());
                return Ok(Some(listener));
            }
        }
    }
    Ok(Some(listener))
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
fn accept(listener: &impl AsRawFd) -> io::Result<Foreign> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a plain system call for a socket of ours; what it returns is a new descriptor, ours alone.
    unsafe {
        let null = std::ptr::null_mut();
        let fd = check(libc::accept4(listener.as_raw_fd(), null, null.cast(), flags) as _)?;
        Ok(Foreign::connection(OwnedFd::from_raw_fd(fd as _)))
    }
}

/// The number of the process at the other end, if it is of this user. Processes without a number here, since their PID namespace
/// is not visible, could not be told apart.
fn own_process(connection: &OwnedFd) -> Option<libc::pid_t> {
    // SAFETY: the call fills in the structure, whose size it is told; all zeros is a valid value.
    unsafe {
        let mut other: libc::ucred = zeroed();
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        let (to, fd) = ((&raw mut other).cast(), connection.as_raw_fd());
        let is_known =
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut size) == 0;
        let is_own = other.uid == libc::geteuid() && other.uid != NO_USER && other.pid > 0;
        (is_known && is_own).then_some(other.pid)
    }
}

#[derive(Debug)]
enum Heard {
    Nothing,
    /// The other side has let us in: how to wake it, and whether it lets us into its memory too, by this table.
    Answer(Bell, Option<Foreign>),
    /// The other end is gone, or says what nobody says.
    End,
}

/// The answer to a process that is let in. It comes with a bell, and perhaps a table.
const WELCOME: &[u8] = b"!";

/// Whether the other end is gone, or sends nothing more, even if messages of it are still unread.
fn is_hung_up(connection: &OwnedFd) -> bool {
    let mut file = libc::pollfd { fd: connection.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one live structure.
    unsafe { libc::poll(&mut file, 1, 0) > 0 }
}

/// Receives one message, without blocking.
fn listen(connection: &OwnedFd) -> Heard {
    let mut text = [0; TEXT];
    match receive(connection, &mut text) {
        Ok((length, [Some(bell), table])) if text[..length] == *WELCOME => {
            Bell::open(bell).map_or(Heard::End, |bell| Heard::Answer(bell, table))
        }
        Ok(_) => Heard::End,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Heard::Nothing,
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Heard::Nothing,
        Err(_) => Heard::End,
    }
}

/// How many files a message has at most.
const FILES: usize = 2;

/// A control message with room for them, aligned as C has it.
#[repr(C)]
struct Control {
    header: libc::cmsghdr,
    files: [c_int; FILES],
}

/// Says who we are, with the proof of it, and hands over the ring.
fn introduce(connection: &OwnedFd, from: (IpAddr, &Listener), ring: &OwnedFd) -> io::Result<()> {
    let proof = from.1.proof.as_ref().ok_or(io::ErrorKind::Unsupported)?;
    from.1.is_sent.store(true, Ordering::Relaxed);
    send(connection, from.0.to_string().as_bytes(), &[ring, proof])
}

/// Lets the other side in.
fn answer(connection: &OwnedFd, bell: &Bell, table: Option<&OwnedFd>) -> io::Result<()> {
    let files = [bell.as_fd(), table.unwrap_or(bell.as_fd())];
    send(connection, WELCOME, &files[..1 + usize::from(table.is_some())])
}

/// Sends a message with files, without blocking.
fn send(connection: &OwnedFd, text: &[u8], files: &[&OwnedFd]) -> io::Result<()> {
    // SAFETY: all zeros is a valid value of these C structures; the message points to live variables of the sizes
    // that it names. The arithmetic of `CMSG_LEN` is that of the structure.
    unsafe {
        let mut control: Control = zeroed();
        let size = files.len().min(FILES) * size_of::<c_int>();
        control.header.cmsg_len = libc::CMSG_LEN(size as _) as _;
        control.header.cmsg_level = libc::SOL_SOCKET;
        control.header.cmsg_type = libc::SCM_RIGHTS;
        control.files.iter_mut().zip(files).for_each(|(to, file)| *to = file.as_raw_fd());
        let mut part =
            libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        if !files.is_empty() {
            message.msg_control = (&raw mut control).cast();
            message.msg_controllen = libc::CMSG_SPACE(size as _) as _;
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        check(libc::sendmsg(connection.as_raw_fd(), &message, flags)).map(drop)
    }
}

/// Receives what [`introduce`] sent, if it is there: an address that the other process has, and a ring.
fn meet(connection: &OwnedFd) -> io::Result<(IpAddr, Foreign)> {
    let mut text = [0_u8; TEXT];
    let (length, files) = receive(connection, &mut text)?;
    let text = std::str::from_utf8(&text[..length]).ok();
    match (text.and_then(|text| text.parse().ok()), files) {
        (Some(from), [Some(ring), Some(proof)]) if Listener::is_proof(&proof, from, connection) => {
            Ok((from, ring))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Receives a message, and the files that came with it, without blocking.
///
/// The files are looked at first, while the socket has them too: what there is no room for stays there, as does its message, and is
/// closed with the connection.
fn receive(
    connection: &OwnedFd,
    text: &mut [u8; TEXT],
) -> io::Result<(usize, [Option<Foreign>; FILES])> {
    // SAFETY: as in `send`. The control message is read if the kernel has written one; there is room for as many
    // descriptors only, which are ours from here on.
    unsafe {
        let mut control: Control = zeroed();
        let mut part = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = libc::CMSG_LEN(size_of_val(&control.files) as _) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC | libc::MSG_PEEK;
        let length = check(libc::recvmsg(connection.as_raw_fd(), &mut message, flags))?;
        let (mut files, header) = ([const { None }; FILES], libc::CMSG_FIRSTHDR(&message));
        if let Some(header) = header.as_ref()
            && (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS)
        {
            #[allow(clippy::unnecessary_cast, reason = "its type differs between C libraries")]
            let size = header.cmsg_len as usize - libc::CMSG_LEN(0) as usize;
            let count = size / size_of::<c_int>();
            for (to, &file) in files.iter_mut().zip(&control.files).take(count) {
                *to = Some(Foreign::file(OwnedFd::from_raw_fd(file)));
            }
        }
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let no_text = std::ptr::null_mut();
        check(libc::recv(connection.as_raw_fd(), no_text, 0, libc::MSG_DONTWAIT))?;
        Ok((length, files))
    }
}

#[cfg(test)]
mod tests;
