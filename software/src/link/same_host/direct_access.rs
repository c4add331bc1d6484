//! One-sided operations that the initiator carries out in the target's memory, so that the target needs no processor for
//! them, as with an adapter.
//!
//! A target that allows it keeps a table in memory that its peers can read: the regions that peers may read or write, and the
//! connected queue pairs. A peer says in its ring's memory, which is its and the target's alone, which region and queue pair it
//! is about to use (its lease), looks into the table, copies by the kernel (`process_vm_readv`, `process_vm_writev`) and ends
//! its lease. Before memory is taken away, the target clears the entry and then waits until no lease names it: a peer that was
//! there has left, and one that comes later finds no entry. The wait has a bound ([`PATIENCE`]), and no lock is held meanwhile: a
//! peer that stops while it has a lease keeps that region registered, and nothing else.
//!
//! The kernel makes sure that the peer may read and write the target's memory by any other means, as a debugger does. So
//! what is in the table is not for protection against a hostile process of the same user, but for the rules of verbs.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::ring::Mapping;
use super::{MOST, check, is_hung_up, own_process};
use crate::ffi::ibv_access_flags as Access;
use crate::files::wait_for;
use crate::foreign::Foreign;

/// The table's words, in this order: whether it is open; the regions; the queue pairs.
const REGIONS: usize = 1;
const PAIRS: usize = REGIONS + ENTRIES * WORDS;
const LENGTH: usize = (PAIRS + ENTRIES * WORDS) * size_of::<u64>();

/// How many regions, and queue pairs, it has room for. Others are reached by packets alone.
const ENTRIES: usize = 4096;

/// The words of an entry. The first one is 0 while the entry is not valid, and is never the same twice.
const WORDS: usize = 5;

/// The longest operation that is carried out so, in bytes: the device does nothing else meanwhile.
const LONGEST: u64 = 4 << 20;

/// How often a target looks whether a peer has left its memory, and for how long.
const LOOK: Duration = Duration::from_micros(20);
const PATIENCE: Duration = Duration::from_secs(1);

/// In a lease: there is one. A queue pair's number is below.
const TAKEN: u32 = 1 << 31;

/// A READ or WRITE of a reliable connection that nothing is under way before.
#[derive(Debug)]
pub(crate) struct OneSided {
    pub(crate) writes: bool,
    /// The address and the queue pair of the initiator, and the target's queue pair.
    pub(crate) from: (IpAddr, u32),
    pub(crate) to: u32,
    pub(crate) rkey: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

fn pack(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn unpack(both: u64) -> (u32, u32) {
    (both as u32, (both >> 32) as u32)
}

fn bits(address: IpAddr) -> [u64; 2] {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    [(u128::from(v6) >> 64) as u64, u128::from(v6) as u64]
}

/// The place of a key, and of a queue pair's number: where both have their index.
fn region_at(key: u32) -> Option<usize> {
    let index = (key >> 8) as usize;
    (index < ENTRIES).then_some(REGIONS + index * WORDS)
}

fn pair_at(number: u32) -> Option<usize> {
    let index = (number & 0xffff) as usize;
    (index < ENTRIES).then_some(PAIRS + index * WORDS)
}

/// A lease, as its target knows it.
struct Taken {
    /// The connection of the peer that has it.
    connection: Arc<Foreign>,
    ring: Arc<Mapping>,
    is_ending: bool,
}

impl Taken {
    /// Whether the peer has ended. A child of it may have the connection open.
    fn is_gone(&self) -> bool {
        let is_no_process = own_process(&self.connection).is_some_and(|process| {
            // SAFETY: no signal is sent, and no memory is involved.
            let found = unsafe { libc::kill(process, 0) };
            found != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
        });
        is_no_process || is_hung_up(&self.connection)
    }
}

/// The target's side.
pub(crate) struct DirectAccess {
    table: Mapping,
    file: OwnedFd,
    leases: Mutex<Vec<Option<Taken>>>,
    stamp: AtomicU64,
}

impl fmt::Debug for DirectAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirectAccess").finish_non_exhaustive()
    }
}

