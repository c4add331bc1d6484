//! The registration cache, on a device of software.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::memory::{RegionBuffer, SharedMemory};
use ibverbs::{AccessFlags, ProtectionDomain, RegionOptions};
use ibverbs_software::Device;
use ibverbs_transfer::{CacheError, RegistrationCache};

const KIB: usize = 1024;

fn domain() -> (Arc<ProtectionDomain<'static>>, Device) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("cache{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let device = Device::builder().name(&name).build().unwrap();
    device.register();
    let context = ibverbs::open(&name).unwrap();
    (Arc::new(ProtectionDomain::new(context).unwrap()), device)
}

fn arena(len: usize) -> SharedMemory {
    SharedMemory::from(RegionBuffer::new(len, RegionOptions::new().page_aligned()).unwrap())
}

fn cache(domain: &Arc<ProtectionDomain<'static>>, most: usize) -> RegistrationCache {
    RegistrationCache::new(domain, AccessFlags::REMOTE_READ, most)
}

fn at(memory: &SharedMemory, offset: usize) -> *const u8 {
    memory.as_ptr().wrapping_add(offset)
}

#[test]
fn what_is_registered_is_found_and_the_least_recently_used_goes() {
    let (domain, _device) = domain();
    let memory = arena(1024 * KIB);
    let mut cache = cache(&domain, 192 * KIB);
    cache.add(&memory).unwrap();
    let first = cache.get(at(&memory, 5), 10).unwrap();
    let address = memory.as_ptr() as u64 + 5;
    assert_eq!((first.remote().address(), first.remote().length()), (address, 10));
    assert_eq!((first.region().len(), cache.pinned()), (64 * KIB, 64 * KIB));
    for offset in [0, 64 * KIB - 1, 100] {
        cache.get(at(&memory, offset), 1).unwrap();
    }
    assert_eq!(cache.registered(), 1);
    drop(first);
    cache.get(at(&memory, 128 * KIB), 1).unwrap();
    cache.get(at(&memory, 256 * KIB), 1).unwrap();
    cache.get(at(&memory, 0), 1).unwrap();
    assert_eq!((cache.registered(), cache.pinned()), (3, 192 * KIB));
    // The one at 128 KiB was not used for the longest time.
    cache.get(at(&memory, 512 * KIB), 1).unwrap();
    let is_there = |offset| cache.covering(at(&memory, offset), 1).is_some();
    assert_eq!([0, 128, 256, 512].map(|kib| is_there(kib * KIB)), [true, false, true, true]);
    assert_eq!(cache.pinned(), 192 * KIB);
}

#[test]
fn what_operations_use_stays_and_counts_until_they_have_ended() {
    let (domain, _device) = domain();
    let memory = arena(1024 * KIB);
    let mut cache = cache(&domain, 128 * KIB);
    cache.add(&memory).unwrap();
    let one = cache.get(at(&memory, 0), 1).unwrap();
    let two = cache.get(at(&memory, 64 * KIB), 1).unwrap();
    let error = cache.get(at(&memory, 128 * KIB), 1).unwrap_err();
    assert_eq!(error, CacheError::InUse { pinned: 128 * KIB });
    // Forgotten, though in use: still pinned, and not found.
    let start = memory.as_ptr() as usize;
    cache.invalidate(start..start + 1);
    assert!(cache.covering(at(&memory, 0), 1).is_none());
    assert_eq!(cache.get(at(&memory, 0), 1).unwrap_err(), error);
    assert_eq!(one.as_slice().unwrap().read_one(0), Ok(0));
    drop(one);
    assert_eq!(cache.pinned(), 64 * KIB);
    cache.get(at(&memory, 0), 1).unwrap();
    assert!(cache.remove(&memory) && !cache.remove(&memory));
    assert_eq!(cache.pinned(), 64 * KIB, "that of the second");
    drop(two);
    assert_eq!(cache.pinned(), 0);
    // Nothing but us has the memory now: its regions are gone.
    let address = at(&memory, 0);
    assert!(matches!(cache.get(address, 1), Err(CacheError::Unknown { len: 1, .. })));
}

