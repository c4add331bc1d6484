//! The rows of `script/compare streams`, for each kind of stream. The client writes pieces of one size; the server sends each back, or
//! reads all and confirms once.

use std::error::Error;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Clone, Copy)]
pub struct Work {
    count: usize,
    size: usize,
    back: bool,
}

impl Work {
    /// COUNT SIZE back|one
    pub fn parse(args: &[String]) -> Result<Self> {
        let [count, size, way] = args else { return Err("COUNT SIZE back|one".into()) };
        Ok(Self { count: count.parse()?, size: size.parse()?, back: way == "back" })
    }

    /// A tenth of it, and all of it.
    fn twice(self) -> [Self; 2] {
        [Self { count: self.count.div_ceil(10), ..self }, self]
    }
}

fn used() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// Prints the time, and the processor's time of this process, in microseconds for each piece.
struct Clocks(Instant, Duration);

impl Clocks {
    fn now() -> Self {
        Self(Instant::now(), used())
    }

    fn print(self, count: usize) {
        let [time, used] =
            [self.0.elapsed(), used() - self.1].map(|time| time.as_secs_f64() * 1e6 / count as f64);
        println!("{time:.4} {used:.4}");
    }
}

#[allow(dead_code, reason = "not every program has threads")]
pub fn asks(mut stream: impl Read + Write, work: Work) -> Result<()> {
    let mut bytes = vec![7; work.size];
    for Work { count, back, .. } in work.twice() {
        let start = Clocks::now();
        for _ in 0..count {
            stream.write_all(&bytes)?;
            if back {
                stream.read_exact(&mut bytes)?;
            }
        }
        if !back {
            stream.flush()?;
            stream.read_exact(&mut [0])?;
        }
        if count == work.count {
            start.print(count);
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "not every program has threads")]
pub fn answers(mut stream: impl Read + Write, work: Work) -> Result<()> {
    let mut bytes = vec![7; work.size.min(64 << 10)];
    for Work { count, size, back } in work.twice() {
        if back {
            for _ in 0..count {
                stream.read_exact(&mut bytes)?;
                stream.write_all(&bytes)?;
            }
            continue;
        }
        let mut left = size * count;
        while left > 0 {
            let most = bytes.len().min(left);
            left -= match stream.read(&mut bytes[..most])? {
                0 => return Err("the client has gone".into()),
                read => read,
            };
        }
        stream.write_all(&[1])?;
        stream.flush()?;
    }
    // The client closes when it has read all.
    stream.read(&mut [0])?;
    Ok(())
}

pub async fn asks_as_task(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    work: Work,
) -> Result<()> {
    let mut bytes = vec![7; work.size];
    for Work { count, back, .. } in work.twice() {
        let start = Clocks::now();
        for _ in 0..count {
            stream.write_all(&bytes).await?;
            if back {
                stream.read_exact(&mut bytes).await?;
            }
        }
        if !back {
            stream.flush().await?;
            stream.read_exact(&mut [0]).await?;
        }
        if count == work.count {
            start.print(count);
        }
    }
    Ok(())
}

pub async fn answers_as_task(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    work: Work,
) -> Result<()> {
    let mut bytes = vec![7; work.size.min(64 << 10)];
    for Work { count, size, back } in work.twice() {
        if back {
            for _ in 0..count {
                stream.read_exact(&mut bytes).await?;
                stream.write_all(&bytes).await?;
            }
            continue;
        }
        let mut left = size * count;
        while left > 0 {
            let most = bytes.len().min(left);
            left -= match stream.read(&mut bytes[..most]).await? {
                0 => return Err("the client has gone".into()),
                read => read,
            };
        }
        stream.write_all(&[1]).await?;
        stream.flush().await?;
    }
    // The client closes when it has read all.
    let _ = stream.read(&mut [0]).await;
    Ok(())
}

pub fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}
