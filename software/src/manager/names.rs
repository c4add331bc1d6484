//! The ports of wildcard addresses, and of addresses that no device has, are the machine's. The abstract name space of Unix
//! sockets, which belongs to the network namespace as ports do, says which process has them.
//!
//! A process that has a port alone binds a datagram socket to the port's name, one for each family of addresses: the kernel gives
//! a name to one socket, and frees it when the process ends. That socket is connected to another one of the process, whose
//! name has the address of its device. Only its owner can connect it, so a client that follows the connection
//! ([`find`]) comes to the device of the process that listens, whatever names others have taken.
//!
//! A process that shares a port before it listens ([`share`]) binds a socket to a name of its own below the port's. Both
//! kinds take their name first, and then look for the other kind: of two at once, at least one sees the other.

use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use crate::causes::is_used_up;
use crate::link::unix_sockets::{self, UnixSocket};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub(super) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }
}

/// A port of the machine for one family of addresses, until this is dropped.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) family: Family,
    /// This process has it alone; several identifiers of it may, at different addresses. Else other processes may share it as
    /// well, as long as none of them listens.
    pub(super) is_sole: bool,
    _sockets: Arc<[UnixDatagram]>,
}

fn name((space, port): (u16, u16), family: Family) -> String {
    format!("ibverbs-cm/{space:04x}/{port}/{family:?}")
}

/// Returns the prefix of the names of this process's sockets that no other process has to find: no two processes have the same.
fn own() -> String {
    static RANDOM: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    format!("{}.{:x}", std::process::id(), *RANDOM)
}

/// The name of another socket of this process, below that one.
fn another(name: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{name}/{}/{}", own(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

fn bind(name: &str) -> io::Result<UnixDatagram> {
    unix_sockets::deaf(name.as_bytes())
}

fn errno(error: io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::ENOMEM)
}

/// All sockets whose name begins so.
fn named(begin: &str) -> Result<Vec<UnixSocket>, c_int> {
    let all = unix_sockets::abstract_names(|name| name.starts_with(begin.as_bytes()));
    all.map_err(errno)
}

/// Takes a port for this process alone. `device` is the address that clients find there.
///
/// # Errors
///
/// `EADDRINUSE`: another process has it, or shares it.
pub(super) fn take(
    port: (u16, u16),
    family: Family,
    device: Option<IpAddr>,
) -> Result<Claim, c_int> {
    let name = name(port, family);
    let taken = bind(&name).map_err(errno)?;
    let mut sockets = vec![];
    if let Some(device) = device {
        let at = another(&format!("ibverbs-cm/device/{device}"));
        sockets.push(bind(&at).map_err(errno)?);
        taken.connect_addr(&address(&at).map_err(errno)?).map_err(errno)?;
    }
    sockets.push(taken);
    let (shared, ours) = (format!("{name}/"), format!("{name}/{}/", own()));
    let is_foreign = |socket: &UnixSocket| !socket.name.starts_with(ours.as_bytes());
    if named(&shared)?.iter().any(is_foreign) {
        return Err(libc::EADDRINUSE);
    }
    Ok(Claim { family, is_sole: true, _sockets: sockets.into() })
}

/// Takes a port that other processes may share.
///
/// # Errors
///
/// `EADDRINUSE`: another process has it alone.
pub(super) fn share(port: (u16, u16), family: Family) -> Result<Claim, c_int> {
    let name = name(port, family);
    let shared = bind(&another(&name)).map_err(errno)?;
    if named(&name)?.iter().any(|socket| socket.name == name.as_bytes()) {
        return Err(libc::EADDRINUSE);
    }
    Ok(Claim { family, is_sole: false, _sockets: [shared].into() })
}

/// The address of the device of the process that has a port of the machine alone.
///
/// # Errors
///
/// `EMFILE`, `ENFILE`, `ENOMEM`, `ENOBUFS`: no file or memory is left to look for it.
pub(super) fn find(port: (u16, u16), family: Family) -> Result<Option<IpAddr>, c_int> {
    match named("ibverbs-cm/") {
        Ok(all) => Ok(owner(&all, &name(port, family)).filter(|it| Family::of(*it) == family)),
        Err(errno) if is_used_up(errno) => Err(errno),
        // The kernel has no list of sockets.
        Err(_) => Ok(None),
    }
}

