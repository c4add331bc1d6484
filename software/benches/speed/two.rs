//! Two processes: round trips and streams, beside UDP and TCP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, Gid, QueuePair, QueuePairEndpoint, RemoteMemoryRegion, WorkCompletion,
    settings::PacketSequenceNumber,
};
use ibverbs_software::Device;

use super::{
    ALONE, CHILD, LARGE, Memory, ONE_SIDED, PROCESSOR, Result, SMALL, SOCKETS, TRIPS, WORK, WRITES,
    asked, beside, poll, prepare, rounds, stream, used,
};

#[derive(Clone, Copy, PartialEq)]
enum Waiting {
    Polling,
    Sleeping,
}

/// Sizes of the writes whose processor time is measured.
const SIZES: [(usize, &str); 2] = [(64 << 10, "64 KiB"), (LARGE, "1 MiB")];

const WAITINGS: [(Waiting, &str); 2] =
    [(Waiting::Polling, "polling"), (Waiting::Sleeping, "sleeping")];

/// How packets go from one process to the other.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Way {
    /// In memory that both share.
    Memory,
    /// Through the kernel's sockets, as between two machines.
    Sockets,
    /// The initiator of a write accesses the memory of the other.
    OneSided,
}

fn wait(queue: &CompletionQueue<'_>, how: Waiting) -> Result<()> {
    if how == Waiting::Polling {
        return poll(queue).map(drop);
    }
    let mut room = [WorkCompletion::default()];
    for completion in queue.wait(&mut room)? {
        completion.result()?;
    }
    Ok(())
}

/// One of two processes with a connection.
struct End<'a> {
    queue_pair: QueuePair<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
    memory: Memory<'a>,
    remote: RemoteMemoryRegion,
    udp: UdpSocket,
    tcp: TcpStream,
}

