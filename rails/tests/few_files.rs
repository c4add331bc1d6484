//! While a process can open no more files, `accept` says so, and peers that are connecting go on. When it can, it accepts peers again.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_rails::{Event, Rails, RailsError};
use ibverbs_software::Device;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn is_full(error: &RailsError) -> bool {
    matches!(error, RailsError::Control(error) if error.to_string().contains("Too many open files"))
}

/// This test runs itself, with few files.
#[test]
fn peers_that_are_connecting_go_on_without_files() {
    const ALONE: &str = "IBVERBS_RAILS_FEW_FILES";
    if std::env::var_os(ALONE).is_none() {
        let alone = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "peers_that_are_connecting_go_on_without_files", "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let text = [alone.stdout, alone.stderr].concat();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&text));
        return;
    }
    let device = Device::builder().name("few0").build().unwrap();
    device.register();
    let rails = || Rails::builder().device("few0").peers(4).build().unwrap();
    let (mut server, clients) = (rails(), [rails(), rails()]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    // The first one is taken, and says nothing yet. The other one waits in the backlog.
    let first = stream();
    let soon = Instant::now() + Duration::from_millis(20);
    assert!(matches!(server.accept(&listener, soon), Err(RailsError::TimedOut)));
    let streams = [first, stream()];
    let files: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let connects = |mut rails: Rails, stream: TcpStream| {
        stream.set_nonblocking(true).unwrap();
        let peer = rails.connect_over(stream).unwrap();
        while !matches!(rails.wait_event(deadline()).unwrap(), Event::Connected(_)) {}
        assert_eq!(rails.receive(peer, deadline()).unwrap(), b"welcome");
        // It keeps its files.
        rails
    };
    let until = deadline();
    let accept = |server: &mut Rails, files: &mut Vec<File>| loop {
        assert!(Instant::now() < until, "nobody is accepted");
        match server.accept(&listener, until) {
            Ok(peer) => break server.send(peer, *b"welcome").map(drop).unwrap(),
            Err(error) => assert!(is_full(&error) && !files.is_empty(), "{error}"),
        }
    };
    thread::scope(|threads| {
        let mut files = files;
        let clients = clients
            .into_iter()
            .zip(streams)
            .map(|(rails, stream)| threads.spawn(move || connects(rails, stream)));
        let clients: Vec<_> = clients.collect();
        accept(&mut server, &mut files);
        while !clients[0].is_finished() {
            server.turn(Instant::now());
            thread::yield_now();
        }
        let error = server.accept(&listener, until).unwrap_err();
        assert!(is_full(&error), "{error}");
        files.clear();
        accept(&mut server, &mut files);
        while !clients[1].is_finished() {
            server.turn(Instant::now());
            thread::yield_now();
        }
    });
}