impl DirectAccess {
    pub(in crate::link) fn new() -> io::Result<Arc<Self>> {
        let (table, file) = Mapping::create(LENGTH, false)?;
        table.word(0).store(1, Ordering::SeqCst);
        let leases = Mutex::new(Vec::new());
        Ok(Arc::new(Self { table, file, leases, stamp: AtomicU64::new(1) }))
    }

    fn publish(&self, at: usize, words: [u64; WORDS - 1]) {
        for (index, word) in words.into_iter().enumerate() {
            self.table.word(at + 1 + index).store(word, Ordering::Relaxed);
        }
        let stamp = self.stamp.fetch_add(1, Ordering::Relaxed);
        self.table.word(at).store(stamp, Ordering::SeqCst);
    }

    /// Lets peers use this region, as far as `access` allows it: `length` bytes of this process's memory from
    /// `start` on, which requests address from `iova` on.
    pub(crate) fn add_region(
        &self,
        (key, pd): (u32, u32),
        (start, iova, length): (u64, u64, u64),
        access: u32,
    ) {
        let remote = Access::IBV_ACCESS_REMOTE_READ.0 | Access::IBV_ACCESS_REMOTE_WRITE.0;
        // The rights are in two of the bits that an address and a length of this machine do not have.
        let rights = u64::from(access & remote) << LENGTH_BITS;
        if let Some(at) = region_at(key)
            && access & remote != 0
            && length >> LENGTH_BITS == 0
        {
            self.publish(at, [pack(key, pd), start, iova, length | rights]);
        }
    }

    /// Ends access to the region.
    pub(crate) fn remove_region(&self, key: u32) {
        region_at(key).into_iter().for_each(|at| self.table.word(at).store(0, Ordering::SeqCst));
    }

    /// Waits until no peer is in a removed region. False: a peer has stopped there, and may still access its memory.
    pub(crate) fn wait_for_region(&self, key: u32) -> bool {
        self.wait(|lease| unpack(lease).0 == key)
    }

    /// Lets the peer of this connected queue pair use regions of its domain.
    pub(crate) fn add_pair(&self, (number, pd): (u32, u32), peer: (IpAddr, u32), access: u32) {
        let [high, low] = bits(peer.0);
        if let Some(at) = pair_at(number) {
            // The rights are below 2^8, and a number has 24 bits.
            self.publish(at, [pack(number, pd), pack(peer.1, access), high, low]);
        }
    }

    /// Ends access by this queue pair's peer.
    pub(crate) fn remove_pair(&self, number: u32) {
        pair_at(number).into_iter().for_each(|at| self.table.word(at).store(0, Ordering::SeqCst));
    }

    /// Waits until nobody is in memory on behalf of a removed queue pair's peer. False: it has stopped there; the memory is
    /// registered still.
    pub(crate) fn wait_for_pair(&self, number: u32) -> bool {
        self.wait(|lease| unpack(lease).1 == number | TAKEN)
    }

    /// Whether peers may use it at all. Those that are in memory already finish.
    pub(crate) fn set_open(&self, is_open: bool) {
        self.table.word(0).store(is_open.into(), Ordering::SeqCst);
    }

