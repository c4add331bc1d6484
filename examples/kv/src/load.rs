//! Clients that check every answer, and clients that measure.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::Result;
use crate::client::Client;
use crate::plain::PlainClient;

/// How often one request is repeated before the check fails.
const ATTEMPTS: u32 = 20;

/// The lengths of the values that are checked.
const LENGTHS: [usize; 7] = [0, 1, 100, 4096, 4097, 100_000, 1 << 20];

fn value(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + index / 251) as u8 ^ seed).collect()
}

/// Puts and gets values for a while, compares each, and repeats requests that have failed.
///
/// # Errors
///
/// A value is wrong, or the server cannot be reached.
pub async fn check(client: &mut Client, key: &str, time: Duration) -> Result<String> {
    let (start, mut rounds, mut failures) = (Instant::now(), 0_u32, 0_u32);
    while start.elapsed() < time || rounds < LENGTHS.len() as u32 {
        let value = value(LENGTHS[rounds as usize % LENGTHS.len()], rounds as u8);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let asked = async {
                client.put(key.as_bytes(), Some(&value)).await?;
                client.get(key.as_bytes()).await
            };
            match asked.await {
                Ok(found) if found.as_ref() == Some(&value) => break,
                Ok(_) => return Err(format!("round {rounds}: another value").into()),
                Err(error) if attempts < ATTEMPTS => {
                    eprintln!("{key}, round {rounds}: {error}");
                    failures += 1;
                }
                Err(error) => return Err(error),
            }
        }
        rounds += 1;
        if rounds == 2 {
            println!("{key}: values come back");
        }
    }
    Ok(format!("{key}: {rounds} values came back whole; {failures} requests were repeated"))
}

/// A store that is measured.
trait Remote {
    fn get(&mut self, key: &[u8]) -> impl Future<Output = Result<Option<Vec<u8>>>> + Send;
    fn put(&mut self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<()>> + Send;
}

impl Remote for Client {
    async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Self::get(self, key).await
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Self::put(self, key, Some(value)).await
    }
}

impl Remote for PlainClient {
    async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Self::get(self, key).await
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        Self::put(self, key, value).await
    }
}

/// Clients of a server, each with one request of 64 bytes at a time.
const RATES: [usize; 3] = [1, 8, 64];
const SECOND: Duration = Duration::from_secs(1);

/// The processor's time that a process has used, by the kernel's clock of 100 Hz.
fn used(process: u32) -> Result<Duration> {
    let line = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, in brackets, may contain anything.
    let (_, fields) = line.rsplit_once(") ").ok_or("/proc/PID/stat without a name")?;
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u32>);
    Ok(Duration::from_millis(10) * ticks.sum::<Result<u32, _>>()?)
}

/// Requests per second of clients that ask at the same time, for a second, and the processor's time that client and
/// server have used for one, in microseconds.
async fn rate<R: Remote + Send + 'static>(stores: &mut Vec<R>, server: u32) -> Result<[f64; 2]> {
    let processes = [server, std::process::id()];
    let all_used = || processes.iter().map(|one| used(*one)).sum::<Result<Duration>>();
    let (before, start) = (all_used()?, Instant::now());
    let mut clients = JoinSet::<Result<(R, u32)>>::new();
    for mut store in stores.drain(..) {
        clients.spawn(async move {
            let mut count = 0_u32;
            while start.elapsed() < SECOND {
                count += 16;
                time(&mut store, true, &[0; 64], 16).await?;
            }
            Ok((store, count))
        });
    }
    let mut count = 0;
    while let Some(client) = clients.join_next().await {
        let (store, of_client) = client??;
        stores.push(store);
        count += of_client;
    }
    let (time, used) = (start.elapsed(), all_used()? - before);
    Ok([f64::from(count) / time.as_secs_f64(), used.as_secs_f64() * 1e6 / f64::from(count)])
}

/// Rates of requests over RDMA and over TCP, in turns. Returns the lines of a table.
///
/// # Errors
///
/// A server fails.
pub async fn rates(
    mut client: impl FnMut() -> Result<Client>,
    tcp: SocketAddr,
    server: u32,
) -> Result<Vec<String>> {
    const TURNS: usize = 9;
    let mut lines = Vec::new();
    for number in RATES {
        let (mut rdma, mut plain) = (Vec::new(), Vec::new());
        for _ in 0..number {
            rdma.push(client()?);
            plain.push(PlainClient::connect(tcp).await?);
        }
        rdma[0].put(b"bench", Some(&[1; 64])).await?;
        plain[0].put(b"bench", &[1; 64]).await?;
        let mut turns = Vec::new();
        // The first turn warms up.
        for turn in 0..=TURNS {
            let both = [rate(&mut rdma, server).await?, rate(&mut plain, server).await?];
            turns.extend((turn > 0).then_some(both));
        }
        let median = |of: &dyn Fn(&[[f64; 2]; 2]) -> f64| {
            let mut values: Vec<f64> = turns.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[TURNS / 2]
        };
        let mut line = format!("| {number} |");
        for (what, digits) in [(0, 0), (1, 1)] {
            let ratio = median(&|[rdma, tcp]| rdma[what] / tcp[what]);
            line += &format!(
                " {:.digits$} | {:.digits$} | {ratio:.2} |",
                median(&|[rdma, _]| rdma[what]),
                median(&|[_, tcp]| tcp[what]),
            );
        }
        lines.push(line);
    }
    Ok(lines)
}

/// The time of some requests, one after the other.
async fn time(store: &mut impl Remote, gets: bool, value: &[u8], count: u32) -> Result<Duration> {
    let start = Instant::now();
    for _ in 0..count {
        if gets {
            let found = store.get(b"bench").await?.ok_or("the value is gone")?;
            if found.len() != value.len() {
                return Err("another value".into());
            }
        } else {
            store.put(b"bench", value).await?;
        }
    }
    Ok(start.elapsed())
}

/// Times of requests over RDMA and over TCP, in turns. Returns the lines of a table.
///
/// # Errors
///
/// A server fails.
pub async fn bench(rdma: &mut Client, tcp: &mut PlainClient) -> Result<Vec<String>> {
    const TURNS: u32 = 10;
    let mut lines = Vec::new();
    for (name, length, count) in [("64 B", 64, 50), ("4 KiB", 4096, 50), ("1 MiB", 1 << 20, 2)] {
        let value = value(length, 1);
        for gets in [false, true] {
            let mut times = [Duration::ZERO; 2];
            // The first turn warms up.
            for turn in 0..=TURNS {
                let turn_times =
                    [time(rdma, gets, &value, count).await?, time(tcp, gets, &value, count).await?];
                for (sum, time) in times.iter_mut().zip(turn_times) {
                    *sum += if turn == 0 { Duration::ZERO } else { time };
                }
            }
            let [rdma, tcp] = times.map(|time| time.as_secs_f64() * 1e6 / f64::from(TURNS * count));
            let verb = if gets { "GET" } else { "PUT" };
            lines.push(format!("| {verb} {name} | {rdma:.0} | {tcp:.0} | {:.2} |", rdma / tcp));
        }
    }
    Ok(lines)
}
