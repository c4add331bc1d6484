//! All kinds of memory that Soft-RoCE supports. To be run by `script/test rxe`, in the machine
//! that `script/vm` starts.

#[path = "support/one_sided.rs"]
mod one_sided;
#[path = "support/vm/mod.rs"]
mod vm;

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::memory::{
    BorrowedMemoryRegion, HugePages, ImplicitMemoryRegion, MemoryWindowType, NullMemoryRegion,
    PinnedMemory, RawMemoryRegion, ReregisteredState, Reregistration,
};
use ibverbs::operation::WindowBinding;
use ibverbs::{
    AccessFlags, BufferPool, Channel, Context, ErrorKind, MemoryRegion, ProtectionDomain,
    RegionOptions, WorkStatus,
};

use one_sided::{fetch_add, pair, read, send, status, to_itself, write};
use vm::{one_at_a_time, with_rxe0};

#[test]
fn every_option_is_accepted_and_its_memory_works() {
    with_rxe0(|_, domain, queue| {
        let mut queue_pair = to_itself(domain, queue);
        let source = domain.register_read_only(b"anything").unwrap();
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let options = RegionOptions::new().access(access);
        for (options, len) in [
            (options, 100),
            (options.alignment(1 << 16), 100),
            (options.page_aligned(), 10_000),
            (options.access(AccessFlags::RELAXED_ORDERING), 100),
            (options.access(AccessFlags::MW_BIND), 100),
            (options.huge_pages(HugePages::Transparent), 3 << 20),
            (options, 2 << 20),
            (options.iova(0), 10_000),
            (options.iova(0x1234_5000), 10_000),
        ] {
            let region = domain.allocate_shared::<u8>(len, options).unwrap();
            let to = region.remote_range(len - 9..len - 1).unwrap();
            let from = source.gather_element(..).unwrap();
            assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success, "{options:?}");
            assert_eq!(region.slice(len - 9..).unwrap().to_vec(), b"anything\0", "{options:?}");
            let mut back = [0_u8; 8];
            let mut target = domain.register(&mut back).unwrap();
            let element = target.scatter_element(..).unwrap();
            assert_eq!(read(&mut queue_pair, to, &[element]), WorkStatus::Success, "{options:?}");
            assert_eq!(target[..], *b"anything");
        }
    });
}

#[test]
#[ignore = "sets huge pages of the machine aside"]
fn huge_pages_come_from_those_that_were_set_aside() {
    with_rxe0(|_, domain, _| {
        let free = || {
            let text = fs::read_to_string("/proc/meminfo").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
            line.expect("this kernel has huge pages").trim().parse::<u32>().unwrap()
        };
        let options = RegionOptions::new().huge_pages(HugePages::Size2MiB);
        assert_eq!(free(), 0);
        let error = MemoryRegion::<u8>::with_options(domain, 1, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Resource);
        assert!(error.to_string().contains("/sys/kernel/mm/hugepages"), "{error}");

        fs::write("/proc/sys/vm/nr_hugepages", "8").unwrap();
        assert_eq!(free(), 8);
        let mut region =
            MemoryRegion::<u64>::with_options(domain, (5 << 20) / 8 + 1, options).unwrap();
        assert_eq!(region.as_ptr() as usize % (2 << 20), 0);
        // Registering has brought them in: three, for a little more than 5 MiB.
        assert_eq!(free(), 5);
        let last = region.len() - 1;
        region[last] = 7;
        assert_eq!(region.iter().sum::<u64>(), 7);
        let aligned = options.alignment(4 << 20);
        let second = MemoryRegion::<u8>::with_options(domain, 1, aligned).unwrap();
        assert_eq!(second.as_ptr() as usize % (4 << 20), 0);
        assert_eq!(free(), 4);
        region.close().unwrap();
        drop(second);
        assert_eq!(free(), 8);
        the_buffers_of_a_pool_are_in_huge_pages(options, free);
        assert_eq!(free(), 8);
        fs::write("/proc/sys/vm/nr_hugepages", "0").unwrap();

        let huge = RegionOptions::new().huge_pages(HugePages::Size1GiB);
        let error = MemoryRegion::<u8>::with_options(domain, 1, huge).unwrap_err();
        assert!(error.to_string().contains("huge pages of that size"), "{error}");
    });
}