    fn leases(&self) -> MutexGuard<'_, Vec<Option<Taken>>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no peer that lives has a lease of this kind. False: one has not left for a long time.
    fn wait(&self, concerns: impl Fn(u64) -> bool) -> bool {
        let is_in = |taken: &Option<Taken>| {
            taken
                .as_ref()
                .is_some_and(|it| concerns(it.ring.lease().load(Ordering::SeqCst)) && !it.is_gone())
        };
        let start = Instant::now();
        while self.leases().iter().any(is_in) {
            if start.elapsed() > PATIENCE {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// A lease for the process at the other end, whose ring this is. `None`: there are enough.
    pub(super) fn admit(
        self: &Arc<Self>,
        connection: &Arc<Foreign>,
        ring: &Arc<Mapping>,
    ) -> Option<Lease> {
        let mut leases = self.leases();
        let is_free =
            |lease: &Option<Taken>| lease.as_ref().is_none_or(|it| it.is_ending && it.is_gone());
        let number = leases.iter().position(is_free).unwrap_or_else(|| {
            leases.push(None);
            leases.len() - 1
        });
        if number >= MOST {
            leases.pop();
            return None;
        }
        let (connection, ring) = (connection.clone(), ring.clone());
        leases[number] = Some(Taken { connection, ring, is_ending: false });
        Some(Lease { direct_access: self.clone(), number })
    }
}

/// The bits of the length of a region; the rights are above.
const LENGTH_BITS: u32 = 56;

/// A peer's lease, on the target's side.
#[derive(Debug)]
pub(super) struct Lease {
    direct_access: Arc<DirectAccess>,
    number: usize,
}

impl Lease {
    /// The table, for the process at the other end.
    pub(super) fn table(&self) -> &OwnedFd {
        &self.direct_access.file
    }
}

impl Drop for Lease {
    /// Ends the connection. A peer that lives takes its lease until it sees the end: nobody else gets the lease before.
    fn drop(&mut self) {
        let mut leases = self.direct_access.leases();
        let lease = &mut leases[self.number];
        lease.take_if(|it| it.is_gone());
        if let Some(taken) = lease {
            taken.is_ending = true;
            // SAFETY: no memory is involved.
            unsafe { libc::shutdown(taken.connection.as_raw_fd(), libc::SHUT_WR) };
        }
    }
}

/// The initiator's side: what it may do in the memory of another process.
pub(super) struct Reach {
    table: Mapping,
    process: libc::pid_t,
    /// Readable once it has ended. A child of it may keep the connection open.
    end: OwnedFd,
}

/// A file that is readable once the process that has this number now has ended.
pub(super) fn pidfd(process: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
    unsafe {
        let fd = check(libc::syscall(libc::SYS_pidfd_open, process, 0) as _)?;
        Ok(OwnedFd::from_raw_fd(fd as _))
    }
}

impl fmt::Debug for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach").field("process", &self.process).finish_non_exhaustive()
    }
}

impl Reach {
    /// Uses the table that another process has handed over. `end` is that process's [`pidfd`], of before that.
    pub(super) fn new(file: &OwnedFd, process: libc::pid_t, end: OwnedFd) -> io::Result<Self> {
        Ok(Self { table: Mapping::open(file, LENGTH, false)?, process, end })
    }

    /// Whether the process lives, and still lets this one in.
    pub(super) fn is_connected(&self, connection: &OwnedFd) -> bool {
        let mut files = [connection, &self.end].map(|file| wait_for(file.as_raw_fd()));
        // SAFETY: two live structures.
        unsafe { libc::poll(files.as_mut_ptr(), files.len() as _, 0) == 0 }
    }

    /// Carries an operation out, whose own memory is in `local`. False: it has to go by packets, which give the right
    /// answer. `lease` tells the other process of it. [`is_connected`](Self::is_connected) is called then: the process's number may
    /// be another one's by now.
    ///
    /// # Errors
    ///
    /// The kernel does not let this process into the other's memory.
    ///
    /// # Safety
    ///
    /// A READ writes to all of `local`: no Rust reference to that memory may be in use, as when an adapter writes there.
    pub(super) unsafe fn carry_out(
        &self,
        lease: &AtomicU64,
        request: &OneSided,
        local: &[libc::iovec],
        is_connected: impl FnOnce() -> bool,
    ) -> io::Result<bool> {
        if request.length > LONGEST {
            return Ok(false);
        }
        lease.store(pack(request.rkey, request.to | TAKEN), Ordering::SeqCst);
        let found = if is_connected() { self.find(request) } else { None };
        let done = match found {
            // SAFETY: the caller vouches for `local`, which the kernel checks as well. What is in the other process's memory
            // is that process's: it has a region there.
            Some(start) => unsafe { self.copy(request, start, local) },
            None => Ok(false),
        };
        lease.store(0, Ordering::SeqCst);
        done
    }

