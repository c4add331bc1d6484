//! The rules for requests that access the peer's memory: its bounds, and the size and alignment of atomics.
//!
//! Work requests, batches and channels all use these checks, so the same mistake has the same message
//! everywhere.

use crate::error::{Error, Result, err_from_call};
use crate::ffi;
use crate::memory::RemoteMemoryRegion;

const VERB: &str = "ibv_post_send";

/// The length in bytes of an atomic, on both sides.
const ATOMIC: u64 = 8;

/// Checks that the peer's memory has room for `length` bytes.
#[inline]
pub(crate) fn check_remote(remote: &RemoteMemoryRegion, length: u64) -> Result<()> {
    if length > remote.length() {
        return err_from_call(too_small(remote, length));
    }
    Ok(())
}

#[cold]
fn too_small(remote: &RemoteMemoryRegion, length: u64) -> Error {
    let what = "the length, for the remote region,";
    Error::out_of_range(VERB, what, length, 0, remote.length())
}

/// Checks that an atomic can access the peer's memory (8 bytes, aligned) and return `local` bytes.
#[inline]
pub(crate) fn check_atomic(remote: &RemoteMemoryRegion, local: u64) -> Result<()> {
    if local != ATOMIC || remote.length() < ATOMIC || !remote.address().is_multiple_of(ATOMIC) {
        return err_from_call(not_atomic(remote, local));
    }
    Ok(())
}

#[cold]
fn not_atomic(remote: &RemoteMemoryRegion, local: u64) -> Error {
    if local != ATOMIC {
        let what = "the length in bytes of an atomic's buffer";
        Error::out_of_range(VERB, what, local, ATOMIC as u32, ATOMIC)
    } else if remote.length() < ATOMIC {
        too_small(remote, ATOMIC)
    } else {
        Error::invalid(VERB, "the remote address of an atomic is not a multiple of 8")
    }
}

/// The part of a read's or write's C struct that describes the peer's memory.
#[inline]
pub(crate) fn rdma(remote: &RemoteMemoryRegion) -> ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
    ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
        remote_addr: remote.address(),
        rkey: remote.rkey(),
    }
}

/// The part of an atomic's C struct that describes the peer's memory.
#[inline]
pub(crate) fn atomic(
    remote: &RemoteMemoryRegion,
    compare_add: u64,
    swap: u64,
) -> ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
    ffi::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
        remote_addr: remote.address(),
        compare_add,
        swap,
        rkey: remote.rkey(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(address: u64, length: u64) -> RemoteMemoryRegion {
        RemoteMemoryRegion::new(address, length, 0xabc).unwrap()
    }

    #[test]
    fn a_message_fits_into_the_remote_region() {
        assert!(check_remote(&remote(0x7000, 24), 24).is_ok());
        assert!(check_remote(&remote(0x7000, 0), 0).is_ok());
        let error = check_remote(&remote(0x7000, 24), 25).unwrap_err().to_string();
        let text = "the length, for the remote region, is 25, and must be within 0..=24";
        assert!(error.ends_with(text), "{error}");
    }

    #[test]
    fn an_atomic_has_8_aligned_bytes_on_both_sides() {
        assert!(check_atomic(&remote(0x7000, 8), 8).is_ok());
        for (region, local, text) in [
            (remote(0x7000, 8), 4, "of an atomic's buffer is 4, and must be within 8..=8"),
            (remote(0x7000, 7), 8, "must be within 0..=7"),
            (remote(0x7004, 8), 8, "not a multiple of 8"),
        ] {
            let error = check_atomic(&region, local).unwrap_err().to_string();
            assert!(error.ends_with(text), "{error}");
        }
    }
}
