//! Event loops: the program waits only in one `poll` of all file descriptors.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use ibverbs::Channel;
use ibverbs::rdmacm::{
    Connecting, Connection, ConnectionEventKind as Kind, Listener, Route, RouteResolution, Step,
};

use crate::managed::{Device, TIME, listen, transfer};
use crate::nothing_is_left;
use crate::vm::alone;

/// Sleeps until one of the files is readable.
fn wait(files: &[&dyn AsFd]) {
    let mut files: Vec<_> = files
        .iter()
        .map(|file| libc::pollfd { fd: file.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    // SAFETY: as many files as is said.
    let ready = unsafe { libc::poll(files.as_mut_ptr(), files.len() as u64, 30_000) };
    assert!(ready > 0, "nothing happens");
}

#[expect(clippy::large_enum_variant, reason = "there are few")]
enum Client {
    Resolving(RouteResolution),
    Connecting(Connecting<Channel<'static>>),
    Connected(Connection<Channel<'static>>),
}

impl Client {
    fn step(self, device: &Device) -> Self {
        match self {
            Self::Resolving(resolution) => match resolution.step().unwrap() {
                Step::Pending(resolution) => Self::Resolving(resolution),
                Step::Done(route) => start(route, device),
            },
            Self::Connecting(connecting) => match connecting.step().unwrap() {
                Step::Pending(connecting) => Self::Connecting(connecting),
                Step::Done(connection) => Self::Connected(connection),
            },
            connected => connected,
        }
    }

    fn file(&self) -> &dyn AsFd {
        match self {
            Self::Resolving(resolution) => resolution,
            Self::Connecting(connecting) => connecting,
            Self::Connected(connection) => connection,
        }
    }
}

fn start(route: Route, device: &Device) -> Client {
    let pending = route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    Client::Connecting(pending.start(b"steps").unwrap())
}

#[test]
fn one_thread_does_both_sides_of_several_connections() {
    let _alone = alone("steps", 120);
    let (mut listener, address): (Listener, _) = listen();
    let device = Device::named("rxe0");
    const COUNT: usize = 5;
    let mut clients: Vec<Client> = (0..COUNT)
        .map(|_| Client::Resolving(Route::to(address).begin(Instant::now() + TIME).unwrap()))
        .collect();
    let mut servers: Vec<Client> = Vec::new();
    let begin = Instant::now();
    loop {
        let done =
            |all: &[Client]| all.iter().filter(|c| matches!(c, Client::Connected(_))).count();
        if done(&clients) == COUNT && done(&servers) == COUNT {
            break;
        }
        let mut files: Vec<&dyn AsFd> = vec![&listener];
        let waiting = |client: &&Client| !matches!(client, Client::Connected(_));
        files.extend(clients.iter().chain(&servers).filter(waiting).map(Client::file));
        wait(&files);
        clients = clients.into_iter().map(|client| client.step(&device)).collect();
        servers = servers.into_iter().map(|server| server.step(&device)).collect();
        while let Some(request) = listener.try_next().unwrap() {
            assert_eq!(request.private_data().trim_end(), b"steps");
            let pending = request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
            servers.push(Client::Connecting(pending.start(b"").unwrap()));
        }
        assert!(begin.elapsed() < TIME);
    }
    // Each pair by its addresses.
    for client in clients {
        let Client::Connected(one) = client else { unreachable!() };
        let found = servers.iter().position(|server| match server {
            Client::Connected(two) => two.peer_addr() == one.local_addr(),
            _ => false,
        });
        let Client::Connected(two) = servers.swap_remove(found.unwrap()) else { unreachable!() };
        let (mut one, mut two) = ((one, device.clone()), (two, device.clone()));
        transfer(&mut one, &mut two, b"in steps");
        one.0.disconnect().unwrap();
        wait(&[&two.0]);
        assert_eq!(two.0.event().unwrap().unwrap().kind(), Kind::Disconnected);
    }
    drop((listener, device));
    nothing_is_left();
}