    /// The address in the other process, if the table allows the operation.
    fn find(&self, request: &OneSided) -> Option<u64> {
        if self.table.word(0).load(Ordering::SeqCst) != 1 {
            return None;
        }
        let right = if request.writes {
            Access::IBV_ACCESS_REMOTE_WRITE
        } else {
            Access::IBV_ACCESS_REMOTE_READ
        };
        let [pair, peer, high, low] = self.read(pair_at(request.to)?)?;
        let ((number, pd), (own, access)) = (unpack(pair), unpack(peer));
        let is_peer = (number, own) == (request.to, request.from.1)
            && [high, low] == bits(request.from.0)
            && access & right.0 != 0;
        let [key, start, iova, length] = self.read(region_at(request.rkey)?)?;
        let (rights, length) = (length >> LENGTH_BITS, length & ((1 << LENGTH_BITS) - 1));
        let offset = request.address.checked_sub(iova)?;
        let is_inside = offset <= length && request.length <= length - offset;
        let is_allowed = unpack(key) == (request.rkey, pd) && rights & u64::from(right.0) != 0;
        (is_peer && is_allowed && is_inside).then(|| start.wrapping_add(offset))
    }

    /// The words of a valid entry.
    fn read(&self, at: usize) -> Option<[u64; WORDS - 1]> {
        let stamp = self.table.word(at).load(Ordering::SeqCst);
        let words = std::array::from_fn(|i| self.table.word(at + 1 + i).load(Ordering::Relaxed));
        std::sync::atomic::fence(Ordering::Acquire);
        let is_same = self.table.word(at).load(Ordering::SeqCst) == stamp;
        (stamp != 0 && is_same).then_some(words)
    }

    /// # Safety
    ///
    /// As [`carry_out`](Self::carry_out).
    unsafe fn copy(
        &self,
        request: &OneSided,
        start: u64,
        local: &[libc::iovec],
    ) -> io::Result<bool> {
        let length = request.length as usize;
        let remote = libc::iovec { iov_base: start as *mut _, iov_len: length };
        let count = local.len() as libc::c_ulong;
        // SAFETY: the caller vouches for the memory; the lists are live.
        let copied = unsafe {
            if request.writes {
                libc::process_vm_writev(self.process, local.as_ptr(), count, &remote, 1, 0)
            } else {
                libc::process_vm_readv(self.process, local.as_ptr(), count, &remote, 1, 0)
            }
        };
        if copied < 0 {
            let error = io::Error::last_os_error();
            let refuses = [libc::EPERM, libc::EACCES, libc::ENOSYS].map(Some);
            // Any other error means that memory is not mapped, or the process has just ended.
            return if refuses.contains(&error.raw_os_error()) { Err(error) } else { Ok(false) };
        }
        Ok(copied as usize == length)
    }
}

/// Lets other processes of the user into this one's memory, where the kernel's Yama would let in its parents alone.
pub(in crate::link) fn let_in() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: no memory is involved. Without Yama the kernel knows no such call, and needs none.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const OWN: (IpAddr, u32) = (IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0x12);
    const TARGET: u32 = 0x34;
    const KEY: u32 = 0x500;
    const IOVA: u64 = 0x10_000;

    /// Both ends of a connection in this process, and the initiator's reach into it.
    fn admitted(direct_access: &Arc<DirectAccess>) -> (Lease, Foreign, Reach) {
        let [ours, theirs] = pair();
        let lease = direct_access.admit(&Arc::new(ours), &ring()).unwrap();
        let process = std::process::id() as libc::pid_t;
        let end = pidfd(process).unwrap();
        (lease, theirs, Reach::new(&direct_access.file, process, end).unwrap())
    }

    fn ring() -> Arc<Mapping> {
        Arc::new(Mapping::create(Mapping::RING, true).unwrap().0)
    }

    fn pair() -> [Foreign; 2] {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        [one, other].map(|end| Foreign::connection(end.into()))
    }

    fn request(writes: bool, address: u64, length: u64) -> OneSided {
        OneSided { writes, from: OWN, to: TARGET, rkey: KEY, address, length }
    }

    fn run(reach: &Reach, request: &OneSided, local: &mut [u8]) -> bool {
        let part = libc::iovec { iov_base: local.as_mut_ptr().cast(), iov_len: local.len() };
        // SAFETY: nothing else uses the bytes meanwhile.
        unsafe { reach.carry_out(&AtomicU64::new(0), request, &[part], || true) }.unwrap()
    }

