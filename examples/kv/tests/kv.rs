//! The store on devices made of software: clients that come and go, are killed, and connect again.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ibverbs_kv::client::Client;
use ibverbs_kv::plain::{self, PlainClient};
use ibverbs_kv::{Connect, server};
use ibverbs_software::Device;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Notify};
use tokio::task::JoinHandle;

/// Held while a program is started: until that runs, it has a copy of each of this process's sockets, and listens on
/// those that listen here.
static STARTING: Mutex<()> = Mutex::const_new(());

struct Server {
    clients: SocketAddr,
    admin: SocketAddr,
    task: JoinHandle<ibverbs_kv::Result<()>>,
}

async fn server_at(address: &str) -> Server {
    server_for(address, server::CLIENTS).await
}

async fn server_for(address: &str, most_clients: u32) -> Server {
    let clients = TcpListener::bind(address).await.unwrap();
    let admin = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (at, admin_at) = (clients.local_addr().unwrap(), admin.local_addr().unwrap());
    let context = Device::new().unwrap().open().unwrap();
    let stop = Arc::new(Notify::new());
    let task = tokio::spawn(server::run(context, clients, Some(admin), stop, most_clients, 2));
    Server { clients: at, admin: admin_at, task }
}

impl Server {
    fn client(&self) -> Client {
        Client::new(Device::new().unwrap().open().unwrap(), self.clients).unwrap()
    }

    /// The answer of the admin socket.
    async fn admin(&self, line: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).await.unwrap();
        stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn clients(&self) -> usize {
        self.admin("stats").await.split(' ').nth(1).unwrap().parse().unwrap()
    }

