//! Rare events of the kernel: a device that is removed, an address that moves, and events that this
//! version does not know. Soft-RoCE does none of it, so the answers of `/dev/infiniband/rdma_cm` are
//! replaced below librdmacm, where it asks for the next event.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use ibverbs::rdmacm::{ConnectionError, ConnectionEventKind as Kind, Listener, Route, Step};
use ibverbs::{Inline, TransportError};

use crate::asynchronous::on_both;
use crate::managed::{Device, TIME, expect, here, listen, pair, transfer};
use crate::nothing_is_left;
use crate::vm::alone;

const CREATE_ID: u32 = 0;
const GET_EVENT: u32 = 12;

const DEVICE_REMOVAL: u32 = 11;
const ADDR_CHANGE: u32 = 14;

/// The identifier that was created last, and its file.
static LAST: AtomicU64 = AtomicU64::new(0);
static FILE: AtomicI32 = AtomicI32::new(-1);
/// The event, plus one, that the next read from the file returns, and the identifier that it is about.
static EVENT: AtomicU32 = AtomicU32::new(0);
static OF: AtomicU64 = AtomicU64::new(0);

/// The beginning of `struct ucma_abi_create_id` and `struct ucma_abi_get_event`, which librdmacm writes to
/// the file.
#[repr(C)]
struct Command {
    command: u32,
    sizes: [u16; 2],
    /// The place of the identifier for CREATE_ID, and of the answer for GET_EVENT.
    word: u64,
}

/// The beginning of `struct ucma_abi_event_resp`; the rest was zeroed.
#[repr(C)]
struct Answer {
    identifier: u64,
    number: u32,
    event: u32,
    status: u32,
}

/// Replaces the C library's.
///
/// # Safety
///
/// As of `write(2)`.
#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize {
    if count >= size_of::<Command>() && buffer.cast::<Command>().is_aligned() {
        // SAFETY: librdmacm passes that many bytes.
        let command = unsafe { &*buffer.cast::<Command>() };
        if command.command == CREATE_ID && command.sizes[0] as usize == count - 8 {
            LAST.store(command.word, Ordering::Relaxed);
            FILE.store(fd, Ordering::Relaxed);
        }
        if command.command == GET_EVENT && command.sizes[0] as usize == count - 8 {
            let event = EVENT.load(Ordering::Relaxed);
            if event > 0 && FILE.load(Ordering::Relaxed) == fd {
                EVENT.store(0, Ordering::Relaxed);
                let identifier = OF.load(Ordering::Relaxed);
                let answer = Answer { identifier, number: 0, event: event - 1, status: 0 };
                // SAFETY: this is where librdmacm expects the answer, and it has room for more than this.
                unsafe { (command.word as *mut Answer).write(answer) };
                return count as isize;
            }
        }
    }
    // SAFETY: the caller vouches for the buffer.
    unsafe { libc::syscall(libc::SYS_write, fd, buffer, count) as isize }
}

/// Makes this the next event of the identifier that was created last.
fn next_is(event: u32) {
    OF.store(LAST.load(Ordering::Relaxed), Ordering::Relaxed);
    EVENT.store(event + 1, Ordering::Relaxed);
}

#[test]
#[ignore = "Soft-RoCE: what the kernel answers is replaced"]
fn a_removed_device_stops_the_channel_and_ends_the_connection() {
    let _alone = alone("removed", 60);
    // The side that connects creates its identifier last; the other's came with the request.
    let [mut one, mut two] = pair();
    next_is(DEVICE_REMOVAL);
    assert_eq!(one.0.event().unwrap().unwrap().kind(), Kind::DeviceRemoved);
    assert!(matches!(one.0.send(Inline(b"x")), Err(TransportError::Stopped)));
    let error = one.0.event().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
    assert!(one.0.event_until(Instant::now()).is_err());
    assert_eq!((one.0.peer_addr(), one.0.control().as_raw().is_null()), (None, true));
    assert!(one.0.disconnect().is_err());
    // The identifier is destroyed before the queue pair, and the peer sees the end of the connection.
    expect(&mut two.0, Kind::Disconnected);
    drop((one, two));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: what the kernel answers is replaced"]
fn a_removed_device_ends_the_futures() {
    let _alone = alone("removed futures", 120);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let accepted = async {
            let request = listener.next_on_tokio().await.unwrap();
            program.accept(request).await.unwrap()
        };
        let (one, mut two) = tokio::join!(program.connect(address), accepted);
        let mut one = one.unwrap();
        next_is(DEVICE_REMOVAL);
        // The faked event does not make the file readable.
        assert_eq!(one.event().unwrap().unwrap().kind(), Kind::DeviceRemoved);
        let failed = one.receive(program.pool.take().unwrap()).await.unwrap_err();
        assert_eq!(failed.error, TransportError::Stopped);
        assert!(failed.buffer.is_some());
        let error = one.event_on_tokio().await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        assert_eq!(two.event_on_tokio().await.unwrap().kind(), Kind::Disconnected);
    });
}

#[test]
#[ignore = "Soft-RoCE: what the kernel answers is replaced"]
fn an_address_that_moves_and_what_is_unknown_are_told_and_change_nothing() {
    let _alone = alone("moved", 60);
    let [mut one, mut two] = pair();
    for (event, kind) in [(ADDR_CHANGE, Kind::AddressChanged), (99, Kind::Unknown(99))] {
        next_is(event);
        assert_eq!(one.0.event().unwrap().unwrap().kind(), kind);
        transfer(&mut one, &mut two, b"still there");
    }
    drop((one, two));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: what the kernel answers is replaced"]
fn a_device_can_go_at_any_time() {
    let _alone = alone("going", 60);
    let (mut listener, address) = listen();
    next_is(DEVICE_REMOVAL);
    assert!(listener.try_next().is_err(), "it says so");
    let error = listener.next_until(Instant::now() + TIME).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
    drop(listener);

    let listener = Listener::bind(here(0)).unwrap();
    let listening = listener.local_addr().unwrap();
    assert_ne!(address, listening);
    let resolution = Route::to(listening).begin(Instant::now() + TIME).unwrap();
    next_is(DEVICE_REMOVAL);
    assert_eq!(resolution.finish().unwrap_err(), ConnectionError::DeviceRemoved);

    let device = Device::named("rxe0");
    let route = Route::resolve(listening, Instant::now() + TIME).unwrap();
    let pending = route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    let connecting = pending.start(b"").unwrap();
    next_is(99);
    let Ok(Step::Pending(connecting)) = connecting.step() else { panic!("an unknown event") };
    next_is(DEVICE_REMOVAL);
    assert_eq!(
        connecting.finish(Instant::now() + TIME).unwrap_err(),
        ConnectionError::DeviceRemoved
    );
    drop((listener, device));
    nothing_is_left();
}