    /// Access to memory of 64 bytes, which one pair may write, and read if `access` says so.
    fn access_to(memory: &mut [u64; 8], access: Access) -> Arc<DirectAccess> {
        let direct_access = DirectAccess::new().unwrap();
        let both = Access::IBV_ACCESS_REMOTE_WRITE | Access::IBV_ACCESS_REMOTE_READ;
        direct_access.add_region((KEY, 7), (memory.as_mut_ptr() as u64, IOVA, 64), access.0);
        direct_access.add_pair((TARGET, 7), OWN, both.0);
        direct_access
    }

    #[test]
    fn what_the_table_allows_is_carried_out_and_nothing_else() {
        let both = Access::IBV_ACCESS_REMOTE_WRITE | Access::IBV_ACCESS_REMOTE_READ;
        let mut memory = Box::new([1_u64; 8]);
        let direct_access = access_to(&mut memory, both);
        let (_lease, _line, reach) = admitted(&direct_access);
        assert!(run(&reach, &request(true, IOVA + 8, 8), &mut 2_u64.to_ne_bytes()));
        let mut read = [0; 16];
        assert!(run(&reach, &request(false, IOVA + 8, 16), &mut read));
        assert_eq!(read[..8], 2_u64.to_ne_bytes());
        assert_eq!(read[8..], 1_u64.to_ne_bytes());
        // Bounds, key, queue pairs, address, and the length of one operation.
        let allows = |change: fn(&mut OneSided)| {
            let mut request = request(true, IOVA, 8);
            change(&mut request);
            run(&reach, &request, &mut [0; 8])
        };
        assert!(allows(|_| {}) && allows(|it| it.address = IOVA + 56));
        assert!(!allows(|it| it.address = IOVA + 57) && !allows(|it| it.address = IOVA - 1));
        assert!(!allows(|it| it.address = u64::MAX) && !allows(|it| it.length = u64::MAX));
        assert!(!allows(|it| it.rkey = KEY + 1) && !allows(|it| it.rkey = KEY + 0x100));
        assert!(!allows(|it| it.rkey = u32::MAX) && !allows(|it| it.to = TARGET + 0x1_0000));
        assert!(!allows(|it| it.to = TARGET + 1) && !allows(|it| it.from.1 = 0x13));
        assert!(!allows(|it| it.from.0 = "127.0.0.2".parse().unwrap()));
        // Rights of the pair, its domain, and rights of the region.
        direct_access.add_pair((TARGET, 7), OWN, Access::IBV_ACCESS_REMOTE_READ.0);
        assert!(!allows(|_| {}) && allows(|it| it.writes = false));
        direct_access.add_pair((TARGET, 8), OWN, both.0);
        assert!(!allows(|_| {}));
        direct_access.add_pair((TARGET, 7), OWN, both.0);
        assert!(allows(|_| {}));
        direct_access.remove_pair(TARGET);
        assert!(!allows(|_| {}));
        direct_access.add_pair((TARGET, 7), OWN, both.0);
        direct_access.set_open(false);
        assert!(!allows(|_| {}));
        direct_access.set_open(true);
        assert!(allows(|_| {}));
        direct_access.remove_region(KEY);
        assert!(!allows(|_| {}));
        let read = access_to(&mut memory, Access::IBV_ACCESS_REMOTE_READ);
        let (_lease, _line, reach) = admitted(&read);
        assert!(!run(&reach, &request(true, IOVA, 8), &mut [0; 8]));
        assert!(run(&reach, &request(false, IOVA, 8), &mut [0; 8]));
    }

