//! A peer requests access without the right to it: the device refuses, the peer gets an error, and the memory
//! stays unchanged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::memory::RawMemoryRegion;
use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, FetchAddWorkRequest, Inline, MemoryRegion,
    ProtectionDomain, RemoteMemoryRegion, SharedMemoryRegion, TransportError, TransportResult,
    WorkStatus, WriteWorkRequest, completion::WorkErrorClass,
};

use crate::alone;
use crate::figures::figure;
use crate::vm::PATIENCE;
use crate::vm::channels::{
    ALL, Side, connect, deadline, exchange, nothing_is_left, reconnect, sides,
};

/// The registered bytes. As many on either side of them are not registered.
const REGION: usize = 8192;
const WHOLE: usize = 3 * REGION;

#[derive(Clone, Copy, Debug)]
enum Request {
    Write,
    WriteWithImmediate,
    Read,
    FetchAdd,
    CompareSwap,
}

use Request::*;

const EVERY: [Request; 5] = [Write, WriteWithImmediate, Read, FetchAdd, CompareSwap];

/// The possible outcomes of a receive that the passive side has posted.
const PASSIVE: [WorkStatus; 3] =
    [WorkStatus::Flushed, WorkStatus::LocalAccess, WorkStatus::RemoteAccess];

/// The memory of the passive side. Only volatile reads access it, since a device may write to it.
struct Memory {
    /// The region comes before the bytes, so that it is dropped first.
    region: RawMemoryRegion<'static>,
    bytes: Box<[u8]>,
}

impl Memory {
    fn new(side: &Side, access: AccessFlags) -> Self {
        let mut bytes: Box<[u8]> = (0..WHOLE).map(Self::expected).collect();
        let start = bytes.as_mut_ptr();
        // SAFETY: the bytes outlive the region, stay where they are, and are accessed by volatile
        // reads only.
        let region =
            unsafe { RawMemoryRegion::new(&side.domain, start.add(REGION), REGION, access) };
        Self { region: region.unwrap(), bytes }
    }

    fn expected(index: usize) -> u8 {
        (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ 0x5a
    }

    /// Every byte of it, registered or not.
    fn assert_unchanged(&self, what: &str) {
        for index in 0..WHOLE {
            // SAFETY: it is within the bytes.
            let found = unsafe { self.bytes.as_ptr().add(index).read_volatile() };
            let place = index as isize - REGION as isize;
            assert_eq!(found, Self::expected(index), "{what}: the byte at {place} has changed");
        }
    }

    /// `length` bytes at any `offset`, in the region or not.
    fn at(&self, offset: i64, length: u64) -> RemoteMemoryRegion {
        let address = self.region.remote().address().wrapping_add_signed(offset);
        RemoteMemoryRegion::new(address, length, self.region.remote().rkey()).unwrap()
    }
}

/// Two channels, which are connected again after each refusal, and the outcomes of all requests.
struct Trial {
    sides: (Side, Side),
    /// The side that requests, and the side whose memory it is.
    channels: Option<(Channel<'static>, Channel<'static>)>,
    refused: u32,
    slowest: Duration,
}

impl Trial {
    fn new(access: AccessFlags) -> Self {
        let sides = sides();
        let channels = connect(sides.0.builder(), sides.1.builder().access(access));
        Self { sides, channels: Some(channels), refused: 0, slowest: Duration::ZERO }
    }

    /// Executes a request, which must end with `status` and leave the memory unchanged.
    fn refuse(
        &mut self,
        what: &str,
        request: Request,
        remote: RemoteMemoryRegion,
        status: WorkStatus,
        memory: &Memory,
    ) {
        let what = format!("{what}, {request:?} of {remote:?}");
        let (mut one, mut two) = self.channels.take().unwrap();
        let length = remote.length() as usize;
        let mut local = MemoryRegion::<u8>::new(&self.sides.0.domain, length).unwrap();
        local.fill(0x11);
        let start = Instant::now();
        // The passive side waits for a message, so that it learns of the refusal too. A write with immediate
        // would wait for a receive before anything is checked.
        let passive = two.scope(|s| {
            let receive = s.post_receive(())?;
            let error = ask(&mut one, request, &mut local, remote).expect_err(&what);
            let took = start.elapsed();
            let told = receive.wait_until(deadline()).map(drop);
            Ok::<_, TransportError>((error, took, told.expect_err(&what)))
        });
        let (error, took, told) = passive.unwrap();
        let told = told.work_error().unwrap_or_else(|| panic!("{what}: {told}"));
        assert!(PASSIVE.contains(&told.status()), "{what}: {told}");
        let failed = error.work_error().unwrap_or_else(|| panic!("{what}: {error}"));
        assert_eq!(failed.status(), status, "{what}: {failed}");
        assert_eq!(failed.class(), WorkErrorClass::Remote, "{what}: {failed}");
        assert!(took < PATIENCE, "{what}: it took {took:?}");
        memory.assert_unchanged(&what);
        if matches!(request, Read | FetchAdd | CompareSwap) {
            let untouched = local.iter().all(|&byte| byte == 0x11);
            assert!(untouched, "{what}: the reader's memory has changed");
        }
        let error = one.send(Inline(&[1])).unwrap_err();
        assert_eq!(error.work_error().unwrap().status(), WorkStatus::Flushed, "{what}: {error}");
        let (one, two) = reconnect(one, two);
        self.channels = Some((one, two));
        self.refused += 1;
        self.slowest = self.slowest.max(took);
    }

