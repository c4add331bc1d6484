//! Where a device is in the machine, read from trees with the shape of sysfs.
//!
//! The trees are those of published outputs: `nvidia-smi topo -m` and NCCL's topology of an HGX H100, Azure's
//! file of the ND v5 (`ndv5-topo.xml`), Amazon's of the p5en.48xlarge (in aws-ofi-nccl), and a server with two
//! sockets. Where they leave bridges out, bridges stand in.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use ibverbs_transfer::{PciAddress, PciDistance, PciFunction};

use PciDistance::{OtherNode, SameNode, SameRootComplex, SameSwitch};

/// A folder with `devices`, and `class` with a link for each name. It is removed in the end.
struct Machine(PathBuf);

impl Drop for Machine {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

impl Machine {
    /// Each device is its name, its path from the root complex on, and its NUMA node.
    fn new(kind: &str, devices: &[(&str, &str, i32)]) -> Self {
        let folder =
            std::env::temp_dir().join(format!("ibverbs-pci-{}-{kind}", std::process::id()));
        let machine = Self(folder);
        fs::create_dir_all(machine.0.join("class")).unwrap();
        for (name, path, node) in devices {
            let function = machine.0.join("devices").join(path);
            let device = function.join("infiniband").join(name);
            fs::create_dir_all(&device).unwrap();
            fs::write(function.join("numa_node"), format!("{node}\n")).unwrap();
            symlink(&device, machine.0.join("class").join(name)).unwrap();
            symlink(&function, device.join("device")).unwrap();
        }
        machine
    }

    fn write(&self, name: &str, file: &str, text: &str) {
        fs::write(self.0.join("class").join(name).join("device").join(file), text).unwrap();
    }

    fn function(&self, name: &str) -> PciFunction {
        let class = self.0.join("class").join(name);
        let function = PciFunction::at(&class).unwrap();
        assert_eq!(PciFunction::at(&class.join("device")).as_ref(), Some(&function));
        function
    }

