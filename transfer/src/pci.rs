//! Where a device is in the machine, as sysfs tells it.

use std::path::Path;
use std::str::FromStr;
use std::{fmt, fs};

use ibverbs::device::Device;

/// The address of a PCI function, such as `0000:5e:00.0` (also in `lspci -D`, sysfs, CUDA and NVMe tools).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PciAddress {
    /// The domain (segment): 0 on most machines, and sometimes above 16 bits on virtual ones.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on the bus: 0 to 31.
    pub device: u8,
    /// The function of the device: 0 to 7.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

/// The text is no [`PciAddress`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParsePciAddressError(());

impl fmt::Display for ParsePciAddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a PCI address is written DOMAIN:BUS:DEVICE.FUNCTION, such as 0000:5e:00.0")
    }
}

impl std::error::Error for ParsePciAddressError {}

/// `0000:5e:00.0` in either case; the domain has 4 to 8 digits (CUDA: 8), or is left out.
impl FromStr for PciAddress {
    type Err = ParsePciAddressError;

    fn from_str(text: &str) -> Result<Self, ParsePciAddressError> {
        let number = |text: &str, digits: std::ops::RangeInclusive<usize>, most: u32| {
            let hexadecimal = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let number = u32::from_str_radix(text, 16).ok();
            number.filter(|&n| hexadecimal && digits.contains(&text.len()) && n <= most)
        };
        let parse = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, device) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
            Some(Self {
                domain: number(domain, 4..=8, u32::MAX)?,
                bus: number(bus, 2..=2, 0xff)? as u8,
                device: number(device, 2..=2, 31)? as u8,
                function: number(function, 1..=1, 7)? as u8,
            })
        };
        parse().ok_or(ParsePciAddressError(()))
    }
}

/// How far data travels between a device and another part of the machine, nearest first. In brackets the
/// names of `nvidia-smi topo -m` and NCCL.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PciDistance {
    /// Through PCIe bridges alone: one switch or one card (PIX, PXB).
    SameSwitch,
    /// Through a common root complex (PHB).
    SameRootComplex,
    /// Between root complexes of a NUMA node (NODE).
    SameNode,
    /// Between NUMA nodes (SYS).
    OtherNode,
}

/// A PCI function and its place in the machine, as sysfs showed it.
///
/// What a virtual machine or a container hides is `None`. Software devices have no PCI function.
///
/// ```
/// # fn choose(gpu: ibverbs_transfer::PciAddress) -> ibverbs::Result<()> {
/// use ibverbs_transfer::PciFunction;
///
/// // The device that is nearest to a GPU, an NVMe disk, or another PCI function.
/// let gpu = PciFunction::find(gpu);
/// let devices = ibverbs::devices()?;
/// let nearest = devices.iter().min_by_key(|device| {
///     let distance = PciFunction::of(device).zip(gpu.as_ref()).and_then(|(nic, gpu)| nic.distance(gpu));
///     (distance.is_none(), distance)
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PciFunction {
    address: PciAddress,
    bridges: Vec<PciAddress>,
    /// Such as `pci0000:5d`.
    root: String,
    numa_node: Option<u32>,
    processors: Option<Vec<u32>>,
    link_speed: Option<u32>,
    link_width: Option<u32>,
}

impl PciFunction {
    /// The function that carries a device. `None` for software devices, and where a container hides it.
    pub fn of(device: &Device<'_>) -> Option<Self> {
        Self::at(&device.sysfs_path().join("device"))
    }

    /// Finds a function in `/sys/bus/pci/devices`; `None` if this process sees none.
    pub fn find(address: PciAddress) -> Option<Self> {
        Self::at(&Path::new("/sys/bus/pci/devices").join(address.to_string()))
    }

