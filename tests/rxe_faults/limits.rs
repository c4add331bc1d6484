//! Limits that are reached: file descriptors, queue pairs. `rxe_bad_input` tests locked memory.

use std::process::Command;
use std::{env, fs, process};

use ibverbs::{
    Channel, CompletionChannel, CompletionQueue, Error, ErrorKind, PreparedChannel,
    ProtectionDomain, QueuePairType, Rc,
};

use crate::alone;
use crate::figures::figure;
use crate::vm::channels::{Side, exchange, handshake};
use crate::vm::process::{Limit, open_files};
use crate::vm::{assert_nothing_left, run};

/// The highest descriptor that is open.
fn highest_file() -> u64 {
    let files = fs::read_dir("/proc/self/fd").unwrap();
    files.map(|file| file.unwrap().file_name().to_str().unwrap().parse().unwrap()).max().unwrap()
}

/// Opens everything that needs a file, as far as the limit allows.
fn all_that_opens_files() -> Result<(), Error> {
    ibverbs::devices()?;
    let context = ibverbs::open("rxe0")?;
    let channel = CompletionChannel::new(&context)?;
    let queue = CompletionQueue::builder(&context, 8).channel(&channel).build()?;
    let other = CompletionQueue::builder(&context, 8).own_channel().build()?;
    let domain = context.alloc_pd()?;
    drop(domain.create_qp(&queue, &other, Rc).build()?);
    drop(domain.create_channel().sleep_after(1).build()?);
    domain.allocate::<u8>(4096)?.close()
}

/// The error is the limit, and its text says so.
fn assert_out_of_files(error: Error) -> &'static str {
    assert_eq!(
        (error.kind(), error.raw_os_error()),
        (ErrorKind::Resource, Some(libc::EMFILE)),
        "{error}"
    );
    assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
    error.verb()
}

/// The limit grows by one descriptor each time, until there are enough.
#[test]
#[ignore = "Soft-RoCE: listing its devices opens files"]
fn out_of_file_descriptors() {
    const CHILD: &str = "IBVERBS_TEST_FEW_FILES";
    let _alone = alone("file descriptors", 250);
    if let Ok(room) = env::var(CHILD) {
        // This process has not listed the devices before.
        let limit = highest_file() + room.parse::<u64>().unwrap();
        let _limit = Limit::new(libc::RLIMIT_NOFILE, limit);
        match all_that_opens_files() {
            Ok(()) => println!("enough"),
            Err(error) => println!("failed: {}", assert_out_of_files(error)),
        }
        return;
    }
    // Opens what is opened once per process, so that it does not count.
    all_that_opens_files().unwrap();
    let before = open_files();
    let mut verbs = Vec::new();
    let needed = (0..32).find(|room| {
        let limit = Limit::new(libc::RLIMIT_NOFILE, highest_file() + room);
        let result = all_that_opens_files();
        drop(limit);
        assert_eq!(open_files(), before, "with room for {room}: {result:?}");
        assert_nothing_left("rxe0");
        verbs.extend(result.err().map(assert_out_of_files));
        result.is_ok()
    });
    let needed = needed.expect("32 descriptors are enough");
    let exe = env::current_exe().unwrap();
    let name = "limits::out_of_file_descriptors";
    let mut fresh = 0;
    for room in 0..=needed {
        let mut child = Command::new(&exe);
        child
            .args(["--include-ignored", "--nocapture", "--exact", name])
            .env(CHILD, room.to_string());
        let child = child.output().unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        let error = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "room for {room}: {text}{error}");
        fresh += u32::from(text.contains("failed: ibv_get_device_list"));
        assert_eq!(text.contains("enough"), room == needed, "room for {room}: {text}");
    }
    assert!(fresh > 0, "listing never failed");
    verbs.sort_unstable();
    verbs.dedup();
    assert_nothing_left("rxe0");
    figure(
        "no-file-descriptors",
        &format!(
            "with room for 0 to {needed} more files, and in fresh processes: EMFILE of \
             {verbs:?}, each text naming RLIMIT_NOFILE; after each the same number of files open \
             ({before}) and resources at baseline; with the limit lifted all works"
        ),
    );
}

/// The kernel's limit for a control group, on the objects of one device; put back when dropped.
struct ControlGroup;

const ROOT: &str = "/tmp/ibverbs-control-groups";

impl ControlGroup {
    fn new(limit: &str) -> Self {
        run(&format!(
            "mkdir -p {ROOT}; mount -t cgroup2 none {ROOT}
            echo +rdma > {ROOT}/cgroup.subtree_control
            mkdir {ROOT}/limited
            echo '{limit}' > {ROOT}/limited/rdma.max
            echo {} > {ROOT}/limited/cgroup.procs",
            process::id()
        ));
        Self
    }

