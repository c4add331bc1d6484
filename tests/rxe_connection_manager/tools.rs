//! Connections to and from rdma-core's own programs.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{ConnectionError, ConnectionEventKind as Kind, Listener, Route};
use ibverbs::{
    AccessFlags, Channel, Inline, MemoryRegion, ReceiveWorkRequest, RemoteMemoryRegion,
    SharedMemoryRegion,
};

use crate::kept::{self, Kept};
use crate::managed::{Device, Managed, TIME, connect, expect, here};
use crate::nothing_is_left;
use crate::perftest_report::lacks_only_the_report;
use crate::vm::alone;

/// A program of rdma-core. It is stopped when this is dropped.
pub(crate) struct Tool(Child, String);

impl Tool {
    pub(crate) fn start(command: &str) -> Self {
        let mut words = command.split_whitespace();
        let child = Command::new("timeout")
            .arg("300")
            .args(&mut words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child, command.to_owned())
    }

    /// Waits for it to end, with success.
    pub(crate) fn finish(mut self) -> String {
        let name = self.1.clone();
        let output = std::mem::replace(&mut self.0, Command::new("true").spawn().unwrap())
            .wait_with_output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() || lacks_only_the_report(&errors),
            "{name}: {}\n{text}{errors}",
            output.status
        );
        text
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        // To "timeout", which passes it on.
        // SAFETY: it was not waited for yet, so the number is its own.
        unsafe { libc::kill(self.0.id() as libc::pid_t, libc::SIGTERM) };
        let _ = self.0.wait();
    }
}

/// Connects as soon as the tool listens.
pub(crate) fn connect_soon<T>(mut connect: impl FnMut() -> Result<T, ConnectionError>) -> T {
    let start = Instant::now();
    loop {
        match connect() {
            Ok(connected) => return connected,
            Err(ConnectionError::Rejected(_)) if start.elapsed() < TIME => {
                thread::sleep(Duration::from_millis(50));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// How large the pings are: rping's default.
const PING: usize = 64;
const PINGS: u64 = 10;
/// The access of rping to our memory.
const REMOTE: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);

/// A message of one side of rping to the other: where to read from or to write to.
struct Note([u8; 16]);

impl Note {
    fn of(region: &SharedMemoryRegion<'_, u8>) -> Self {
        let remote = region.remote();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&remote.address().to_be_bytes());
        bytes[8..12].copy_from_slice(&remote.rkey().to_be_bytes());
        bytes[12..].copy_from_slice(&(PING as u32).to_be_bytes());
        Self(bytes)
    }

    fn remote(&self) -> RemoteMemoryRegion {
        let word = |at: usize| u32::from_be_bytes(self.0[at..at + 4].try_into().unwrap());
        let address = u64::from_be_bytes(self.0[..8].try_into().unwrap());
        RemoteMemoryRegion::new(address, word(12).into(), word(8)).unwrap()
    }
}

/// The buffer for a note of the peer's. It is posted before the peer can send: Linux 5.10 gives up early where a receive is
/// missing.
type Room = MemoryRegion<'static, u8>;

fn receive(channel: &mut Channel<'_>, device: &Device) -> Kept<Room> {
    let room = MemoryRegion::new(&device.domain, 16).unwrap();
    let all = |room: &'static mut Room| ReceiveWorkRequest::new(room.slice_mut(..).unwrap());
    kept::post(channel, room, all).unwrap()
}

fn wait(mut receive: Kept<Room>, channel: &mut Managed) -> Note {
    let (room, told) = receive.wait(channel).unwrap();
    assert_eq!(told.byte_len(), 16);
    Note(room[..].try_into().unwrap())
}

fn send(channel: &mut Managed, note: &Note) {
    channel.until(Instant::now() + TIME).send(Inline(&note.0)).unwrap();
}

/// We are the client: rping reads what we have, and writes it back elsewhere.
#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn pinging_rping() {
    let _alone = alone("pinging rping", 120);
    let rping = Tool::start(&format!("rping -s -a {} -p 7501 -C {PINGS} -V", here(0).ip()));
    let (mut channel, device) = connect_soon(|| connect(here(7501), b""));
    let source = device.domain.allocate_shared::<u8>(PING, REMOTE).unwrap();
    let sink = device.domain.allocate_shared::<u8>(PING, REMOTE).unwrap();
    for ping in 0..PINGS {
        let mut text: Vec<u8> =
            (0..PING).map(|at| b'a' + ((at as u64 + ping) % 26) as u8).collect();
        // rping writes back as much as a string in C has.
        *text.last_mut().unwrap() = 0;
        source.write(0, &text).unwrap();
        for region in [&source, &sink] {
            let receive = self::receive(&mut channel, &device);
            send(&mut channel, &Note::of(region));
            wait(receive, &mut channel); // it has read, or written
        }
        let mut back = [0; PING];
        sink.read(0, &mut back).unwrap();
        assert_eq!(back[..], text[..]);
    }
    channel.disconnect().unwrap();
    drop((source, sink, channel));
    drop(device);
    rping.finish();
    nothing_is_left();
}

/// We are the server: rping checks that what it gets is what it has sent.
#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn rping_pings_us() {
    let _alone = alone("rping pings us", 120);
    let mut listener = Listener::bind(here(7502)).unwrap();
    let rping = Tool::start(&format!("rping -c -a {} -p 7502 -C {PINGS} -V -v", here(0).ip()));
    let request = listener.next_until(Instant::now() + TIME).unwrap();
    let device = Device::of(request.open_device().unwrap(), request.port());
    let mut pending = request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    let mut receive = self::receive(pending.queue_pair(), &device);
    let mut channel = pending.start(b"").unwrap().finish(Instant::now() + TIME).unwrap();
    let mut region = device.domain.allocate::<u8>(PING).unwrap();
    for _ in 0..PINGS {
        let from = wait(receive, &mut channel).remote();
        let mut all = region.slice_mut(..).unwrap();
        channel.until(Instant::now() + TIME).read(&mut all, from).unwrap();
        receive = self::receive(&mut channel, &device);
        send(&mut channel, &Note([0; 16]));
        let to = wait(receive, &mut channel).remote();
        let all = region.slice(..).unwrap();
        channel.until(Instant::now() + TIME).write(all, to).unwrap();
        receive = self::receive(&mut channel, &device);
        send(&mut channel, &Note([0; 16]));
    }
    expect(&mut channel, Kind::Disconnected);
    channel.disconnect().unwrap();
    assert!(receive.wait(&mut channel).is_err(), "the last receive was not flushed");
    let text = rping.finish();
    assert_eq!(text.matches("ping data:").count() as u64, PINGS, "{text}");
    drop((receive, region, channel, listener));
    drop(device);
    nothing_is_left();
}

