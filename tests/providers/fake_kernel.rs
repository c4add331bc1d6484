//! A fake of the kernel's RDMA subsystem for libibverbs: an RDMA netlink socket that answers, a sysfs
//! tree, and device nodes that `stat` finds.
//!
//! libibverbs is linked statically, so its calls of `socket` and `stat` (and, where it asks through
//! libnl, of `bind`, `getsockname` and `recvmsg`) reach the functions of these names here, which pass
//! calls that do not concern RDMA on to the real ones.

use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

#[derive(Debug)]
pub(crate) struct FakeDevice {
    pub(crate) enabled: bool,
    pub(crate) name: &'static str,
    pub(crate) provider: &'static str,
    pub(crate) driver_id: u32,
    pub(crate) abi: u32,
    pub(crate) modalias: &'static str,
}

impl FakeDevice {
    /// How the child prints it.
    pub(crate) fn line(&self) -> String {
        format!("{} by {}", self.name, self.provider)
    }
}

/// The interface that the fake kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    /// RDMA netlink. Of sysfs only the files that name the PCI device.
    Netlink,
    /// The whole of sysfs, no RDMA netlink.
    Sysfs,
}

const RDMA_NODE_IB_CA: u8 = 1;
const RDMA_NL_NLDEV: u16 = 5;
const CMD_GET: u16 = 1;
const CMD_GET_CHARDEV: u16 = 15;
const ATTR_DEV_INDEX: u16 = 1;
const ATTR_DEV_NAME: u16 = 2;
const ATTR_PORT_INDEX: u16 = 3;
const ATTR_NODE_GUID: u16 = 6;
const ATTR_DEV_NODE_TYPE: u16 = 14;
const ATTR_CHARDEV_NAME: u16 = 70;
const ATTR_CHARDEV_ABI: u16 = 71;
const ATTR_CHARDEV: u16 = 72;
const ATTR_UVERBS_DRIVER_ID: u16 = 73;
/// A driver that this version of libibverbs does not know.
const ATTR_OF_THE_FUTURE: u16 = 500;

