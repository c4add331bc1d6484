use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::{fmt, fs, io};

use super::{Context, Device};
use crate::base::{Error, Object, Result, ffi};

const VERB: &str = "counters";

/// Words, and the drivers' names with the units of one count. The first existing name counts.
macro_rules! counters {
    ($($(#[$meta:meta])* $counter:ident, $words:literal: $(($name:literal, $unit:literal)),+;)+) => {
        /// A counter under one name, whatever each driver calls it.
        ///
        /// Drivers count slightly different things, and none has all counters. [`Counters::by_name`] finds
        /// those without a variant.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub enum Counter {
            $($(#[$meta])* $counter,)+
        }

        impl Counter {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$counter),+];

            fn names(self) -> &'static [(&'static str, u64)] {
                match self {
                    $(Self::$counter => &[$(($name, $unit)),+],)+
                }
            }
        }

        impl fmt::Display for Counter {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Self::$counter => $words,)+
                })
            }
        }
    };
}

counters! {
    /// Bytes sent, with headers (`port_xmit_data`, in words of 4 bytes; `tx_bytes`).
    SentBytes, "bytes sent": ("port_xmit_data", 4), ("tx_bytes", 1);
    /// Bytes received, with headers (`port_rcv_data`, in words of 4 bytes; `rx_bytes`).
    ReceivedBytes, "bytes received": ("port_rcv_data", 4), ("rx_bytes", 1);
    /// Packets sent (`port_xmit_packets`, `tx_pkts`; `sent_pkts` of rxe).
    SentPackets, "packets sent": ("port_xmit_packets", 1), ("tx_pkts", 1), ("sent_pkts", 1);
    /// Packets received (`port_rcv_packets`, `rx_pkts`; `rcvd_pkts` of rxe).
    ReceivedPackets, "packets received": ("port_rcv_packets", 1), ("rx_pkts", 1), ("rcvd_pkts", 1);
    /// How often this side sent again what was not acknowledged.
    ///
    /// efa counts packets (`retrans_pkts`), mlx5 and bnxt_re timeouts (`local_ack_timeout_err`,
    /// `to_retransmits`), rxe retries for any reason (`completer_retry_err`).
    Retransmissions, "retransmissions":
        ("retrans_pkts", 1), ("local_ack_timeout_err", 1), ("to_retransmits", 1),
        ("completer_retry_err", 1);
    /// How often a peer missed an earlier packet of this side (`packet_seq_err` of mlx5, `rcvd_seq_err` of
    /// rxe, `seq_err_naks_rcvd` of bnxt_re).
    SequenceErrors, "sequence errors":
        ("packet_seq_err", 1), ("rcvd_seq_err", 1), ("seq_err_naks_rcvd", 1);
    /// Packets that arrived out of order (`out_of_sequence` of mlx5, `out_of_seq_request` of rxe,
    /// `oos_drop_count` of bnxt_re).
    OutOfOrder, "packets out of order":
        ("out_of_sequence", 1), ("out_of_seq_request", 1), ("oos_drop_count", 1);
    /// Requests that a peer sent again (`duplicate_request` of mlx5 and rxe, `dup_req` of bnxt_re).
    DuplicateRequests, "duplicate requests": ("duplicate_request", 1), ("dup_req", 1);
    /// How often a peer had no receive for a message from this side (`rnr_nak_retry_err` of mlx5,
    /// `rcvd_rnr_err` of rxe, `rnr_naks_rcvd` of bnxt_re).
    RnrNaksReceived, "RNR NAKs received":
        ("rnr_nak_retry_err", 1), ("rcvd_rnr_err", 1), ("rnr_naks_rcvd", 1);
    /// Messages that found no receive posted here (`out_of_buffer` of mlx5, `send_rnr_err` of rxe,
    /// `rx_out_of_buffer` of bnxt_re).
    ReceiverNotReady, "receiver not ready":
        ("out_of_buffer", 1), ("send_rnr_err", 1), ("rx_out_of_buffer", 1);
    /// Requests given up after all retries (`req_transport_retries_exceeded` of mlx5,
    /// `retry_exceeded_err` of rxe, `max_retry_exceeded` of bnxt_re).
    RetriesExceeded, "retries exceeded":
        ("req_transport_retries_exceeded", 1), ("retry_exceeded_err", 1), ("max_retry_exceeded", 1);
    /// Requests given up because the peer had no receive (`req_rnr_retries_exceeded` of mlx5,
    /// `retry_rnr_exceeded_err` of rxe).
    RnrRetriesExceeded, "RNR retries exceeded":
        ("req_rnr_retries_exceeded", 1), ("retry_rnr_exceeded_err", 1);
    /// Congestion notifications sent to peers (`np_cnp_sent` of mlx5).
    CongestionNotificationsSent, "congestion notifications sent": ("np_cnp_sent", 1);
    /// Congestion notifications that slowed this side down (`rp_cnp_handled` of mlx5).
    CongestionNotificationsHandled, "congestion notifications handled": ("rp_cnp_handled", 1);
}

