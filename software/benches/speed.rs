//! What the software device costs, side by side with the sockets below it: `script/bench software`.
//!
//! Everything is measured in turns within one run, and compared by medians, so that other work on the machine
//! falls on both sides, and by the best rounds, which had the processors for themselves. The second process is this program again; the two speak over its standard input and output.

use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, CompletionQueue, Context, Gid, MaxRnrRetries, PacketSequenceNumber,
    PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairEndpoint, RawMemoryRegion, Rc,
    RemoteMemoryRegion, WorkCompletion,
};
use ibverbs_software::Device;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const CHILD: &str = "IBVERBS_SOFTWARE_BENCH_CHILD";
/// What is measured between two processes, unless some are named.
const WORK: [&str; 3] = ["polling", "sleeping", "stream"];
/// The part of packets through the kernel.
const SOCKETS: &str = "sockets";
/// Leaves out what the device is compared with.
const ALONE: &str = "alone";

const SMALL: usize = 64;
const LARGE: usize = 1 << 20;
/// Writes of 1 MiB under way.
const WINDOW: usize = 4;
/// Round trips, and writes of 1 MiB, in each round.
const TRIPS: u32 = 1000;
const WRITES: usize = 64;

/// How often all is measured, by both processes: 15 times, or `IBVERBS_SOFTWARE_BENCH_ROUNDS` (at least 1).
fn rounds() -> usize {
    std::env::var("IBVERBS_SOFTWARE_BENCH_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(15)
}

#[derive(Clone, Copy, PartialEq)]
enum Waiting {
    Polling,
    Sleeping,
}

const WAITINGS: [(Waiting, &str); 2] =
    [(Waiting::Polling, "polling"), (Waiting::Sleeping, "sleeping")];

/// How packets go from one process to the other.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// In memory that both share.
    Memory,
    /// Through the kernel's sockets, as between two machines.
    Sockets,
}

/// Memory, registered for everything, at an address that stays.
struct Memory<'pd> {
    region: RawMemoryRegion<'pd>,
    _words: Vec<u64>,
}

impl<'pd> Memory<'pd> {
    fn new(domain: &'pd ProtectionDomain<'pd>, bytes: usize) -> Result<Self> {
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        // SAFETY: the vector outlives the region, and nobody accesses its elements but the device.
        let region = unsafe { domain.register_raw(words.as_mut_ptr().cast(), bytes, access)? };
        Ok(Self { region, _words: words })
    }

    fn remote(&self) -> Result<RemoteMemoryRegion> {
        let start = self.region.as_ptr() as u64;
        Ok(RemoteMemoryRegion::new(start, self._words.len() as u64 * 8, self.region.rkey())?)
    }
}

fn prepare<'a>(
    domain: &'a ProtectionDomain<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
    depth: u32,
) -> Result<PreparedQueuePair<'a>> {
    Ok(domain
        .create_qp(sends, receives, Rc)
        .max_send_wr(depth)
        .max_recv_wr(depth)
        .access(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()?)
}

/// Polls until something has completed.
fn poll(queue: &CompletionQueue<'_>) -> Result<WorkCompletion> {
    let mut room = [WorkCompletion::default()];
    loop {
        if let [completion] = queue.poll(&mut room)? {
            completion.result()?;
            return Ok(*completion);
        }
    }
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

    /// The same over a bare UDP socket.
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
        stream(&mut self.queue_pair, self.sends, &self.memory, self.remote, WRITES)?;
        Ok(WRITES as f64 / start.elapsed().as_secs_f64())
    }

    /// The same over TCP. The reader says when it has all.
    fn tcp_stream(&mut self, bytes: &[u8]) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..WRITES {
            self.tcp.write_all(bytes)?;
        }
        self.tcp.read_exact(&mut [0])?;
        Ok(WRITES as f64 / start.elapsed().as_secs_f64())
    }

    fn tcp_read(&mut self, bytes: &mut [u8]) -> Result<()> {
        for _ in 0..WRITES {
            self.tcp.read_exact(bytes)?;
        }
        Ok(self.tcp.write_all(&[1])?)
    }
}

