//! What the machine does not have: file descriptors, queue pairs. Locked memory is in
//! `device_bad_input`.

use std::fs;
use std::sync::Arc;

use ibverbs::{
    Channel, CompletionChannel, CompletionQueue, Context, Error, ErrorKind, ProtectionDomain,
    QueuePairType,
};

use crate::alone;
use crate::figures::figure;
use crate::vm::channels::{connect, exchange, sides};
use crate::vm::process::{Limit, open_files};
use crate::vm::{assert_nothing_left, resources, run};

/// Everything that opens files, as far as it gets.
fn all_that_opens_files() -> Result<(), Error> {
    ibverbs::devices()?;
    let context = ibverbs::open("rxe0")?;
    let channel = CompletionChannel::new(&context)?;
    let queue = CompletionQueue::builder(&context, 8).channel(&channel).build()?;
    let other = CompletionQueue::builder(&context, 8).own_channel().build()?;
    let domain = context.alloc_pd()?;
    domain.create_qp(&queue, &other, QueuePairType::ReliableConnected).build()?;
    domain.create_channel().sleep_after(1).build()?;
    domain.allocate::<u8>(4096)?;
    Ok(())
}

/// With one descriptor more each time, until there are enough.
#[test]
fn out_of_file_descriptors() {
    let _alone = alone("file descriptors", 60);
    // Whatever is opened once in the life of the process is opened now.
    all_that_opens_files().unwrap();
    let before = open_files();
    let mut verbs = Vec::new();
    let mut enough = false;
    for room in 0..32 {
        let highest = fs::read_dir("/proc/self/fd").unwrap();
        let numbers = highest.map(|file| file.unwrap().file_name().to_str().unwrap().parse());
        let highest: u64 = numbers.map(Result::unwrap).max().unwrap();
        // The listing has taken one, which is free again.
        let limit = Limit::new(libc::RLIMIT_NOFILE, highest + room);
        let result = all_that_opens_files();
        drop(limit);
        assert_eq!(open_files(), before, "with room for {room}: {result:?}");
        assert_nothing_left("rxe0");
        println!("{room}: {result:?}");
        match result {
            Ok(()) => {
                enough = true;
                break;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), libc::EMFILE, "with room for {room}: {error}");
                assert_eq!(error.kind(), ErrorKind::Resource, "{error}");
                assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
                verbs.push(error.verb());
            }
        }
    }
    assert!(enough, "32 descriptors are not enough?");
    verbs.dedup();
    println!("{verbs:?}");
}
