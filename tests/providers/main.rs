//! Every enabled provider is part of the program and registered, and no other is.
//!
//! libibverbs sees a fake kernel with one device of every driver (see [`fake_kernel`]). The device list
//! must then hold exactly the devices whose providers are enabled, each claimed by its
//! own provider. There are two runs: with RDMA netlink, as in every kernel since 5.1, and with
//! sysfs only.
//!
//! libibverbs reads the environment once, so a child process makes each listing: this
//! program again, running the ignored test.
#![cfg(not(feature = "system"))]

mod fake_kernel;

use std::collections::BTreeSet;
use std::env;
use std::ffi::{CStr, c_char};
use std::process::{Command, Stdio};

use fake_kernel::{FakeDevice, Interface};
use ibverbs::ffi;

macro_rules! device {
    ($feature:literal, $provider:literal, $driver_id:literal, $abi:literal, $modalias:literal) => {
        device!($feature, $provider, $driver_id, $abi, $modalias, concat!($feature, "-fake"))
    };
    ($feature:literal, $provider:literal, $driver_id:literal, $abi:literal, $modalias:literal, $name:expr) => {
        FakeDevice {
            enabled: cfg!(feature = $feature) && (cfg!(rdma_core_65) || $driver_id != IONIC),
            name: $name,
            provider: $provider,
            driver_id: $driver_id,
            abi: $abi,
            modalias: $modalias,
        }
    };
}

/// One device of each driver: cargo feature, the provider's own name, `RDMA_DRIVER_*` of the
/// kernel, an ABI version that the provider takes, and how its PCI device shows in sysfs.
const DEVICES: &[FakeDevice] = &[
    device!("bnxt_re", "bnxt_re", 6, 1, "pci:v000014E4d00001605sv"),
    device!("cxgb4", "cxgb4", 4, 3, "pci:v00001425d00004401sv"),
    device!("efa", "efa", 17, 1, "pci:v00001D0Fd0000EFA0sv"),
    device!("erdma", "erdma", 19, 1, "pci:v00001DEDd0000107Fsv"),
    device!("hfi1verbs", "hfi1verbs", 15, 1, "pci:v00008086d000024F0sv"),
    device!("hns", "hns", 12, 1, "pci:v000019E5d0000A222sv"),
    device!("ionic", "ionic", 21, 1, ""),
    device!("ipathverbs", "ipathverbs", 16, 1, "pci:v00001077d00007322sv"),
    device!("irdma", "irdma", 9, 5, "pci:v00008086d00001592sv"),
    // GEN3, which the provider knows by its driver alone.
    device!("irdma", "irdma", 9, 5, "pci:v00008086d00001452sv", "irdma-gen3"),
    device!("mana", "mana", 20, 1, ""),
    device!("mlx4", "mlx4", 2, 4, "pci:v000015B3d00001003sv"),
    device!("mlx5", "mlx5", 1, 1, "pci:v000015B3d00001017sv"),
    device!("mthca", "mthca", 5, 1, "pci:v000015B3d00005A44sv"),
    device!("ocrdma", "ocrdma", 7, 2, "pci:v000010DFd00000720sv"),
    device!("qedr", "qedr", 11, 8, "pci:v00001077d00001629sv"),
    device!("rxe", "rxe", 14, 2, ""),
    device!("siw", "siw", 18, 1, ""),
    device!("vmw_pvrdma", "pvrdma", 10, 3, "pci:v000015ADd00000820sv"),
];

/// The driver id of ionic, whose provider older releases lack.
const IONIC: u32 = 21;

const INTERFACE: &str = "IBVERBS_TEST_INTERFACE";
const LINE: &str = "listed: ";

#[test]
fn netlink_lists_one_device_per_enabled_provider() {
    let expected = DEVICES.iter().filter(|d| d.enabled);
    assert_eq!(listed(Interface::Netlink), expected.map(FakeDevice::line).collect());
}

/// In sysfs no file names the driver of a device. Most providers recognise their PCI devices, and rxe goes by
/// the device's name; ionic, mana, siw and the new devices of irdma have neither.
#[test]
fn sysfs_lists_one_device_per_enabled_provider_that_it_can_tell() {
    let unknown = ["ionic-fake", "irdma-gen3", "mana-fake", "siw-fake"];
    let expected = DEVICES.iter().filter(|d| d.enabled && !unknown.contains(&d.name));
    assert_eq!(listed(Interface::Sysfs), expected.map(FakeDevice::line).collect());
}

/// The devices that a child process lists.
fn listed(interface: Interface) -> BTreeSet<String> {
    let sysfs = fake_kernel::Sysfs::create(interface, DEVICES);
    let output = Command::new(env::current_exe().expect("a test has a path"))
        .args(["child_lists_devices", "--exact", "--ignored", "--nocapture"])
        .env("SYSFS_PATH", sysfs.path())
        .env(INTERFACE, format!("{interface:?}"))
        .stderr(Stdio::inherit())
        .output()
        .expect("the child starts");
    let text = String::from_utf8(output.stdout).expect("the child prints text");
    assert!(output.status.success(), "the child failed ({}):\n{text}", output.status);
    let lines: Vec<_> =
        text.lines().filter_map(|l| Some(l.split_once(LINE)?.1.to_owned())).collect();
    let set: BTreeSet<_> = lines.iter().cloned().collect();
    assert_eq!(lines.len(), set.len(), "a device was listed twice:\n{text}");
    set
}

#[test]
#[ignore = "run by the other tests, in a process of its own"]
fn child_lists_devices() {
    let interface = match env::var(INTERFACE).as_deref() {
        Ok("Netlink") => Interface::Netlink,
        Ok("Sysfs") => Interface::Sysfs,
        other => panic!("{INTERFACE} is {other:?}: only the other tests of this file run this one"),
    };
    fake_kernel::play(interface, DEVICES);

    let mut count = 0;
    // SAFETY: `count` is writable.
    let list = unsafe { ffi::ibv_get_device_list(&mut count) };
    assert!(!list.is_null(), "ibv_get_device_list: {}", std::io::Error::last_os_error());
    for i in 0..usize::try_from(count).expect("not negative") {
        // SAFETY: the list holds `count` devices.
        let device = unsafe { *list.add(i) };
        // SAFETY: the device is live until the list is freed.
        let name = unsafe { CStr::from_ptr(ffi::ibv_get_device_name(device)) };
        // SAFETY: libibverbs makes every `ibv_device` as the first field of a `verbs_device`, whose
        // second is the provider's `verbs_device_ops`, whose first is the provider's name.
        let provider = unsafe {
            let ops = *device.add(1).cast::<*const *const c_char>();
            CStr::from_ptr(*ops)
        };
        println!("{LINE}{} by {}", name.to_string_lossy(), provider.to_string_lossy());
    }
    assert_eq!(
        fake_kernel::was_asked(),
        interface == Interface::Netlink,
        "libibverbs did not use the interface that this test is about"
    );
    // SAFETY: the list came from ibv_get_device_list and is not used again.
    unsafe { ffi::ibv_free_device_list(list) };
    // A direct verb of mlx5 tells its devices from those of all others.
    #[cfg(feature = "mlx5")]
    for device in &ibverbs::devices().expect("a list") {
        assert_eq!(device.is_mlx5(), device.name() == "mlx5-fake", "{}", device.name());
    }
}
