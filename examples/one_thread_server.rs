//! A server of a thousand clients on one thread, which accepts them while it serves those that are there: nothing waits for a
//! slow one, and nothing is polled by time while there are files. `one_thread_server [CLIENTS]`

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::event_loop::LoopWaker;
use ibverbs::tcp::{Exchange, Step};
use ibverbs::{
    AccessFlags, BufferPool, Context, Loop, PooledBuffer, PreparedChannel, ProtectionDomain,
    ReceiveWorkRequest, SendWorkRequest,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RECEIVE: u64 = 0;
const SEND: u64 = 1;
/// How long no clients are accepted when too many files are open.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// The bytes of a question, and of its answer.
const LEN: usize = 8;

/// A client that connects, in steps that do not wait.
struct Guest {
    stream: TcpStream,
    exchange: Exchange<PreparedChannel<'static>>,
}

pub(crate) struct Server {
    pub(crate) channels: Loop<'static, PooledBuffer>,
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
    pub(crate) listener: TcpListener,
    guests: Vec<Guest>,
    /// False while too many files are open.
    accepts: bool,
    answers: usize,
}

impl Server {
    pub(crate) fn new(context: &Arc<Context<'static>>, clients: usize) -> Result<Self> {
        let domain = Arc::new(ProtectionDomain::new(context)?);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            channels: Loop::new(context, 2 * clients as u32)?,
            pool: BufferPool::new(&domain, LEN, clients, AccessFlags::empty())?,
            domain,
            listener,
            guests: Vec::new(),
            accepts: true,
            answers: 0,
        })
    }

    /// Serves until another thread has set `is_over` and woken it.
    pub(crate) fn run(&mut self, waker: &LoopWaker, is_over: &AtomicBool) -> Result<()> {
        loop {
            // The order matters: from here on, the files below become readable for what ends and for who wakes. `arm`
            // forgets earlier wake-ups, so the server looks at what they were for after it.
            self.channels.arm()?;
            if is_over.load(Ordering::Acquire) {
                return Ok(());
            }
            self.accept()?;
            self.connect()?;
            while let Some(ended) = self.channels.next_ended()? {
                if ended.result().is_err() {
                    // Its client has left: the first operation that ends so removes it.
                    let _ = self.channels.remove(ended.channel);
                    continue;
                }
                let (channel, token, buffer) = (ended.channel, ended.token, ended.buffer);
                if token == RECEIVE {
                    // The answer is the question.
                    self.channels.post(channel, SendWorkRequest::new(buffer), SEND)?;
                    self.answers += 1;
                } else {
                    self.channels.post(channel, ReceiveWorkRequest::new(buffer), RECEIVE)?;
                }
            }
            let mut files =
                vec![PollFd::new(waker, PollFlags::IN), PollFd::new(&self.channels, PollFlags::IN)];
            files.extend(self.accepts.then(|| PollFd::new(&self.listener, PollFlags::IN)));
            files.extend(self.guests.iter().map(|guest| {
                let reads = guest.exchange.to_send().is_empty();
                PollFd::new(&guest.stream, if reads { PollFlags::IN } else { PollFlags::OUT })
            }));
            poll(&mut files, (!self.accepts).then_some(&PAUSE))?;
            self.accepts = true;
        }
    }

    fn has_clients(&self) -> bool {
        let (all, left) = self.channels.capacity();
        left < all
    }

    /// Takes all that have come.
    fn accept(&mut self) -> Result<()> {
        while self.accepts {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // Too many files are open: those that connect, and the clients, are served meanwhile.
                Err(error) if !self.guests.is_empty() || self.has_clients() => {
                    eprintln!("{error}");
                    self.accepts = false;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let builder = self.channels.create_channel(&self.domain);
            let prepared = builder.max_send_wr(1).max_recv_wr(1).build()?;
            let exchange = prepared.begin_accept(b"").map_err(|failed| failed.error)?;
            self.guests.push(Guest { stream, exchange });
        }
        Ok(())
    }

    /// Goes on with those that connect. One that fails is forgotten.
    fn connect(&mut self) -> Result<()> {
        for mut guest in std::mem::take(&mut self.guests) {
            match guest.exchange.step(&mut guest.stream) {
                Ok(Step::Pending(exchange)) => self.guests.push(Guest { exchange, ..guest }),
                Ok(Step::Done((mut channel, _))) => {
                    // It ends when the client does, and the loop looks at it.
                    channel.keep_stream(guest.stream);
                    let channel = match self.channels.add(channel) {
                        Ok(channel) => channel,
                        Err(failed) => {
                            eprintln!("{}", failed.error);
                            continue;
                        }
                    };
                    let buffer = self.pool.take().ok_or("more clients than buffers")?;
                    self.channels.post(channel, ReceiveWorkRequest::new(buffer), RECEIVE)?;
                }
                Err(failed) => eprintln!("{}", failed.error),
            }
        }
        Ok(())
    }
}

/// Connects this many clients, each of which asks once when all have connected.
#[allow(dead_code, reason = "a test has clients of its own")]
fn ask(context: &Arc<Context<'static>>, address: SocketAddr, clients: usize) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let domain = Arc::new(ProtectionDomain::new(context)?);
    let pool = BufferPool::new(&domain, LEN, 2 * clients, AccessFlags::empty())?;
    let mut channels = Loop::<PooledBuffer>::new(context, 2 * clients as u32)?;
    let mut all = Vec::new();
    for _ in 0..clients {
        let prepared = channels.create_channel(&domain).max_send_wr(1).max_recv_wr(1).build()?;
        let (channel, _) = prepared.connect(address, b"", deadline)?;
        all.push(channels.add(channel)?);
    }
    for (index, &channel) in all.iter().enumerate() {
        let answer = pool.take().ok_or("no buffer")?;
        channels.post(channel, ReceiveWorkRequest::new(answer), index as u64)?;
        let question = pool.take_from(&index.to_ne_bytes())?.ok_or("no buffer")?;
        channels.post(channel, SendWorkRequest::new(question), u64::MAX)?;
    }
    let mut answers = 0;
    while answers < clients {
        let ended = channels.wait_ended_until(deadline)?.ok_or("no answer within a minute")?;
        ended.result()?;
        if ended.token != u64::MAX {
            assert_eq!(ended.buffer[..], ended.token.to_ne_bytes());
            answers += 1;
        }
    }
    Ok(())
}

#[allow(dead_code, reason = "a test has a server of its own")]
fn main() -> Result<()> {
    let clients = std::env::args().nth(1).map_or(Ok(1000), |clients| clients.parse())?;
    let _software = ibverbs_software::register_if_none()?;
    let context = Arc::new(ibverbs::open_first()?);
    let mut server = Server::new(&context, clients)?;
    let (address, waker) = (server.listener.local_addr()?, server.channels.waker()?);
    let is_over = AtomicBool::new(false);
    let start = Instant::now();
    thread::scope(|threads| {
        let asks = threads.spawn(|| {
            let asked = ask(&context, address, clients);
            is_over.store(true, Ordering::Release);
            waker.wake();
            asked
        });
        server.run(&waker, &is_over)?;
        asks.join().map_err(|_| "a client has panicked")?
    })?;
    println!("{} clients connected and were answered in {:?}", server.answers, start.elapsed());
    Ok(())
}
