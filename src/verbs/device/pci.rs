use crate::base::c_enum::getters;
use std::ffi::c_void;
use std::path::Path;
use std::str::FromStr;
use std::{fmt, fs};

use super::Device;
use super::context::Context;

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
/// # fn choose(gpu: ibverbs::device::PciAddress) -> ibverbs::Result<()> {
/// use ibverbs::device::PciFunction;
///
/// // The device that is nearest to a GPU, an NVMe disk, or another PCI function.
/// let gpu = PciFunction::find(gpu);
/// let devices = ibverbs::devices()?;
/// let nearest = devices.iter().min_by_key(|device| {
///     let distance = device.pci_function().zip(gpu.as_ref()).and_then(|(nic, gpu)| nic.distance(gpu));
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

    getters! { self,
        /// Its address.
        address: PciAddress => self.address;

        /// The bridges from the root complex to the function, in that order.
        bridges: &[PciAddress] => &self.bridges;

        /// The NUMA node. `None` where the firmware names none.
        numa_node: Option<u32> => self.numa_node;

        /// The processors near to it, ascending.
        local_processors: Option<&[u32]> => self.processors.as_deref();

        /// The current speed of a lane of its PCIe link, in millions of transfers per second (32,000: PCIe
        /// 5). For a network port see [`PortAttributes::speed`](crate::device::PortAttributes::speed).
        link_speed: Option<u32> => self.link_speed;

        /// The current number of lanes of its PCIe link.
        link_width: Option<u32> => self.link_width;
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

    /// How far data travels to the farthest page of `memory`, of up to 1,024 evenly spread ones.
    ///
    /// `None` if the function's own node is not known, none of those pages has been touched, or the kernel
    /// does not say where they are (many containers forbid `move_pages`(2)).
    #[doc(alias = "move_pages")]
    pub fn distance_to_memory<T>(&self, memory: &[T]) -> Option<PciDistance> {
        const MOST: usize = 1024;
        const PAGE: usize = 4096; // The smallest: with larger ones, some pages are asked for twice.
        let step = size_of_val(memory).div_ceil(MOST).next_multiple_of(PAGE);
        let mut pages: Vec<*const c_void> = (0..size_of_val(memory).div_ceil(step.max(1)))
            .map(|i| memory.as_ptr().cast::<c_void>().wrapping_byte_add(i * step))
            .collect();
        let mut nodes = vec![-1i32; pages.len()];
        // SAFETY: both arrays have this many elements. Without a list of nodes the kernel only writes each page's node,
        // or a negative error number, into the second.
        let result = unsafe {
            libc::syscall(
                crate::base::linux::SYS_move_pages,
                0,
                pages.len(),
                pages.as_mut_ptr(),
                std::ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        if result != 0 {
            return None;
        }
        let known = nodes.into_iter().filter_map(|node| u32::try_from(node).ok());
        known.filter_map(|node| self.distance_to_node(node)).max()
    }
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

impl Device<'_> {
    /// The PCI function that carries the device. `None` for software devices, and where a container hides it.
    pub fn pci_function(&self) -> Option<PciFunction> {
        PciFunction::at(&self.sysfs_path().join("device"))
    }
}

impl Context<'_> {
    /// [`Device::pci_function`].
    pub fn pci_function(&self) -> Option<PciFunction> {
        self.device().pci_function()
    }
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
}
