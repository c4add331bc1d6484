//! Clients that check every answer, and clients that measure.

use std::time::{Duration, Instant};

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
    async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>>;
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()>;
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