/// Sends from one chunk of a pool to another. `free` says how many of the eight pages are left.
fn the_buffers_of_a_pool_are_in_huge_pages(options: RegionOptions, free: impl Fn() -> u32) {
    let context = ibverbs::open("rxe0").unwrap();
    let domain = Arc::new(ProtectionDomain::new(context).unwrap());
    let pool = BufferPool::new(&domain, 1 << 20, 5, options).unwrap();
    assert_eq!(free(), 5, "5 MiB are on three pages");
    let prepared = Channel::builder(&domain).build().unwrap();
    let itself = prepared.endpoint();
    let mut channel = prepared.handshake(itself).unwrap();
    let (mut from, mut received) = (pool.take().unwrap(), pool.take().unwrap());
    from.set_len(1 << 20).unwrap();
    from.fill(7);
    channel
        .scope(|scope| {
            let receive = scope.post_receive(&mut received)?;
            scope.post_send(&from)?.wait()?;
            receive.wait().map(drop)
        })
        .unwrap();
    assert!(received.iter().all(|&byte| byte == 7));
    drop(pool);
    assert_eq!(free(), 5, "a buffer is left");
}

#[test]
fn shared_memory_is_read_written_and_counted_in() {
    with_rxe0(|_, domain, queue| {
        let mut queue_pair = to_itself(domain, queue);
        let access =
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        let region = domain.allocate_shared::<u64>(20_000, access).unwrap();
        let numbers: Vec<u64> = (0..10_000).map(|i| i * 0x0101_0101).collect();
        region.write(0, &numbers).unwrap();
        let (source, target) = region.as_slice().split_at(10_000).unwrap();
        let from = source.gather_element().unwrap();
        assert_eq!(write(&mut queue_pair, &[from], target.remote()), WorkStatus::Success);
        assert_eq!(target.to_vec(), numbers);

        target.write_one(7, 40).unwrap();
        let counter = target.slice(7..8).unwrap().remote();
        let old = source.slice(..1).unwrap().scatter_element().unwrap();
        assert_eq!(fetch_add(&mut queue_pair, 2, counter, old), WorkStatus::Success);
        assert_eq!((source.read_one(0), target.read_one(7)), (Ok(40), Ok(42)));

        // Without the access, the peer is refused.
        let closed = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_READ).unwrap();
        let from = source.slice(..8).unwrap().gather_element().unwrap();
        let [mut peer, _ours] = pair(domain, queue);
        assert_eq!(write(&mut peer, &[from], closed.remote()), WorkStatus::RemoteAccess);
    });
}

#[test]
fn slices_of_the_callers_are_sent_and_received() {
    with_rxe0(|_, domain, queue| {
        let mut queue_pair = to_itself(domain, queue);
        // Memory that really cannot be written: it is in a read-only segment.
        static TEXT: [u8; 5000] = [0x5a; 5000];
        let (mut on_stack, mut on_heap) = ([0_u8; 3000], vec![0_u16; 1000]);
        {
            let source = domain.register_read_only(&TEXT).unwrap();
            let mut first = domain.register(&mut on_stack).unwrap();
            let relaxed = AccessFlags::RELAXED_ORDERING;
            let mut second =
                BorrowedMemoryRegion::with_access(domain, &mut on_heap, relaxed).unwrap();
            let from = source.gather_element(..).unwrap();
            let to = [first.scatter_element(..).unwrap(), second.scatter_element(..).unwrap()];
            send(&mut queue_pair, &[from], &to);
            assert!(first.iter().all(|&byte| byte == 0x5a));
            assert!(second.iter().all(|&word| word == 0x5a5a));
        }
        assert_eq!((on_stack[2999], on_heap[999]), (0x5a, 0x5a5a));
        assert!(vm::resources("rxe0").contains("mr 0"), "{}", vm::resources("rxe0"));
    });
}

