//! The connection manager between two machines, on Soft-RoCE and on Soft-iWARP. `script/soak pair` runs it.
//!
//! Machine 1 listens, machine 2 connects, asks, and ends the connection. On iWARP a message must find its
//! receive, so both post theirs before the other side may send.

#[path = "support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;
use std::time::Instant;

use ibverbs::rdmacm::{ConnectionEventKind as Kind, Listener, Route};
use ibverbs::{Channel, TransportError};
use two_machines::{PATIENCE, Peer, pair, report, role};

const PORT: u16 = 7471;
/// The port where the machines meet over TCP. Soft-iWARP's listener takes the port of that number too.
const MEETING: u16 = PORT + 1;
/// How many connections are made, one after the other.
const CONNECTIONS: usize = 5;
const QUESTION: &[u8] = b"how far is it?";
const ANSWER: &[u8] = b"one wire";

fn main() -> ExitCode {
    let tests: &[(&str, fn())] =
        &[("soft_roce", || connections(&[])), ("soft_iwarp", || connections(&["--siw"]))];
    two_machines::main(tests, |role, _| match role {
        "listen" => listen(),
        "connect" => {
            let mut peer = Peer::meet(MEETING);
            (0..CONNECTIONS).for_each(|round| connect(round, &mut peer));
        }
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
    let mut peer = Peer::meet(MEETING);
    for round in 0..CONNECTIONS {
        let request = listener.next_until(Instant::now() + PATIENCE).unwrap();
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
                control = Some(accept.accept(b"welcome", Instant::now() + PATIENCE).unwrap());
                peer.meet_again();
                let (asked, told) = receive.wait_until(soon())?;
                assert_eq!(&asked[..told.byte_len() as usize], QUESTION);
                Ok::<_, TransportError>(())
            })
            .unwrap();
        region[..ANSWER.len()].copy_from_slice(ANSWER);
        channel.until(soon()).send(region.slice(..ANSWER.len()).unwrap()).unwrap();
        let mut control = control.unwrap();
        assert_eq!(
            control.event_until(Instant::now() + PATIENCE).unwrap().kind(),
            Kind::Disconnected
        );
        report("answered");
    }
}

fn connect(round: usize, peer: &mut Peer) {
    let address = format!("{}:{PORT}", std::env::var("IBVERBS_VM_PEER").unwrap());
    let address = address.parse().unwrap();
    let route = Route::resolve(address, Instant::now() + PATIENCE).unwrap();
    let context = route.open_device().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    region[..QUESTION.len()].copy_from_slice(QUESTION);
    let prepared = Channel::builder(&domain).port(route.port()).build().unwrap();
    let mut connection =
        route.connect(prepared, &[round as u8], Instant::now() + PATIENCE).unwrap();
    assert!(connection.private_data().starts_with(b"welcome"));
    // Soft-iWARP does not read what arrives while it finishes accepting before more arrives: see
    // script/vm.d/README.md. The peer sends nothing more here, so wait until it says that it has accepted.
    peer.meet_again();
    let (question, room) = region.slice_mut(..).unwrap().split_at(QUESTION.len()).unwrap();
    connection
        .scope(|scope| {
            let receive = scope.post_receive(room)?;
            scope.post_send(question)?.wait_until(soon())?;
            let (answer, told) = receive.wait_until(soon())?;
            assert_eq!(&answer[..told.byte_len() as usize], ANSWER);
            Ok::<_, TransportError>(())
        })
        .unwrap();
    connection.disconnect().unwrap();
    report("asked");
}
