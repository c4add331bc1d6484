//! The connection manager between two machines, on Soft-RoCE and on Soft-iWARP. `script/test pair` runs it.
//!
//! Machine 1 listens, machine 2 connects, asks, and ends the connection. On iWARP a message must find its
//! receive, so both post theirs before the other side may send.

#[path = "support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    Channel, Connection, ConnectionError, ConnectionEventKind as Kind, Listener, Route,
    TransportError,
};
use two_machines::{PATIENCE, pair, report, role};

const PORT: u16 = 7471;
/// How many connections are made, one after the other.
const CONNECTIONS: usize = 5;
const QUESTION: &[u8] = b"how far is it?";
const ANSWER: &[u8] = b"one wire";

fn main() -> ExitCode {
    let tests: &[(&str, fn())] =
        &[("soft_roce", || connections(&[])), ("soft_iwarp", || connections(&["--siw"]))];
    two_machines::main(tests, |role, _| match role {
        "listen" => listen(),
        "connect" => (0..CONNECTIONS).for_each(connect),
        role => panic!("{role} is not a role"),
    })
}

fn connections(options: &[&str]) {
    let reports = pair(options, &role("listen"), &role("connect"));
    assert_eq!(reports.len(), 2 * CONNECTIONS, "{reports:?}");
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn listen() {
    let mut listener = Listener::bind(format!("0.0.0.0:{PORT}").parse().unwrap()).unwrap();
    for round in 0..CONNECTIONS {
        let request = listener.next_timeout(PATIENCE).unwrap();
        assert_eq!(request.private_data().first(), Some(&(round as u8)));
        let context = request.open_device().unwrap();
        let domain = context.alloc_pd().unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let prepared = Channel::builder(&domain).port(request.port()).build().unwrap();
        let (mut channel, accept) =
            request.prepare_parts(prepared).map_err(|(.., error)| error).unwrap();
        let (mut control, room) = (None, region.slice_mut(..).unwrap());
        channel
            .scope(|scope| {
                let receive = scope.post_receive(room)?;
                control = Some(accept.accept(b"welcome", PATIENCE).unwrap());
                let (asked, told) = receive.wait_deadline(soon())?;
                assert_eq!(&asked[..told.byte_len() as usize], QUESTION);
                Ok::<_, TransportError>(())
            })
            .unwrap();
        region[..ANSWER.len()].copy_from_slice(ANSWER);
        channel.send_deadline(&region.slice(..ANSWER.len()).unwrap(), soon()).unwrap();
        let mut control = control.unwrap();
        assert_eq!(control.event_timeout(PATIENCE).unwrap().kind(), Kind::Disconnected);
        report("answered");
    }
}

/// The other machine may not listen yet.
fn connect_soon<T>(mut connect: impl FnMut() -> Result<T, ConnectionError>) -> T {
    let start = Instant::now();
    loop {
        match connect() {
            Ok(connected) => return connected,
            Err(ConnectionError::Rejected(_) | ConnectionError::NoAddress(_))
                if start.elapsed() < PATIENCE =>
            {
                thread::sleep(Duration::from_millis(100));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn connect(round: usize) {
    let address = format!("{}:{PORT}", std::env::var("IBVERBS_VM_PEER").unwrap());
    let address = address.parse().unwrap();
    let first = connect_soon(|| Route::resolve(address, PATIENCE));
    let context = first.open_device().unwrap();
    let domain = context.alloc_pd().unwrap();
    let port = first.port();
    drop(first);
    let mut region = domain.allocate::<u8>(64).unwrap();
    region[..QUESTION.len()].copy_from_slice(QUESTION);
    let mut connection: Connection<Channel<'_>> = connect_soon(|| {
        let prepared = Channel::builder(&domain).port(port).build()?;
        Route::resolve(address, PATIENCE)?.connect(prepared, &[round as u8], PATIENCE)
    });
    assert!(connection.private_data().starts_with(b"welcome"));
    // What arrives while Soft-iWARP finishes accepting is not read before more arrives: see
    // script/vm.d/README.md. Nobody sends more here.
    thread::sleep(Duration::from_secs(1));
    let (question, room) = region.slice_mut(..).unwrap().split_at(QUESTION.len()).unwrap();
    connection
        .scope(|scope| {
            let receive = scope.post_receive(room)?;
            scope.post_send(question)?.wait_deadline(soon())?;
            let (answer, told) = receive.wait_deadline(soon())?;
            assert_eq!(&answer[..told.byte_len() as usize], ANSWER);
            Ok::<_, TransportError>(())
        })
        .unwrap();
    connection.disconnect().unwrap();
    report("asked");
}