#[test]
fn raw_memory_is_what_was_mapped() {
    with_rxe0(|_, domain, queue| {
        let mut queue_pair = to_itself(domain, queue);
        let local = domain.register_read_only(b"a message").unwrap();
        let from = local.gather_element(..).unwrap();
        let bytes = 3 * 4096;
        // SAFETY: a new mapping, of memory that this process shares with itself.
        let mapped = unsafe {
            let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            libc::mmap(std::ptr::null_mut(), bytes, access, flags | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        // SAFETY: the mapping lives until after the regions, and is read by volatile accesses only.
        unsafe {
            let address = mapped.cast::<u8>();
            let region = RawMemoryRegion::new(domain, address, bytes, access).unwrap();
            let to = region.remote_range(4090..4099).unwrap();
            assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
            let seen: Vec<u8> = (0..9).map(|i| address.add(4090 + i).read_volatile()).collect();
            assert_eq!(seen, b"a message");
            region.close().unwrap();

            let iova = 0xabcd_e000;
            let region = RawMemoryRegion::with_iova(domain, address, bytes, iova, access).unwrap();
            let to = region.remote_range(1..10).unwrap();
            assert_eq!(to.address(), iova + 1);
            assert_eq!(write(&mut queue_pair, &[from], to), WorkStatus::Success);
            let seen: Vec<u8> = (0..9).map(|i| address.add(1 + i).read_volatile()).collect();
            assert_eq!(seen, b"a message");
            drop(region);

            // The kernel pins what it registers, and fails if there is nothing to pin.
            libc::munmap(mapped, bytes);
            let error = RawMemoryRegion::new(domain, address, bytes, access).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
            assert!(error.to_string().contains("not mapped"), "{error}");
        }
    });
}

/// Posts a binding and waits for it.
macro_rules! bind {
    ($queue_pair:expr, $window:expr, $binding:expr) => {{
        // SAFETY: no other request is outstanding.
        let remote = unsafe { $queue_pair.post_bind_mw(&mut $window, $binding, 5) }.unwrap();
        assert_eq!(status($queue_pair.send_cq(), 5), WorkStatus::Success);
        remote
    }};
}

#[test]
fn a_window_opens_a_part_of_a_region() {
    with_rxe0(|_, domain, queue| {
        let source = domain.register_read_only(b"12345678").unwrap();
        let from = source.gather_element(..).unwrap();
        for window_type in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
            let options = RegionOptions::new().access(AccessFlags::MW_BIND);
            let region = domain.allocate_shared::<u8>(4096, options).unwrap();
            let [mut peer, mut queue_pair] = pair(domain, queue);
            // Declared last, so that it goes before the queue pair does.
            let mut window = domain.alloc_mw(window_type).unwrap();
            let binding = WindowBinding::new(&region, 100..108, AccessFlags::REMOTE_WRITE).unwrap();
            let remote = bind!(queue_pair, window, binding);
            assert_eq!(write(&mut peer, &[from], remote), WorkStatus::Success);
            assert_eq!(region.slice(99..109).unwrap().to_vec(), b"\x0012345678\0");

            if window_type == MemoryWindowType::Type2 {
                // SAFETY: no other request is outstanding.
                unsafe { queue_pair.post_invalidate_mw(&mut window, 6) }.unwrap();
                assert_eq!(status(queue, 6), WorkStatus::Success);
            }
            let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
            let binding = WindowBinding::new(&region, 200..208, access).unwrap();
            let moved = bind!(queue_pair, window, binding);
            assert_ne!(moved.rkey(), remote.rkey());
            assert_eq!(write(&mut peer, &[from], moved), WorkStatus::Success);
            assert_eq!(region.slice(200..208).unwrap().to_vec(), b"12345678");
            // The earlier key opens nothing any more.
            assert_eq!(write(&mut peer, &[from], remote), WorkStatus::RemoteAccess);
        }
    });
}

/// Soft-RoCE compares accesses with the bounds of the region, not of the window. Accesses beyond the window
/// are tested on the function device.
#[test]
fn a_window_opens_for_its_access_only() {
    with_rxe0(|_, domain, queue| {
        let mut memory = [1_u8; 8];
        let options = RegionOptions::new().access(AccessFlags::MW_BIND);
        let region = domain.allocate_shared::<u8>(4096, options).unwrap();
        for access in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_READ] {
            let mut local = domain.register(&mut memory).unwrap();
            let [mut peer, mut queue_pair] = pair(domain, queue);
            let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
            let binding = WindowBinding::new(&region, 100..108, access).unwrap();
            let remote = bind!(queue_pair, window, binding);
            let outcome = if access == AccessFlags::REMOTE_WRITE {
                read(&mut peer, remote, &[local.scatter_element(..).unwrap()])
            } else {
                write(&mut peer, &[local.gather_element(..).unwrap()], remote)
            };
            assert_eq!(outcome, WorkStatus::RemoteAccess, "{access:?}");
            assert!(region.to_vec().iter().all(|&byte| byte == 0));
            assert_eq!(local[..], [1; 8]);
        }
    });
}