    async fn until_clients_are(&self, count: usize) {
        for _ in 0..600 {
            if self.clients().await == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{}", self.admin("stats").await);
    }

    /// Shuts the server down, which must succeed.
    async fn stop(self) {
        assert_eq!(self.admin("shutdown").await, "stopping\n");
        self.task.await.unwrap().unwrap();
    }
}

fn value(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + index / 251) as u8 ^ seed).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_too_many_is_refused_until_another_one_leaves() {
    let server = server_for("127.0.0.1:0", 2).await;
    let (mut one, mut two, mut three) = (server.client(), server.client(), server.client());
    one.put(b"key", Some(&value(10, 1))).await.unwrap();
    two.get(b"key").await.unwrap();
    let refused = three.get(b"key").await.unwrap_err();
    assert_eq!(refused.to_string(), "the server has as many clients as it serves");
    assert_eq!(two.get(b"key").await.unwrap(), Some(value(10, 1)), "the others are not affected");
    drop(one);
    server.until_clients_are(1).await;
    assert_eq!(three.get(b"key").await.unwrap(), Some(value(10, 1)));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_place_goes_from_client_to_client() {
    let server = server_for("127.0.0.1:0", 1).await;
    for round in 0..50 {
        let mut client = server.client();
        let value = value(10, round);
        // The server may not have noticed yet that the client before has left. Nothing else goes wrong.
        while let Err(error) = client.put(b"key", Some(&value)).await {
            assert_eq!(error.to_string(), "the server has as many clients as it serves");
        }
        assert_eq!(client.get(b"key").await.unwrap(), Some(value));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_of_all_lengths_come_back_whole() {
    let server = server_at("127.0.0.1:0").await;
    let (mut one, mut other) = (server.client(), server.client());
    assert_eq!(one.get(b"nothing").await.unwrap(), None);
    for (seed, length) in [0, 1, 4095, 4096, 4097, 100_000, 1 << 20].into_iter().enumerate() {
        let value = value(length, seed as u8);
        one.put(b"key", Some(&value)).await.unwrap();
        assert_eq!(other.get(b"key").await.unwrap().unwrap(), value);
    }
    other.put(b"key", None).await.unwrap();
    assert_eq!(one.get(b"key").await.unwrap(), None);
    assert!(one.put(b"key", Some(&vec![0; (1 << 20) + 1])).await.is_err());
    assert!(one.put(&[0; 256], Some(b"")).await.is_err());
    assert_eq!(server.admin("nonsense").await, "say stats or shutdown\n");
    server.stop().await;
}

#[tokio::test]
async fn clients_come_and_go_on_one_thread() {
    let server = server_at("127.0.0.1:0").await;
    for round in 0..3 {
        let clients: Vec<_> = (0..8).map(|_| server.client()).collect();
        let tasks = clients.into_iter().enumerate().map(|(index, mut client)| {
            tokio::spawn(async move {
                let key = format!("key {index}");
                for step in 0..5 {
                    let value = value(if step == 4 { 50_000 } else { 100 }, index as u8 ^ step);
                    client.put(key.as_bytes(), Some(&value)).await.unwrap();
                    assert_eq!(client.get(key.as_bytes()).await.unwrap().unwrap(), value);
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        server.until_clients_are(0).await;
        let stats = server.admin("stats").await;
        assert!(stats.contains(&format!("keys 8 requests {}", (round + 1) * 80)), "{stats}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_is_killed_hurts_nobody() {
    let server = server_at("127.0.0.1:0").await;
    let mut client = server.client();
    client.put(b"mine", Some(&value(200_000, 1))).await.unwrap();
    for _ in 0..3 {
        let starting = STARTING.lock().await;
        let mut load = Command::new(env!("CARGO_BIN_EXE_kv"))
            .args(["load", &server.clients.to_string()])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        drop(starting);
        server.until_clients_are(2).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(load.try_wait().unwrap().is_none(), "it works until it is killed");
        load.kill().unwrap();
        load.wait().unwrap();
        for _ in 0..5 {
            assert_eq!(client.get(b"mine").await.unwrap().unwrap(), value(200_000, 1));
        }
        server.until_clients_are(1).await;
    }
    server.stop().await;
}

/// A client's way to the server, over a stream that was connected before.
struct Ready(std::sync::Mutex<Option<TcpStream>>);

impl Connect for Ready {
    type Stream = TcpStream;

    async fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = self.0.lock().unwrap().take();
        stream.ok_or_else(|| std::io::ErrorKind::NotConnected.into())
    }
}

/// While the process can open no file, the server serves the clients that it has, lets new ones wait, and can be stopped.
/// This test runs itself, with few files.
#[tokio::test]
async fn without_files_the_servers_serve_on() {
    const ALONE: &str = "IBVERBS_KV_FEW_FILES";
    if std::env::var_os(ALONE).is_none() {
        let starting = STARTING.lock().await;
        let mut alone = Command::new("sh");
        alone.args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""]);
        alone.arg(std::env::current_exe().unwrap()).env(ALONE, "1");
        alone.args(["--exact", "without_files_the_servers_serve_on", "--nocapture"]);
        let mut alone = alone.spawn().unwrap();
        drop(starting);
        assert!(
            tokio::task::spawn_blocking(move || alone.wait()).await.unwrap().unwrap().success()
        );
        return;
    }
    let all_files =
        || -> Vec<_> { std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect() };
    let patience = Duration::from_secs(60);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap();
    tokio::spawn(plain::run(listener));
    let clients = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = clients.local_addr().unwrap();
    let stop = Arc::new(Notify::new());
    let context = Device::new().unwrap().open().unwrap();
    let task = tokio::spawn(server::run(context, clients, None, stop.clone(), 4, 2));
    let client = |stream| {
        let context = Device::new().unwrap().open().unwrap();
        Client::new(context, Ready(std::sync::Mutex::new(Some(stream)))).unwrap()
    };
    let mut one = client(TcpStream::connect(address).await.unwrap());
    one.put(b"key", Some(b"value")).await.unwrap();
    let mut tcp = PlainClient::connect(plain).await.unwrap();
    tcp.put(b"key", b"value").await.unwrap();
    // These wait in the backlog, since the servers run on this thread.
    let connect = |to| {
        let stream = std::net::TcpStream::connect(to).unwrap();
        stream.set_nonblocking(true).unwrap();
        TcpStream::from_std(stream).unwrap()
    };
    let (mut waits, other) = (client(connect(address)), connect(plain));
    let mut files = all_files();
    for _ in 0..3 {
        assert_eq!(one.get(b"key").await.unwrap(), Some(b"value".to_vec()));
        assert_eq!(tcp.get(b"key").await.unwrap(), Some(b"value".to_vec()));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    files.clear();
    let got = tokio::time::timeout(patience, waits.get(b"key")).await.expect("it waits for ever");
    assert_eq!(got.unwrap(), Some(b"value".to_vec()));
    drop(other);
    let mut tcp =
        tokio::time::timeout(patience, PlainClient::connect(plain)).await.unwrap().unwrap();
    let got = tokio::time::timeout(patience, tcp.get(b"key")).await.expect("it waits for ever");
    assert_eq!(got.unwrap(), Some(b"value".to_vec()));
    let _other = connect(address);
    files.extend(all_files());
    tokio::time::sleep(Duration::from_millis(10)).await;
    stop.notify_one();
    tokio::time::timeout(patience, task).await.expect("it does not hear").unwrap().unwrap();
}

#[tokio::test]
async fn a_client_connects_again_to_a_server_that_was_restarted() {
    // An address of this process alone: elsewhere, another socket may take the port between the two servers.
    let process = std::process::id().to_be_bytes();
    let starting = STARTING.lock().await;
    let server =
        server_at(&format!("127.{}.{}.{}:0", 64 + process[1] % 64, process[2], process[3])).await;
    let address = server.clients.to_string();
    let mut client = server.client();
    client.put(b"key", Some(b"value")).await.unwrap();
    // The server waits for the client's session, which is idle.
    server.stop().await;
    let server = server_at(&address).await;
    drop(starting);
    // The client finds out with the first request that the session is over.
    let lost = tokio::time::timeout(Duration::from_secs(60), client.get(b"key")).await.unwrap();
    assert!(lost.is_err() || lost.unwrap().is_none());
    assert_eq!(client.get(b"key").await.unwrap(), None);
    client.put(b"key", Some(b"new")).await.unwrap();
    assert_eq!(client.get(b"key").await.unwrap().unwrap(), b"new");
    server.stop().await;
}
