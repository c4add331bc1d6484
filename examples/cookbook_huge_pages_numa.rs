//! Cookbook: huge pages, and memory near the device.
//!
//! A device keeps a table of the pages of each region. With huge pages the table is 512 times shorter, so
//! the device finds its entries in its cache. On a machine with several memory nodes, the memory of the
//! device's own node is the nearest. The kernel takes memory from the node of the processor that touches it
//! first, so the thread first moves to that node, and then allocates.

#[path = "common/two_sides.rs"]
mod two_sides;

use ibverbs::memory::HugePages;
use ibverbs::{Context, MemoryRegion, ProtectionDomain, RegionOptions};

use two_sides::{Result, both, connect, deadline};

/// Numbers in the region: 4 MiB.
const NUMBERS: usize = 1 << 19;

#[allow(dead_code, reason = "a test calls run")]
fn main() -> Result {
    two_sides::main(run)
}

pub(crate) fn run(sender: &Context<'_>, receiver: &Context<'_>) -> Result {
    for context in [sender, receiver] {
        match near(context) {
            Some(processors) => {
                run_on(&processors)?;
                println!("{}: this thread runs on a processor near the device", context.name());
            }
            None => println!("{}: the kernel does not say where it is", context.name()),
        }
    }
    let (sender, receiver) = (sender.alloc_pd()?, receiver.alloc_pd()?);
    let (mut out, mut incoming) = connect(sender.create_channel(), receiver.create_channel())?;
    let (mut source, mut sink) = (allocate(&sender)?, allocate(&receiver)?);
    for (index, number) in source.iter_mut().enumerate() {
        *number = index as u64;
    }
    both(
        || {
            incoming.until(deadline()).receive(&mut sink.slice_mut(..)?)?;
            Ok(())
        },
        || {
            out.until(deadline()).send(source.slice(..)?)?;
            Ok(())
        },
    )?;
    if !sink.iter().copied().eq(0..NUMBERS as u64) {
        return Err("what arrived is not what was sent".into());
    }
    println!("{} bytes arrived", 8 * NUMBERS);
    Ok(())
}

/// Allocates memory on huge pages that were set aside, or otherwise on transparent huge pages.
fn allocate<'d>(domain: &'d ProtectionDomain<'d>) -> Result<MemoryRegion<'d, u64>> {
    let options = RegionOptions::new();
    let set_aside = options.huge_pages(HugePages::Size2MiB);
    match MemoryRegion::with_options(domain, NUMBERS, set_aside) {
        Ok(region) => {
            println!("the region lies on huge pages that were set aside");
            Ok(region)
        }
        // This command sets pages aside: echo 4 >/proc/sys/vm/nr_hugepages
        Err(error) => {
            println!("{error}: transparent huge pages instead");
            let options = options.huge_pages(HugePages::Transparent);
            Ok(MemoryRegion::with_options(domain, NUMBERS, options)?)
        }
    }
}

/// The processors that are near the device, by a list such as `0-3,16-19`. `PciFunction` of `ibverbs-transfer` has it too.
fn near(context: &Context<'_>) -> Option<Vec<u32>> {
    let file = format!("/sys/class/infiniband/{}/device/local_cpulist", context.name());
    let mut processors = Vec::new();
    for range in std::fs::read_to_string(file).ok()?.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        processors.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(processors)
}

/// Moves this thread to these processors.
fn run_on(processors: &[u32]) -> Result {
    // SAFETY: a set of processors is bits, of which all may be 0.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &processor in processors.iter().filter(|&&p| p < libc::CPU_SETSIZE as u32) {
        // SAFETY: the number is within the set.
        unsafe { libc::CPU_SET(processor as usize, &mut set) };
    }
    // SAFETY: the length is that of the set; 0 is this thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().into()),
    }
}
