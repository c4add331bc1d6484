//! Why this process cannot use a device of the kernel: what an errno alone does not tell.

use std::collections::BTreeMap;
#[cfg(not(feature = "system"))]
use std::ffi::{CStr, c_char, c_uint};
use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::base::linux;

/// Also has devices that this process cannot open.
pub(crate) fn devices_folder() -> PathBuf {
    sysfs().join("class/infiniband")
}

fn verbs_folder() -> PathBuf {
    sysfs().join("class/infiniband_verbs")
}

/// The folder of sysfs, which libibverbs finds in the same way.
pub(crate) fn sysfs() -> PathBuf {
    // SAFETY: the functions have no preconditions.
    let is_own = unsafe { libc::getuid() == libc::geteuid() };
    let path = std::env::var_os("SYSFS_PATH").filter(|_| is_own);
    path.map_or_else(|| PathBuf::from("/sys"), PathBuf::from)
}

/// `None` if the kernel has no device.
pub(crate) fn abi_of_verbs() -> Option<u32> {
    let text = fs::read_to_string(verbs_folder().join("abi_version")).ok()?;
    text.trim().parse().ok().filter(|_| !names(&devices_folder()).is_empty())
}

pub(crate) const FILES: &str = "/dev/infiniband";

pub(crate) struct Unusable {
    device: String,
    why: Why,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// Module `ib_uverbs` is missing.
    NoVerbs,
    /// The number of the file `uverbs*`.
    NoFile(u16),
    /// The file is not this device's.
    OtherFile(u16),
    OtherNamespace,
    NotAllowed(u16),
    /// The driver's ABI, or 0 if the kernel does not tell.
    NoProvider(u16),
    /// This build's provider does not know its driver's ABI.
    Abi(Abi),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Abi {
    found: u16,
    low: u16,
    high: u16,
}

/// The drivers that libibverbs reported, by device name.
static DRIVERS: Mutex<BTreeMap<String, Abi>> = Mutex::new(BTreeMap::new());

/// For a driver whose ABI its provider does not know: see `src/c/messages.c`.
///
/// # Safety
///
/// `device` is a string, the device's folder.
#[cfg(not(feature = "system"))]
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_bundled_driver_abi(
    device: *const c_char,
    found: c_uint,
    low: c_uint,
    high: c_uint,
) {
    // SAFETY: the caller promises a string.
    let device = unsafe { CStr::from_ptr(device) }.to_string_lossy();
    let device = device.rsplit('/').next().unwrap_or_default().to_owned();
    // Bounded by the kernel's devices.
    let mut drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let number = |version: c_uint| u16::try_from(version).unwrap_or(u16::MAX);
    let abi = Abi { found: number(found), low: number(low), high: number(high) };
    drivers.insert(device, abi);
}

impl Unusable {
    #[cfg(feature = "rdmacm")]
    pub(crate) fn first() -> Option<Self> {
        names(&devices_folder()).iter().find_map(|device| Self::of(device))
    }

    pub(crate) fn of(device: &str) -> Option<Self> {
        Self::in_folders(device, &devices_folder(), &verbs_folder(), Path::new(FILES))
    }

    /// For a device that could be opened but is not in the list.
    pub(crate) fn without_provider(device: &str) -> Option<Self> {
        Self::of(device).or_else(|| {
            let verbs = verbs_folder();
            let abi = interface(device, &verbs)
                .and_then(|name| fs::read_to_string(verbs.join(name).join("abi_version")).ok())
                .and_then(|text| text.trim().parse().ok());
            let drivers = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
            let why = match drivers.get(device) {
                Some(&known) if abi.is_none_or(|abi| abi == known.found) => Why::Abi(known),
                _ => Why::NoProvider(abi.unwrap_or(0)),
            };
            is_there(device, &devices_folder()).then(|| Self { device: device.to_owned(), why })
        })
    }