    /// The function at a sysfs path: a folder of `/sys/bus/pci/devices`, or of a device on the function, such
    /// as `/sys/class/nvme/nvme0`. Follows symbolic links.
    pub fn at(path: &Path) -> Option<Self> {
        let path = fs::canonicalize(path).ok()?;
        let is_function =
            |path: &&Path| name(path).is_some_and(|n| n.parse::<PciAddress>().is_ok());
        let folder = path.ancestors().find(is_function)?;
        let mut bridges = Vec::new();
        let mut root = None;
        for above in folder.ancestors().skip(1) {
            match name(above)?.parse() {
                Ok(bridge) => bridges.push(bridge),
                Err(_) => {
                    root = name(above);
                    break;
                }
            }
        }
        bridges.reverse();
        let read = |file: &str| fs::read_to_string(folder.join(file)).ok();
        Some(Self {
            address: name(folder)?.parse().ok()?,
            bridges,
            root: root?.to_owned(),
            // -1: the firmware does not say.
            numa_node: read("numa_node").and_then(|text| text.trim().parse().ok()),
            processors: read("local_cpulist").and_then(|text| processors(text.trim())),
            link_speed: read("current_link_speed").and_then(|text| megatransfers(&text)),
            // 0: no link, as in a virtual machine.
            link_width: read("current_link_width")
                .and_then(|text| text.trim().parse().ok())
                .filter(|&width| width > 0),
        })
    }

    /// Its address.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// The bridges from the root complex to the function, in that order.
    pub fn bridges(&self) -> &[PciAddress] {
        &self.bridges
    }

    /// The NUMA node. `None` where the firmware names none.
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// The processors near to it, ascending.
    pub fn local_processors(&self) -> Option<&[u32]> {
        self.processors.as_deref()
    }

    /// The current speed of a lane of its PCIe link, in millions of transfers per second (32,000: PCIe
    /// 5). For a network port see [`PortAttributes::speed`](ibverbs::device::PortAttributes::speed).
    pub fn link_speed(&self) -> Option<u32> {
        self.link_speed
    }

    /// The current number of lanes of its PCIe link.
    pub fn link_width(&self) -> Option<u32> {
        self.link_width
    }

    /// How far data travels to another function, such as a GPU or an NVMe disk. `None` if they share no
    /// bridge or root complex, and a NUMA node is not known.
    pub fn distance(&self, other: &Self) -> Option<PciDistance> {
        if self.root == other.root {
            // Functions of one device are one card, even without a bridge.
            let slot = |function: &Self| {
                let PciAddress { domain, bus, device, .. } = function.address;
                (domain, bus, device)
            };
            let below_one_bridge =
                self.bridges.first().is_some_and(|bridge| other.bridges.first() == Some(bridge));
            let near = below_one_bridge || slot(self) == slot(other);
            return Some(match near {
                true => PciDistance::SameSwitch,
                false => PciDistance::SameRootComplex,
            });
        }
        self.distance_to_node(other.numa_node?)
    }

    /// How far data travels to a NUMA node: [`SameNode`](PciDistance::SameNode) or
    /// [`OtherNode`](PciDistance::OtherNode). `None` if the function's own node is not known.
    pub fn distance_to_node(&self, node: u32) -> Option<PciDistance> {
        Some(if self.numa_node? == node { PciDistance::SameNode } else { PciDistance::OtherNode })
    }

    /// How far data travels to `memory`, or to the farthest page of the mapping that it begins in: an allocation of many pages
    /// has a mapping of its own.
    ///
    /// `None` if the function's own node is not known, no page of the mapping has been touched, or the kernel
    /// does not say where they are (`/proc/self/numa_maps`).
    pub fn distance_to_memory<T>(&self, memory: &[T]) -> Option<PciDistance> {
        let maps = fs::read_to_string("/proc/self/numa_maps").ok()?;
        let mapping = mapping_of(&maps, memory.as_ptr().addr()).filter(|_| !memory.is_empty())?;
        nodes(mapping).filter_map(|node| self.distance_to_node(node)).max()
    }
}

