//! Servers of the examples in a process that can open no more files: they serve on, and accept when there are files again.

#[allow(clippy::duplicate_mod, reason = "it is a program, too")]
#[path = "../examples/async_cm.rs"]
mod async_cm;
#[allow(clippy::duplicate_mod, reason = "it is a program, too")]
#[path = "../examples/cm.rs"]
mod cm;
#[allow(clippy::duplicate_mod, reason = "it is a program, too")]
#[path = "../examples/one_thread_server.rs"]
mod one_thread_server;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::settings::MaxRnrRetries;
use ibverbs::{Channel, ProtectionDomain, TransportError};
use ibverbs_software::Device;

/// This process is the server of this name.
const SERVES: &str = "IBVERBS_TEST_FEW_FILES";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A server in a process of its own.
struct Server(Child, BufReader<ChildStdout>);

impl Server {
    fn start(test: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(SERVES, test)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self(child, output)
    }

    /// The rest of the next line with this text.
    fn says(&mut self, text: &str) -> String {
        let mut lines = self.1.by_ref().lines().map(Result::unwrap);
        let rest = lines.find_map(|line| Some(line.split_once(text)?.1.to_owned()));
        rest.unwrap_or_else(|| panic!("the server has ended without '{text}'"))
    }

    fn is_told(&mut self, command: &str) {
        self.0.stdin.as_mut().unwrap().write_all(command.as_bytes()).unwrap();
        self.says("has done it");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets this process open no file with this number or a higher one.
fn limit_files(most: libc::rlim_t) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limits are readable and writable.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = most;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// Serves in this process, if it is the one for that, with all files or none as the parent says.
fn is_server(test: &str, serve: fn(&Device)) -> bool {
    if std::env::var(SERVES).as_deref() != Ok(test) {
        return false;
    }
    let device = Device::new().unwrap();
    device.register();
    thread::spawn(move || serve(&device));
    for line in std::io::stdin().lines() {
        // The first ones stay open.
        limit_files(if line.unwrap() == "full" { 8 } else { 256 });
        println!("has done it");
    }
    true
}

#[test]
fn a_server_on_one_thread() {
    let serve = |device: &Device| {
        let context = Arc::new(device.open().unwrap());
        let mut server = one_thread_server::Server::new(&context, 8).unwrap();
        println!("\nlistening at {}", server.listener.local_addr().unwrap());
        let waker = server.channels.waker().unwrap();
        println!("ends with {:?}", server.run(&waker, &AtomicBool::new(false)));
        std::process::exit(1);
    };
    if is_server("a_server_on_one_thread", serve) {
        return;
    }
    let mut server = Server::start("a_server_on_one_thread");
    let address: SocketAddr = server.says("listening at ").parse().unwrap();
    let device = Device::new().unwrap();
    let domain = ProtectionDomain::new(Arc::new(device.open().unwrap())).unwrap();
    let client = || {
        let builder = Channel::builder(&domain).max_rnr_retries(MaxRnrRetries::UNLIMITED);
        let prepared = builder.build().unwrap();
        prepared.connect(address, b"", soon()).unwrap().0
    };
    let is_served = |client: &mut Channel<'_>| {
        let question = domain.allocate::<u8>(8).unwrap();
        let mut answer = domain.allocate::<u8>(8).unwrap();
        client.scope(|scope| {
            let receive = scope.post_receive(answer.slice_mut(..)?)?;
            scope.post_send(question.slice(..)?)?.wait_until(soon())?;
            receive.wait_until(soon())?;
            Ok::<_, TransportError>(())
        })
    };
    let mut first = client();
    is_served(&mut first).unwrap();
    server.is_told("full\n");
    let _waits = TcpStream::connect(address).unwrap();
    is_served(&mut first).unwrap();
    server.is_told("free\n");
    is_served(&mut client()).unwrap();
    is_served(&mut first).unwrap();
}

/// Connects until the server accepts: while it has no files, its connection manager rejects clients.
fn until_it_accepts(mut server: Server, connect: impl Fn(SocketAddr) -> bool + Sync) {
    let address: SocketAddr = server.says("listening at ").parse().unwrap();
    assert!(connect(address));
    server.is_told("full\n");
    thread::scope(|threads| {
        let connects = threads.spawn(|| {
            let until = soon();
            while !connect(address) {
                assert!(Instant::now() < until, "nobody accepts");
            }
        });
        // A client is lost, and then none is accepted.
        for _ in 0..3 {
            server.says("Too many open files");
        }
        server.is_told("free\n");
        connects.join().unwrap();
    });
}

#[test]
fn one_peer_after_the_other() {
    let serve = |device: &Device| {
        println!("\nends with {:?}", cm::listen((device.address(), 0).into()));
        std::process::exit(1);
    };
    if is_server("one_peer_after_the_other", serve) {
        return;
    }
    let device = Device::new().unwrap();
    device.register();
    let connect = |address| cm::connect(address, &["hello".to_owned()]).is_ok();
    until_it_accepts(Server::start("one_peer_after_the_other"), connect);
}

#[test]
fn a_server_of_tasks() {
    let serve = |device: &Device| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let listens = async_cm::listen((device.address(), 0).into());
        println!("\nends with {:?}", runtime.block_on(listens));
        std::process::exit(1);
    };
    if is_server("a_server_of_tasks", serve) {
        return;
    }
    let device = Device::new().unwrap();
    device.register();
    let connect = |address| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async_cm::connect(address, &["hello".to_owned()])).is_ok()
    };
    until_it_accepts(Server::start("a_server_of_tasks"), connect);
}