#[test]
#[ignore = "Soft-RoCE: its errno value; the software device says EBUSY"]
fn a_region_under_a_window_does_not_deregister() {
    with_rxe0(|_, domain, queue| {
        let options = RegionOptions::new().access(AccessFlags::MW_BIND);
        let region = domain.allocate_shared::<u8>(64, options).unwrap();
        let mut queue_pair = to_itself(domain, queue);
        let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
        let raw = region.as_raw();
        let binding = WindowBinding::new(&region, .., AccessFlags::REMOTE_READ).unwrap();
        bind!(queue_pair, window, binding);
        // The borrow checker prevents this, and so does the kernel. SAFETY: the region is live, and stays so
        // since this fails.
        let error = unsafe { ibverbs::ffi::ibv_dereg_mr(raw) };
        assert_eq!(error, libc::EINVAL);
        window.close().unwrap();
        region.close().unwrap();
    });
}

#[test]
fn a_window_goes_before_its_queue_pair_quickly() {
    with_rxe0(|_, domain, queue| {
        let options = RegionOptions::new().access(AccessFlags::MW_BIND);
        let region = domain.allocate_shared::<u8>(64, options).unwrap();
        let start = Instant::now();
        {
            let mut queue_pair = to_itself(domain, queue);
            let mut window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
            let binding = WindowBinding::new(&region, .., AccessFlags::REMOTE_READ).unwrap();
            bind!(queue_pair, window, binding);
        }
        assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    });
}

/// The error of importing the device. The copy of the descriptor that C is given stays open, since C
/// does not say whether it has closed it: it would keep the context alive in the kernel.
fn not_imported(context: &Context<'_>) -> ibverbs::Error {
    let copy = context.command_fd().try_clone_to_owned().unwrap().as_raw_fd();
    let error = Context::import(context.command_fd()).unwrap_err();
    // SAFETY: the copy has the lowest free number, since the other tests are waiting.
    drop(unsafe { OwnedFd::from_raw_fd(copy) });
    error
}

/// A verb that Soft-RoCE does not support fails and has no other effect.
#[test]
#[ignore = "Soft-RoCE: what it lacks"]
fn what_is_not_there_is_unsupported() {
    with_rxe0(|context, domain, _| {
        let mut region = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ).unwrap();
        region.write(0, b"stays").unwrap();
        let change = Reregistration::new().access(AccessFlags::REMOTE_WRITE);
        let error = region.rereg(change).unwrap_err();
        assert_eq!(error.state, ReregisteredState::Unchanged);
        assert_eq!(error.error.kind(), ErrorKind::Unsupported);
        assert_eq!(region.slice(..5).unwrap().to_vec(), b"stays");

        let on_demand = RegionOptions::new().access(AccessFlags::ON_DEMAND);
        let unsupported = [
            MemoryRegion::<u8>::with_options(domain, 64, on_demand).unwrap_err(),
            ImplicitMemoryRegion::new(domain).unwrap_err(),
            NullMemoryRegion::new(domain).unwrap_err(),
            context.alloc_dm(64).unwrap_err(),
            domain
                .advise_mr(
                    ibverbs::memory::MemoryAdvice::Prefetch,
                    false,
                    &[region.gather_element(..).unwrap()],
                )
                .unwrap_err(),
            not_imported(context),
            ProtectionDomain::import(context, domain.handle()).unwrap_err(),
            // SAFETY: it fails.
            unsafe { RawMemoryRegion::import(domain, 1, 0, AccessFlags::empty()) }.unwrap_err(),
        ];
        for error in unsupported {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        }
        let file = fs::File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsFd::as_fd(&file);
        let error = RawMemoryRegion::from_dmabuf(domain, fd, 0, 64, 0, AccessFlags::LOCAL_WRITE)
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput),
            "{error:?}"
        );
    });
}

/// Root is not limited, and cannot take rights back that it has given up. So this test runs itself in a
/// process with fewer rights.
#[test]
#[ignore = "Soft-RoCE: the kernel locks registered memory"]
fn locked_memory_is_limited() {
    const CHILD: &str = "IBVERBS_TEST_MAY_NOT_LOCK_MEMORY";
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    if std::env::var_os(CHILD).is_some() {
        let error = domain.allocate::<u8>(2 << 20).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
        // `PinnedMemory::check` gives the same error beforehand.
        assert_eq!(PinnedMemory::check(&domain, 2 << 20), Err(error));
        PinnedMemory::check(&domain, 64 << 10).unwrap();
        domain.allocate::<u8>(64 << 10).unwrap();
        return;
    }
    domain.allocate::<u8>(2 << 20).unwrap();
    let exe = std::env::current_exe().unwrap();
    let command = format!(
        "ulimit -l 1024; exec '{}' --include-ignored --exact locked_memory_is_limited",
        exe.display()
    );
    let output = std::process::Command::new("setpriv")
        .args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "bash", "-c", &command])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}{error}");
}