    fn distance(&self, one: &str, two: &str) -> Option<PciDistance> {
        let (one, two) = (self.function(one), self.function(two));
        assert_eq!(one.distance(&two), two.distance(&one));
        one.distance(&two)
    }
}

/// Each GPU has a switch with a NIC of its own; two switches are on one root complex here.
#[test]
fn hgx_h100() {
    let machine = Machine::new(
        "hgx",
        &[
            ("gpu5", "pci0000:b5/0000:b5:01.0/0000:b6:00.0/0000:b7:00.0/0000:b8:00.0", 1),
            ("mlx5_4", "pci0000:b5/0000:b5:01.0/0000:b6:00.0/0000:b7:01.0/0000:b9:00.0", 1),
            ("gpu7", "pci0000:d6/0000:d6:01.0/0000:d7:00.0/0000:d8:00.0/0000:d9:00.0", 1),
            ("mlx5_5", "pci0000:d6/0000:d6:01.0/0000:d7:00.0/0000:d8:01.0/0000:da:00.0", 1),
            ("storage", "pci0000:d6/0000:d6:03.0/0000:e0:00.0", 1),
            ("gpu0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:19:00.0", 0),
        ],
    );
    assert_eq!(machine.distance("mlx5_5", "gpu7"), Some(SameSwitch));
    assert_eq!(machine.distance("mlx5_4", "gpu5"), Some(SameSwitch));
    assert_eq!(machine.distance("mlx5_5", "storage"), Some(SameRootComplex));
    assert_eq!(machine.distance("mlx5_5", "gpu5"), Some(SameNode));
    assert_eq!(machine.distance("mlx5_5", "gpu0"), Some(OtherNode));
    assert_eq!(machine.distance("mlx5_5", "mlx5_5"), Some(SameSwitch));
    assert!(SameSwitch < SameRootComplex && SameRootComplex < SameNode && SameNode < OtherNode);

    let nic = machine.function("mlx5_5");
    assert_eq!(nic.address().to_string(), "0000:da:00.0");
    let bridges: Vec<String> = nic.bridges().iter().map(PciAddress::to_string).collect();
    assert_eq!(bridges, ["0000:d6:01.0", "0000:d7:00.0", "0000:d8:01.0"]);
}

/// Amazon's machine shows bridges of its own: four EFA devices and one GPU below each.
#[test]
fn aws_p5en() {
    let machine = Machine::new(
        "p5en",
        &[
            ("rdmap110s0", "pci0000:5d/0000:5d:00.0/0000:5e:00.0/0000:5f:01.6/0000:6e:00.0", 0),
            ("rdmap111s0", "pci0000:5d/0000:5d:00.0/0000:5e:00.0/0000:5f:01.7/0000:6f:00.0", 0),
            ("gpu2", "pci0000:5d/0000:5d:00.0/0000:5e:00.0/0000:5f:02.2/0000:72:00.0", 0),
            ("gpu1", "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:02.3/0000:5a:00.0", 0),
            ("nvme2", "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:02.4/0000:5b:00.0", 0),
        ],
    );
    assert_eq!(machine.distance("rdmap110s0", "gpu2"), Some(SameSwitch));
    assert_eq!(machine.distance("rdmap110s0", "rdmap111s0"), Some(SameSwitch));
    assert_eq!(machine.distance("rdmap110s0", "gpu1"), Some(SameNode));
    assert_eq!(machine.distance("gpu1", "nvme2"), Some(SameSwitch));
}

/// Azure's machine gives each function a PCI domain of its own: only the NUMA nodes tell them apart.
#[test]
fn azure_nd_v5() {
    let machine = Machine::new(
        "ndv5",
        &[
            ("mlx5_ib0", "LNXSYSTM:00/VMBUS:00/0101/pci0101:00/0101:00:00.0", 0),
            ("gpu0", "LNXSYSTM:00/VMBUS:00/0001/pci0001:00/0001:00:00.0", 0),
            ("gpu4", "LNXSYSTM:00/VMBUS:00/0009/pci0009:00/0009:00:00.0", 1),
        ],
    );
    assert_eq!(machine.distance("mlx5_ib0", "gpu0"), Some(SameNode));
    assert_eq!(machine.distance("mlx5_ib0", "gpu4"), Some(OtherNode));
    assert_eq!(machine.function("mlx5_ib0").bridges(), []);
}

/// Two ports of one card are two functions of one device; each socket has a root complex.
#[test]
fn two_sockets() {
    let machine = Machine::new(
        "sockets",
        &[
            ("mlx5_0", "pci0000:00/0000:00:02.0/0000:03:00.0", 0),
            ("mlx5_1", "pci0000:00/0000:00:02.0/0000:03:00.1", 0),
            ("nvme0", "pci0000:00/0000:00:03.0/0000:04:00.0", 0),
            ("integrated0", "pci0000:00/0000:00:1f.2", 0),
            ("integrated1", "pci0000:00/0000:00:1f.5", 0),
            ("mlx5_2", "pci0000:80/0000:80:02.0/0000:83:00.0", 1),
        ],
    );
    assert_eq!(machine.distance("mlx5_0", "mlx5_1"), Some(SameSwitch));
    assert_eq!(machine.distance("mlx5_0", "nvme0"), Some(SameRootComplex));
    assert_eq!(machine.distance("integrated0", "integrated1"), Some(SameSwitch));
    assert_eq!(machine.distance("integrated0", "nvme0"), Some(SameRootComplex));
    assert_eq!(machine.distance("mlx5_0", "mlx5_2"), Some(OtherNode));

    machine.write("mlx5_0", "local_cpulist", "0-3,16-17\n");
    machine.write("mlx5_0", "current_link_speed", "16.0 GT/s PCIe\n");
    machine.write("mlx5_0", "current_link_width", "8\n");
    let nic = machine.function("mlx5_0");
    assert_eq!(nic.local_processors(), Some(&[0, 1, 2, 3, 16, 17][..]));
    assert_eq!((nic.link_speed(), nic.link_width()), (Some(16_000), Some(8)));
    assert_eq!(nic.distance_to_node(0), Some(SameNode));
    assert_eq!(nic.distance_to_node(1), Some(OtherNode));
}

/// A fact that a container or a virtual machine hides is `None`, and so is what depends on it.
#[test]
fn hidden_facts() {
    let machine = Machine::new(
        "hidden",
        &[
            ("mlx5_0", "pci0000:00/0000:00:05.0", -1),
            ("mlx5_1", "pci0000:01/0000:01:05.0", 0),
            ("soft0", "virtual", 0),
        ],
    );
    machine.write("mlx5_0", "current_link_speed", "Unknown\n");
    machine.write("mlx5_0", "current_link_width", "0\n");
    let hidden = machine.function("mlx5_0");
    assert_eq!((hidden.numa_node(), hidden.local_processors()), (None, None));
    assert_eq!((hidden.link_speed(), hidden.link_width()), (None, None));
    assert_eq!(hidden.distance_to_node(0), None);
    assert_eq!(hidden.distance_to_memory(&[1u8; 64]), None);
    assert_eq!(machine.distance("mlx5_0", "mlx5_1"), None);
    assert_eq!(machine.distance("mlx5_0", "mlx5_0"), Some(SameSwitch));
    assert_eq!(PciFunction::at(&machine.0.join("class/soft0")), None);
    assert_eq!(PciFunction::at(&machine.0.join("class/missing")), None);
    assert_eq!(PciFunction::find("ffffffff:ff:1f.7".parse().unwrap()), None);
}

/// The memory of this process is on the nodes of this machine; where the kernel does not tell, the answer is
/// `None` for all.
#[test]
fn memory_is_where_its_pages_are() {
    let nodes = || {
        (0..64).filter(|node| fs::exists(format!("/sys/devices/system/node/node{node}")).unwrap())
    };
    let machine = Machine::new(
        "memory",
        &[("here", "pci0000:00/0000:00:05.0", 0), ("there", "pci0000:01/0000:01:05.0", 4_096)],
    );
    let memory = vec![1u64; 100_000];
    let (here, there) = (machine.function("here"), machine.function("there"));
    match there.distance_to_memory(&memory) {
        None => assert_eq!(here.distance_to_memory(&memory), None),
        Some(distance) => {
            assert_eq!(distance, OtherNode);
            if nodes().eq([0]) {
                assert_eq!(here.distance_to_memory(&memory), Some(SameNode));
            }
        }
    }
    assert_eq!(here.distance_to_memory::<u64>(&[]), None);
}
