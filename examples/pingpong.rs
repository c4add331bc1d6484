//! Two processes that send a message to and fro. It speaks with rdma-core's `ibv_rc_pingpong`, on
//! either end: the options, the exchange of addresses over TCP and the closing lines are the same.
//!
//! With `--chk` every byte of every message is checked: the client sends one message after another
//! that differ, and expects each back as it was; the server knows what a client sends. (The C tool
//! looks at one byte per page of the last message.)

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::{Range, RangeBounds};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, CompletionQueue, ErrorKind, Gid, MaximumTransferUnit, MemoryRegion,
    PacketSequenceNumber, QueuePair, QueuePairEndpoint, QueuePairType, SendFlags, SendOperations,
    ServiceLevel, WorkCompletion,
};
use lexopt::prelude::*;

const USAGE: &str = "\
Usage:
  pingpong            start a server and wait for connection
  pingpong <host>     connect to server at <host>

Options:
  -p, --port=<port>      listen on/connect to port <port> (default 18515)
  -d, --ib-dev=<dev>     use IB device <dev> (default first device found)
  -i, --ib-port=<port>   use port <port> of IB device (default 1)
  -s, --size=<size>      size of message to exchange (default 4096)
  -m, --mtu=<size>       path MTU (default 1024)
  -r, --rx-depth=<dep>   number of receives to post at a time (default 500, at least 2;
                         fewer of large messages, for each has a buffer of its own)
  -n, --iters=<iters>    number of exchanges (default 1000)
  -l, --sl=<sl>          service level value
  -e, --events           sleep on CQ events (default poll)
  -g, --gid-idx=<index>  local port gid index (default: the one that peers can reach)
  -o, --odp              use on demand paging
  -c, --chk              validate received buffer
  -N, --new_send         use new post send WR API
  -h, --help             print this";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long the peer may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a client says when it has the server's address: `"done"` with its null.
const DONE: &[u8; 5] = b"done\0";

/// The most memory for receives.
const RECEIVE_MEMORY: usize = 64 << 20;

struct Options {
    server: Option<String>,
    tcp_port: u16,
    device: Option<String>,
    port: u8,
    size: usize,
    mtu: MaximumTransferUnit,
    rx_depth: u32,
    iterations: u64,
    service_level: ServiceLevel,
    events: bool,
    gid_index: Option<u8>,
    on_demand: bool,
    check: bool,
    new_send: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            server: None,
            tcp_port: 18515,
            device: None,
            port: 1,
            size: 4096,
            mtu: MaximumTransferUnit::Mtu1024,
            rx_depth: 500,
            iterations: 1000,
            service_level: ServiceLevel::default(),
            events: false,
            gid_index: None,
            on_demand: false,
            check: false,
            new_send: false,
        }
    }
}