    /// Connected once more, data moves, and no object is left in the kernel.
    fn finish(self, row: &str, how: &str, memories: Vec<Memory>) {
        let Self { sides, channels, refused, slowest } = self;
        let (mut one, mut two) = channels.unwrap();
        exchange(&sides, &mut one, &mut two);
        drop((one, two, memories));
        nothing_is_left(sides);
        figure(
            row,
            &format!(
                "{how}: all {refused} requests (writes, reads and atomics) ended so, the slowest in \
                 {slowest:.1?} (bound {PATIENCE:?}); {WHOLE} bytes in and around the region \
                 unchanged after each, and the requester's too; the next request was Flushed, and \
                 so was the peer's receive; reset, connected again and data moved; resources at baseline"
            ),
        );
    }
}

/// Executes one request.
fn ask(
    channel: &mut Channel<'_>,
    request: Request,
    local: &mut MemoryRegion<'_, u8>,
    remote: RemoteMemoryRegion,
) -> TransportResult<()> {
    let done = match request {
        Write => channel.until(deadline()).write(local.slice(..)?, remote),
        WriteWithImmediate => channel
            .until(deadline())
            .run(WriteWorkRequest::new(&local.slice(..)?, remote).immediate(7)),
        Read => channel.until(deadline()).read(&mut local.slice_mut(..)?, remote),
        FetchAdd => channel.until(deadline()).run(FetchAddWorkRequest::new(
            &mut local.slice_mut(..)?,
            remote,
            3,
        )),
        CompareSwap => {
            let swap = u64::MAX;
            channel.until(deadline()).run(CompareSwapWorkRequest::new(
                &mut local.slice_mut(..)?,
                remote,
                0,
                swap,
            ))
        }
    };
    done.map(drop)
}

/// A key that was never given out, one of another domain, and one whose region is gone.
#[test]
fn a_wrong_rkey_opens_nothing() {
    let _alone = alone("wrong rkey", 250);
    let mut trial = Trial::new(ALL);
    let memory = Memory::new(&trial.sides.1, ALL);
    let right = memory.at(0, 8);
    let elsewhere = Arc::new(ProtectionDomain::new(&trial.sides.1.context).unwrap());
    let foreign = SharedMemoryRegion::<u64>::new(&elsewhere, 1, ALL).unwrap();
    let gone = SharedMemoryRegion::<u64>::new(&trial.sides.1.domain, 1, ALL).unwrap();
    let (key_of_gone, key_of_foreign) = (gone.rkey(), foreign.rkey());
    gone.close().unwrap();
    let wrong = [
        ("no key at all", 0),
        ("all ones", u32::MAX),
        ("another variant", right.rkey() ^ 1),
        ("another variant", right.rkey() ^ 0x80),
        ("another region", right.rkey().wrapping_add(0x4200)),
        ("the key of a region that is gone", key_of_gone),
        ("the key of another protection domain", key_of_foreign),
    ];
    for (what, rkey) in wrong {
        for request in EVERY {
            let remote = RemoteMemoryRegion::new(right.address(), 8, rkey).unwrap();
            trial.refuse(what, request, remote, WorkStatus::RemoteAccess, &memory);
        }
    }
    assert_eq!(foreign.to_vec(), [0]);
    drop((foreign, elsewhere));
    trial.finish("wrong-rkey", "RemoteAccess at the active side", vec![memory]);
}

/// The peer asks for memory before the region, behind it, over its edges, and all around it.
#[test]
fn beyond_a_region_there_is_nothing() {
    let _alone = alone("out of bounds", 250);
    let mut trial = Trial::new(ALL);
    let memory = Memory::new(&trial.sides.1, ALL);
    let region = REGION as i64;
    for (what, offset) in [
        ("right before it", -8),
        ("right behind it", region),
        ("far behind it", region + 4096),
        ("a terabyte away", 1 << 40),
    ] {
        for request in EVERY {
            let status = WorkStatus::RemoteAccess;
            trial.refuse(what, request, memory.at(offset, 8), status, &memory);
        }
    }
    // Atomics must be aligned, so none of these requests is one. The crate refuses addresses outside of a
    // region that it knows, so these regions are made up from numbers.
    for (what, offset, length) in [
        ("over its start", -1, 8),
        ("over its end", region - 7, 8),
        ("one byte too long, in several packets", 0, REGION as u64 + 1),
        ("one byte too early, in several packets", -1, REGION as u64),
        ("all around it", -region, WHOLE as u64),
    ] {
        for request in [Write, WriteWithImmediate, Read] {
            let status = WorkStatus::RemoteAccess;
            trial.refuse(what, request, memory.at(offset, length), status, &memory);
        }
    }
    // The last address there is: address plus length just does not overflow.
    let last = RemoteMemoryRegion::new(u64::MAX - 8, 8, memory.region.rkey()).unwrap();
    for request in [Write, Read] {
        trial.refuse("the end of all", request, last, WorkStatus::RemoteAccess, &memory);
    }
    // The crate refuses what it knows to be outside of the region.
    let mut local = trial.sides.0.region(2);
    let (mut one, two) = trial.channels.take().unwrap();
    let short = memory.at(0, 8);
    let error = one.write(local.slice(..).unwrap(), short).unwrap_err();
    assert!(
        matches!(error, TransportError::Verbs(e) if e.raw_os_error() == Some(libc::EINVAL)),
        "{error}"
    );
    let error = one.read(&mut local.slice_mut(..).unwrap(), short).unwrap_err();
    assert!(
        matches!(error, TransportError::Verbs(e) if e.raw_os_error() == Some(libc::EINVAL)),
        "{error}"
    );
    trial.channels = Some((one, two));
    drop(local);
    trial.finish("out-of-bounds", "RemoteAccess at the active side", vec![memory]);
}

/// Rights that the region does not grant.
#[test]
fn a_region_allows_what_it_was_registered_for() {
    let _alone = alone("read-only region", 250);
    let mut trial = Trial::new(ALL);
    let mut memories = Vec::new();
    let (read, write) = (AccessFlags::REMOTE_READ, AccessFlags::REMOTE_WRITE);
    let local = AccessFlags::LOCAL_WRITE;
    for (what, access, refused) in [
        ("read-only", read, &[Write, WriteWithImmediate, FetchAdd, CompareSwap][..]),
        ("local only", local, &EVERY),
        ("not even written locally", AccessFlags::empty(), &EVERY),
        ("write-only", local | write, &[Read, FetchAdd, CompareSwap]),
        ("no atomics", local | read | write, &[FetchAdd, CompareSwap]),
    ] {
        let memory = Memory::new(&trial.sides.1, access);
        for &request in refused {
            let status = WorkStatus::RemoteAccess;
            trial.refuse(what, request, memory.at(64, 8), status, &memory);
            if matches!(request, Write | Read | WriteWithImmediate) {
                trial.refuse(what, request, memory.at(0, REGION as u64), status, &memory);
            }
        }
        // Access that the region grants works, with the same key.
        if access.contains(read) {
            let (one, _) = trial.channels.as_mut().unwrap();
            let mut back = MemoryRegion::<u8>::new(&trial.sides.0.domain, REGION).unwrap();
            let whole = memory.at(0, REGION as u64);
            one.until(deadline()).read(&mut back.slice_mut(..).unwrap(), whole).unwrap();
            assert!((0..REGION).all(|index| back[index] == Memory::expected(REGION + index)));
        }
        memories.push(memory);
    }
    trial.finish("read-only", "RemoteAccess at the active side", memories);
}

/// Rights that the queue pair does not grant, whatever the region grants. The device does not execute such a
/// request at all.
#[test]
fn a_queue_pair_allows_what_it_was_connected_for() {
    let _alone = alone("access of the queue pair", 250);
    let mut trial = Trial::new(AccessFlags::empty());
    let memory = Memory::new(&trial.sides.1, ALL);
    for request in EVERY {
        let status = WorkStatus::RemoteInvalidRequest;
        trial.refuse("nothing is allowed", request, memory.at(0, 8), status, &memory);
    }
    let Trial { sides, channels, .. } = trial;
    drop((channels, memory));
    nothing_is_left(sides);
}