static PLAYED: OnceLock<(Interface, &'static [FakeDevice])> = OnceLock::new();
/// libibverbs' end of the socket.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static ASKED: AtomicBool = AtomicBool::new(false);

/// Installs the fake kernel for the rest of this process.
pub(crate) fn play(interface: Interface, devices: &'static [FakeDevice]) {
    PLAYED.set((interface, devices)).expect("played once");
}

/// Whether the netlink socket was used.
pub(crate) fn was_asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

// sysfs.

/// A tree for the environment's `SYSFS_PATH`; removed when dropped.
pub(crate) struct Sysfs(PathBuf);

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Sysfs {
    pub(crate) fn create(interface: Interface, devices: &[FakeDevice]) -> Self {
        let name = format!("ibverbs-sysfs-{}-{interface:?}", std::process::id());
        let tree = Self(std::env::temp_dir().join(name));
        let write = |path: String, text: String| {
            let path = tree.0.join(path);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("a folder in TMPDIR");
            fs::write(path, text + "\n").expect("a file in TMPDIR");
        };
        for (i, device) in devices.iter().enumerate() {
            let name = device.name;
            if !device.modalias.is_empty() {
                let path = format!("class/infiniband/{name}/device/modalias");
                write(path, device.modalias.to_owned() + "00000000sd00000000bc02sc00i00");
            }
            if interface == Interface::Sysfs {
                write(format!("class/infiniband/{name}/node_type"), "1: CA".into());
                let uverbs = format!("class/infiniband_verbs/uverbs{i}");
                write(format!("{uverbs}/ibdev"), name.into());
                write(format!("{uverbs}/dev"), format!("231:{}", 192 + i));
                write(format!("{uverbs}/abi_version"), device.abi.to_string());
            }
        }
        if interface == Interface::Sysfs {
            write("class/infiniband_verbs/abi_version".into(), "6".into());
        }
        tree
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

// Netlink.

/// Answers all requests until the other end is closed.
fn serve(socket: &OwnedFd, devices: &[FakeDevice]) {
    let mut request = [0u8; 512];
    loop {
        // SAFETY: the buffer is writable for its length.
        let n = unsafe {
            libc::recv(socket.as_raw_fd(), request.as_mut_ptr().cast(), request.len(), 0)
        };
        let Some(request) = usize::try_from(n).ok().filter(|n| *n > 0).map(|n| &request[..n])
        else {
            return;
        };
        ASKED.store(true, Ordering::SeqCst);
        for datagram in answers(request, devices) {
            // SAFETY: the buffer is readable for its length.
            let sent = unsafe {
                libc::send(socket.as_raw_fd(), datagram.as_ptr().cast(), datagram.len(), 0)
            };
            assert_eq!(usize::try_from(sent).ok(), Some(datagram.len()));
        }
    }
}

fn answers(request: &[u8], devices: &[FakeDevice]) -> Vec<Vec<u8>> {
    let u16_at = |at: usize| u16::from_ne_bytes([request[at], request[at + 1]]);
    let u32_at = |at: usize| {
        u32::from_ne_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]])
    };
    let (kind, sequence) = (u16_at(4), u32_at(8));
    assert_ne!(u16_at(6) & 1, 0, "NLM_F_REQUEST is set");
    assert_eq!(kind >> 10, RDMA_NL_NLDEV);
    match kind & 0x3ff {
        CMD_GET => {
            // The kernel answers with a dump in two datagrams.
            let mut parts =
                devices.iter().enumerate().map(|(i, d)| device_message(kind, sequence, i, d));
            let first: Vec<u8> = parts.by_ref().take(5).flatten().collect();
            let mut rest: Vec<u8> = parts.flatten().collect();
            rest.extend(message(3, 2, sequence, &0i32.to_ne_bytes()));
            // First a datagram that answers no request of this socket. libnl would take it for an answer.
            let stale = message(kind, 2, sequence.wrapping_sub(1), &[]);
            let stale = (!cfg!(feature = "neigh")).then_some(stale);
            stale.into_iter().chain([first, rest]).collect()
        }
        CMD_GET_CHARDEV => {
            // The only number in this request is the index of the device.
            assert_eq!((u16_at(16), u16_at(18)), (8, ATTR_DEV_INDEX));
            let index = u32_at(20);
            let device = &devices[index as usize - 1];
            let mut payload = attribute(ATTR_OF_THE_FUTURE, &[1, 2, 3]);
            payload.extend(attribute(ATTR_CHARDEV_NAME, format!("uverbs{index}\0").as_bytes()));
            payload.extend(attribute(ATTR_CHARDEV_ABI, &u64::from(device.abi).to_ne_bytes()));
            payload.extend(attribute(ATTR_CHARDEV, &u64::from(0xe700 + index).to_ne_bytes()));
            payload.extend(attribute(ATTR_UVERBS_DRIVER_ID, &device.driver_id.to_ne_bytes()));
            vec![message(kind, 0, sequence, &payload)]
        }
        // EOPNOTSUPP, with the request's header.
        _ => {
            let mut payload = (-libc::EOPNOTSUPP).to_ne_bytes().to_vec();
            payload.extend(&request[..16]);
            vec![message(2, 0, sequence, &payload)]
        }
    }
}

fn device_message(kind: u16, sequence: u32, i: usize, device: &FakeDevice) -> Vec<u8> {
    let index = u32::try_from(i + 1).expect("few devices");
    let mut payload = attribute(ATTR_DEV_INDEX, &index.to_ne_bytes());
    payload.extend(attribute(ATTR_DEV_NAME, format!("{}\0", device.name).as_bytes()));
    payload.extend(attribute(ATTR_PORT_INDEX, &1u32.to_ne_bytes()));
    payload.extend(attribute(ATTR_NODE_GUID, &u64::from(index).to_ne_bytes()));
    payload.extend(attribute(ATTR_DEV_NODE_TYPE, &[RDMA_NODE_IB_CA]));
    message(kind, 2, sequence, &payload)
}

