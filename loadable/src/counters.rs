//! Adds what the ports of this process count to the files of counters that `run` makes, which monitoring reads: a port of all
//! processes counts what each of them does.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::time::Duration;

use ibverbs_software::{Device, PortCounters};

/// How often a thread adds what is new.
const PERIOD: Duration = Duration::from_secs(1);

/// How long a process that ends tries to add the rest while others do.
const LAST: Duration = Duration::from_millis(100);

/// The names of the files, as the kernel has them. Data is counted in words of four bytes.
const FILES: [&str; 5] =
    ["port_xmit_data", "port_xmit_packets", "port_rcv_data", "port_rcv_packets", "port_rcv_errors"];

fn values(counters: &PortCounters) -> [u64; FILES.len()] {
    [
        counters.bytes_sent / 4,
        counters.packets_sent,
        counters.bytes_received / 4,
        counters.packets_received,
        counters.packets_malformed,
    ]
}

struct Counter {
    path: PathBuf,
    added: u64,
}

impl Counter {
    /// Another process adds to its file at the moment: `WouldBlock`.
    fn set(&mut self, value: u64) -> io::Result<()> {
        if value == self.added {
            return Ok(());
        }
        // The folder may be another program's by now: no FIFO is waited for, and no link followed.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let mut file =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(&self.path)?;
        try_lock(&file)?;
        let mut text = String::new();
        file.by_ref().take(32).read_to_string(&mut text)?;
        let sum: u64 = text.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
        let sum = sum.wrapping_add(value - self.added);
        // The text never gets shorter.
        file.write_all_at(format!("{sum}\n").as_bytes(), 0)?;
        self.added = value;
        Ok(())
    }
}

/// Closing the file unlocks it.
fn try_lock(file: &File) -> io::Result<()> {
    // SAFETY: no memory is involved.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The devices of a process, and their files in the order of the devices and their ports.
pub(crate) struct Published {
    devices: &'static [Device],
    files: Vec<[Counter; FILES.len()]>,
}

impl Published {
    /// `None` if `run` has made no folder for counters.
    pub(crate) fn new(devices: &'static [Device]) -> Option<Self> {
        let class = PathBuf::from(std::env::var_os("IBVERBS_SOFTWARE_SYSFS")?);
        let ports = devices.iter().flat_map(|device| {
            let folder = class.join(device.name()).join("ports");
            (1..=device.port_counters().len()).map(move |port| folder.join(port.to_string()))
        });
        let files = ports.map(|port| {
            FILES.map(|name| Counter { path: port.join("counters").join(name), added: 0 })
        });
        Some(Self { devices, files: files.collect() })
    }

    /// Adds what is new. Returns whether something is left since others add at the moment.
    pub(crate) fn add(&mut self) -> bool {
        let counters = self.devices.iter().flat_map(Device::port_counters);
        let mut is_left = false;
        for (files, counters) in self.files.iter_mut().zip(counters) {
            for (file, value) in files.iter_mut().zip(values(&counters)) {
                let added = file.set(value);
                is_left |= added.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            }
        }
        is_left
    }

    /// Adds the rest at the end of the process.
    pub(crate) fn add_last(&mut self) {
        let tries = 10;
        for _ in 0..tries {
            if !self.add() {
                break;
            }
            std::thread::sleep(LAST / tries);
        }
    }
}

/// Starts the thread that adds, which blocks all signals: they are for the program's own threads.
pub(crate) fn start(mut add: impl FnMut() + Send + 'static) {
    // SAFETY: the sets are live variables, and the thread's own set is as it was afterwards.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let thread = std::thread::Builder::new().name("ibverbs-counters".into());
        // Without a thread, the counts are added when the process ends.
        _ = thread.spawn(move || {
            loop {
                std::thread::sleep(PERIOD);
                add();
            }
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut());
    }
}
