//! Ten thousand streams on shared receives: `ulimit -n 30000; ten_thousand [STREAMS]` connects them, measures what an idle end
//! takes of memory, sends a message there and back on each, and closes them.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use ibverbs_software::Device;
use ibverbs_stream::Hub;
use ibverbs_stream::tokio::{Listener, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Connections that are made at a time.
const SIDE_BY_SIDE: usize = 32;

/// The bytes of memory that the process has.
fn resident() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kib: usize = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib * 1024)
}

#[tokio::main]
async fn main() -> Result<()> {
    let count = std::env::args().nth(1).map_or(Ok(10_000), |count| count.parse())?;
    let devices = [Device::new()?, Device::new()?];
    let hub = |device: &Device| -> Result<Hub> {
        let builder = Hub::builder(&Arc::new(device.open()?)).chunk(4096).receives(4).sends(2);
        Ok(builder.shared_receives(512).max_connections(count as u32).build()?)
    };
    let (server, client) = (hub(&devices[0])?, hub(&devices[1])?);
    let mut listener = Listener::bind(&server, "127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let accepts = tokio::spawn(async move {
        let mut accepted = Vec::new();
        while accepted.len() < count {
            accepted.push(listener.accept().await?.0);
        }
        std::io::Result::Ok(accepted)
    });
    let (start, before) = (Instant::now(), resident()?);
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count {
        let more = SIDE_BY_SIDE.min(count - streams.len());
        let connects: Vec<_> = (0..more)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { Stream::connect(&client, address).await })
            })
            .collect();
        for connected in connects {
            streams.push(connected.await??);
        }
    }
    let accepted = accepts.await??;
    let elapsed = start.elapsed();
    let idle = (resident()? - before) as f64 / (2 * count) as f64 / 1024.0;
    println!(
        "{count} streams in {elapsed:?}, {:?} each; an idle end has {idle:.1} KiB",
        elapsed / count as u32
    );
    let start = Instant::now();
    for mut stream in accepted {
        tokio::spawn(async move {
            let mut bytes = [0; 64];
            while let Ok(len @ 1..) = stream.read(&mut bytes).await {
                stream.write_all(&bytes[..len]).await?;
            }
            std::io::Result::Ok(())
        });
    }
    let trips: Vec<_> = streams
        .into_iter()
        .enumerate()
        .map(|(index, mut stream)| {
            tokio::spawn(async move {
                let (sent, mut got) = (index.to_ne_bytes(), [0; 8]);
                stream.write_all(&sent).await?;
                stream.read_exact(&mut got).await?;
                assert_eq!(got, sent);
                stream.shutdown().await
            })
        })
        .collect();
    for trip in trips {
        trip.await??;
    }
    println!("a message there and back on each, all at once: {:?}", start.elapsed());
    while [&server, &client].iter().any(|hub| hub.stats().connections > 0) {
        tokio::task::yield_now().await;
    }
    println!("all closed after {:?}", start.elapsed());
    assert!(idle <= 8.0, "an idle end has more than 8 KiB");
    Ok(())
}
