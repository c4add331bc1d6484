//! Memory of all kinds, on a device made of functions: the arguments that the provider receives, the handling
//! of its answers, and the transferred bytes.

mod elsewhere;
#[path = "../support/one_sided.rs"]
mod one_sided;
mod regions;
mod rereg;
mod windows;

use std::fs::File;
use std::os::fd::FromRawFd;

use ibverbs::*;
use ibverbs_function_device::{Builder, FunctionDevice};

const PAGE: usize = 4096;

fn paging_device() -> FunctionDevice {
    Builder::model().limits(|limits| limits.on_demand = 1).build()
}

/// Asserts that a call fails with this errno and these words, and that the verb is not called.
#[track_caller]
fn refused<T: std::fmt::Debug>(
    device: &FunctionDevice,
    result: Result<T>,
    errno: i32,
    words: &str,
) {
    let calls = device.calls("reg_mr");
    let error = result.expect_err("it is refused");
    assert_eq!(error.raw_os_error(), Some(errno), "{error}");
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(device.calls("reg_mr"), calls);
}

/// Anonymous shared memory as a file, which the function device takes for a dma-buf.
fn shared_file(bytes: u64) -> File {
    // SAFETY: the name is a C string; the descriptor that comes back is ours.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"memory".as_ptr(), 0)) };
    file.set_len(bytes).unwrap();
    file
}
