//! Connecting over TCP and other streams, on a device of software: either both sides are ready, or both
//! get an error; also with peers that violate the protocol.

mod hostile;
#[path = "../support/software.rs"]
mod software;
mod streams;
mod tcp;

use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    Channel, ChannelBuilder, ExchangeError, MaxRnrRetries, MemoryRegion, PreparedChannel,
    ProtectionDomain,
};
use software::Software;

/// A device with a domain. The tests take turns: they count what the process has open.
struct Rig {
    domain: Arc<ProtectionDomain<'static>>,
    device: Software,
    files: usize,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    fn new() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let device = Software::new();
        let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
        let rig = Self { domain, device, files: 0, _turn: turn };
        // Open what is opened once per process, such as by the first channel, so that it is not counted as a
        // leak.
        drop(rig.prepared());
        Self { files: open_files(), ..rig }
    }

    fn builder(&self) -> ChannelBuilder<'static> {
        Channel::builder(&self.domain)
            .max_inline_data(64)
            // Virtual time flies while a thread polls, so a send waits without limit for its receive.
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .settle_timeout(Duration::from_millis(50))
    }

    fn prepared(&self) -> PreparedChannel<'static> {
        self.builder().build().unwrap()
    }

    /// No connection has left anything behind: neither queue pairs nor files.
    #[track_caller]
    fn assert_nothing_left(&self) {
        let live = self.device.live_objects();
        assert_eq!((live.queue_pairs, live.completion_queues), (0, 0));
        assert_eq!(open_files(), self.files, "open files");
    }

    /// One message each way.
    fn talk(&self, one: &mut Channel<'_>, two: &mut Channel<'_>) {
        self.tell(one, two);
        self.tell(two, one);
    }

    fn tell(&self, from: &mut Channel<'_>, to: &mut Channel<'_>) {
        let mut inbox = MemoryRegion::<u8>::new(&self.domain, 16).unwrap();
        thread::scope(|threads| {
            threads.spawn(|| from.send_inline_deadline(b"hello", soon()).unwrap());
            let done = to.receive_deadline(&mut inbox.slice_mut(..).unwrap(), soon()).unwrap();
            assert_eq!(done.byte_len(), 5);
        });
        assert_eq!(&inbox[..5], b"hello");
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Longer than a handshake that succeeds takes.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Short, for what cannot succeed.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// Two ends of a TCP connection.
fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = listener();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

/// Returns the error, and fails the test if there is none.
#[track_caller]
fn error<T>(result: Result<T, impl Into<ExchangeError>>) -> ExchangeError {
    result.err().expect("it fails").into()
}
