//! A dma-buf of the kernel's: memory of a memfd, where the machine has `/dev/udmabuf`.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use ibverbs::AccessFlags;
use ibverbs_rails::{RailMemory, Rails, RailsError, Transfer};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Result;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

use crate::support::World;
use crate::{SECOND, network, pattern, whole_write};

/// `struct udmabuf_create` of the kernel's `linux/udmabuf.h`.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

// SAFETY: `UDMABUF_CREATE` reads this structure, and returns a new descriptor.
unsafe impl Ioctl for Create {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::write::<Self>(b'u', 0x42)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self).cast()
    }

    unsafe fn output_from_ptr(returned: IoctlOutput, _: *mut c_void) -> Result<OwnedFd> {
        // SAFETY: the call has just made the descriptor, and returned it here alone.
        Ok(unsafe { OwnedFd::from_raw_fd(returned) })
    }
}

/// A memfd, and a dma-buf of it; without `/dev/udmabuf` the memfd again, which devices of software take for one.
fn dmabuf(len: usize) -> (File, OwnedFd) {
    let file = File::from(memfd_create("gpu", MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(len as u64).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    match OpenOptions::new().read(true).write(true).open("/dev/udmabuf") {
        Ok(device) => {
            let memfd = file.as_raw_fd() as u32;
            let create = Create { memfd, flags: 0, offset: 0, size: len as u64 };
            // SAFETY: the file is of the driver whose request this is.
            let dmabuf = unsafe { ioctl(device, create) }.unwrap();
            println!("a dma-buf of udmabuf");
            (file, dmabuf)
        }
        Err(error) => {
            println!(
                "NOT CHECKED: a dma-buf of the kernel's (/dev/udmabuf: {error}); a memfd instead"
            );
            let same = file.as_fd().try_clone_to_owned().unwrap();
            (file, same)
        }
    }
}

#[test]
fn a_dma_buf_goes_over_all_rails() {
    const LEN: usize = 1 << 20;
    const START: usize = 4096 + 24;
    let mut world = World::new(3, network());
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let [(our_file, ours), (their_file, theirs)] = [0, 1].map(|side| {
        let (file, dmabuf) = dmabuf(2 * LEN);
        let rails: &Rails = &world.sides[side];
        let registered = rails.register_dmabuf(dmabuf.as_fd(), START as u64, LEN, access).unwrap();
        (file, registered)
    });
    our_file.write_all_at(&pattern(LEN), START as u64).unwrap();
    let peer = world.peers[0];
    world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    world.until(SECOND, |world| world.ended() == [true]);
    let read = |file: &File| {
        let mut bytes = vec![0; LEN];
        file.read_exact_at(&mut bytes, START as u64).unwrap();
        bytes
    };
    assert!(read(&their_file) == pattern(LEN));
    assert!(world.sides[0].bytes_carried(peer).iter().all(|&bytes| bytes > 0));

    // And back, in parts, beside memory of the host.
    let host = world.sides[0].allocate(LEN, access).unwrap();
    our_file.write_all_at(&vec![0; LEN], START as u64).unwrap();
    let half = LEN / 2;
    let part = |memory: &RailMemory, range: std::ops::Range<usize>| memory.slice(range).unwrap();
    let transfer = Transfer::read_list([
        (part(&ours, half..LEN), theirs.remote().slice(half..LEN).unwrap()),
        (part(&host, 0..half), theirs.remote().slice(..half).unwrap()),
    ]);
    world.sides[0].post(peer, transfer).unwrap();
    world.until(SECOND, |world| world.ended() == [true, true]);
    assert!(read(&our_file)[..half] == vec![0; half]);
    assert!(read(&our_file)[half..] == pattern(LEN)[half..]);
    let mut bytes = vec![0; half];
    host.read(0, &mut bytes).unwrap();
    assert!(bytes == pattern(LEN)[..half]);
    let mut around = [1; 24];
    our_file.read_exact_at(&mut around, START as u64 - 24).unwrap();
    assert_eq!(around, [0; 24]);
}

#[test]
fn a_dma_buf_is_for_devices_alone() {
    let world = World::new(2, network());
    let (file, dmabuf) = dmabuf(8192);
    let rails: &Rails = &world.sides[0];
    let access = AccessFlags::LOCAL_WRITE;
    let memory = rails.register_dmabuf(dmabuf.as_fd(), 0, 8192, access).unwrap();
    drop((file, dmabuf));
    assert_eq!((memory.len(), memory.region(0).is_none()), (8192, true));
    for refused in [memory.read(0, &mut [0]), memory.write(0, &[0])] {
        let RailsError::InvalidInput(text) = refused.unwrap_err() else { panic!("another error") };
        assert!(text.contains("dma-buf"), "{text}");
    }
    // A pipe is no memory.
    let (reader, _writer) = std::io::pipe().unwrap();
    let error = rails.register_dmabuf(reader.as_fd(), 0, 4096, access).unwrap_err();
    assert!(matches!(error, RailsError::Verbs { .. }), "{error}");
}