fn message(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(16 + payload.len()).expect("short").to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(payload);
    bytes
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = u16::try_from(4 + value.len()).expect("short").to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

// The functions that replace those of the C library.

fn fail(errno: c_int) -> c_int {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

#[unsafe(no_mangle)]
extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    match PLAYED.get() {
        Some((interface, devices))
            if domain == libc::AF_NETLINK && protocol == libc::NETLINK_RDMA =>
        {
            if *interface == Interface::Sysfs {
                return fail(libc::EPROTONOSUPPORT);
            }
            let mut pair = [-1; 2];
            // SAFETY: `pair` has room for two descriptors.
            let made = unsafe {
                libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, pair.as_mut_ptr())
            };
            assert_eq!(made, 0);
            // SAFETY: the descriptor is new and has no other owner.
            let kernel = unsafe { OwnedFd::from_raw_fd(pair[1]) };
            std::thread::spawn(move || serve(&kernel, devices));
            // SAFETY: likewise; it is given to the caller at once.
            let program = unsafe { OwnedFd::from_raw_fd(pair[0]) }.into_raw_fd();
            SOCKET.store(program, Ordering::SeqCst);
            program
        }
        _ => {
            // SAFETY: the system call takes three integers and no pointer.
            let fd = unsafe { libc::syscall(libc::SYS_socket, domain, kind, protocol) };
            c_int::try_from(fd).unwrap_or(-1)
        }
    }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn stat(path: *const c_char, buffer: *mut libc::stat) -> c_int {
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(path) };
    if PLAYED.get().is_some() && name.to_bytes().starts_with(b"/dev/infiniband/uverbs") {
        // SAFETY: the caller gives a writable buffer, for which all zeroes are valid.
        unsafe { buffer.write_bytes(0, 1) };
        return 0;
    }
    // SAFETY: both are the caller's.
    unsafe { libc::fstatat(libc::AT_FDCWD, path, buffer, 0) }
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn bind(
    fd: c_int,
    address: *const libc::sockaddr,
    size: libc::socklen_t,
) -> c_int {
    if fd >= 0 && fd == SOCKET.load(Ordering::SeqCst) {
        return 0;
    }
    // SAFETY: all are the caller's.
    let result = unsafe { libc::syscall(libc::SYS_bind, fd, address, size) };
    c_int::try_from(result).unwrap_or(-1)
}

/// The address of a netlink socket as the kernel sees it.
fn netlink_address() -> libc::sockaddr_nl {
    // SAFETY: all zeroes are a valid `sockaddr_nl`.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut libc::sockaddr,
    size: *mut libc::socklen_t,
) -> c_int {
    if fd >= 0 && fd == SOCKET.load(Ordering::SeqCst) {
        // SAFETY: who asks for a netlink socket's address gives room for one.
        unsafe {
            address.cast::<libc::sockaddr_nl>().write(netlink_address());
            *size = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
        }
        return 0;
    }
    // SAFETY: all are the caller's.
    let result = unsafe { libc::syscall(libc::SYS_getsockname, fd, address, size) };
    c_int::try_from(result).unwrap_or(-1)
}

/// # Safety
///
/// As the C function.
#[unsafe(no_mangle)]
unsafe extern "C" fn recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    // SAFETY: both are the caller's.
    let n = unsafe { libc::syscall(libc::SYS_recvmsg, fd, message, flags) };
    if n >= 0 && fd == SOCKET.load(Ordering::SeqCst) {
        // SAFETY: the caller's message is writable, and its address has room for a netlink one.
        unsafe {
            let message = &mut *message;
            if !message.msg_name.is_null() {
                message.msg_name.cast::<libc::sockaddr_nl>().write(netlink_address());
                message.msg_namelen = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
            }
        }
    }
    n as isize
}
