//! Streams beside TCP, in one run: `cargo run --release -p ibverbs-stream --features tokio --example ratios [ROUNDS [FILE.svg]]`.
//!
//! Each round runs every row over both, one after the other, so that what else the machine does hits both. A row has the median
//! and the best of the rounds, as ratios of times: less than 1 is faster than TCP.

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use ibverbs_stream::{Hub, Listener, Stream};
use plotters::prelude::*;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TRIPS: usize = 2000;
const LARGE: usize = 64;
const SMALL: usize = 50_000;
const REQUESTS: usize = 1000;

/// One end echoes pieces of 64 bytes.
fn trips(
    mut one: impl Read + Write,
    mut two: impl Read + Write + Send + 'static,
) -> Result<Duration> {
    let echo = thread::spawn(move || -> std::io::Result<()> {
        let mut bytes = [0; 64];
        for _ in 0..TRIPS {
            two.read_exact(&mut bytes)?;
            two.write_all(&bytes)?;
        }
        Ok(())
    });
    let (start, mut bytes) = (Instant::now(), [7; 64]);
    for _ in 0..TRIPS {
        one.write_all(&bytes)?;
        one.read_exact(&mut bytes)?;
    }
    let elapsed = start.elapsed();
    echo.join().map_err(|_| "the echo has panicked")??;
    Ok(elapsed)
}

/// One end writes pieces of this length, the other reads all.
fn one_way(
    mut one: impl Write,
    mut two: impl Read + Send + 'static,
    len: usize,
    count: usize,
) -> Result<Duration> {
    let reads = thread::spawn(move || -> std::io::Result<()> {
        let (mut bytes, mut left) = (vec![0; 1 << 16], len * count);
        while left > 0 {
            let most = bytes.len().min(left);
            left -= two.read(&mut bytes[..most])?.max(1);
        }
        Ok(())
    });
    let (start, bytes) = (Instant::now(), vec![7; len]);
    for _ in 0..count {
        one.write_all(&bytes)?;
    }
    one.flush()?;
    reads.join().map_err(|_| "the reader has panicked")??;
    Ok(start.elapsed())
}

async fn async_trips(
    mut one: impl AsyncRead + AsyncWrite + Unpin,
    mut two: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<Duration> {
    let echo = tokio::spawn(async move {
        let mut bytes = [0; 64];
        for _ in 0..TRIPS {
            two.read_exact(&mut bytes).await?;
            two.write_all(&bytes).await?;
        }
        std::io::Result::Ok(())
    });
    let (start, mut bytes) = (Instant::now(), [7; 64]);
    for _ in 0..TRIPS {
        one.write_all(&bytes).await?;
        one.read_exact(&mut bytes).await?;
    }
    let elapsed = start.elapsed();
    echo.await??;
    Ok(elapsed)
}

async fn async_one_way(
    mut one: impl AsyncWrite + Unpin,
    mut two: impl AsyncRead + Unpin + Send + 'static,
    len: usize,
    count: usize,
) -> Result<Duration> {
    let reads = tokio::spawn(async move {
        let (mut bytes, mut left) = (vec![0; 1 << 16], len * count);
        while left > 0 {
            let most = bytes.len().min(left);
            left -= two.read(&mut bytes[..most]).await?.max(1);
        }
        std::io::Result::Ok(())
    });
    let (start, bytes) = (Instant::now(), vec![7; len]);
    for _ in 0..count {
        one.write_all(&bytes).await?;
    }
    reads.await??;
    Ok(start.elapsed())
}

/// One request after the other, on a connection of HTTP/1.
async fn requests(
    one: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    two: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<Duration> {
    let answer = service_fn(|_| async {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(&[7; 64]))))
    });
    let server = hyper::server::conn::http1::Builder::new();
    let serves = tokio::spawn(server.serve_connection(TokioIo::new(two), answer));
    let (mut client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(one)).await?;
    let drives = tokio::spawn(connection);
    let start = Instant::now();
    for _ in 0..REQUESTS {
        client.ready().await?;
        let request = Request::get("/").header("host", "ratios").body(Empty::<Bytes>::new())?;
        let body = client.send_request(request).await?.into_body().collect().await?;
        assert_eq!(body.to_bytes().len(), 64);
    }
    let elapsed = start.elapsed();
    drop(client);
    drives.await??;
    serves.await??;
    Ok(elapsed)
}

fn tcp() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let two = listener.accept()?.0;
    one.set_nodelay(true)?;
    two.set_nodelay(true)?;
    Ok((one, two))
}

fn rdma(hubs: &[Hub; 2]) -> Result<(Stream, Stream)> {
    let listener = Listener::bind(&hubs[1], "127.0.0.1:0")?;
    let (hub, address) = (hubs[0].clone(), listener.local_addr()?);
    let deadline = Instant::now() + Duration::from_secs(10);
    let connects = thread::spawn(move || Stream::connect(&hub, address, deadline));
    let two = listener.accept()?.0;
    Ok((connects.join().map_err(|_| "it has panicked")??, two))
}

async fn async_tcp() -> Result<(tokio::net::TcpStream, tokio::net::TcpStream)> {
    let (one, two) = tcp()?;
    one.set_nonblocking(true)?;
    two.set_nonblocking(true)?;
    Ok((tokio::net::TcpStream::from_std(one)?, tokio::net::TcpStream::from_std(two)?))
}

