//! Errors of the system, with their usual causes.

use std::ffi::c_int;
use std::{fmt, io};

/// Whether no file, or no memory for one, is left: what could not be opened may exist.
pub(crate) fn is_used_up(errno: c_int) -> bool {
    matches!(errno, libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS)
}

/// Says what could not be made, and the usual cause.
pub(crate) fn explained(what: impl fmt::Display, error: &io::Error) -> io::Error {
    let cause = match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::AddrInUse, _) => {
            "UDP port 4791 is in use, by another device, another program, or the kernel's Soft-RoCE (module rdma_rxe), \
             which takes it on all addresses"
        }
        (io::ErrorKind::AddrNotAvailable, _) => {
            "no interface of this machine, or of this network namespace, has the address"
        }
        (_, Some(libc::EMFILE)) => "RLIMIT_NOFILE is used up (ulimit -n)",
        (_, Some(libc::ENFILE)) => "the machine has too many files open (/proc/sys/fs/file-max)",
        (_, Some(libc::EAGAIN)) => {
            "no thread is left: RLIMIT_NPROC (ulimit -u), or pids.max of the control group"
        }
        _ => return io::Error::new(error.kind(), format!("{what}: {error}")),
    };
    io::Error::new(error.kind(), format!("{what}: {cause}"))
}