#[test]
fn parts_that_overlap_become_one_if_it_fits() {
    let (domain, _device) = domain();
    let memory = arena(1000 * KIB);
    let mut cache = cache(&domain, 256 * KIB);
    cache.add(&memory).unwrap();
    cache.get(at(&memory, 0), 1).unwrap();
    cache.get(at(&memory, 128 * KIB), 1).unwrap();
    let all = cache.get(at(&memory, 60 * KIB), 70 * KIB).unwrap();
    assert_eq!((all.region().len(), cache.pinned()), (192 * KIB, 192 * KIB));
    drop(all);
    // The union would be too long, so the wanted part alone is registered.
    let tail = cache.get(at(&memory, 190 * KIB), 130 * KIB).unwrap();
    assert_eq!((tail.region().len(), cache.pinned()), (192 * KIB, 192 * KIB));
    assert!(cache.covering(at(&memory, 0), 1).is_none());
    drop(tail);
    // The end of the memory is no multiple of a granule.
    let end = cache.get(at(&memory, 1000 * KIB - 1), 1).unwrap();
    assert_eq!(end.region().len(), 40 * KIB);
    for (offset, len) in [(1000 * KIB, 1), (1000 * KIB - 1, 2), (0, 0), (5, usize::MAX)] {
        let error = cache.get(at(&memory, offset), len).unwrap_err();
        assert!(matches!(error, CacheError::Unknown { .. }), "{offset} {len}: {error}");
    }
    let error = cache.get(at(&memory, 0), 257 * KIB).unwrap_err();
    assert_eq!(error, CacheError::TooLong { len: 320 * KIB, most: 256 * KIB });
}

#[test]
fn memories_do_not_overlap() {
    let (domain, _device) = domain();
    let (one, two) = (arena(100 * KIB), arena(100 * KIB));
    let mut cache = cache(&domain, 256 * KIB);
    cache.add(&one).unwrap();
    cache.add(&two).unwrap();
    let error = cache.add(&one.clone()).unwrap_err();
    assert!(matches!(error, CacheError::Overlaps { .. }), "{error}");
    assert!(cache.get(at(&one, 99 * KIB), 1).is_ok() && cache.get(at(&two, 0), 1).is_ok());
    assert!(cache.remove(&one) && cache.get(at(&one, 0), 1).is_err());
    cache.add(&one).unwrap();
}

/// The cache always finds the requested bytes, and never more is pinned than allowed.
#[test]
fn any_order_of_uses() {
    let (domain, _device) = domain();
    let mut random = fastrand::Rng::with_seed(62);
    let memory = arena(512 * KIB);
    let whole = memory.register(domain.clone(), .., AccessFlags::empty()).unwrap();
    let bytes: Vec<u8> = (0..512 * KIB).map(|_| random.u8(..)).collect();
    whole.write(0, &bytes).unwrap();
    let mut cache = cache(&domain, 128 * KIB);
    cache.set_granule(4 * KIB);
    cache.add(&memory).unwrap();
    let (mut held, mut found) = (Vec::new(), 0);
    for _ in 0..3000 {
        match random.u8(..8) {
            0 => held.clear(),
            1 => {
                let start = memory.as_ptr() as usize + random.usize(..512 * KIB);
                cache.invalidate(start..start + random.usize(..64 * KIB));
            }
            _ => {
                let offset = random.usize(..512 * KIB);
                let len = random.usize(1..=(16 * KIB).min(512 * KIB - offset));
                match cache.get(at(&memory, offset), len) {
                    Ok(range) => {
                        let slice = range.as_slice().unwrap();
                        assert_eq!(slice.to_vec(), bytes[offset..offset + len]);
                        held.push(range);
                        found += 1;
                    }
                    Err(CacheError::InUse { .. }) => held.clear(),
                    Err(error) => panic!("{offset} {len}: {error}"),
                }
            }
        }
        assert!(cache.pinned() <= 128 * KIB);
    }
    assert!(found > 1000 && cache.registered() < found, "{found} {}", cache.registered());
}

#[test]
fn regions_with_addresses_of_their_own_are_refused() {
    let (domain, _device) = domain();
    let memory = arena(256 * KIB);
    let iova = RegionOptions::from(AccessFlags::REMOTE_READ).iova(0x7fff_ffff_f000_0000);
    for options in [iova, (AccessFlags::REMOTE_READ | AccessFlags::ZERO_BASED).into()] {
        let mut cache = RegistrationCache::new(&domain, options, 256 * KIB);
        cache.add(&memory).unwrap();
        let error = cache.get(at(&memory, 64 * KIB), 10).unwrap_err().to_string();
        assert!(error.contains("requests do not see the region at its own address"), "{error}");
        assert_eq!(cache.pinned(), 0);
    }
}