    fn in_folders(device: &str, class: &Path, verbs: &Path, files: &Path) -> Option<Self> {
        let no_access = |why| Some(Self { device: device.to_owned(), why });
        let interface = interface(device, verbs);
        if !is_there(device, class) {
            // The kernel shows devices by network namespace, and the files of all.
            return interface.and_then(|_| no_access(Why::OtherNamespace));
        }
        let Some(interface) = interface else { return no_access(Why::NoVerbs) };
        let number = interface.trim_start_matches("uverbs").parse().unwrap_or(0);
        match File::options().read(true).write(true).open(files.join(&interface)) {
            Err(e) if e.kind() == ErrorKind::NotFound => no_access(Why::NoFile(number)),
            Err(e) if e.kind() == ErrorKind::PermissionDenied => no_access(Why::NotAllowed(number)),
            // Another device, or none, has this number.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => {
                no_access(Why::OtherFile(number))
            }
            Ok(file) if !is_file_of(&file, &verbs.join(interface)) => {
                no_access(Why::OtherFile(number))
            }
            _ => None,
        }
    }

    /// A device of another network namespace.
    pub(crate) fn elsewhere() -> Option<Self> {
        let verbs = verbs_folder();
        let devices = names(&verbs)
            .into_iter()
            .filter_map(|name| fs::read_to_string(verbs.join(name).join("ibdev")).ok());
        let mut no_access = devices.filter_map(|device| Self::of(device.trim()));
        no_access.find(|no_access| no_access.why == Why::OtherNamespace)
    }

    pub(crate) fn is_denied(&self) -> bool {
        matches!(self.why, Why::NotAllowed(_))
    }
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = &self.device;
        match self.why {
            Why::NoVerbs => write!(
                f,
                "the kernel has the device {device}, but not its module ib_uverbs (modprobe ib_uverbs)"
            ),
            Why::NoFile(number) => write!(
                f,
                "the kernel has the device {device}, but this process sees no file {FILES}/uverbs{number}: pass it to \
                 the container if this is one"
            ),
            Why::OtherFile(number) => write!(
                f,
                "{FILES}/uverbs{number} is there, but it is not the file of the device {device} (its number is not that in \
                 /sys/class/infiniband_verbs/uverbs{number}/dev): the driver was loaded again, or the container was given an \
                 older file; make it again"
            ),
            Why::OtherNamespace => write!(
                f,
                "the device {device} is in another network namespace (`rdma system` shows the mode; \
                 `rdma dev set {device} netns NAME` moves the device)"
            ),
            Why::NotAllowed(number) => write!(
                f,
                "the process may not open {FILES}/uverbs{number}, the file of the device {device}: it takes rights to \
                 read and write it, and in a container its device list has to name it (`--device`)"
            ),
            Why::Abi(Abi { found, low, high }) => write!(
                f,
                "the kernel's driver of the device {device} has version {found} of its interface, and the provider in this \
                 build takes {low} to {high}: it takes another release of rdma-core (docs/rdma-core.md), or another kernel"
            ),
            Why::NoProvider(abi) => {
                write!(
                    f,
                    "the kernel has the device {device}, but this build of the crate has no provider that takes it \
                     (a cargo feature such as mlx5)"
                )?;
                match abi {
                    0 => Ok(()),
                    _ => write!(f, ", or none for version {abi} of its driver's interface"),
                }
            }
        }
    }
}

fn is_there(device: &str, class: &Path) -> bool {
    !device.contains('/') && !matches!(device, "" | "." | "..") && class.join(device).exists()
}

/// Whether the file is a device file with the number that sysfs has, if it has one.
fn is_file_of(file: &File, interface: &Path) -> bool {
    let Ok(metadata) = file.metadata() else { return true };
    let number = fs::read_to_string(interface.join("dev")).unwrap_or_default();
    let number = number.trim().split_once(':');
    let number = number.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let is_it = |(major, minor)| linux::makedev(major, minor) == metadata.rdev();
    metadata.file_type().is_char_device() && number.is_none_or(is_it)
}