impl End<'_> {
    fn post_receive(&mut self) -> Result<()> {
        // SAFETY: nobody reads the memory, and it outlives the queue pair.
        unsafe { self.queue_pair.post_receive(&mut self.memory.region, ..SMALL, 0)? };
        Ok(())
    }

    fn send(&mut self) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.queue_pair.post_send(&self.memory.region, ..SMALL, 0)? };
        Ok(())
    }

    /// Round trips over the device. A receive is always posted.
    fn device_trips(&mut self, starts: bool, how: Waiting) -> Result<Duration> {
        let start = Instant::now();
        for _ in 0..TRIPS {
            if starts {
                self.send()?;
            }
            wait(self.receives, how)?;
            self.post_receive()?;
            if !starts {
                self.send()?;
            }
            poll(self.sends)?;
        }
        Ok(start.elapsed() / TRIPS)
    }

    /// Round trips over a bare UDP socket.
    fn udp_trips(&mut self, starts: bool, how: Waiting) -> Result<Duration> {
        self.udp.set_nonblocking(how == Waiting::Polling)?;
        let mut bytes = [0; SMALL];
        let start = Instant::now();
        for _ in 0..TRIPS {
            if starts {
                self.udp.send(&bytes)?;
            }
            loop {
                match self.udp.recv(&mut bytes) {
                    Ok(_) => break,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        std::thread::yield_now();
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if !starts {
                self.udp.send(&bytes)?;
            }
        }
        Ok(start.elapsed() / TRIPS)
    }

    /// MiB per second of writes to the peer's memory.
    fn device_stream(&mut self) -> Result<f64> {
        let start = Instant::now();
        self.device_writes(LARGE, Waiting::Polling)?;
        Ok(WRITES as f64 / start.elapsed().as_secs_f64())
    }

    fn device_writes(&mut self, size: usize, how: Waiting) -> Result<()> {
        let writes = (WRITES * LARGE / size, size);
        let once = |queue: &CompletionQueue<'_>| wait(queue, how);
        stream(&mut self.queue_pair, self.sends, &self.memory, self.remote, writes, once)
    }

    /// Streams over TCP. The reader says when it has all.
    fn tcp_stream(&mut self, bytes: &[u8]) -> Result<f64> {
        let start = Instant::now();
        self.tcp_writes(bytes)?;
        Ok(WRITES as f64 / start.elapsed().as_secs_f64())
    }

    fn tcp_writes(&mut self, bytes: &[u8]) -> Result<()> {
        for _ in 0..WRITES * LARGE / bytes.len() {
            self.tcp.write_all(bytes)?;
        }
        Ok(self.tcp.read_exact(&mut [0])?)
    }

    fn tcp_read(&mut self, bytes: &mut [u8]) -> Result<()> {
        for _ in 0..WRITES * LARGE / bytes.len() {
            self.tcp.read_exact(bytes)?;
        }
        Ok(self.tcp.write_all(&[1])?)
    }

    /// The processor's time of both processes in microseconds per MiB. The other one is in [`Self::tells_its_time`].
    fn time_of_both(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<f64> {
        let before = used();
        work(self)?;
        let own = used() - before;
        self.tcp.write_all(&[0])?;
        let mut other = [0; 8];
        self.tcp.read_exact(&mut other)?;
        Ok((own.as_micros() as u64 + u64::from_ne_bytes(other)) as f64 / WRITES as f64)
    }

    fn tells_its_time(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let before = used();
        work(self)?;
        // Sleeps while the parent writes to its memory.
        self.tcp.read_exact(&mut [0])?;
        Ok(self.tcp.write_all(&((used() - before).as_micros() as u64).to_ne_bytes())?)
    }
}

/// One side's addresses, as a line of text for the other process.
fn describe(endpoint: &QueuePairEndpoint, memory: &Memory<'_>, udp: &UdpSocket) -> Result<String> {
    let psn = endpoint.send_psn().map_or(0, |psn| psn.value());
    let gid = u128::from_be_bytes(endpoint.gid().to_bytes());
    let remote = memory.remote()?;
    let (address, rkey, port) = (remote.address(), remote.rkey(), udp.local_addr()?.port());
    Ok(format!("{} {psn} {gid} {address} {rkey} {port}", endpoint.num()))
}

fn with_end(
    child: bool,
    way: Way,
    mut exchange: impl FnMut(&str) -> Result<String>,
    work: impl FnOnce(End<'_>) -> Result<()>,
) -> Result<()> {
    let device = Device::builder()
        .through_kernel(way == Way::Sockets)
        .one_sided(way == Way::OneSided)
        .build()?;
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let sends = CompletionQueue::builder(&context, 64).own_channel().build()?;
    let receives = CompletionQueue::builder(&context, 64).own_channel().build()?;
    let prepared = prepare(&domain, &sends, &receives, 32)?;
    let memory = Memory::new(&domain, LARGE)?;
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = describe(&prepared.endpoint(), &memory, &udp)?;
    let line = exchange(&format!("{own} {}", listener.local_addr()?.port()))?;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let &[number, psn, gid, address, rkey, udp_port, tcp_port] = fields.as_slice() else {
        return Err(format!("'{line}'").into());
    };
    let gid = Gid::from_bytes(gid.parse::<u128>()?.to_be_bytes());
    let endpoint = QueuePairEndpoint::new(number.parse()?, 0, gid)?
        .with_send_psn(PacketSequenceNumber::new(psn.parse()?)?);
    let remote = RemoteMemoryRegion::new(address.parse()?, LARGE as u64, rkey.parse()?)?;
    let queue_pair = prepared.handshake(endpoint).map_err(|e| e.error)?;
    udp.connect(("127.0.0.1", udp_port.parse()?))?;
    let tcp = if child {
        TcpStream::connect(("127.0.0.1", tcp_port.parse::<u16>()?))?
    } else {
        listener.accept()?.0
    };
    tcp.set_nodelay(true)?;
    let (sends, receives) = (&sends, &receives);
    let mut end = End { queue_pair, sends, receives, memory, remote, udp, tcp };
    end.post_receive()?;
    // The child asks for no more than it needs to know that both are ready.
    exchange("ready")?;
    let (role, start) = (if child { "child" } else { "parent" }, Instant::now());
    work(end).inspect_err(|_| {
        eprintln!("{role}, after {:?}: {:?}", start.elapsed(), device.counters());
    })
}

pub(crate) fn child(way: Way) -> Result<()> {
    let mut lines = std::io::stdin().lines();
    let mut exchange = |own: &str| {
        println!("{own}");
        Ok(lines.next().ok_or("the parent has gone")??)
    };
    with_end(true, way, &mut exchange, |mut end| {
        let mut bytes = vec![0; LARGE];
        for _ in 0..rounds() {
            for (how, _) in WAITINGS.into_iter().filter(|(_, name)| asked(name)) {
                end.device_trips(false, how)?;
                if !asked(ALONE) {
                    end.udp_trips(false, how)?;
                }
            }
            if asked("stream") {
                // Sleeps while the parent writes to its memory: the device's thread does the work.
                end.tcp.read_exact(&mut [0])?;
                if !asked(ALONE) {
                    end.tcp_read(&mut bytes)?;
                }
            }
            for (size, _) in SIZES.into_iter().filter(|_| asked(PROCESSOR)) {
                end.tells_its_time(|_| Ok(()))?;
                if !asked(ALONE) {
                    end.tells_its_time(|end| end.tcp_read(&mut bytes[..size]))?;
                }
            }
        }
        Ok(())
    })
}

pub(crate) fn two_processes(way: Way) -> Result<()> {
    let mut words: Vec<&str> = [ALONE].into_iter().chain(WORK).filter(|word| asked(word)).collect();
    words.extend((way == Way::Sockets).then_some(SOCKETS));
    words.extend((way == Way::OneSided).then_some(ONE_SIDED));
    let mut process = Command::new(std::env::current_exe()?)
        .env(CHILD, words.join(" "))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input: ChildStdin = process.stdin.take().ok_or("its input")?;
    let mut output: BufReader<ChildStdout> =
        BufReader::new(process.stdout.take().ok_or("its output")?);
    let exchange = |own: &str| -> Result<String> {
        writeln!(input, "{own}")?;
        let mut line = String::new();
        output.read_line(&mut line)?;
        Ok(line)
    };
    let mut trips = [(); 4].map(|()| Vec::new());
    let mut streams = [(); 2].map(|()| Vec::new());
    let mut times = [(); 4].map(|()| Vec::new());
    with_end(false, way, exchange, |mut end| {
        let bytes = vec![7; LARGE];
        for _ in 0..rounds() {
            for (i, (how, name)) in WAITINGS.into_iter().enumerate() {
                if asked(name) {
                    trips[2 * i].push(end.device_trips(true, how)?.as_secs_f64() * 1e6);
                    if !asked(ALONE) {
                        trips[2 * i + 1].push(end.udp_trips(true, how)?.as_secs_f64() * 1e6);
                    }
                }
            }
            if asked("stream") {
                streams[0].push(end.device_stream()?);
                end.tcp.write_all(&[0])?;
                if !asked(ALONE) {
                    streams[1].push(end.tcp_stream(&bytes)?);
                }
            }
            for (i, (size, _)) in SIZES.into_iter().enumerate().filter(|_| asked(PROCESSOR)) {
                let ours = |end: &mut End<'_>| end.device_writes(size, Waiting::Sleeping);
                times[2 * i].push(end.time_of_both(ours)?);
                if !asked(ALONE) {
                    let tcp = |end: &mut End<'_>| end.tcp_writes(&bytes[..size]);
                    times[2 * i + 1].push(end.time_of_both(tcp)?);
                }
            }
        }
        Ok(())
    })?;
    process.wait()?;
    for (i, (_, how)) in WAITINGS.into_iter().enumerate() {
        let name = format!("round trip of 64 bytes, two processes, {how}");
        beside(&name, "us", "UDP", &trips[2 * i], &trips[2 * i + 1]);
    }
    beside("writes of 1 MiB, two processes", "MiB/s", "TCP", &streams[0], &streams[1]);
    for (i, (_, size)) in SIZES.into_iter().enumerate() {
        let name = format!("writes of {size}, two processes, sleeping, processors' time");
        beside(&name, "us a MiB", "TCP", &times[2 * i], &times[2 * i + 1]);
    }
    Ok(())
}
