//! A device of software on which channels connect.
//!
//! It counts what the process has open, so whatever opens or closes files takes its turn (see [`turn`]).

use std::io::Read;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::tcp::ExchangeError;
use ibverbs::{
    Channel, ChannelBuilder, PreparedChannel, ProtectionDomain, settings::MaxRnrRetries,
};

use crate::software::Software;

/// A device with a domain.
pub(crate) struct Rig {
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) device: Software,
    files: usize,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let turn = turn();
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

    pub(crate) fn prepared(&self) -> PreparedChannel<'static> {
        self.builder().build().unwrap()
    }

    /// No connection has left anything behind: neither queue pairs nor files.
    #[track_caller]
    pub(crate) fn assert_nothing_left(&self) {
        let live = self.device.live_objects();
        assert_eq!((live.queue_pairs, live.completion_queues), (0, 0));
        assert_eq!(open_files(), self.files, "open files");
    }
}

/// Held by one test at a time.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Longer than a handshake that succeeds takes.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// Two ends of a TCP connection.
pub(crate) fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = listener();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (one, listener.accept().unwrap().0)
}

/// Returns the error, and fails the test if there is none.
#[track_caller]
pub(crate) fn error<T>(result: Result<T, impl Into<ExchangeError>>) -> ExchangeError {
    result.err().expect("it fails").into()
}

/// The bytes of a client whose queue pair will be the next one: a greeting, and that it is ready.
pub(crate) fn recorded(rig: &Rig) -> (Vec<u8>, Vec<u8>) {
    let prepared = rig.prepared();
    let (mut ours, mut theirs) = tcp_pair();
    // This client gets no answer.
    theirs.shutdown(Shutdown::Write).unwrap();
    let reason = error(prepared.connect_over(&mut ours, b"private", soon()));
    assert!(matches!(reason, ExchangeError::Closed(_)), "{reason}");
    drop(ours);
    let mut greeting = Vec::new();
    theirs.read_to_end(&mut greeting).unwrap();
    (greeting, vec![1, 0, 0, 0, 0])
}
