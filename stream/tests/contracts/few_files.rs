//! Listeners of a process that can open no more files: clients that are connecting go on, whoever accepts hears of it, and clients
//! are served again when there are files.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_stream::{Listener, Role, Stream, tokio as tasks};
use tokio::io::AsyncWriteExt as _;

use super::{MANAGED, PATIENCE, managed_hub, soon};

const SHORT: Duration = Duration::from_millis(5);

/// This process is the server, and accepts so.
const SERVES: &str = "IBVERBS_STREAM_FEW_FILES_SERVES";

const TEST: &str = "few_files::clients_are_served_when_there_are_files_again";

/// All files that the process can open.
fn all_files() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Accepts a client within this time, and greets it.
type Accept<'a> = &'a mut dyn FnMut(Duration) -> io::Result<Box<dyn Send>>;

/// Accepts until a client has come that says nothing.
fn takes_one_that_is_silent(accept: Accept<'_>) {
    let before = open_files();
    let until = soon();
    while open_files() <= before {
        assert!(Instant::now() < until, "nobody comes");
        assert_eq!(accept(SHORT).err().unwrap().kind(), ErrorKind::WouldBlock);
    }
}

fn serve(address: SocketAddr, over_tcp: bool, accept: Accept<'_>) {
    assert_eq!(accept(SHORT).err().unwrap().kind(), ErrorKind::WouldBlock);
    println!("\nat {address}");
    let mut streams = Vec::new();
    if over_tcp {
        takes_one_that_is_silent(accept);
    } else {
        // librdmacm opens the device for the first client.
        streams.push(accept(PATIENCE).unwrap());
    }
    let files = all_files();
    println!("full");
    if over_tcp {
        streams.push(accept(PATIENCE).expect("that client was there before"));
    }
    let error = loop {
        match accept(SHORT).map(drop) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            ended => break ended.expect_err("there is no file for it"),
        }
    };
    assert!(error.to_string().contains("Too many open files"), "{error}");
    println!("fails");
    drop(files);
    streams.push(accept(PATIENCE).unwrap());
    if over_tcp {
        println!("empty");
        takes_one_that_is_silent(accept);
        let files = all_files();
        println!("full");
        let mut line = String::new();
        io::stdin().read_line(&mut line).unwrap();
        thread::scope(|threads| {
            threads.spawn(|| {
                // The listener has most likely failed once by then.
                thread::sleep(Duration::from_millis(50));
                drop(files);
            });
            streams.push(accept(PATIENCE).unwrap());
        });
    }
    io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

fn serve_as(how: &str) {
    let hub = managed_hub(8);
    let managed = SocketAddr::new(MANAGED.address(), 0);
    let over_tcp = how.ends_with("TCP");
    if how.starts_with("threads") {
        let listener = match over_tcp {
            true => Listener::bind(&hub, "127.0.0.1:0").unwrap(),
            false => Listener::bind_rdmacm(&hub, managed).unwrap(),
        };
        return serve(listener.local_addr().unwrap(), over_tcp, &mut |time| {
            listener.set_deadline(Some(Instant::now() + time));
            let (mut stream, _) = listener.accept()?;
            stream.write_all(b"!").unwrap();
            Ok(Box::new(stream))
        });
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = match over_tcp {
        true => runtime.block_on(tasks::Listener::bind(&hub, "127.0.0.1:0")).unwrap(),
        false => runtime.block_on(async { tasks::Listener::bind_rdmacm(&hub, managed).unwrap() }),
    };
    serve(listener.local_addr().unwrap(), over_tcp, &mut |time| {
        runtime.block_on(async {
            let accepted = tokio::time::timeout(time, listener.accept()).await;
            let (mut stream, _) = accepted.map_err(|_| ErrorKind::WouldBlock)??;
            stream.write_all(b"!").await.unwrap();
            stream.flush().await.unwrap();
            Ok(Box::new(stream) as _)
        })
    });
}

#[test]
fn clients_are_served_when_there_are_files_again() {
    if let Ok(how) = std::env::var(SERVES) {
        return serve_as(&how);
    }
    let hub = managed_hub(64);
    for how in ["threads over TCP", "tasks over TCP", "threads managed", "tasks managed"] {
        let mut server = Command::new("sh")
            .args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture"])
            .env(SERVES, how)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
        let mut says = |begin: &str| {
            let mut lines = lines.by_ref().map(Result::unwrap);
            let line = lines.find(|line| line.starts_with(begin));
            line.unwrap_or_else(|| panic!("{how}: it does not say '{begin}'"))
        };
        let address: SocketAddr = says("at ")[3..].parse().unwrap();
        let tcp = || TcpStream::connect(address).unwrap();
        let over = |tcp| Stream::over(&hub, tcp, Role::Connects, soon()).unwrap();
        let managed = || Stream::connect_rdmacm(&hub, address, soon()).unwrap();
        let is_greeted = |mut stream: Stream| {
            stream.read_exact(&mut [0; 1]).unwrap();
            stream
        };
        let mut streams = Vec::new();
        if how.ends_with("managed") {
            streams.push(is_greeted(managed()));
            says("full");
            thread::scope(|threads| {
                // The connection manager keeps the client waiting, or refuses it.
                let connects = threads.spawn(|| {
                    loop {
                        match Stream::connect_rdmacm(&hub, address, soon()) {
                            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                            connected => break connected.unwrap(),
                        }
                    }
                });
                says("fails");
                streams.push(is_greeted(connects.join().unwrap()));
            });
        } else {
            let first = tcp();
            says("full");
            let second = tcp();
            streams.push(is_greeted(over(first)));
            says("fails");
            streams.push(is_greeted(over(second)));
            says("empty");
            let silent = tcp();
            says("full");
            let third = tcp();
            server.stdin.as_mut().unwrap().write_all(b"come\n").unwrap();
            streams.push(is_greeted(over(third)));
            silent.set_nonblocking(true).unwrap();
            let error = (&silent).read(&mut [0; 1]).expect_err("it was given up before");
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{how}: {error}");
        }
        drop(server.stdin.take());
        assert!(server.wait().unwrap().success(), "{how}");
    }
}
