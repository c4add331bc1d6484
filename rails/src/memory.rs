//! Memory that is registered on all devices, and a peer's.

use std::num::NonZero;
use std::ops::{Bound, Range, RangeBounds};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{panic, thread};

use ibverbs::memory::{PinnedMemory, RawMemoryRegion, RegionBuffer, SharedMemory};
use ibverbs::{
    AccessFlags, ProtectionDomain, RegionOptions, RemoteMemoryRegion, SharedMemoryRegion,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{RailsError, Result};

/// Bytes that are registered on all devices of a [`Rails`](crate::Rails): one allocation, or a part of
/// [memory that is there](crate::Rails::register), and a key per device. It is deregistered on all of them before it is freed.
///
/// Clones are the same memory. There is no reference into it, since a peer may write at any time: the
/// [region](Self::region) of any device copies bytes in and out.
#[derive(Clone, Debug)]
pub struct RailMemory {
    regions: Regions,
}

/// A region of each device, and the number of the rails whose devices they are: here it takes no room of its own.
#[derive(Clone, Debug)]
pub(crate) enum Regions {
    Shared(u32, Arc<[Arc<SharedMemoryRegion<'static, u8>>]>),
    /// Of a dma-buf, each at addresses of its own.
    DmaBuf(u32, Arc<[Arc<RawMemoryRegion<'static>>]>),
}

impl RailMemory {
    /// Allocates `len` bytes and registers them in all domains of these rails, each with the name of its device.
    pub(crate) fn new(
        rails: u32,
        domains: &[(&str, &Arc<ProtectionDomain<'static>>)],
        len: usize,
        options: RegionOptions,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self> {
        let (&(name, domain), others) = domains.split_first().expect("rails have a device");
        let error = |error| RailsError::verbs(name, error);
        let is_pinned = !options.flags().contains(AccessFlags::ON_DEMAND);
        let mut buffer = RegionBuffer::new(len, options).map_err(error)?;
        // All of it is brought in, then each device registers all of it. No address space is so large that this overflows.
        let len = len as u64;
        let total = len.saturating_mul(domains.len() as u64 + 1);
        if is_pinned {
            PinnedMemory::check(domain, buffer.len().saturating_mul(domains.len()))
                .map_err(error)?;
            let threads = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
            buffer.populate(threads, |bytes| progress(bytes as u64, total)).map_err(error)?;
        }
        let first = SharedMemoryRegion::from_buffer(domain, buffer, options).map_err(error)?;
        let registered = AtomicU64::new(len.saturating_mul(2));
        progress(len.saturating_mul(2), total);
        let access = first.access();
        // Pinning takes time, and the devices do not wait for each other.
        let others = thread::scope(|scope| {
            let register = |&(name, domain): &(&str, &_)| {
                let region = first.register_in(domain, access);
                let done = registered.fetch_add(len, Ordering::Relaxed);
                progress(done.saturating_add(len), total);
                region.map_err(|error| RailsError::verbs(name, error))
            };
            let spawn = |domain| {
                let thread = thread::Builder::new().spawn_scoped(scope, move || register(domain));
                thread.map_err(|_| domain)
            };
            let threads: Vec<_> = others.iter().map(spawn).collect();
            let regions = threads.into_iter().map(|thread| match thread.map(|it| it.join()) {
                Ok(Ok(region)) => region,
                Ok(Err(payload)) => panic::resume_unwind(payload),
                // No thread can be made, so this one does it.
                Err(domain) => register(domain),
            });
            regions.collect::<Result<Vec<_>>>()
        })?;
        let regions = [first].into_iter().chain(others).map(Arc::new).collect();
        Ok(Self { regions: Regions::Shared(rails, regions) })
    }

    /// Registers a part of memory that is there in all domains.
    pub(crate) fn of_memory(
        rails: u32,
        domains: &[(&str, &Arc<ProtectionDomain<'static>>)],
        memory: &SharedMemory,
        range: impl RangeBounds<usize>,
        options: RegionOptions,
    ) -> Result<Self> {
        let (start, len) = resolve(range, memory.len())?;
        let register = |&(name, domain): &(&str, &_)| {
            let region = memory.register(domain, start..start + len, options);
            region.map(Arc::new).map_err(|error| RailsError::verbs(name, error))
        };
        let regions = domains.iter().map(register).collect::<Result<_>>()?;
        Ok(Self { regions: Regions::Shared(rails, regions) })
    }

    /// Registers a part of a dma-buf in all domains.
    pub(crate) fn of_dmabuf(
        rails: u32,
        domains: &[(&str, &Arc<ProtectionDomain<'static>>)],
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        access: AccessFlags,
    ) -> Result<Self> {
        let register = |&(name, domain): &(&str, &Arc<_>)| {
            let region = RawMemoryRegion::map_dmabuf(domain, dmabuf, offset, len, access);
            region.map(Arc::new).map_err(|error| RailsError::verbs(name, error))
        };
        let regions = domains.iter().map(register).collect::<Result<_>>()?;
        Ok(Self { regions: Regions::DmaBuf(rails, regions) })
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        match &self.regions {
            Regions::Shared(_, regions) => regions[0].len(),
            Regions::DmaBuf(_, regions) => regions[0].len(),
        }
    }

    /// The region of one of the devices, by its place in [`Rails::devices`](crate::Rails::devices): to copy bytes in
    /// and out, any of them will do. `None` also if it is a [dma-buf](crate::Rails::register_dmabuf).
    pub fn region(&self, device: usize) -> Option<&Arc<SharedMemoryRegion<'static, u8>>> {
        match &self.regions {
            Regions::Shared(_, regions) => regions.get(device),
            Regions::DmaBuf(..) => None,
        }
    }

    fn first(&self) -> Result<&SharedMemoryRegion<'static, u8>> {
        let reason = "a dma-buf is for devices: its exporter reads and writes it, or lets the program map it";
        self.region(0)
            .map(|region| &**region)
            .ok_or_else(|| RailsError::InvalidInput(reason.into()))
    }

    /// Copies the bytes from `offset` on to `to`.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): the memory ends before that many bytes, or is a dma-buf.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.first()?.read(offset, to).map_err(RailsError::range)
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): the memory ends before that many bytes, or is a dma-buf.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.first()?.write(offset, from).map_err(RailsError::range)
    }

    /// The keys that a peer needs to read and write this memory, as far as its access allows. The program sends them over.
    pub fn remote(&self) -> RemoteRailMemory {
        match &self.regions {
            Regions::Shared(_, regions) => {
                RemoteRailMemory::new(regions.iter().map(|region| region.remote()))
            }
            Regions::DmaBuf(_, regions) => {
                RemoteRailMemory::new(regions.iter().map(|region| region.remote()))
            }
        }
    }

    /// A part of it, for a [`Transfer`](crate::Transfer).
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): the range is empty or out of bounds.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<RailSlice> {
        let (start, len) = resolve(range, self.len())?;
        Ok(RailSlice { memory: self.clone(), start, len })
    }
}

/// A part of [`RailMemory`].
#[derive(Clone, Debug)]
pub struct RailSlice {
    memory: RailMemory,
    start: usize,
    len: usize,
}

impl RailSlice {
    /// Says that it has this length, for what looks at the length alone.
    #[cfg(test)]
    pub(crate) fn of_length(memory: &RailMemory, len: usize) -> Self {
        Self { memory: memory.clone(), start: 0, len }
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The number of the rails that it is of.
    pub(crate) fn rails(&self) -> u32 {
        match self.memory.regions {
            Regions::Shared(rails, _) | Regions::DmaBuf(rails, _) => rails,
        }
    }

    pub(crate) fn regions(&self) -> &Regions {
        &self.memory.regions
    }

    /// A part of it, as a range of each region.
    pub(crate) fn range(&self, offset: usize, len: usize) -> Range<usize> {
        let start = self.start + offset;
        start..start + len
    }
}

/// A peer's [`RailMemory`]: the address and the keys, by its devices. It is plain data; the peer may have freed the
/// memory since.
#[derive(Clone, Debug)]
pub struct RemoteRailMemory {
    /// A region of each device; the memory is a part of each.
    regions: Arc<[RemoteMemoryRegion]>,
    start: u64,
    len: u64,
}

impl RemoteRailMemory {
    /// Takes a region of each device.
    fn new(regions: impl IntoIterator<Item = RemoteMemoryRegion>) -> Self {
        let regions = regions.into_iter().collect::<Arc<[_]>>();
        let len = regions.iter().map(RemoteMemoryRegion::length).min().unwrap_or(0);
        Self { regions, start: 0, len }
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// A part of it.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): the range is empty or out of bounds.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (start, len) = resolve(range, usize::try_from(self.len).unwrap_or(usize::MAX))?;
        let (regions, start) = (self.regions.clone(), self.start + start as u64);
        Ok(Self { regions, start, len: len as u64 })
    }

    /// How many devices it is registered on.
    pub(crate) fn devices(&self) -> usize {
        self.regions.len()
    }

    /// A part of it as one of the peer's devices knows it.
    #[inline]
    pub(crate) fn part(
        &self,
        device: usize,
        offset: usize,
        len: usize,
    ) -> ibverbs::Result<RemoteMemoryRegion> {
        self.regions[device].sub_region(self.start + offset as u64, len as u64)
    }
}

impl RemoteRailMemory {
    /// The memory as 20 bytes for each device: address, length and key, in network order, as
    /// [`RemoteMemoryRegion::to_bytes`] has them. Use them to send it without serde.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.parts().flat_map(|part| part.to_bytes()).collect()
    }

    /// The memory that was converted into these bytes by [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): there are not 20 bytes for each of 1 to 255 devices, or the end of a
    ///    region is more than 64 bits hold.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let devices = bytes.len() / 20;
        if !bytes.len().is_multiple_of(20) || !(1..=255).contains(&devices) {
            let text = format!(
                "the memory of 1 to 255 devices is 20 bytes for each, not {} bytes",
                bytes.len()
            );
            return Err(RailsError::InvalidInput(text));
        }
        let regions = bytes.chunks_exact(20).map(RemoteMemoryRegion::from_bytes);
        Ok(Self::new(regions.collect::<ibverbs::Result<Vec<_>>>().map_err(RailsError::range)?))
    }

    /// The part, as each device knows it.
    fn parts(&self) -> impl Iterator<Item = RemoteMemoryRegion> {
        // The part is within each region, so none is left out.
        self.regions.iter().filter_map(|region| region.sub_region(self.start, self.len).ok())
    }
}

impl Serialize for RemoteRailMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Formats ask for the length first.
        self.parts().collect::<Vec<_>>().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RemoteRailMemory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::new)
    }
}

/// The start and the length of a range that is not empty.
fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<(usize, usize)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&end) => end.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start >= end || end > len {
        let text = format!("{start}..{end} is empty, or not within the {len} bytes of the memory");
        return Err(RailsError::InvalidInput(text));
    }
    Ok((start, end - start))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::{env, thread};

    use ibverbs::AccessFlags;
    use ibverbs_software::{Device, Network};

    /// This test runs itself, where each thread would have a stack that there is no memory for.
    #[test]
    fn without_threads_the_devices_register_one_after_the_other() {
        const ALONE: &str = "IBVERBS_RAILS_NO_THREADS";
        if env::var_os(ALONE).is_none() {
            let name = "memory::tests::without_threads_the_devices_register_one_after_the_other";
            let alone = Command::new(env::current_exe().unwrap())
                .args(["--exact", name, "--test-threads=1", "--nocapture"])
                .env(ALONE, "1")
                .env("RUST_MIN_STACK", (1_u64 << 60).to_string())
                .output()
                .unwrap();
            let text = [alone.stdout, alone.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(alone.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        assert!(thread::Builder::new().spawn(|| {}).is_err());
        let network = Network::builder().manual().build();
        let device = |name: &str| {
            let device = Device::builder().network(&network).name(name).build().unwrap();
            device.register();
            device
        };
        let _devices = ["alone0", "alone1", "alone2"].map(device);
        let builder = crate::Rails::builder().device("alone0").device("alone1").device("alone2");
        let memory = builder.build().unwrap().allocate(4096, AccessFlags::REMOTE_WRITE).unwrap();
        assert_eq!(memory.remote().devices(), 3);
    }
}
