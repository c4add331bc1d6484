//! `kv serve ADDRESS ADMIN-ADDRESS`, `kv get ADDRESS KEY`, `kv put ADDRESS KEY VALUE`, and `kv load ADDRESS`,
//! which puts and gets without end.

#![forbid(unsafe_code)]

use std::sync::Arc;

use ibverbs::Context;
use ibverbs_kv::client::Client;
use ibverbs_kv::{Result, server};
use tokio::net::TcpListener;
use tokio::sync::Notify;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Where the machine has no RDMA device.
    let _software = ibverbs_software::register_if_none()?;
    match arguments[..] {
        ["serve", address, admin] => {
            let stop = Arc::new(Notify::new());
            let (clients, admin) = (TcpListener::bind(address).await?, TcpListener::bind(admin).await?);
            let signalled = stop.clone();
            tokio::spawn(async move {
                if tokio::signal::ctrl_c().await.is_ok() {
                    signalled.notify_one();
                }
            });
            server::run(open()?, clients, admin, stop).await
        }
        ["get", address, key] => {
            match Client::new(open()?, address.parse()?)?.get(key.as_bytes()).await? {
                Some(value) => println!("{}", String::from_utf8_lossy(&value)),
                None => println!("there is no such key"),
            }
            Ok(())
        }
        ["put", address, key, value] => {
            let mut client = Client::new(open()?, address.parse()?)?;
            client.put(key.as_bytes(), Some(value.as_bytes())).await
        }
        ["load", address] => {
            let mut client = Client::new(open()?, address.parse()?)?;
            let value = vec![7; 1 << 20];
            for length in [10, 4096, 1 << 20].into_iter().cycle() {
                client.put(b"load", Some(&value[..length])).await?;
                client.get(b"load").await?;
            }
            Ok(())
        }
        _ => Err("usage: kv serve ADDRESS ADMIN | get ADDRESS KEY | put ADDRESS KEY VALUE | load ADDRESS".into()),
    }
}

/// The first device.
fn open() -> Result<Context<'static>> {
    let devices = ibverbs::devices()?;
    let first = devices.iter().next().ok_or("there is no RDMA device")?;
    Ok(ibverbs::open(first.name())?)
}
