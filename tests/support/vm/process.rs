//! This process as the kernel sees it: its resources, limits and signals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io, process, ptr};

/// How many descriptors are open.
pub fn open_files() -> usize {
    // The listing itself has one open.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// The number of the line that begins with `name`, in KiB, in a file of /proc.
fn kib(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in:\n{text}"));
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The resident memory of this process in KiB.
pub fn resident_kib() -> u64 {
    kib("/proc/self/status", "VmRSS:")
}

/// The memory that is locked on behalf of this process in KiB, as registering counts it.
pub fn pinned_kib() -> u64 {
    kib("/proc/self/status", "VmPin:")
}

/// The memory that the kernel itself holds and cannot give back, in KiB.
pub fn kernel_kib() -> u64 {
    kib("/proc/meminfo", "SUnreclaim:")
}

/// Ends the process when it is not dropped in time: a hang must become a failure that says where.
#[must_use]
pub struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    pub fn new(what: &'static str, limit: Duration) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        thread::spawn(move || {
            let start = Instant::now();
            while start.elapsed() < limit {
                thread::sleep(Duration::from_millis(200));
                if seen.load(Ordering::Acquire) {
                    return;
                }
            }
            eprintln!("{what}: hangs, or takes longer than {limit:?}");
            process::abort();
        });
        Self(over)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// How many signals of storms were handled.
static HANDLED: AtomicU64 = AtomicU64::new(0);

/// Signals to the thread that made it, thousands in a second, each of which interrupts what it does in
/// the kernel. Until it is dropped.
#[must_use]
pub struct Storm {
    over: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
    before: u64,
}

extern "C" fn count(_: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

impl Storm {
    pub fn new() -> Self {
        // SAFETY: the handler does nothing that is not allowed in one. Without SA_RESTART, system
        // calls that are interrupted return EINTR.
        let target = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = count as extern "C" fn(libc::c_int) as usize;
            let installed = libc::sigaction(libc::SIGUSR1, &action, ptr::null_mut());
            assert_eq!(installed, 0, "{}", io::Error::last_os_error());
            libc::pthread_self()
        };
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let sender = thread::spawn(move || {
            while !seen.load(Ordering::Acquire) {
                // SAFETY: the thread is alive: its storm is not over before this thread is.
                unsafe { libc::pthread_kill(target, libc::SIGUSR1) };
                thread::sleep(Duration::from_micros(200));
            }
        });
        Self { over, sender: Some(sender), before: HANDLED.load(Ordering::Relaxed) }
    }

    /// How many signals it was so far.
    pub fn signals(&self) -> u64 {
        HANDLED.load(Ordering::Relaxed) - self.before
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let sender = self.sender.take().expect("it is joined once");
        sender.join().expect("it cannot panic");
    }
}

/// A lower limit on what this process may have, until it is dropped.
#[must_use]
pub struct Limit {
    resource: libc::__rlimit_resource_t,
    before: libc::rlimit,
}

impl Limit {
    /// The soft limit only, so that it can be raised again.
    pub fn new(resource: libc::__rlimit_resource_t, value: u64) -> Self {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the struct is writable.
        assert_eq!(unsafe { libc::getrlimit(resource, &mut before) }, 0);
        let limit = libc::rlimit { rlim_cur: value, ..before };
        // SAFETY: the struct is valid.
        assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
        Self { resource, before }
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        // SAFETY: the struct is valid. It is what was.
        unsafe { libc::setrlimit(self.resource, &self.before) };
    }
}

/// Runs `test` in a thread of its own that has given up root's rights (the thread, not the process:
/// the raw system call is about the calling thread alone).
pub fn as_nobody<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let thread = || {
        const NOBODY: libc::c_long = 65534;
        // SAFETY: the system call changes nothing but who this thread acts for.
        let returned = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(returned, 0);
        test()
    };
    thread::scope(|scope| scope.spawn(thread).join().unwrap())
}
