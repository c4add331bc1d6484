//! Either side is killed, in each state that a connection has.

use std::env;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{ConnectionError, ConnectionEventKind as Kind, Route};

use crate::managed::{Device, TIME, accept, connect, expect, is_iwarp, listen, nothing_is_left};
use crate::vm::alone;

const ROLE: &str = "IBVERBS_TEST_ROLE";

/// This program in one role, as a process of its own.
struct Other {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(role: &str, address: SocketAddr) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "deaths::role", "--nocapture"])
            .env(ROLE, format!("{role} {address}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Waits until the process prints this, and returns the rest of the line.
    fn says(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has ended without {word}");
            if let Some(at) = line.find(word) {
                return line[at + word.len()..].trim().to_owned();
            }
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints its state, and waits to be killed.
fn here_i_am(what: &str) -> ! {
    println!("ready: {what}");
    thread::sleep(Duration::from_secs(120));
    panic!("nobody has killed it")
}

#[test]
#[ignore = "a role, which other tests start"]
fn role() {
    // With "--include-ignored" it is started by itself, too.
    let Ok(role) = env::var(ROLE) else { return };
    let (role, address) = role.rsplit_once(' ').unwrap();
    let address: SocketAddr = address.parse().unwrap();
    let device = Device::first();
    let pending = || {
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap()
    };
    match role {
        "client resolved" => {
            let _route = Route::resolve(address, Instant::now() + TIME).unwrap();
            here_i_am(role)
        }
        "client prepared" => {
            let _pending = pending();
            here_i_am(role)
        }
        "client asking" => {
            let _connecting = pending().start(b"").unwrap();
            here_i_am(role)
        }
        "client established" => {
            let _connection = connect(address, b"").unwrap();
            here_i_am(role)
        }
        "client disconnecting" => {
            let (mut connection, _device) = connect(address, b"").unwrap();
            connection.disconnect().unwrap();
            here_i_am(role)
        }
        _ => {}
    }
    let (mut listener, address) = listen();
    println!("listening: {address}");
    match role {
        "server listening" => here_i_am(role),
        "server asked" => {
            let _request = listener.next_until(Instant::now() + TIME).unwrap();
            here_i_am(role)
        }
        "server prepared" => {
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let _pending = request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
            here_i_am(role)
        }
        "server answering" => {
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let pending = request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
            let _connecting = pending.start(b"").unwrap();
            here_i_am(role)
        }
        "server established" => {
            let _connection =
                accept(listener.next_until(Instant::now() + TIME).unwrap(), b"").unwrap();
            here_i_am(role)
        }
        role => panic!("{role} is no role"),
    }
}

#[test]
#[ignore = "Soft-RoCE: both processes are on one device"]
fn the_client_is_killed_in_each_state() {
    let _alone = alone("clients", 240);
    let (mut listener, address) = listen();
    let device = Device::first();
    for role in ["client resolved", "client prepared"] {
        let mut client = Other::start(role, address);
        client.says("ready");
        client.kill();
        assert!(
            listener.next_until(Instant::now() + Duration::from_millis(100)).is_err(),
            "it has not asked"
        );
    }

    // The client has sent its request. Whether we accept before or after it dies, the connection fails.
    for late in [false, true] {
        let mut client = Other::start("client asking", address);
        client.says("ready");
        let request = (!late).then(|| listener.next_until(Instant::now() + TIME).unwrap());
        client.kill();
        let request =
            request.unwrap_or_else(|| listener.next_until(Instant::now() + TIME).unwrap());
        let error = match request.accept(device.prepare(), b"", Instant::now() + TIME) {
            Err(error) => error,
            // The kernel takes the connection for established once the answer is on its way.
            Ok(mut connection) if is_iwarp() => {
                expect(&mut connection, Kind::Disconnected);
                continue;
            }
            Ok(_) => panic!("it is dead"),
        };
        assert!(
            matches!(
                error,
                ConnectionError::Rejected(_)
                    | ConnectionError::Disconnected
                    | ConnectionError::Unreachable(_)
                    | ConnectionError::Verbs(_)
            ),
            "{error}"
        );
    }

    // The client has our answer, but does not read it.
    let mut client = Other::start("client asking", address);
    client.says("ready");
    let request = listener.next_until(Instant::now() + TIME).unwrap();
    let pending = request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    let connecting = pending.start(b"").unwrap();
    client.kill();
    let start = Instant::now();
    match connecting.finish(Instant::now() + TIME) {
        Err(_) => assert!(start.elapsed() < TIME, "the kernel has told us"),
        Ok(mut connection) if is_iwarp() => expect(&mut connection, Kind::Disconnected),
        Ok(_) => panic!("it is dead"),
    }

    for role in ["client established", "client disconnecting"] {
        let mut client = Other::start(role, address);
        let accepted = accept(listener.next_until(Instant::now() + TIME).unwrap(), b"");
        client.says("ready");
        client.kill();
        match accepted {
            Ok((mut connection, _device)) => {
                expect(&mut connection, Kind::Disconnected);
                connection.disconnect().unwrap();
            }
            // Its message that it is ready was overtaken by the one that it disconnects.
            Err(ConnectionError::Disconnected) if role == "client disconnecting" => {}
            Err(error) => panic!("{role}: {error}"),
        }
    }
    drop((listener, device));
    nothing_is_left();
}

#[test]
#[ignore = "Soft-RoCE: both processes are on one device"]
fn the_server_is_killed_in_each_state() {
    let _alone = alone("servers", 240);
    let device = Device::first();
    let none = "0.0.0.0:0".parse().unwrap();
    for role in ["server listening", "server asked", "server prepared", "server answering"] {
        let mut server = Other::start(role, none);
        let address = server.says("listening: ").parse().unwrap();
        if role == "server listening" {
            server.says("ready");
            server.kill();
            let error = connect(address, b"").err().unwrap();
            assert!(matches!(error, ConnectionError::Rejected(_)), "{role}: {error}");
            continue;
        }
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        let pending = route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
        let connecting = pending.start(b"").unwrap();
        server.says("ready");
        server.kill();
        let start = Instant::now();
        match connecting.finish(Instant::now() + TIME) {
            // The server had answered before it died, so the end of the connection is reported.
            Ok(mut connection) if role == "server answering" => {
                expect(&mut connection, Kind::Disconnected);
            }
            Ok(_) => panic!("{role}: nobody has accepted"),
            Err(_) => assert!(start.elapsed() < TIME, "{role}: the kernel has told us"),
        }
    }
    let mut server = Other::start("server established", none);
    let address = server.says("listening: ").parse().unwrap();
    let (mut connection, connected_device) = connect(address, b"").unwrap();
    server.says("ready");
    server.kill();
    expect(&mut connection, Kind::Disconnected);
    // An operation that is posted from then on ends with an error, and does not hang.
    let mut region = connected_device.domain.allocate::<u8>(8).unwrap();
    connection.disconnect().unwrap();
    let mut room = region.slice_mut(..).unwrap();
    assert!(connection.receive(&mut room).is_err());
    drop((region, connection));
    drop((connected_device, device));
    nothing_is_left();
}
