//! Routes to a name, and events that a program writes, which both take Linux 6.18: on a librdmacm of these tests.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

use ibverbs::ffi::*;
use ibverbs::rdmacm::{ConnectionError, Route};

/// The only identifier of a thread.
#[derive(Default)]
struct Manager {
    file: Option<OwnedFd>,
    channel: rdma_event_channel,
    id: rdma_cm_id,
    events: VecDeque<rdma_cm_event>,
    /// The address of the name; without, `rdma_query_addrinfo` finds none.
    found: Option<libc::sockaddr_in>,
    list: rdma_addrinfo,
    /// The value that `rdma_resolve_addrinfo` leaves in `errno`.
    refuses: Option<c_int>,
    calls: Vec<String>,
}

thread_local! {
    static MANAGER: RefCell<Box<Manager>> = RefCell::default();
}

fn manager<T>(change: impl FnOnce(&mut Manager) -> T) -> T {
    MANAGER.with_borrow_mut(|manager| change(manager))
}

fn event(kind: rdma_cm_event_type) {
    manager(|m| {
        let id = &raw mut m.id;
        m.events.push_back(rdma_cm_event { id, event: kind, ..Default::default() });
    });
}

fn done(call: String, kind: rdma_cm_event_type) -> c_int {
    manager(|m| m.calls.push(call));
    event(kind);
    0
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_rdma_create_event_channel() -> *mut rdma_event_channel {
    manager(|m| {
        // Always readable.
        let file = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
        m.channel.fd = file.as_raw_fd();
        m.file = Some(file);
        &raw mut m.channel
    })
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_rdma_destroy_event_channel(_: *mut rdma_event_channel) {
    manager(|m| m.file = None);
}

/// # Safety
///
/// As the C function, here and below.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    _: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    manager(|m| {
        m.id = rdma_cm_id { channel, ps, ..Default::default() };
        // SAFETY: the pointer is the caller's.
        unsafe { id.write(&raw mut m.id) };
    });
    0
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_rdma_destroy_id(_: *mut rdma_cm_id) -> c_int {
    manager(|m| m.calls.push("destroy_id".to_owned()));
    0
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_get_cm_event(
    _: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    match manager(|m| m.events.pop_front()) {
        Some(next) => {
            // SAFETY: the pointer is the caller's.
            unsafe { event.write(Box::into_raw(Box::new(next))) };
            0
        }
        None => {
            // SAFETY: the location is this thread's.
            unsafe { *libc::__errno_location() = libc::EAGAIN };
            -1
        }
    }
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: `rdma_get_cm_event` has made it.
    drop(unsafe { Box::from_raw(event) });
    0
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_resolve_addrinfo(
    _: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    assert!(hints.is_null());
    if let Some(errno) = manager(|m| m.refuses) {
        // SAFETY: the location is this thread's.
        unsafe { *libc::__errno_location() = errno };
        return -1;
    }
    // SAFETY: both are texts of the caller's.
    let (node, service) = unsafe { (CStr::from_ptr(node), CStr::from_ptr(service)) };
    let call = format!("resolve_addrinfo {} {}", node.to_str().unwrap(), service.to_str().unwrap());
    done(call, rdma_cm_event_type::RDMA_CM_EVENT_ADDRINFO_RESOLVED)
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_query_addrinfo(
    _: *mut rdma_cm_id,
    found: *mut *mut rdma_addrinfo,
) -> c_int {
    manager(|m| {
        m.calls.push("query_addrinfo".to_owned());
        if let Some(address) = &mut m.found {
            m.list.ai_dst_addr = ptr::from_mut(address).cast();
        }
        // SAFETY: the pointer is the caller's.
        unsafe { found.write(&raw mut m.list) };
    });
    0
}

#[unsafe(no_mangle)]
extern "C" fn __wrap_rdma_freeaddrinfo(_: *mut rdma_addrinfo) {
    manager(|m| m.calls.push("freeaddrinfo".to_owned()));
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_rdma_resolve_addr(
    _: *mut rdma_cm_id,
    _: *mut sockaddr,
    address: *mut sockaddr,
    _: c_int,
) -> c_int {
    // SAFETY: the address is the caller's; those of these tests are IPv4.
    let address = unsafe { *address.cast::<libc::sockaddr_in>() };
    let ip = u32::from_be(address.sin_addr.s_addr).to_be_bytes();
    let call = format!("resolve_addr {ip:?} {}", u16::from_be(address.sin_port));
    // A kernel without a device for the address answers so. The test ends there.
    done(call, rdma_cm_event_type::RDMA_CM_EVENT_ADDR_ERROR)
}

const TIME: Duration = Duration::from_secs(60);

#[test]
fn a_name_is_resolved_and_then_its_address() {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 7471_u16.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_be_bytes([10, 77, 0, 2]).to_be() },
        sin_zero: [0; 8],
    };
    manager(|m| m.found = Some(address));
    let error = Route::to_name("storage", "7471").resolve(Instant::now() + TIME).unwrap_err();
    assert!(matches!(error, ConnectionError::NoAddress(_)), "{error}");
    let calls = manager(|m| std::mem::take(&mut m.calls));
    assert_eq!(
        calls,
        [
            "resolve_addrinfo storage 7471",
            "query_addrinfo",
            "freeaddrinfo",
            "resolve_addr [10, 77, 0, 2] 7471",
            "destroy_id"
        ]
    );
}

#[test]
fn names_that_are_not_known() {
    let errno =
        |node: &str| match Route::to_name(node, "1").resolve(Instant::now() + TIME).unwrap_err() {
            ConnectionError::Verbs(error) => (error.raw_os_error().unwrap(), error.to_string()),
            other => panic!("{other}"),
        };
    assert_eq!(errno("a\0b").0, libc::EINVAL);
    let (empty, text) = errno("");
    assert!(empty == libc::EINVAL && text.contains("the name is empty"), "{text}");
    for port in ["65536", "99999", "99999999999999999999"] {
        let to = Route::to_name("127.0.0.1", port).resolve(Instant::now() + TIME);
        let text = to.unwrap_err().to_string();
        assert!(text.contains("a port is at most 65535"), "{text}");
    }
    assert_eq!(errno("without").0, libc::ENOENT, "the list has no address");
    let freed = manager(|m| m.calls.iter().filter(|call| *call == "freeaddrinfo").count());
    assert_eq!(freed, 1);
    // librdmacm leaves the number of the resolver in `errno`, or one that is no number at all.
    manager(|m| m.refuses = Some(libc::EAI_NONAME));
    let (unknown, text) = errno("nobody");
    assert_eq!(unknown, libc::ENOENT);
    assert!(text.contains("nobody: the name is not known"), "{text}");
    manager(|m| m.refuses = Some(libc::EAI_SERVICE));
    let (errno_of_service, text) = errno("storage");
    assert_eq!(errno_of_service, libc::ENOENT);
    assert!(text.contains("1: the service is not known"), "{text}");
    manager(|m| m.refuses = Some(libc::EAI_AGAIN));
    assert_eq!(errno("storage").0, libc::EAGAIN);
    manager(|m| m.refuses = Some(-1));
    let (errno, text) = errno("storage");
    assert_eq!(errno, libc::EOPNOTSUPP);
    assert!(text.contains("Linux 6.18"), "{text}");
}

#[test]
fn addresses_need_no_name() {
    let address: SocketAddr = "10.77.0.9:1".parse().unwrap();
    let error = Route::to(address).resolve(Instant::now() + TIME).unwrap_err();
    assert!(matches!(error, ConnectionError::NoAddress(_)), "{error}");
    assert_eq!(manager(|m| m.calls.clone()), ["resolve_addr [10, 77, 0, 9] 1", "destroy_id"]);
}