fn stream(
    queue_pair: &mut QueuePair<'_>,
    sends: &CompletionQueue<'_>,
    memory: &Memory<'_>,
    remote: RemoteMemoryRegion,
    writes: usize,
) -> Result<()> {
    for posted in 0..writes + WINDOW {
        if posted >= WINDOW {
            poll(sends)?;
        }
        if posted < writes {
            // SAFETY: nobody reads the memory, and it outlives the queue pair.
            unsafe { queue_pair.post_write(&memory.region, ..LARGE, remote, 0)? };
        }
    }
    Ok(())
}

/// What two processes tell each other, as a line of text.
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
    let device = Device::builder().through_kernel(way == Way::Sockets).build()?;
    let context = device.open()?;
    let domain = context.alloc_pd()?;
    let sends = context.create_cq(64)?;
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

/// What was asked for. The child gets it from its parent.
fn asked(name: &str) -> bool {
    static WORDS: OnceLock<Vec<String>> = OnceLock::new();
    let words = WORDS.get_or_init(|| match std::env::var(CHILD) {
        Ok(words) => words.split(' ').map(str::to_owned).collect(),
        Err(_) => std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect(),
    });
    let among = |names: &[&str]| words.iter().any(|word| names.contains(&word.as_str()));
    among(&[name]) || WORK.contains(&name) && !among(&WORK)
}

fn child(way: Way) -> Result<()> {
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
        }
        Ok(())
    })
}

/// Of nothing, it is no number.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn two_processes(way: Way) -> Result<()> {
    let mut words: Vec<&str> = [ALONE].into_iter().chain(WORK).filter(|word| asked(word)).collect();
    words.extend((way == Way::Sockets).then_some(SOCKETS));
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
        }
        Ok(())
    })?;
    process.wait()?;
    for (i, (_, how)) in WAITINGS.into_iter().enumerate() {
        let name = format!("round trip of 64 bytes, two processes, {how}");
        beside(&name, "us", "UDP", &trips[2 * i], &trips[2 * i + 1]);
    }
    beside("writes of 1 MiB, two processes", "MiB/s", "TCP", &streams[0], &streams[1]);
    Ok(())
}

/// A line, if anything was measured. The ratios are the median of those of the rounds, and that of the best rounds.
fn beside(what: &str, unit: &str, other: &str, device: &[f64], base: &[f64]) {
    if device.is_empty() {
        return;
    }
    let ratios: Vec<f64> = device.iter().zip(base).map(|(a, b)| a / b).collect();
    // Times are best if short, rates if high.
    let choose = if unit == "us" { f64::min } else { f64::max };
    let best = |values: &[f64]| values.iter().copied().reduce(choose).unwrap_or(f64::NAN);
    let (value, other_value, ratio) = (median(device), median(base), median(&ratios));
    let (best, other_best) = (best(device), best(base));
    println!(
        "| {what} | {value:.1} {unit} | {other}: {other_value:.1} {unit} | {ratio:.2} \
         | {best:.1}, {other_best:.1}: {:.2} |",
        best / other_best
    );
}

fn endpoints<'a>(
    one: PreparedQueuePair<'a>,
    other: PreparedQueuePair<'a>,
) -> Result<[QueuePair<'a>; 2]> {
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let one = one.handshake(to_other).map_err(|e| e.error)?;
    Ok([one, other.handshake(to_one).map_err(|e| e.error)?])
}

/// Two devices, and one thread.
fn one_process() -> Result<()> {
    let contexts = [Device::new()?.open()?, Device::new()?.open()?];
    let domains = [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?];
    let queues = [contexts[0].create_cq(64)?, contexts[1].create_cq(64)?];
    let one = prepare(&domains[0], &queues[0], &queues[0], 32)?;
    let other = prepare(&domains[1], &queues[1], &queues[1], 32)?;
    let [mut one, _other] = endpoints(one, other)?;
    let memory = [Memory::new(&domains[0], LARGE)?, Memory::new(&domains[1], LARGE)?];
    let remote = memory[1].remote()?;
    let (mut device, mut copies) = (Vec::new(), Vec::new());
    let (from, mut to) = (vec![3_u8; LARGE], vec![0_u8; LARGE]);
    for _ in 0..rounds() {
        let start = Instant::now();
        stream(&mut one, &queues[0], &memory[0], remote, WRITES)?;
        let writes = WRITES as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..WRITES {
            to.copy_from_slice(black_box(&from));
            black_box(&to);
        }
        let copied = WRITES as f64 / start.elapsed().as_secs_f64();
        device.push(writes);
        copies.push(copied);
    }
    beside("writes of 1 MiB, one process", "MiB/s", "copying", &device, &copies);
    Ok(())
}