/// How many connections `ucmatose` makes at a time. Its two sides exchange nothing but what the connection manager does:
/// those of `cmtime` also meet over TCP, which each release does in another way.
const CONNECTIONS: usize = 50;

#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn ucmatose_connects_to_us() {
    let _alone = alone("ucmatose to us", 120);
    let mut listener = Listener::builder(here(7503)).backlog(0).bind().unwrap();
    let ucmatose =
        Tool::start(&format!("ucmatose -s {} -p 7503 -c {CONNECTIONS} -C 0", here(0).ip()));
    let device = Device::named("rxe0");
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        connections.push(request.accept(device.prepare(), b"", Instant::now() + TIME).unwrap());
    }
    for connection in &mut connections {
        connection.disconnect().unwrap();
        expect(connection, Kind::Disconnected);
    }
    drop(connections);
    ucmatose.finish();
    drop((device, listener));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn we_connect_to_ucmatose() {
    let _alone = alone("us to ucmatose", 120);
    let ucmatose =
        Tool::start(&format!("ucmatose -b {} -p 7504 -c {CONNECTIONS} -C 0", here(0).ip()));
    let device = Device::named("rxe0");
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(connect_soon(|| {
            let route = Route::resolve(here(7504), Instant::now() + TIME)?;
            let prepared =
                Channel::builder(&device.domain).access(AccessFlags::LOCAL_WRITE).build().unwrap();
            route.connect(prepared, b"", Instant::now() + TIME)
        }));
    }
    for connection in &mut connections {
        expect(connection, Kind::Disconnected);
        connection.disconnect().unwrap();
    }
    drop(connections);
    ucmatose.finish();
    drop(device);
    nothing_is_left();
}

/// `rping` answers without a credit word.
#[test]
#[ignore = "Soft-RoCE: a program of rdma-core is the other side, which asks the kernel"]
fn rping_has_no_flow_control() {
    let _alone = alone("rping without credits", 60);
    let rping = Tool::start(&format!("rping -s -P -a {} -p 7505", here(0).ip()));
    let device = Device::named("rxe0");
    let error = connect_soon(|| {
        let route = Route::resolve(here(7505), Instant::now() + TIME)?;
        let prepared = Channel::builder(&device.domain).flow_control(true).build().unwrap();
        match route.connect(prepared, b"", Instant::now() + TIME) {
            Ok(_) => panic!("rping has flow control"),
            Err(ConnectionError::Verbs(error)) => Ok(error),
            Err(error) => Err(error),
        }
    });
    assert!(error.to_string().contains("both sides need it"), "{error}");
    drop(rping);
    drop(device);
    nothing_is_left();
}
