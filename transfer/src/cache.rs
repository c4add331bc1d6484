//! Registrations that are made when they are needed, and kept.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

use ibverbs::memory::{SharedMemory, SharedMemoryRange};
use ibverbs::{Error, ErrorKind, ProtectionDomain, RegionOptions, SharedMemoryRegion};

/// Regions of the parts of memory that a program asks for, by address.
///
/// Registering takes many microseconds and pins the memory. So a part stays registered until the bytes that are pinned
/// would exceed the limit; then the least recently used parts make room. A part that an operation uses stays registered
/// until that has ended, whatever happens to the cache.
///
/// The program says when memory is about to go: [`remove`](Self::remove), or [`invalidate`](Self::invalidate) for a part
/// of it, such as a file that is to be written anew.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::sync::Arc;
///
/// use ibverbs::memory::{RegionBuffer, SharedMemory};
/// use ibverbs::{AccessFlags, ProtectionDomain, RegionOptions};
/// use ibverbs_transfer::RegistrationCache;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let arena = SharedMemory::from(RegionBuffer::new(64 << 20, RegionOptions::new())?);
/// let mut cache = RegistrationCache::new(&domain, AccessFlags::REMOTE_READ, 16 << 20);
/// cache.add(&arena)?;
/// let block = arena.as_ptr().wrapping_add(5 << 20);
/// let range = cache.get(block, 4096)?; // registered now: `WriteWorkRequest::new(range, to)`
/// let again = cache.get(block, 4096)?; // found
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RegistrationCache {
    domain: Arc<ProtectionDomain<'static>>,
    options: RegionOptions,
    most: usize,
    granule: usize,
    /// Keys are addresses of first bytes. The entries do not overlap.
    memories: BTreeMap<usize, SharedMemory>,
    /// Keys are addresses of first bytes. The entries do not overlap.
    parts: BTreeMap<usize, Part>,
    /// No longer found, but in use when they were given up.
    leaving: Vec<Weak<SharedMemoryRegion<'static, u8>>>,
    /// Counts the uses.
    now: u64,
    registered: u64,
}

type Region = Arc<SharedMemoryRegion<'static, u8>>;

#[derive(Debug)]
struct Part {
    region: Region,
    used: u64,
}

/// The reason why there is no registered memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CacheError {
    /// The bytes are not within one memory that the cache knows, or there are none.
    Unknown {
        /// The address of the first byte.
        address: usize,
        /// Their number.
        len: usize,
    },
    /// The memory that was added overlaps another.
    Overlaps {
        /// The address of its first byte.
        address: usize,
    },
    /// The bytes are more than the cache may pin.
    TooLong {
        /// Their number, whole granules.
        len: usize,
        /// The bytes that the cache may pin.
        most: usize,
    },
    /// Operations that have not ended pin so many bytes that there is no room: try again when some have ended.
    InUse {
        /// The bytes that are pinned.
        pinned: usize,
    },
    /// The registration has failed.
    Verbs(Error),
}