async fn async_rdma(
    hubs: &[Hub; 2],
) -> Result<(ibverbs_stream::tokio::Stream, ibverbs_stream::tokio::Stream)> {
    let listener = ibverbs_stream::tokio::Listener::bind(&hubs[1], "127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let connects = ibverbs_stream::tokio::Stream::connect(&hubs[0], address);
    let (one, two) = tokio::join!(connects, listener.accept());
    Ok((one?, two?.0))
}

fn hubs(devices: &[ibverbs_software::Device; 2]) -> Result<[Hub; 2]> {
    let hub = |device: &ibverbs_software::Device| -> Result<Hub> {
        Ok(Hub::builder(&Arc::new(device.open()?)).chunk(64 << 10).max_connections(4).build()?)
    };
    Ok([hub(&devices[0])?, hub(&devices[1])?])
}

const ROWS: [&str; 8] = [
    "64 B round trip, threads",
    "64 B round trip, tasks",
    "1 MiB writes, threads",
    "1 MiB writes, tasks",
    "64 B writes, threads",
    "64 B writes, threads, Hub::run",
    "64 B writes, tasks",
    "HTTP requests, hyper",
];

/// The times of each row: over RDMA, and over TCP.
fn round(devices: &[ibverbs_software::Device; 2]) -> Result<[[Duration; 2]; ROWS.len()]> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (threads, tasks) = (hubs(devices)?, hubs(devices)?);
    let (mut times, million) = ([[Duration::ZERO; 2]; ROWS.len()], 1 << 20);
    let ((a, b), (c, d)) = (rdma(&threads)?, tcp()?);
    times[0] = [trips(a, b)?, trips(c, d)?];
    let ((a, b), (c, d)) = (rdma(&threads)?, tcp()?);
    times[2] = [one_way(a, b, million, LARGE)?, one_way(c, d, million, LARGE)?];
    let ((a, b), (c, d)) = (rdma(&threads)?, tcp()?);
    times[4] = [one_way(a, b, 64, SMALL)?, one_way(c, d, 64, SMALL)?];
    let ((a, b), (c, d)) = (rdma(&threads)?, tcp()?);
    times[5] = thread::scope(|scope| -> Result<_> {
        let drives = threads.each_ref().map(|hub| scope.spawn(|| hub.run()));
        let times = [one_way(a, b, 64, SMALL), one_way(c, d, 64, SMALL)];
        threads.iter().for_each(Hub::stop);
        for drive in drives {
            drive.join().map_err(|_| "it has panicked")??;
        }
        let [ours, theirs] = times;
        Ok([ours?, theirs?])
    })?;
    let of_tasks = async move {
        let ((a, b), (c, d)) = (async_rdma(&tasks).await?, async_tcp().await?);
        let trips = [async_trips(a, b).await?, async_trips(c, d).await?];
        let ((a, b), (c, d)) = (async_rdma(&tasks).await?, async_tcp().await?);
        let large = [
            async_one_way(a, b, million, LARGE).await?,
            async_one_way(c, d, million, LARGE).await?,
        ];
        let ((a, b), (c, d)) = (async_rdma(&tasks).await?, async_tcp().await?);
        let small = [async_one_way(a, b, 64, SMALL).await?, async_one_way(c, d, 64, SMALL).await?];
        let ((a, b), (c, d)) = (async_rdma(&tasks).await?, async_tcp().await?);
        let http = [requests(a, b).await?, requests(c, d).await?];
        Result::Ok([trips, large, small, http])
    };
    [times[1], times[3], times[6], times[7]] =
        runtime.block_on(async { tokio::spawn(of_tasks).await })??;
    Ok(times)
}

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let rounds = args.next().map_or(Ok(11), |rounds| rounds.parse())?;
    let devices = [ibverbs_software::Device::new()?, ibverbs_software::Device::new()?];
    let mut ratios = [const { Vec::new() }; ROWS.len()];
    for _ in 0..rounds {
        for (row, [ours, theirs]) in round(&devices)?.into_iter().enumerate() {
            ratios[row].push(ours.as_secs_f64() / theirs.as_secs_f64());
        }
    }
    println!("| time beside TCP's | median | best |\n|---|---:|---:|");
    let mut medians = [0.0; ROWS.len()];
    for ((row, ratios), median) in ROWS.iter().zip(&mut ratios).zip(&mut medians) {
        ratios.sort_by(f64::total_cmp);
        *median = ratios[ratios.len() / 2];
        println!("| {row} | {median:.2} | {:.2} |", ratios[0]);
    }
    if let Some(file) = args.next() {
        plot(&file, &medians)?;
    }
    Ok(())
}

/// Bars of the medians, and a line at 1: TCP.
fn plot(file: &str, medians: &[f64; ROWS.len()]) -> Result<()> {
    let area = SVGBackend::new(file, (800, 40 * ROWS.len() as u32 + 60)).into_drawing_area();
    area.fill(&WHITE)?;
    let most = medians.iter().fold(2.0_f64, |most, &median| most.max(median * 1.05));
    let mut chart = ChartBuilder::on(&area)
        .margin(10)
        .x_label_area_size(30)
        .build_cartesian_2d(0.0..most, 0.0..ROWS.len() as f64)?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().x_desc("time, TCP = 1").draw()?;
    for (index, (row, &median)) in ROWS.iter().zip(medians).enumerate() {
        let top = (ROWS.len() - index) as f64;
        let corners = [(0.0, top - 0.8), (median, top - 0.2)];
        chart.draw_series([Rectangle::new(corners, BLUE.mix(0.4).filled())])?;
        let text = format!("{row}: {median:.2}");
        chart.draw_series([Text::new(text, (0.02, top - 0.4), ("sans-serif", 14))])?;
    }
    let tcp = [(1.0, 0.0), (1.0, ROWS.len() as f64)];
    chart.draw_series([PathElement::new(tcp, RED)])?;
    area.present()?;
    Ok(())
}
