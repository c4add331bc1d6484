//! A program that drops its privileges: the kernel then refuses to process its sends, although they are in
//! the queue.

use std::thread;

use ibverbs::{ErrorKind, Inline, SharedMemoryRegion, TransportError};

use crate::alone;
use crate::vm::channels::{ALL, connect, deadline, exchange, nothing_is_left, sides};

#[test]
#[ignore = "Soft-RoCE: the system call of a post"]
fn what_the_kernel_was_not_told_of_is_taken_back() {
    let _alone = alone("credentials", 240);
    let sides = sides();
    let target = SharedMemoryRegion::<u64>::new(&sides.1.domain, 8, ALL).unwrap();
    target.fill(7);
    let mut local = sides.0.region(8);
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    exchange(&sides, &mut one, &mut two);
    thread::scope(|threads| {
        let (one, local) = (&mut one, &mut local);
        let remote = target.remote();
        let unprivileged = threads.spawn(move || {
            // SAFETY: no memory is involved. The bare system call is about this thread alone.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(changed, 0);
            let read = one.until(deadline()).read(&mut local.slice_mut(..).unwrap(), remote);
            let error = read.unwrap_err();
            let TransportError::Verbs(error) = error else { panic!("{error}") };
            assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
            assert!(error.to_string().contains("may still be carried out"), "{error}");
        });
        unprivileged.join().unwrap();
    });
    // The kernel is told of this one, and would find the earlier request in the queue too.
    let next = one.write(Inline(&[1; 8]), target.remote_range(..1).unwrap());
    assert_eq!(local[..], [0; 8], "the memory was given back, and written");
    assert_eq!(next.unwrap_err(), TransportError::Stopped);
    drop((one, two, target, local));
    nothing_is_left(sides);
}