/// Counters at one moment: [`Device::port_counters`], [`Device::counters`].
///
/// All processes share them, and they do not begin at 0: see [`since`](Self::since). With feature `serde` they
/// serialise as a map.
#[derive(Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Counters {
    values: BTreeMap<String, u64>,
}

impl Counters {
    /// The value in the unit that [`Counter`] names; `None` if the driver has no such counter.
    pub fn get(&self, counter: Counter) -> Option<u64> {
        counter
            .names()
            .iter()
            .find_map(|(name, unit)| Some(self.by_name(name)?.saturating_mul(*unit)))
    }

    /// The counter that the driver calls `name`, in the driver's unit.
    pub fn by_name(&self, name: &str) -> Option<u64> {
        self.values.get(name).copied()
    }

    /// All counters by the driver's names, in alphabetical order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        self.values.iter().map(|(name, value)| (name.as_str(), *value))
    }

    /// Whether there is no counter.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// How far each counter has moved since `before`, without those that have not moved, were reset, or are
    /// new.
    ///
    /// ```no_run
    /// # let context = ibverbs::open("rxe0")?;
    /// # let run = || {};
    /// let before = context.port_counters(1)?;
    /// run();
    /// let moved = context.port_counters(1)?.since(&before);
    /// println!("{} requests were sent again", moved.get(ibverbs::device::Counter::Retransmissions).unwrap_or(0));
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let moved = self.iter().filter_map(|(name, value)| {
            let difference = value.checked_sub(before.by_name(name)?)?;
            (difference > 0).then(|| (name.to_owned(), difference))
        });
        Self { values: moved.collect() }
    }

    /// Earlier values stay. The folder may be missing.
    fn read(&mut self, folder: &Path) -> Result<()> {
        let files = match fs::read_dir(folder) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(&error)),
        };
        for file in files {
            let file = file.map_err(|error| failed(&error))?;
            let Ok(name) = file.file_name().into_string() else { continue };
            // For how long, in ms, the kernel caches the values.
            if name == "lifespan" {
                continue;
            }
            // Drivers have files, unreadable or with text, for counters that the device lacks.
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            if let Ok(value) = text.trim_end().parse() {
                self.values.entry(name).or_insert(value);
            }
        }
        Ok(())
    }

    fn of(device: &Path, port: Option<u8>) -> Result<Self> {
        let mut counters = Self::default();
        let Some(port) = port else {
            counters.read(&device.join("hw_counters"))?;
            return Ok(counters);
        };
        let folder = device.join("ports").join(port.to_string());
        if !folder.is_dir() {
            let reason = "the kernel knows no such port of the device";
            return Err(Error::with_reason(VERB, libc::ENOENT, reason));
        }
        counters.read(&folder.join("counters"))?;
        counters.read(&folder.join("hw_counters"))?;
        Ok(counters)
    }
}

fn failed(error: &io::Error) -> Error {
    Error::new(VERB, error.raw_os_error().unwrap_or(libc::EIO))
}

impl fmt::Debug for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Device<'_> {
    /// The counters of a port in sysfs: InfiniBand's and the driver's own, or none.
    ///
    /// It reads dozens of files, and most drivers query the device for them: keep it off the data path.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`: there is no such port. They count from 1.
    ///  - `EACCES`, `EMFILE` ..: sysfs cannot be read.
    pub fn port_counters(&self, port: u8) -> Result<Counters> {
        Counters::of(self.sysfs_path(), Some(port))
    }

    /// The device's counters that belong to no port.
    ///
    /// # Errors
    ///
    ///  - `EACCES`, `EMFILE` ..: sysfs cannot be read.
    pub fn counters(&self) -> Result<Counters> {
        Counters::of(self.sysfs_path(), None)
    }
}

impl Context<'_> {
    /// [`Device::port_counters`].
    ///
    /// # Errors
    ///
    /// Those of [`Device::port_counters`].
    pub fn port_counters(&self, port: u8) -> Result<Counters> {
        self.device().port_counters(port)
    }

    /// [`Device::counters`].
    ///
    /// # Errors
    ///
    /// Those of [`Device::counters`].
    pub fn counters(&self) -> Result<Counters> {
        self.device().counters()
    }
}