/// The line of the mapping with an address. Each begins with the first address of its mapping, the lowest first.
fn mapping_of(maps: &str, address: usize) -> Option<&str> {
    let start = |line: &str| usize::from_str_radix(line.split(' ').next()?, 16).ok();
    maps.lines().take_while(|line| start(line).is_some_and(|start| start <= address)).last()
}

/// The nodes of a line such as `7f0c00000000 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4`.
fn nodes(mapping: &str) -> impl Iterator<Item = u32> {
    mapping.split(' ').filter_map(|word| word.strip_prefix('N')?.split_once('=')?.0.parse().ok())
}

fn name(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// A list like `0-3,8,10-11`.
fn processors(list: &str) -> Option<Vec<u32>> {
    /// More than any kernel has: a broken file must not take memory.
    const MOST: u32 = 1 << 16;
    let mut numbers = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        numbers.extend((last < MOST).then_some(first..=last)?);
    }
    Some(numbers)
}

/// Reads `32.0 GT/s PCIe`; `None` for `Unknown`.
fn megatransfers(text: &str) -> Option<u32> {
    let (number, unit) = text.trim().split_once(' ')?;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u32 = tenths.get(..1)?.parse().ok()?;
    let whole: u32 = whole.parse().ok()?;
    unit.starts_with("GT/s").then(|| whole.checked_mul(1000)?.checked_add(tenths * 100))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let address = PciAddress { domain: 0x1_0000, bus: 0x5e, device: 0x1f, function: 7 };
        assert_eq!(address.to_string(), "10000:5e:1f.7");
        assert_eq!(address.to_string().parse(), Ok(address));
        let address = PciAddress { domain: 0, ..address };
        for text in ["0000:5e:1f.7", "00000000:5E:1F.7", "5e:1f.7"] {
            assert_eq!(text.parse(), Ok(address), "{text}");
        }
        for text in [
            "",
            "5e",
            "5e:00",
            "0000:5e:00",
            "000:5e:00.0",
            "0000:5e:20.0",
            "0000:5e:00.8",
            "0000:+5:00.0",
            "0000:5e:00.0.0",
            "000000000:5e:00.0",
            "0000:5e:00.0 ",
            "0:0000:5e:00.0",
            "pci0000:5d",
        ] {
            let error = text.parse::<PciAddress>().expect_err(text);
            assert!(error.to_string().contains("0000:5e:00.0"));
        }
    }

    #[test]
    fn lists_of_processors_and_speeds_are_read() {
        assert_eq!(processors("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        assert_eq!(processors("7"), Some(vec![7]));
        for broken in ["", "a", "1-", "-1", "0-4294967295", "1,,2"] {
            assert_eq!(processors(broken), None, "{broken:?}");
        }
        assert_eq!(megatransfers("32.0 GT/s PCIe\n"), Some(32_000));
        assert_eq!(megatransfers("2.5 GT/s"), Some(2_500));
        assert_eq!(megatransfers("8 GT/s"), Some(8_000));
        for broken in ["Unknown", "", "32.0", "32. GT/s", "9999999.0 GT/s", "5.0 Gb/s"] {
            assert_eq!(megatransfers(broken), None, "{broken:?}");
        }
    }
    #[test]
    fn mappings_tell_the_nodes_of_their_pages() {
        let maps = "00400000 default file=/bin/a mapped=7 N0=3 N1=4 kernelpagesize_kB=4\n\
                    7f0000000000 bind:2 anon=2 dirty=2 N2=2 kernelpagesize_kB=4\n\
                    7f0000800000 default\n";
        let of = |address| mapping_of(maps, address).map(|line| nodes(line).collect::<Vec<_>>());
        assert_eq!(of(0x40_0000), Some(vec![0, 1]));
        assert_eq!(of(0x7f00_007f_ffff), Some(vec![2]));
        assert_eq!(of(0x7f00_0080_0000), Some(vec![]));
        assert_eq!(of(8), None);
    }
}
