//! Metrics by multicast: a sender sends its load to a group, and every listener that has joined the group receives it. Nobody
//! connects, and the sender does not know its listeners.
//! Listeners come and go. `metrics [SAMPLES]` runs a sender and three listeners, each with a device of its own end.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::DatagramsBuilder;
use ibverbs::pool::DatagramBuffer;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Context, Loop, PooledBuffer, ProtectionDomain,
    ReceiveWorkRequest, operation::DatagramDestination,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const GROUP: IpAddr = IpAddr::V4(Ipv4Addr::new(239, 1, 2, 3));
/// The longest message, and the 40 bytes that precede a datagram.
const CHUNK: usize = 40 + 256;
const LISTENERS: usize = 3;

/// A loop with a datagram end, and buffers for it.
struct Member {
    datagrams: Loop<'static, PooledBuffer>,
    end: ChannelId,
    group: DatagramDestination,
    pool: BufferPool,
}

impl Member {
    fn new(context: &Arc<Context<'static>>, receives: u32) -> Result<Self> {
        let domain = Arc::new(ProtectionDomain::new(context)?);
        let pool = BufferPool::new(&domain, CHUNK, 1 + receives as usize, AccessFlags::empty())?;
        let mut datagrams = Loop::new(context, 1 + receives)?;
        let builder = DatagramsBuilder::new(&domain).max_send_wr(1).max_recv_wr(receives);
        let end = datagrams.add_datagrams(builder)?;
        let group = datagrams.group(end, GROUP)?;
        Ok(Self { datagrams, end, group, pool })
    }
}

/// Sends this number of samples.
fn send(context: &Arc<Context<'static>>, samples: usize) -> Result<()> {
    let Member { mut datagrams, end, group, pool } = Member::new(context, 0)?;
    for sample in 0..samples {
        let mut message = DatagramBuffer::new(pool.take().ok_or("no buffer")?)?;
        write!(message, "sample {sample}: load {:.2}", (sample % 10) as f64 / 10.0)?;
        datagrams.send_to(end, message, &group, 0)?;
        datagrams.wait_ended()?.result()?;
    }
    Ok(())
}

/// Listens until `samples` have come. Whoever comes late, or is slow, has missed some: that is what datagrams are.
fn listen(context: &Arc<Context<'static>>, samples: usize, ready: &Barrier) -> Result<usize> {
    let Member { mut datagrams, end, group, pool } = Member::new(context, samples as u32)?;
    for _ in 0..samples {
        let buffer = pool.take().ok_or("no buffer")?;
        datagrams.post(end, ReceiveWorkRequest::new(buffer), 0)?;
    }
    datagrams.join(end, &group)?;
    ready.wait();
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut heard = 0;
    while heard < samples
        && let Some(ended) = datagrams.wait_ended_until(deadline)?
    {
        let success = ended.result()?;
        let message = DatagramBuffer::from(ended.buffer);
        let sender = datagrams.sender(end, &success, &message.header())?;
        assert_eq!(Some(GROUP), message.header().destination().and_then(address));
        if heard == 0 {
            let text = String::from_utf8_lossy(&message);
            println!("{text} (from {:?}, queue pair {:#x})", sender.path.gid(), sender.number);
        }
        heard += 1;
    }
    Ok(heard)
}

fn address(gid: ibverbs::Gid) -> Option<IpAddr> {
    gid.to_ipv4().map(IpAddr::V4)
}

fn main() -> Result<()> {
    let samples = std::env::args().nth(1).map_or(Ok(20), |samples| samples.parse())?;
    let _software = ibverbs_software::register_if_none()?;
    let context = Arc::new(ibverbs::open_first()?);
    let ready = Barrier::new(LISTENERS + 1);
    thread::scope(|threads| {
        let listeners: Vec<_> =
            (0..LISTENERS).map(|_| threads.spawn(|| listen(&context, samples, &ready))).collect();
        ready.wait();
        send(&context, samples)?;
        for listener in listeners {
            let heard = listener.join().map_err(|_| "a listener has panicked")??;
            println!("a listener has heard {heard} of {samples} samples");
        }
        Ok(())
    })
}