/// The bytes of this process that are in memory.
fn resident() -> Result<f64> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = pages.split(' ').nth(1).ok_or("statm")?.parse()?;
    Ok(pages * 4096.)
}

/// The time of a small write to a queue pair of the same device, with `count` of them.
fn queue_pairs(count: usize) -> Result<()> {
    let context: Context<'static> = Device::new()?.open()?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(64)?;
    let memory = Memory::new(&domain, LARGE)?;
    let remote = memory.remote()?;
    let before = resident()?;
    let start = Instant::now();
    let mut pairs = Vec::with_capacity(count);
    for _ in 0..count {
        let prepared = prepare(&domain, &queue, &queue, 4)?;
        let own = prepared.endpoint();
        pairs.push(prepared.handshake(own).map_err(|e| e.error)?);
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / count as f64;
    let memory_each = (resident()? - before) / count as f64;
    let mut times = Vec::new();
    for round in 0..rounds() {
        let start = Instant::now();
        for i in 0..TRIPS as usize {
            let pair = &mut pairs[(i * 7919 + round) % count];
            // SAFETY: nobody reads the memory, and it outlives the queue pairs.
            unsafe { pair.post_write(&memory.region, ..SMALL, remote, 0)? };
            poll(&queue)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(TRIPS));
    }
    println!(
        "| {count} queue pairs | {each:.1} us | {memory_each:.0} bytes | {:.1} us |",
        median(&times)
    );
    Ok(())
}

/// The time of each of `count` small writes that are posted before the first is polled.
fn outstanding(count: usize) -> Result<()> {
    let context = Device::new()?.open()?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(count as u32 + 1)?;
    let memory = Memory::new(&domain, LARGE)?;
    let remote = memory.remote()?;
    let prepared = prepare(&domain, &queue, &queue, count as u32)?;
    let own = prepared.endpoint();
    let mut pair = prepared.handshake(own).map_err(|e| e.error)?;
    let mut times = Vec::new();
    let repeat = (1000 / count).max(1);
    for _ in 0..rounds() {
        let start = Instant::now();
        for _ in 0..repeat {
            for _ in 0..count {
                // SAFETY: as above.
                unsafe { pair.post_write(&memory.region, ..SMALL, remote, 0)? };
            }
            for _ in 0..count {
                poll(&queue)?;
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / (repeat * count) as f64);
    }
    println!("| {count} requests under way | | | {:.1} us |", median(&times));
    Ok(())
}

/// The processor's time that this process has used.
fn used() -> Duration {
    // SAFETY: all zeros is a valid value, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn idle() -> Result<()> {
    let contexts: Vec<_> = (0..10).map(|_| Ok(Device::new()?.open()?)).collect::<Result<_>>()?;
    std::thread::sleep(Duration::from_millis(100));
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    let used = used() - before;
    println!(
        "\n{} idle devices used {} us of a processor in a second.",
        contexts.len(),
        used.as_micros()
    );
    Ok(())
}

fn main() -> Result<()> {
    let way = if asked(SOCKETS) { Way::Sockets } else { Way::Memory };
    if std::env::var_os(CHILD).is_some() {
        return child(way);
    }
    // Parts by name, or all.
    let parts = ["two", SOCKETS, "one", "growth", "idle"];
    let all = !parts.iter().any(|part| asked(part));
    let wanted = |name: &str| all || asked(name);
    println!("| what | the device | without it | ratio | best rounds |\n|---|---:|---:|---:|---:|");
    if wanted("two") {
        two_processes(Way::Memory)?;
    }
    if wanted(SOCKETS) {
        println!("| through the kernel's sockets: | | | | |");
        two_processes(Way::Sockets)?;
    }
    if wanted("one") {
        one_process()?;
    }
    if wanted("growth") {
        println!(
            "\n| number | making one | memory of one | a write of 64 bytes |\n|---|---:|---:|---:|"
        );
        [1, 100, 10_000].into_iter().try_for_each(queue_pairs)?;
        [1, 100, 10_000].into_iter().try_for_each(outstanding)?;
    }
    if wanted("idle") {
        idle()?;
    }
    Ok(())
}