/// The objects that this process holds, over all devices: see [`process_resources`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ProcessResources {
    /// Open devices.
    pub contexts: usize,
    /// Protection domains, with parent domains.
    pub protection_domains: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
    /// Shared receive queues.
    pub shared_receive_queues: usize,
    /// Memory regions.
    pub memory_regions: usize,
    /// Bytes pinned for devices by the whole process (`VmPin` in `/proc/self/status`).
    pub pinned_bytes: u64,
}

/// Counts this process's pinned memory, and its objects of this crate that were not destroyed (owned,
/// forgotten or leaked).
///
/// # Errors
///
///  - `ENOENT`, `EACCES`, `EMFILE` ..: `/proc/self/status` cannot be read.
pub fn process_resources() -> Result<ProcessResources> {
    let status = fs::read_to_string("/proc/self/status").map_err(|error| failed(&error))?;
    Ok(ProcessResources {
        contexts: live::<ffi::ibv_context>(),
        protection_domains: live::<ffi::ibv_pd>(),
        completion_queues: live::<ffi::ibv_cq>(),
        queue_pairs: live::<ffi::ibv_qp>(),
        shared_receive_queues: live::<ffi::ibv_srq>(),
        memory_regions: live::<ffi::ibv_mr>(),
        pinned_bytes: pinned(&status),
    })
}

fn live<T: Object>() -> usize {
    T::live().load(Ordering::Relaxed)
}

/// In bytes. Only kernel threads lack it.
fn pinned(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map_or(0, |kib| kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(files: &[(&str, &str)]) -> std::path::PathBuf {
        let name = format!("ibverbs-counters-{}-{}", std::process::id(), files.len());
        let folder = std::env::temp_dir().join(name);
        for (file, text) in files {
            let file = folder.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        folder
    }

    #[cfg(feature = "serde")]
    #[test]
    fn counters_serialise_as_a_map() {
        let values = [("out_of_buffer".to_owned(), 3)].into();
        let json = serde_json::to_string(&Counters { values }).unwrap();
        assert_eq!(json, r#"{"out_of_buffer":3}"#);
    }

    #[test]
    fn counters_have_one_meaning_whatever_their_name() {
        let folder = device(&[
            ("ports/1/counters/port_xmit_data", "250\n"),
            ("ports/1/counters/symbol_error", "N/A (no PMA)\n"),
            ("ports/1/counters/link_downed", "1\n"),
            ("ports/1/hw_counters/link_downed", "2\n"),
            ("ports/1/hw_counters/lifespan", "10\n"),
            ("ports/1/hw_counters/out_of_seq_request", "7\n"),
            ("ports/2/gids/0", "fe80::1\n"),
            ("hw_counters/active_qps", "3\n"),
        ]);
        let port = Counters::of(&folder, Some(1)).unwrap();
        let names: Vec<_> = port.iter().collect();
        assert_eq!(names, [("link_downed", 1), ("out_of_seq_request", 7), ("port_xmit_data", 250)]);
        assert_eq!(port.get(Counter::SentBytes), Some(1000));
        assert_eq!(port.get(Counter::OutOfOrder), Some(7));
        assert_eq!(port.get(Counter::Retransmissions), None);
        assert!(Counters::of(&folder, Some(2)).unwrap().is_empty());
        assert_eq!(Counters::of(&folder, None).unwrap().by_name("active_qps"), Some(3));
        let error = Counters::of(&folder, Some(3)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn only_what_has_moved_forward_has_moved() {
        let of = |values: &[(&str, u64)]| Counters {
            values: values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        };
        let before = of(&[("same", 1), ("more", 1), ("set_back", 9)]);
        let after = of(&[("same", 1), ("more", 5), ("set_back", 2), ("new", 3)]);
        assert_eq!(after.since(&before), of(&[("more", 4)]));
    }

    #[test]
    fn pinned_memory_is_read_in_bytes() {
        assert_eq!(pinned("Name:\tx\nVmLck:\t 1 kB\nVmPin:\t      12 kB\n"), 12288);
        assert_eq!(pinned("Name:\tkthreadd\n"), 0);
    }

    #[test]
    fn each_counter_has_a_name_of_its_own() {
        for (index, one) in Counter::ALL.iter().enumerate() {
            for other in &Counter::ALL[..index] {
                assert!(one.names().iter().all(|name| !other.names().contains(name)), "{one}");
                assert_ne!(one.to_string(), other.to_string());
            }
        }
    }
}