fn main() -> ExitCode {
    match parse() {
        Ok(None) => println!("{USAGE}"),
        Ok(Some(options)) => {
            if let Err(error) = run(&options) {
                eprintln!("pingpong: {error}");
                return ExitCode::FAILURE;
            }
        }
        Err(error) => {
            eprintln!("pingpong: {error}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn parse() -> std::result::Result<Option<Options>, lexopt::Error> {
    let mut o = Options::default();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('p') | Long("port") => o.tcp_port = arguments.value()?.parse()?,
            Short('d') | Long("ib-dev") => o.device = Some(arguments.value()?.string()?),
            Short('i') | Long("ib-port") => o.port = arguments.value()?.parse()?,
            Short('s') | Long("size") => o.size = arguments.value()?.parse()?,
            Short('m') | Long("mtu") => {
                let bytes = arguments.value()?.parse()?;
                o.mtu = MaximumTransferUnit::from_bytes(bytes).map_err(custom)?;
            }
            Short('r') | Long("rx-depth") => o.rx_depth = arguments.value()?.parse()?,
            Short('n') | Long("iters") => o.iterations = arguments.value()?.parse()?,
            Short('l') | Long("sl") => {
                let level = arguments.value()?.parse()?;
                o.service_level = ServiceLevel::new(level).map_err(custom)?;
            }
            Short('e') | Long("events") => o.events = true,
            Short('g') | Long("gid-idx") => o.gid_index = Some(arguments.value()?.parse()?),
            Short('o') | Long("odp") => o.on_demand = true,
            Short('c') | Long("chk") => o.check = true,
            Short('N') | Long("new_send") => o.new_send = true,
            Short('h') | Long("help") => return Ok(None),
            Value(host) if o.server.is_none() => o.server = Some(host.string()?),
            other => return Err(other.unexpected()),
        }
    }
    if o.iterations == 0 {
        return Err("at least one exchange is needed".into());
    }
    if o.size == 0 || o.size > ibverbs::MAX_SGE_LENGTH {
        return Err("the size of a message is within 1..=4294967295".into());
    }
    Ok(Some(o))
}

fn custom(error: ibverbs::Error) -> lexopt::Error {
    lexopt::Error::Custom(Box::new(error))
}

fn run(options: &Options) -> Result<()> {
    let devices = ibverbs::devices()?;
    let wanted = |name: &str| options.device.as_deref().is_none_or(|wanted| wanted == name);
    let device = devices.iter().find(|device| wanted(device.name())).ok_or_else(|| {
        options.device.as_ref().map_or("there is no RDMA device".to_owned(), |name| {
            format!("there is no RDMA device '{name}'")
        })
    })?;
    let context = device.open()?;
    let domain = context.alloc_pd()?;

    // A message that arrives while the last one is still being sent back needs a second receive.
    let affordable = u32::try_from(RECEIVE_MEMORY / options.size)?;
    let receives = options.rx_depth.min(affordable).max(2);
    let mut builder = CompletionQueue::builder(&context, receives + 1);
    if options.events {
        builder = builder.own_channel();
    }
    let queue = builder.build()?;
    let access = if options.on_demand { AccessFlags::ON_DEMAND } else { AccessFlags::empty() };
    let mut source = MemoryRegion::with_options(&domain, options.size, access.into())?;
    let all = options.size * receives as usize;
    let mut target = MemoryRegion::with_options(&domain, all, access.into())?;
    source.fill(FILLING);

    let mut builder = domain
        .create_qp(&queue, &queue, QueuePairType::ReliableConnected)
        .max_send_wr(1)
        .max_recv_wr(receives)
        .port(options.port)
        .path_mtu(options.mtu)
        .service_level(options.service_level);
    if let Some(index) = options.gid_index {
        builder = builder.gid_index(index);
    }
    if options.new_send {
        builder = builder.extended(SendOperations::SEND);
    }
    let psn = random_psn();
    let prepared = builder.send_psn(psn).build()?;
    let local = Address { endpoint: prepared.endpoint(), psn };
    local.print("local address: ");
    let (remote, client) = meet(&local, options)?;
    remote.print("remote address:");
    let queue_pair = prepared.receive_psn(remote.psn).handshake(remote.endpoint)?;
    let mut game = Game {
        options,
        queue: &queue,
        source: &mut source,
        target: &mut target,
        queue_pair,
        messages: Messages::new(if options.check { options.size } else { 0 }),
    };
    for slot in 0..receives as usize {
        game.post_receive(slot)?;
    }
    if let Some(client) = client {
        answer(client, &local)?;
    }
    let time = game.play()?;

    let (bytes, seconds) = (options.size as u64 * options.iterations * 2, time.as_secs_f64());
    let megabits = bytes as f64 * 8. / seconds / 1e6;
    println!("{bytes} bytes in {seconds:.2} seconds = {megabits:.2} Mbit/sec");
    let each = seconds * 1e6 / options.iterations as f64;
    println!("{} iters in {seconds:.2} seconds = {each:.2} usec/iter", options.iterations);
    Ok(())
}

/// A random number, for which the standard library's hash keys are good enough.
fn random_psn() -> PacketSequenceNumber {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let number = RandomState::new().build_hasher().finish() as u32;
    PacketSequenceNumber::new(number & PacketSequenceNumber::MAX.value()).unwrap_or_default()
}

/// What the sides tell each other, as text: LID, queue pair number, packet number, GID.
struct Address {
    endpoint: QueuePairEndpoint,
    psn: PacketSequenceNumber,
}

impl Address {
    /// `sizeof "0000:000000:000000:00000000000000000000000000000000"`, with the null at its end.
    const LENGTH: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;

    fn to_wire(&self) -> [u8; Self::LENGTH] {
        let (endpoint, psn) = (self.endpoint, self.psn.value());
        let gid = u128::from_be_bytes(endpoint.gid().to_bytes());
        let text = format!("{:04x}:{:06x}:{psn:06x}:{gid:032x}", endpoint.lid(), endpoint.num());
        let mut wire = [0; Self::LENGTH];
        wire[..text.len()].copy_from_slice(text.as_bytes());
        wire
    }

    fn from_wire(wire: &[u8; Self::LENGTH]) -> Result<Self> {
        let text = std::str::from_utf8(wire)?.trim_end_matches('\0');
        let fields: Vec<&str> = text.split(':').collect();
        let &[lid, num, psn, gid] = fields.as_slice() else {
            return Err(format!("'{text}' is not an address of a ping-pong").into());
        };
        let gid = Gid::from_bytes(u128::from_str_radix(gid, 16)?.to_be_bytes());
        let (lid, num) = (u16::from_str_radix(lid, 16)?, u32::from_str_radix(num, 16)?);
        Ok(Self {
            endpoint: QueuePairEndpoint::new(num, lid, gid)?,
            psn: PacketSequenceNumber::new(u32::from_str_radix(psn, 16)?)?,
        })
    }

    fn print(&self, whose: &str) {
        let Self { endpoint: e, psn } = self;
        println!(
            "  {whose} LID {:#06x}, QPN {:#08x}, PSN {:#08x}, GID {}",
            e.lid(),
            e.num(),
            psn.value(),
            e.gid()
        );
    }
}

/// Exchanges addresses over TCP. A server gets the connection too: only when it is ready to receive
/// does it [`answer`], and the client sends first, so that no message comes too early.
fn meet(local: &Address, options: &Options) -> Result<(Address, Option<TcpStream>)> {
    let port = options.tcp_port;
    let mut wire = [0; Address::LENGTH];
    let Some(host) = &options.server else {
        let any: [SocketAddr; 2] =
            [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
        let listener = TcpListener::bind(any.as_slice())
            .map_err(|error| format!("cannot listen on TCP port {port}: {error}"))?;
        let mut stream = listener.accept()?.0;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut wire)?;
        return Ok((Address::from_wire(&wire)?, Some(stream)));
    };
    let mut stream = TcpStream::connect((host.as_str(), port))
        .map_err(|error| format!("cannot connect to {host}:{port}: {error}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&local.to_wire())?;
    stream.read_exact(&mut wire)?;
    stream.write_all(DONE)?;
    Ok((Address::from_wire(&wire)?, None))
}

/// The server's part once it is ready.
fn answer(mut client: TcpStream, local: &Address) -> Result<()> {
    client.write_all(&local.to_wire())?;
    let mut done = [0; DONE.len()];
    client.read_exact(&mut done)?;
    Ok(())
}

/// The number of the send; receives have the number of their slot in `target`.
const SEND: u64 = u64::MAX;

struct Game<'a, 'res> {
    options: &'a Options,
    queue: &'a CompletionQueue<'res>,
    source: &'a mut MemoryRegion<'res, u8>,
    target: &'a mut MemoryRegion<'res, u8>,
    queue_pair: QueuePair<'res>,
    messages: Messages,
}

impl Game<'_, '_> {
    /// Plays all rounds; returns how long that took.
    fn play(&mut self) -> Result<Duration> {
        let (rounds, serves) = (self.options.iterations, self.options.server.is_none());
        let (mut posted, mut sent, mut received) = (0, 0, 0);
        // The server sends each message back from where it was received.
        let (mut to_return, mut returning) = (None, None);
        let mut completions = [WorkCompletion::default(); 2];

        let start = Instant::now();
        while sent < rounds || received < rounds {
            if posted == sent {
                // The last send is complete, so that its memory is ours again.
                if let Some(slot) = returning.take() {
                    self.post_receive(slot)?;
                }
                if let Some(slot) = to_return.take() {
                    self.post_return(slot)?;
                    returning = Some(slot);
                    posted += 1;
                } else if !serves && posted == received && posted < rounds {
                    self.post_message(posted)?;
                    posted += 1;
                }
            }
            for completion in self.next(&mut completions)? {
                let success = completion.result()?;
                if completion.wr_id() == SEND {
                    sent += 1;
                    continue;
                }
                let slot = usize::try_from(completion.wr_id())?;
                if success.byte_len() as usize != self.options.size {
                    return Err(format!("a message of {} bytes came", success.byte_len()).into());
                }
                self.check(slot, received)?;
                received += 1;
                if !serves {
                    self.post_receive(slot)?;
                } else if to_return.replace(slot).is_some() {
                    return Err("the client does not wait for its messages to come back".into());
                }
            }
        }
        Ok(start.elapsed())
    }

    /// Polls, or sleeps, until something has completed.
    fn next<'c>(&self, room: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        let silence = || format!("nothing heard from the peer for {PATIENCE:?}").into();
        if self.options.events {
            return self.queue.wait_timeout(room, PATIENCE).map_err(|error| match error.kind() {
                ErrorKind::TimedOut => silence(),
                _ => error.into(),
            });
        }
        let start = Instant::now();
        loop {
            let found = self.queue.poll(room)?.len();
            if found > 0 {
                return Ok(&room[..found]);
            }
            if start.elapsed() > PATIENCE {
                return Err(silence());
            }
            std::hint::spin_loop();
        }
    }

    fn range(&self, slot: usize) -> Range<usize> {
        slot * self.options.size..(slot + 1) * self.options.size
    }

    fn post_receive(&mut self, slot: usize) -> Result<()> {
        let range = self.range(slot);
        if self.options.check {
            // Nothing old can pass for new.
            self.target.slice_mut(range.clone())?.fill(0);
        }
        // SAFETY: a slot is used again only when its completion was polled; the memory outlives the
        // queue pair.
        unsafe { self.queue_pair.post_receive(self.target, range, slot as u64)? };
        Ok(())
    }

    /// Sends the client's message of this round.
    fn post_message(&mut self, round: u64) -> Result<()> {
        if self.options.check {
            self.source.copy_from_slice(self.messages.of_round(round));
        }
        // SAFETY: the next message is written only when this one's completion was polled; the
        // memory outlives the queue pair.
        unsafe { post_send(&mut self.queue_pair, self.source, .., self.options.new_send)? };
        Ok(())
    }

    /// Sends a message back.
    fn post_return(&mut self, slot: usize) -> Result<()> {
        let range = self.range(slot);
        // SAFETY: the slot is posted for a receive only when this send's completion was polled; the
        // memory outlives the queue pair.
        unsafe { post_send(&mut self.queue_pair, self.target, range, self.options.new_send)? };
        Ok(())
    }

    fn check(&mut self, slot: usize, round: u64) -> Result<()> {
        if self.options.check {
            let message = self.target.slice(self.range(slot))?;
            let checked = match self.options.server {
                Some(_) => compare(&message, self.messages.of_round(round)),
                None => self.messages.check_client(&message, round),
            };
            checked.map_err(|error| format!("message {round}: {error}"))?;
        }
        Ok(())
    }
}

/// Posts a send by the one interface or the other.
///
/// # Safety
///
/// That of [`QueuePair::post_send`].
unsafe fn post_send(
    queue_pair: &mut QueuePair<'_>,
    region: &MemoryRegion<'_, u8>,
    range: impl RangeBounds<usize>,
    new_send: bool,
) -> ibverbs::Result<()> {
    if !new_send {
        // SAFETY: the caller keeps the contract.
        return unsafe { queue_pair.post_send(region, range, SEND) };
    }
    let data = region.gather_element(range)?;
    // SAFETY: the caller keeps the contract.
    unsafe { queue_pair.batch(|batch| batch.send(SEND, SendFlags::SIGNALED, &[data])) }
}

/// What the C tool's messages consist of, but for a zero at the start of each page with `--chk`.
const FILLING: u8 = 0x7b;

/// All page sizes are multiples of this.
const PAGE: usize = 4096;

/// How many messages differ from each other, before they begin anew.
const PERIOD: usize = 251;

/// The messages that are sent and expected.
struct Messages {
    template: Vec<u8>,
    message: Vec<u8>,
    /// What the client sends if it is the C tool: always the same.
    from_c_tool: Option<Vec<u8>>,
}

impl Messages {
    fn new(size: usize) -> Self {
        let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        let template = (1..=(size + PERIOD) as u64).map(byte).collect();
        Self { template, message: vec![0; size], from_c_tool: None }
    }

    /// The message of our client: zero where the C tool, if it is the server, expects that.
    fn of_round(&mut self, round: u64) -> &[u8] {
        let (start, size) = ((round % PERIOD as u64) as usize, self.message.len());
        self.message.copy_from_slice(&self.template[start..start + size]);
        self.message.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
        &self.message
    }

    /// Checks what a client has sent, be it ours or the C tool.
    fn check_client(&mut self, message: &[u8], round: u64) -> std::result::Result<(), String> {
        if let Some(expected) = &self.from_c_tool {
            return compare(message, expected);
        }
        let checked = compare(message, self.of_round(round));
        let from_c_tool =
            |(index, &byte): (usize, &u8)| byte == FILLING || (byte == 0 && index % PAGE == 0);
        if checked.is_err() && round == 0 && message.iter().enumerate().all(from_c_tool) {
            self.from_c_tool = Some(message.to_vec());
            return Ok(());
        }
        checked
    }
}

fn compare(message: &[u8], expected: &[u8]) -> std::result::Result<(), String> {
    if message == expected {
        return Ok(());
    }
    let mut pairs = message.iter().zip(expected).enumerate();
    match pairs.find(|(_, (byte, expected))| byte != expected) {
        Some((index, (byte, expected))) => {
            Err(format!("byte {index} is {byte:#04x}, not {expected:#04x}"))
        }
        None => Err(format!("{} bytes, not {}", message.len(), expected.len())),
    }
}
