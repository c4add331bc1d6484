//! `kv serve ADDRESS ADMIN-ADDRESS [TCP-ADDRESS]` (with the third, it serves the same store over TCP there),
//! `kv get ADDRESS KEY`, `kv put ADDRESS KEY VALUE`, `kv load ADDRESS`, which puts and gets without end,
//! `kv check ADDRESS SECONDS NAME`, which compares what comes back, `kv bench ADDRESS TCP-ADDRESS`, which measures one
//! request after the other, and `kv rates ADDRESS TCP-ADDRESS PROCESS`, which measures many clients at the same time
//! and the processor's time of a server of this machine.
//!
//! `kv -d DEVICE ..` uses that RDMA device, not the first one. `kv --clients NUMBER serve ..` serves at most that many
//! clients at a time (512 unless set). It tells others that it is full, until a client leaves.

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::Context;
use ibverbs_kv::client::Client;
use ibverbs_kv::plain::PlainClient;
use ibverbs_kv::{Result, load, plain, server};
use tokio::net::TcpListener;
use tokio::sync::Notify;

const USAGE: &str = "usage: kv [-d DEVICE] [--clients NUMBER] serve ADDRESS ADMIN [TCP] | get ADDRESS KEY | put ADDRESS KEY VALUE | \
                     load ADDRESS | check ADDRESS SECONDS NAME | bench ADDRESS TCP | rates ADDRESS TCP SERVER";

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // A machine without an RDMA device gets one of software.
    let _software = ibverbs_software::register_if_none()?;
    let (device, arguments) = match &arguments[..] {
        ["-d", device, rest @ ..] => (Some(*device), rest),
        all => (None, all),
    };
    let (most_clients, arguments) = match arguments {
        ["--clients", number, rest @ ..] => (number.parse()?, rest),
        all => (server::CLIENTS, all),
    };
    let client = |address: &str| Client::new(open(device)?, address.parse::<SocketAddr>()?);
    match *arguments {
        ["serve", address, admin] => serve(device, address, admin, most_clients).await,
        ["serve", address, admin, tcp] => {
            tokio::spawn(plain::run(TcpListener::bind(tcp).await?));
            serve(device, address, admin, most_clients).await
        }
        ["get", address, key] => {
            match client(address)?.get(key.as_bytes()).await? {
                Some(value) => println!("{}", String::from_utf8_lossy(&value)),
                None => println!("there is no such key"),
            }
            Ok(())
        }
        ["put", address, key, value] => {
            client(address)?.put(key.as_bytes(), Some(value.as_bytes())).await
        }
        ["load", address] => {
            let mut client = client(address)?;
            let value = vec![7; 1 << 20];
            for length in [10, 4096, 1 << 20].into_iter().cycle() {
                client.put(b"load", Some(&value[..length])).await?;
                client.get(b"load").await?;
                if length > 4096 {
                    println!("loading");
                }
            }
            Ok(())
        }
        ["check", address, seconds, name] => {
            let time = Duration::from_secs(seconds.parse()?);
            println!("{}", load::check(&mut client(address)?, name, time).await?);
            Ok(())
        }
        ["bench", address, tcp] => {
            let mut tcp = PlainClient::connect(tcp.parse()?).await?;
            println!("| request | RDMA, us | TCP, us | ratio |\n|---|---:|---:|---:|");
            for line in load::bench(&mut client(address)?, &mut tcp).await? {
                println!("{line}");
            }
            Ok(())
        }
        ["rates", address, tcp, server] => {
            println!(
                "| clients | RDMA, /s | TCP, /s | ratio | RDMA, processor us each | TCP | ratio |\n\
                 |---:|---:|---:|---:|---:|---:|---:|"
            );
            for line in load::rates(|| client(address), tcp.parse()?, server.parse()?).await? {
                println!("{line}");
            }
            Ok(())
        }
        _ => Err(USAGE.into()),
    }
}

/// Serves until it is interrupted, or told to stop by the admin socket.
async fn serve(device: Option<&str>, address: &str, admin: &str, most_clients: u32) -> Result<()> {
    let stop = Arc::new(Notify::new());
    let (clients, admin) = (TcpListener::bind(address).await?, TcpListener::bind(admin).await?);
    let signalled = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            signalled.notify_one();
        }
    });
    let threads = std::thread::available_parallelism()?.get();
    server::run(open(device)?, clients, Some(admin), stop, most_clients, threads).await
}

/// The device of this name, or the first one.
fn open(device: Option<&str>) -> Result<Context<'static>> {
    Ok(device.map_or_else(ibverbs::open_first, ibverbs::open)?)
}