impl fmt::Display for CacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Unknown { address, len } => {
                write!(f, "the cache knows no memory that has the {len} bytes at {address:#x}")
            }
            Self::Overlaps { address } => {
                write!(f, "the memory at {address:#x} overlaps memory that the cache has")
            }
            Self::TooLong { len, most } => {
                write!(f, "the {len} bytes are more than the {most} that the cache may pin")
            }
            Self::InUse { pinned } => {
                write!(
                    f,
                    "operations that have not ended use too much of the {pinned} bytes that are pinned"
                )
            }
            Self::Verbs(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CacheError {}

impl From<Error> for CacheError {
    fn from(error: Error) -> Self {
        Self::Verbs(error)
    }
}

/// A part is registered in multiples of this, unless the memory ends before.
const GRANULE: usize = 64 << 10;

impl RegistrationCache {
    /// An empty cache, whose regions have the access of `options`, and which pins `most` bytes at most. Regions have no
    /// iova of their own: [`get`](Self::get) fails if the options say otherwise.
    pub fn new(
        domain: &Arc<ProtectionDomain<'static>>,
        options: impl Into<RegionOptions>,
        most: usize,
    ) -> Self {
        Self {
            domain: domain.clone(),
            options: options.into(),
            most,
            granule: GRANULE,
            memories: BTreeMap::new(),
            parts: BTreeMap::new(),
            leaving: Vec::new(),
            now: 0,
            registered: 0,
        }
    }

    /// Registers parts in multiples of `bytes` bytes, which is 64 KiB unless it is set: more bytes are pinned, and more is
    /// found. 0 counts as 1.
    pub fn set_granule(&mut self, bytes: usize) {
        self.granule = bytes.max(1);
    }

    /// Makes a memory known. Nothing of it is registered yet.
    ///
    /// # Errors
    ///
    ///  - [`Overlaps`](CacheError::Overlaps): the cache knows a memory that has some of its addresses.
    pub fn add(&mut self, memory: &SharedMemory) -> Result<(), CacheError> {
        let Range { start, end } = memory.addresses();
        let below = self.memories.range(..end).next_back();
        if below.is_some_and(|(_, other)| other.addresses().end > start) {
            return Err(CacheError::Overlaps { address: start });
        }
        self.memories.insert(start, memory.clone());
        Ok(())
    }

    /// Forgets a memory and all registrations of it. Those that operations use end when these have ended. Returns whether
    /// the cache knew it.
    pub fn remove(&mut self, memory: &SharedMemory) -> bool {
        let addresses = memory.addresses();
        let is_known = |known: &SharedMemory| known.addresses() == addresses;
        let found = self.memories.get(&addresses.start).is_some_and(is_known);
        if found {
            self.memories.remove(&addresses.start);
            self.invalidate(addresses);
        }
        found
    }

    /// Forgets the registrations of all parts that have any of these addresses, so that the next use registers them anew.
    /// Those that operations use end when these have ended.
    pub fn invalidate(&mut self, addresses: Range<usize>) {
        while let Some(start) = self.overlapping(&addresses) {
            self.retire(start);
        }
        self.sweep();
    }

    /// The `len` bytes at `address`, for an operation or a peer. Registers them, unless they are.
    ///
    /// # Errors
    ///
    ///  - [`Unknown`](CacheError::Unknown): they are not within one memory that was [added](Self::add), or `len` is 0.
    ///  - [`TooLong`](CacheError::TooLong): they are more than the cache may pin.
    ///  - [`InUse`](CacheError::InUse): other operations have to end first.
    ///  - [`Verbs`](CacheError::Verbs): the errors of [`SharedMemory::register`]. If the kernel lets the process pin no
    ///    more (`ENOMEM`), all parts that nothing uses were given up before. `EINVAL`: `len` is more than 4 GiB - 1.
    pub fn get(
        &mut self,
        address: *const u8,
        len: usize,
    ) -> Result<SharedMemoryRange<u8>, CacheError> {
        let start = address as usize;
        let unknown = CacheError::Unknown { address: start, len };
        let end = start.checked_add(len).filter(|_| len > 0).ok_or(unknown)?;
        self.now += 1;
        if let Some((&first, part)) = self.parts.range_mut(..=start).next_back()
            && end <= first + part.region.len()
        {
            part.used = self.now;
            return Ok(range(&part.region, start - first, len)?);
        }
        let (first, region) = self.register(start..end).ok_or(unknown)??;
        let found = range(&region, start - first, len)?;
        self.parts.insert(first, Part { region, used: self.now });
        Ok(found)
    }

    /// The region that covers the `len` bytes at `address`, if they are registered.
    pub fn covering(
        &self,
        address: *const u8,
        len: usize,
    ) -> Option<&Arc<SharedMemoryRegion<'static, u8>>> {
        let start = address as usize;
        let (&first, part) = self.parts.range(..=start).next_back()?;
        (start.checked_add(len)? <= first + part.region.len()).then_some(&part.region)
    }

    /// The bytes that are pinned for the cache, also those that are given up when an operation ends.
    pub fn pinned(&self) -> usize {
        let kept = self.parts.values().map(|part| part.region.len());
        kept.chain(self.leaving.iter().filter_map(|region| Some(region.upgrade()?.len()))).sum()
    }

    /// How many regions were registered so far: with [`get`](Self::get)'s calls, the program sees how often it found one.
    pub fn registered(&self) -> u64 {
        self.registered
    }

    /// Returns the address of the region's first byte too. `None`: no memory has these addresses.
    fn register(&mut self, addresses: Range<usize>) -> Option<Result<(usize, Region), CacheError>> {
        let (&base, memory) = self.memories.range(..=addresses.start).next_back()?;
        let last = base + memory.len();
        if addresses.end > last {
            return None;
        }
        let memory = memory.clone();
        let down = |address: usize| base + (address - base) / self.granule * self.granule;
        let up = |address: usize| match (address - base).checked_next_multiple_of(self.granule) {
            Some(whole) => base.saturating_add(whole).min(last),
            None => last,
        };
        let wanted = down(addresses.start)..up(addresses.end);
        let mut part = wanted.clone();
        // Overlapping parts become one part, unless that is too long.
        let mut overlapping = Vec::new();
        for (&start, other) in self.parts.range(..wanted.end).rev() {
            let end = start + other.region.len();
            if end <= wanted.start {
                break;
            }
            part = part.start.min(start)..part.end.max(end);
            overlapping.push(start);
        }
        if part.len() > self.most {
            part = wanted;
        }
        for start in overlapping {
            self.retire(start);
        }
        let region = self.register_part(&memory, part.start - base..part.end - base);
        Some(region.map(|region| (part.start, region)))
    }

    fn register_part(
        &mut self,
        memory: &SharedMemory,
        part: Range<usize>,
    ) -> Result<Region, CacheError> {
        let (len, most) = (part.len(), self.most);
        if len > most {
            return Err(CacheError::TooLong { len, most });
        }
        self.sweep();
        while self.pinned() + len > most {
            if !self.evict() {
                return Err(CacheError::InUse { pinned: self.pinned() });
            }
        }
        loop {
            match memory.register(self.domain.clone(), part.clone(), self.options) {
                Ok(region) => {
                    self.registered += 1;
                    return Ok(Arc::new(region));
                }
                // The device, or what the process may pin, has less room than the cache.
                Err(error) if error.kind() == ErrorKind::Resource && self.evict() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn overlapping(&self, addresses: &Range<usize>) -> Option<usize> {
        let (&start, part) = self.parts.range(..addresses.end).next_back()?;
        (start + part.region.len() > addresses.start && !addresses.is_empty()).then_some(start)
    }

    /// The last operation that uses the part deregisters it.
    fn retire(&mut self, start: usize) {
        self.leaving.extend(self.parts.remove(&start).map(|part| Arc::downgrade(&part.region)));
    }

    /// Deregisters the part that was used least recently of those that nothing uses.
    fn evict(&mut self) -> bool {
        let idle = self.parts.iter().filter(|(_, part)| !is_used(&part.region));
        let Some((&start, _)) = idle.min_by_key(|(_, part)| part.used) else { return false };
        self.parts.remove(&start);
        true
    }

    fn sweep(&mut self) {
        self.leaving.retain(|region| region.strong_count() > 0);
    }
}

/// Nothing but the cache can use a region that nothing else has.
fn is_used(region: &Region) -> bool {
    Arc::strong_count(region) > 1
}

fn range(region: &Region, start: usize, len: usize) -> ibverbs::Result<SharedMemoryRange<u8>> {
    SharedMemoryRange::new(region.clone(), start..start + len)
}