fn owner(all: &[UnixSocket], name: &str) -> Option<IpAddr> {
    let peer = all.iter().find(|socket| socket.name == name.as_bytes())?.peer?;
    let device = all.iter().find(|socket| socket.inode == peer)?;
    let text = std::str::from_utf8(&device.name).ok()?.strip_prefix("ibverbs-cm/device/")?;
    text.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_port() -> (u16, u16) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        (0xff00 + NEXT.fetch_add(1, Ordering::Relaxed) as u16, std::process::id() as u16)
    }

    #[test]
    fn a_name_is_one_process_and_says_where_the_device_is() {
        let _files = crate::link::no_process_starts();
        let port = free_port();
        let here = [IpAddr::from([127, 3, 2, 1]), "fd00::1".parse().unwrap()];
        for address in here {
            let family = Family::of(address);
            assert_eq!(find(port, family), Ok(None));
            let taken = take(port, family, Some(address)).unwrap();
            assert_eq!(find(port, family), Ok(Some(address)));
            assert_eq!(find((port.0, port.1.wrapping_add(1)), family), Ok(None));
            assert_eq!(take(port, family, None).err(), Some(libc::EADDRINUSE));
            assert_eq!(share(port, family).err(), Some(libc::EADDRINUSE));
            drop(taken);
            assert_eq!(find(port, family), Ok(None));
        }
    }

    /// A stranger can take any other name, and connect to the sockets of others: no client follows that.
    #[test]
    fn clients_come_to_the_owner_of_the_port_alone() {
        let _files = crate::link::no_process_starts();
        let (port, family) = (free_port(), Family::Ipv4);
        let own = IpAddr::from([127, 3, 2, 1]);
        let at = another("ibverbs-cm/device/127.6.6.6");
        let strange = bind(&at).unwrap();
        strange.connect_addr(&address(&at).unwrap()).unwrap();
        let taken = take(port, family, Some(own)).unwrap();
        let _near = bind(&format!("{}/127.6.6.6", name(port, family))).unwrap();
        let _old = bind(&format!("ibverbs-cm/{:04x}/{}/127.6.6.6", port.0, port.1)).unwrap();
        let to = address(&name(port, family)).unwrap();
        // The owner's socket is connected elsewhere, and takes nothing.
        assert!(strange.connect_addr(&to).is_err());
        assert_eq!(find(port, family), Ok(Some(own)));
        drop(taken);
        assert_eq!(find(port, family), Ok(None));
    }

    /// Its owner closes what is sent there, and the closing of a file may wait.
    #[test]
    fn nothing_can_be_sent_to_a_port() {
        let at = another("ibverbs-cm/test");
        let (port, stranger) = (bind(&at).unwrap(), UnixDatagram::unbound().unwrap());
        stranger.send_to_addr(&[1], &address(&at).unwrap()).unwrap();
        port.set_nonblocking(true).unwrap();
        assert_eq!(port.recv(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_port_is_shared_until_one_has_it_alone() {
        let _files = crate::link::no_process_starts();
        let (port, family) = (free_port(), Family::Ipv6);
        let (one, two) = (share(port, family).unwrap(), share(port, family).unwrap());
        // The manager compares the listeners of this process.
        let alone = take(port, family, None).unwrap();
        assert_eq!(share(port, family).err(), Some(libc::EADDRINUSE));
        drop((one, two, alone));
        let elsewhere = bind(&format!("{}/1.1/0", name(port, family))).unwrap();
        assert_eq!(take(port, family, None).err(), Some(libc::EADDRINUSE));
        assert!(share(port, family).is_ok(), "a failure keeps nothing");
        assert!(take(port, Family::Ipv4, None).is_ok(), "each family is taken for itself");
        drop(elsewhere);
        assert!(take(port, family, None).is_ok());
    }
}