fn interface(device: &str, verbs: &Path) -> Option<String> {
    names(verbs).into_iter().find(|name| {
        fs::read_to_string(verbs.join(name).join("ibdev")).is_ok_and(|is| is.trim() == device)
    })
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "uses the file system")]
    fn each_reason_names_the_device_and_what_is_missing() {
        let folder =
            std::env::temp_dir().join(format!("ibverbs-device-access-{}", std::process::id()));
        let (class, verbs, files) =
            (folder.join("class"), folder.join("verbs"), folder.join("dev"));
        let why = |device: &str| {
            Unusable::in_folders(device, &class, &verbs, &files).map(|why| why.to_string())
        };
        assert_eq!(why("mlx5_0"), None, "the kernel has none");
        fs::create_dir_all(class.join("mlx5_0")).unwrap();
        for name in ["mlx5_1", "", ".", "..", "../class/mlx5_0"] {
            assert_eq!(why(name), None, "{name:?}");
        }
        assert!(why("mlx5_0").unwrap().contains("mlx5_0, but not its module ib_uverbs"));
        for (interface, device) in [("abi_version", None), ("uverbs7", Some("mlx5_0\n"))] {
            fs::create_dir_all(verbs.join(interface)).unwrap();
            if let Some(device) = device {
                fs::write(verbs.join(interface).join("ibdev"), device).unwrap();
            }
        }
        assert!(why("mlx5_0").unwrap().contains("sees no file /dev/infiniband/uverbs7"));
        fs::create_dir(&files).unwrap();
        assert!(why("mlx5_0").unwrap().contains("sees no file /dev/infiniband/uverbs7"));
        fs::write(files.join("uverbs7"), "").unwrap();
        assert!(why("mlx5_0").unwrap().contains("not the file of the device mlx5_0"));
        fs::remove_file(files.join("uverbs7")).unwrap();
        std::os::unix::fs::symlink("/dev/null", files.join("uverbs7")).unwrap();
        assert_eq!(why("mlx5_0"), None, "it can be opened, and sysfs has no number");
        fs::write(verbs.join("uverbs7/dev"), "1:3\n").unwrap();
        assert_eq!(why("mlx5_0"), None, "it can be opened");
        fs::write(verbs.join("uverbs7/dev"), "231:192\n").unwrap();
        assert!(why("mlx5_0").unwrap().contains("/dev/infiniband/uverbs7 is there, but"));
        fs::remove_dir(class.join("mlx5_0")).unwrap();
        assert!(why("mlx5_0").unwrap().contains("mlx5_0 is in another network namespace"));
        // root may open it all the same
        let denied = Unusable { device: "mlx5_0".to_owned(), why: Why::NotAllowed(7) };
        assert!(denied.to_string().contains("may not open /dev/infiniband/uverbs7"));
        fs::remove_dir_all(folder).unwrap();
    }

    /// Everything else that libibverbs prints is kept.
    #[test]
    #[cfg(not(feature = "system"))]
    #[cfg_attr(miri, ignore = "calls C")]
    fn a_driver_of_another_version_is_named_with_the_versions() {
        unsafe extern "C" {
            fn ibverbs_bundled_message(
                file: *mut libc::FILE,
                format: *const c_char,
                ...
            ) -> std::ffi::c_int;
        }
        let mut text = std::ptr::null_mut();
        let mut length = 0;
        // SAFETY: the pointers are live variables; the formats match their arguments.
        let printed = unsafe {
            let file = libc::open_memstream(&raw mut text, &raw mut length);
            let format = c"libibverbs: Warning: Driver %s does not support the kernel ABI of %u (supports %u to %u) \
                           for device %s\n";
            let path = c"/sys/class/infiniband/abi_test_0";
            ibverbs_bundled_message(
                file,
                format.as_ptr(),
                c"mlx5".as_ptr(),
                9,
                1,
                2,
                path.as_ptr(),
            );
            let fatal =
                c"libibverbs: Fatal: kernel ABI version %d doesn't match library version %d.\n";
            ibverbs_bundled_message(file, fatal.as_ptr(), 9, 6);
            ibverbs_bundled_message(file, c"other %u %s".as_ptr(), 7, c"words".as_ptr());
            libc::fclose(file);
            let printed = CStr::from_ptr(text).to_str().unwrap().to_owned();
            libc::free(text.cast());
            printed
        };
        assert_eq!(printed, "other 7 words");
        let drivers = DRIVERS.lock().unwrap();
        let abi = drivers.get("abi_test_0").copied().unwrap();
        assert_eq!(abi, Abi { found: 9, low: 1, high: 2 });
        let text = Unusable { device: "abi_test_0".to_owned(), why: Why::Abi(abi) }.to_string();
        assert!(
            text.contains("abi_test_0 has version 9") && text.contains("takes 1 to 2"),
            "{text}"
        );
    }
}
