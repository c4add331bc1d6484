//! Moves bytes through an RDMA device, over a channel that is connected to itself, and checks every one:
//! messages that are sent and received, and RDMA writes and reads.

#[path = "common/broken_pipe.rs"]
mod broken_pipe;

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ibverbs::device::{DeviceList, PortState};
use ibverbs::{AccessFlags, Channel, Context, MemoryRegion, SharedMemoryRegion, TransportError};
use lexopt::prelude::*;

const USAGE: &str = "\
Usage: loopback [OPTIONS]

Options:
  -d, --ib-dev=<dev>     use RDMA device <dev> (default: the first with an active port)
  -i, --ib-port=<port>   use port <port> (default: the first active one)
  -g, --gid-idx=<index>  local GID index (default: the one that peers in the network can reach)
  -h, --help             print this";

/// The sizes in bytes: parts of a packet, one packet, many packets.
const SIZES: [usize; 7] = [1, 64, 1_024, 1_025, 4_096, 65_536, 300_000];

/// Bytes before and after the target: they must not change.
const GUARD: usize = 64;

/// The longest time for an operation.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Options {
    device: Option<String>,
    port: Option<u8>,
    gid_index: Option<u8>,
}

fn main() -> ExitCode {
    broken_pipe::end_quietly();
    match parse() {
        Ok(None) => println!("{USAGE}"),
        Ok(Some(options)) => {
            if let Err(error) = run(&options) {
                eprintln!("loopback: {error}");
                return ExitCode::FAILURE;
            }
        }
        Err(error) => {
            eprintln!("loopback: {error}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn parse() -> Result<Option<Options>, lexopt::Error> {
    let mut options = Options::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('d') | Long("ib-dev") => options.device = Some(arguments.value()?.string()?),
            Short('i') | Long("ib-port") => options.port = Some(arguments.value()?.parse()?),
            Short('g') | Long("gid-idx") => options.gid_index = Some(arguments.value()?.parse()?),
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some(options))
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    // A software device, if the machine has no RDMA device.
    let _software = ibverbs_software::register_if_none()?;
    let devices = ibverbs::devices()?;
    let (context, port) = choose(&devices, options)?;
    let domain = context.alloc_pd()?;
    let mut builder = domain.create_channel().port(port).allow_remote_rw();
    if let Some(index) = options.gid_index {
        builder = builder.gid_index(index);
    }
    let prepared = builder.build()?;
    let endpoint = prepared.endpoint();
    println!("{} port {port}: {endpoint}", context.name());
    let mut channel = prepared.handshake(endpoint)?;

    let longest = SIZES.into_iter().max().unwrap_or(0);
    let mut memory = Memory {
        source: domain.allocate(longest)?,
        target: domain.allocate(longest + 2 * GUARD)?,
        shared: domain.allocate_shared(
            longest + 2 * GUARD,
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE,
        )?,
    };
    let (mut moved, mut spent) = (0, Duration::ZERO);
    let operations: [(_, Operation<'_>); 3] =
        [("send", Memory::send), ("write", Memory::write), ("read", Memory::read)];
    for size in SIZES {
        for (name, operation) in operations {
            let time = operation(&mut memory, &mut channel, size)
                .map_err(|error| format!("{name} of {size} bytes: {error}"))?;
            let micros = time.as_secs_f64() * 1e6;
            println!("{name:5} {size:>8} bytes in {micros:>9.1} us: every byte right");
            moved += size;
            spent += time;
        }
    }
    println!(
        "moved {moved} bytes over {} by {} operations, in {:.3} s",
        context.name(),
        SIZES.len() * operations.len(),
        spent.as_secs_f64()
    );
    channel.close()?;
    Ok(())
}

/// The requested device and port, or the first that is active.
fn choose<'list>(
    devices: &'list DeviceList,
    options: &Options,
) -> Result<(Context<'list>, u8), Box<dyn Error>> {
    let mut seen = false;
    for device in devices {
        if options.device.as_deref().is_some_and(|name| name != device.name()) {
            continue;
        }
        seen = true;
        let context = device.open()?;
        if let Some(port) = options.port {
            return Ok((context, port));
        }
        for port in 1..=context.query_device()?.phys_port_cnt() {
            if context.query_port(port)?.state() == PortState::Active {
                return Ok((context, port));
            }
        }
    }
    if let Some(error) = devices.why_empty() {
        return Err(error.into());
    }
    Err(match &options.device {
        Some(name) if !seen => format!("there is no RDMA device '{name}'"),
        Some(name) => format!("no port of {name} is active"),
        None => "no RDMA device has an active port".into(),
    }
    .into())
}

/// Moves this number of bytes and checks the result; returns how long the transfer took.
type Operation<'pd> =
    fn(&mut Memory<'pd>, &mut Channel<'_>, usize) -> Result<Duration, Box<dyn Error>>;

struct Memory<'pd> {
    source: MemoryRegion<'pd, u8>,
    target: MemoryRegion<'pd, u8>,
    shared: SharedMemoryRegion<'pd, u8>,
}

impl Memory<'_> {
    /// A message: one side sends, the other has posted a receive.
    fn send(&mut self, channel: &mut Channel<'_>, size: usize) -> Result<Duration, Box<dyn Error>> {
        fill(&mut self.source[..size], size);
        self.target.fill(UNTOUCHED);
        let start = Instant::now();
        let deadline = start + PATIENCE;
        let source = self.source.slice(..size)?;
        let target = self.target.slice_mut(GUARD..GUARD + size)?;
        let received = channel.scope_until(deadline, |scope| {
            let receive = scope.post_receive(target)?;
            scope.post_send(source)?.wait_until(deadline)?;
            let (_, completion) = receive.wait_until(deadline)?;
            Ok::<_, TransportError>(completion.byte_len() as usize)
        })?;
        let time = start.elapsed();
        if received != size {
            return Err(format!("{received} bytes were received").into());
        }
        check(&self.target, size, size)?;
        Ok(time)
    }

    /// An RDMA write: the peer does nothing.
    fn write(
        &mut self,
        channel: &mut Channel<'_>,
        size: usize,
    ) -> Result<Duration, Box<dyn Error>> {
        let seed = size + 1;
        fill(&mut self.source[..size], seed);
        self.shared.fill(UNTOUCHED);
        let remote = self.shared.remote_range(GUARD..GUARD + size)?;
        let start = Instant::now();
        channel.until(start + PATIENCE).write(self.source.slice(..size)?, remote)?;
        let time = start.elapsed();
        check(&self.shared.to_vec(), size, seed)?;
        Ok(time)
    }

    /// An RDMA read: the peer does nothing.
    fn read(&mut self, channel: &mut Channel<'_>, size: usize) -> Result<Duration, Box<dyn Error>> {
        let seed = size + 2;
        fill(&mut self.source[..size], seed);
        self.shared.write(GUARD, &self.source[..size])?;
        self.target.fill(UNTOUCHED);
        let remote = self.shared.remote_range(GUARD..GUARD + size)?;
        let mut target = self.target.slice_mut(GUARD..GUARD + size)?;
        let start = Instant::now();
        channel.until(start + PATIENCE).read(&mut target, remote)?;
        let time = start.elapsed();
        check(&self.target, size, seed)?;
        Ok(time)
    }
}

/// The initial value of all target bytes.
const UNTOUCHED: u8 = 0xee;

/// Bytes that depend on their position and on the operation.
fn fill(bytes: &mut [u8], seed: usize) {
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = pattern(index, seed);
    }
}

fn pattern(index: usize, seed: usize) -> u8 {
    ((index ^ (seed << 12)).wrapping_mul(0x9e37_79b1) >> 16) as u8
}

/// Checks that the right bytes arrived, and that nothing was written before or after them.
fn check(target: &[u8], size: usize, seed: usize) -> Result<(), String> {
    let (before, rest) = target.split_at(GUARD);
    let (moved, after) = rest.split_at(size);
    let wrong = moved.iter().enumerate().find(|&(index, &byte)| byte != pattern(index, seed));
    if let Some((index, byte)) = wrong {
        return Err(format!("byte {index} is {byte:#04x}, not {:#04x}", pattern(index, seed)));
    }
    if before.iter().chain(after).any(|&byte| byte != UNTOUCHED) {
        return Err("bytes beside the target were written".into());
    }
    Ok(())
}