    #[test]
    fn memory_that_is_not_mapped_and_a_process_that_is_gone_are_refused() {
        let direct_access = DirectAccess::new().unwrap();
        let write = Access::IBV_ACCESS_REMOTE_WRITE.0;
        direct_access.add_region((KEY, 7), (0x1000, IOVA, 64), write);
        direct_access.add_pair((TARGET, 7), OWN, write);
        let (_lease, _line, mut reach) = admitted(&direct_access);
        let mut bytes = [0_u8; 8];
        assert!(!run(&reach, &request(true, IOVA, 8), &mut bytes), "nothing is mapped there");
        let part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 8 };
        let lease = AtomicU64::new(0);
        // SAFETY: it writes nothing here.
        let gone = unsafe { reach.carry_out(&lease, &request(true, IOVA, 8), &[part], || false) };
        assert!(!gone.unwrap());
        reach.process = libc::pid_t::MAX;
        // SAFETY: as above.
        let gone = unsafe { reach.carry_out(&lease, &request(true, IOVA, 8), &[part], || true) };
        assert!(!gone.unwrap(), "nobody has refused it");
    }

    /// Its number may be another process's from then on.
    #[test]
    fn a_process_that_is_gone_is_not_connected_though_a_child_of_it_is() {
        let _alone = crate::link::process_starts();
        let [ours, theirs] = pair();
        let mut child = std::process::Command::new("cat");
        let mut child = child.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = child.id() as libc::pid_t;
        let table = DirectAccess::new().unwrap();
        let reach = Reach::new(&table.file, process, pidfd(process).unwrap()).unwrap();
        assert!(reach.is_connected(&ours));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!reach.is_connected(&ours));
        assert!(pidfd(0).is_err());
        let (_lease, line, reach) = admitted(&table);
        assert!(reach.is_connected(&ours) && reach.is_connected(&line));
        drop(theirs);
        assert!(!reach.is_connected(&ours));
    }

    /// A target waits until a peer leaves its lease, or ends; also one whose connection is ending.
    #[test]
    fn who_takes_memory_away_waits_for_peers_that_are_in_it() {
        for (ends, leaves) in [(false, true), (true, false), (false, false)] {
            let mut memory = Box::new([0; 8]);
            let direct_access = access_to(&mut memory, Access::IBV_ACCESS_REMOTE_WRITE);
            let ([ours, line], ring) = (pair(), ring());
            let lease = direct_access.admit(&Arc::new(ours), &ring).unwrap();
            let word = ring.lease();
            word.store(pack(KEY, TARGET | TAKEN), Ordering::SeqCst);
            if ends {
                drop(lease);
            }
            let (done, waits) = mpsc::channel();
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    direct_access.remove_region(KEY);
                    done.send(direct_access.wait_for_region(KEY)).unwrap();
                });
                std::thread::sleep(10 * LOOK);
                assert!(waits.try_recv().is_err(), "a peer is in the memory");
                assert!(direct_access.wait_for_region(KEY + 1), "nobody is in another region");
                assert!(direct_access.wait_for_pair(TARGET + 1));
                if leaves {
                    word.store(0, Ordering::SeqCst)
                } else {
                    drop(line)
                }
                assert!(waits.recv().unwrap());
            });
        }
    }

    #[test]
    fn a_peer_that_stops_in_memory_is_not_waited_for_without_a_bound() {
        let direct_access = DirectAccess::new().unwrap();
        let ([ours, _theirs], ring) = (pair(), ring());
        let _lease = direct_access.admit(&Arc::new(ours), &ring).unwrap();
        ring.lease().store(pack(KEY, TARGET | TAKEN), Ordering::SeqCst);
        assert!(!direct_access.wait_for_region(KEY) && !direct_access.wait_for_pair(TARGET));
        ring.lease().store(0, Ordering::SeqCst);
        assert!(direct_access.wait_for_region(KEY) && direct_access.wait_for_pair(TARGET));
    }

    #[test]
    fn nobody_gets_a_lease_whose_peer_may_still_take_it() {
        let direct_access = DirectAccess::new().unwrap();
        let (first, line, reach) = admitted(&direct_access);
        drop(first);
        let (second, ..) = admitted(&direct_access);
        assert_eq!(second.number, 1);
        assert!(!reach.is_connected(&line), "the peer is told");
        drop(line);
        let (third, ..) = admitted(&direct_access);
        assert_eq!(third.number, 0);
        let leases: Vec<_> = (2..MOST).map(|_| admitted(&direct_access)).collect();
        let [ours, _theirs] = pair();
        let more = direct_access.admit(&Arc::new(ours), &ring());
        assert!(leases.len() == MOST - 2 && more.is_none());
    }
}