    /// The resources in use.
    fn current() -> String {
        fs::read_to_string(format!("{ROOT}/limited/rdma.current")).unwrap()
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        run(&format!(
            "echo $$ > {ROOT}/cgroup.procs; echo {} > {ROOT}/cgroup.procs; rmdir {ROOT}/limited; umount {ROOT}",
            process::id()
        ));
    }
}

/// Soft-RoCE has a million queue pairs; a control group has as many as it is given.
#[test]
#[ignore = "Soft-RoCE: a control group counts its queue pairs"]
fn out_of_queue_pairs() {
    const OBJECTS: usize = 24;
    let _alone = alone("queue pairs", 250);
    let _group = ControlGroup::new(&format!("rxe0 hca_handle=2 hca_object={OBJECTS}"));
    let (mut most, mut refused) = (0, 0);
    for round in 0..3 {
        let sides = (Side::new("rxe0"), Side::new("rxe1"));
        let mut prepared: Vec<PreparedChannel<'static>> = Vec::new();
        let error = loop {
            assert!(prepared.len() < OBJECTS, "there is no limit");
            match sides.0.builder().build() {
                Ok(channel) => prepared.push(channel),
                Err(error) => break error,
            }
        };
        // The last object to be created may have been the channel's completion queue.
        assert!(["ibv_create_qp", "ibv_create_cq"].contains(&error.verb()), "{error}");
        let limit = (ErrorKind::Resource, Some(libc::EAGAIN));
        assert_eq!((error.kind(), error.raw_os_error()), limit, "{error}");
        assert!(error.to_string().contains("rdma.max"), "{error}");
        most = prepared.len();
        refused += 1;
        // A queue pair by itself, with a queue that is there.
        let freed = prepared.pop().unwrap().close();
        freed.unwrap();
        let queue = CompletionQueue::new(&sides.0.context, 8).unwrap();
        let reliable = QueuePairType::ReliableConnected;
        let mut queue_pairs = Vec::new();
        let error = loop {
            match sides.0.domain.create_qp(&queue, &queue, reliable).build() {
                Ok(queue_pair) => queue_pairs.push(queue_pair),
                Err(error) => break error,
            }
        };
        assert_eq!((error.kind(), error.raw_os_error()), limit, "{error}");
        assert_eq!(error.verb(), "ibv_create_qp");
        assert!(error.to_string().contains("rdma.max"), "{error}");
        refused += 1;
        for other in [
            sides.0.context.create_cq(4).map(drop).unwrap_err(),
            sides.0.context.alloc_pd().map(drop).unwrap_err(),
            sides.0.domain.allocate::<u8>(64).map(drop).unwrap_err(),
            sides.0.domain.create_srq(4, 1).map(drop).unwrap_err(),
        ] {
            assert_eq!((other.kind(), other.raw_os_error()), limit, "{other}");
            assert!(other.to_string().contains("rdma.max"), "{other}");
            refused += 1;
        }
        // Existing objects still work, and what is released can be allocated again.
        drop(queue_pairs);
        drop(queue);
        while prepared.len() > 4 {
            drop(prepared.pop());
        }
        let theirs = sides.1.builder().build().unwrap();
        let (mut one, mut two) = handshake(prepared.remove(0), theirs);
        exchange(&sides, &mut one, &mut two);
        drop((one, two, prepared, sides));
        assert_nothing_left("rxe0");
        assert_nothing_left("rxe1");
        let current = ControlGroup::current();
        let none = |line: &str| line.trim_end().ends_with("hca_handle=0 hca_object=0");
        assert!(current.lines().all(none), "round {round}: {current}");
    }
    figure(
        "no-queue-pairs",
        &format!(
            "limit of the control group ({OBJECTS} objects): {refused} refusals of ibv_create_qp and \
             others over 3 rounds, each Resource (EAGAIN) and naming rdma.max; the {most} channels \
             made before worked on; the group's own count and resources back to 0 and baseline"
        ),
    );
}

#[test]
fn a_domain_outlives_what_could_not_be_made() {
    let _alone = alone("failed builds", 250);
    let context = ibverbs::open("rxe0").unwrap();
    let domain = ProtectionDomain::new(&context).unwrap();
    let most = context.query_device().unwrap().max_qp_wr();
    for _ in 0..100 {
        // The completion queue is made, and the queue pair is refused.
        let error = Channel::builder(&domain).max_send_wr(most + 1).build().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    domain.close().unwrap();
    context.close().unwrap();
    assert_nothing_left("rxe0");
}
