//! One side of a stream of this crate, or of TCP, between two processes:
//! `stream tcp|tcp-tasks|ours|ours-tasks|ours-polling COUNT SIZE back|one [ADDRESS]`. Without an address, it is the server, which
//! prints its own.

mod rows;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_stream::{Hub, Listener, Stream};
use rows::{Result, Work, answers, answers_as_task, asks, asks_as_task, runtime};

const ANY: &str = "127.0.0.1:0";

fn hub(spin: u32) -> Result<Hub> {
    let device = ibverbs_software::Device::new()?;
    Ok(Hub::builder(&Arc::new(device.open()?))
        .chunk(64 << 10)
        .max_connections(4)
        .spin(spin)
        .build()?)
}

fn serve(peer: &str, work: Work) -> Result<()> {
    match peer {
        "tcp" => {
            let listener = TcpListener::bind(ANY)?;
            println!("{}", listener.local_addr()?);
            let stream = listener.accept()?.0;
            stream.set_nodelay(true)?;
            answers(stream, work)
        }
        "ours" | "ours-polling" => {
            let hub = hub(if peer == "ours" { 0 } else { 100_000 })?;
            let listener = Listener::bind(&hub, ANY)?;
            println!("{}", listener.local_addr()?);
            answers(listener.accept()?.0, work)
        }
        _ => runtime()?.block_on(async {
            if peer == "tcp-tasks" {
                let listener = tokio::net::TcpListener::bind(ANY).await?;
                println!("{}", listener.local_addr()?);
                let stream = listener.accept().await?.0;
                stream.set_nodelay(true)?;
                return answers_as_task(stream, work).await;
            }
            let listener = ibverbs_stream::tokio::Listener::bind(&hub(0)?, ANY).await?;
            println!("{}", listener.local_addr()?);
            answers_as_task(listener.accept().await?.0, work).await
        }),
    }
}

fn ask(peer: &str, work: Work, address: &str) -> Result<()> {
    match peer {
        "tcp" => {
            let stream = TcpStream::connect(address)?;
            stream.set_nodelay(true)?;
            asks(stream, work)
        }
        "ours" | "ours-polling" => {
            let hub = hub(if peer == "ours" { 0 } else { 100_000 })?;
            asks(Stream::connect(&hub, address, Instant::now() + Duration::from_secs(10))?, work)
        }
        _ => runtime()?.block_on(async {
            if peer == "tcp-tasks" {
                let stream = tokio::net::TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                return asks_as_task(stream, work).await;
            }
            asks_as_task(ibverbs_stream::tokio::Stream::connect(&hub(0)?, address).await?, work)
                .await
        }),
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [peer, work @ .., address] if work.len() == 3 => ask(peer, Work::parse(work)?, address),
        [peer, work @ ..] => serve(peer, Work::parse(work)?),
        [] => Err("PEER COUNT SIZE back|one [ADDRESS]".into()),
    }
}
