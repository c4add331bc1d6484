use std::iter::Copied;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::ptr::NonNull;
use std::{fmt, fs, io, slice};

use super::context::Context;
use super::{Device, fork};
use crate::base::{
    Detail, Error, ErrorKind, Result,
    device_access::{FILES, Unusable, abi_of_verbs, devices_folder, names, sysfs},
    ffi, hooks, trace,
};

/// libibverbs' `IB_USER_VERBS_MIN_ABI_VERSION` and `.._MAX_..`.
const KERNEL_ABI: RangeInclusive<u32> = 3..=6;

/// `ibv_get_device_list`: the RDMA devices that this process sees and has a provider for.
///
/// A machine without them gives an empty list, or `ENOSYS`.
///
/// # Errors
///
///  - `ENOSYS`: the kernel has no RDMA support.
///  - `EPROTONOSUPPORT`: this release of rdma-core does not know the version of the kernel's interface.
///  - `EPERM`: the process may not list devices.
///  - `ENOMEM`: out of memory.
///  - `EMFILE`, `ENFILE`: the process or the machine has too many files open.
///  - `ENOENT`: the machine has RDMA devices, but this process, such as one in a container, sees no
///    `/dev/infiniband`.
///
/// If `RLIMIT_MEMLOCK` is 32 KiB or less and the process is not root's, the first call makes libibverbs print
/// a warning to the standard error. With a limit of 0, registering memory fails with `EPERM`.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// for device in &ibverbs::devices()? {
///     println!("{} {}", device.name(), device.guid());
/// }
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[doc(alias = "ibv_get_device_list")]
pub fn devices() -> Result<DeviceList> {
    const VERB: &str = "ibv_get_device_list";
    let registered = Registered(hooks::hooks().map_or_else(Vec::new, |hooks| (hooks.list)()));
    let mut count = 0;
    // libibverbs would print this at the first call, and go on at the second.
    let listed = match abi_of_verbs().filter(|found| !KERNEL_ABI.contains(found)) {
        Some(found) => {
            let what =
                "the version of the kernel's interface (/sys/class/infiniband_verbs/abi_version)";
            let (low, high) = (*KERNEL_ABI.start(), (*KERNEL_ABI.end()).into());
            let detail = Detail::Range { what, value: found.into(), low, high };
            Err(Error::with(VERB, libc::EPROTONOSUPPORT, detail))
        }
        None => {
            let _alone = fork::exclusive();
            // SAFETY: `count` is writable.
            ffi::object(VERB, unsafe { ffi::ibv_get_device_list(&mut count) })
                .map_err(|error| out_of_files(VERB).unwrap_or(error))
        }
    };
    let listed = match listed {
        // A provider in this process needs no RDMA in the kernel.
        Err(error) if error.kind() == ErrorKind::Unsupported && !registered.0.is_empty() => None,
        listed => Some(listed?),
    };
    let mut list = DeviceList { listed, devices: Vec::new(), registered };
    // The program's own devices come first.
    list.devices.extend(list.registered.0.iter().map(|&raw| Device { raw, list: PhantomData }));
    if let Some(listed) = listed {
        let count = usize::try_from(count).unwrap_or(0);
        // SAFETY: `ibv_get_device_list` gave `count` pointers, which live as long as the list.
        let listed = unsafe { slice::from_raw_parts(listed.as_ptr(), count) };
        list.devices.extend(listed.iter().filter_map(|&device| Device::new(device)));
    }
    let missing = || without_device_files(&devices_folder(), Path::new(FILES));
    if list.is_empty()
        && let Some(error) = out_of_files(VERB).or_else(missing)
    {
        return Err(error);
    }
    Ok(list)
}

#[cold]
fn without_device_files(class: &Path, files: &Path) -> Option<Error> {
    let there = fs::read_dir(class).is_ok_and(|mut devices| devices.next().is_some());
    // A folder that this process may not read is there.
    let missing = fs::metadata(files).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    (there && missing).then_some(Error::with_reason(
        "ibv_get_device_list",
        libc::ENOENT,
        "this machine has RDMA devices, but this process sees no /dev/infiniband: if it runs in a \
         container, pass that folder to it; otherwise load the module ib_uverbs",
    ))
}

/// With a reference to each device.
struct Registered(Vec<NonNull<ffi::ibv_device>>);

impl Drop for Registered {
    fn drop(&mut self) {
        let Some(hooks) = hooks::hooks() else { return };
        for &device in &self.0 {
            // SAFETY: `devices` took this reference, which is given back once.
            unsafe { (hooks.put)(device) };
        }
    }
}

/// libibverbs then reports `ENOSYS`, or leaves out devices.
#[cold]
fn out_of_files(verb: &'static str) -> Option<Error> {
    /// One more than listing opens.
    const NEEDED: usize = 4;
    let mut files = [const { None }; NEEDED];
    for file in &mut files {
        match std::fs::File::open("/") {
            Ok(opened) => *file = Some(opened),
            Err(error) => {
                let errno =
                    error.raw_os_error().filter(|e| matches!(*e, libc::EMFILE | libc::ENFILE));
                return errno.map(|errno| Error::new(verb, errno));
            }
        }
    }
    None
}

/// Opens the device called `name`, such as `mlx5_0` or `rxe0`. The context borrows no list.
///
/// # Errors
///
/// Those of [`devices`] and [`Device::open`]; `ENODEV`: there is no such device.
#[doc(alias = "ibv_open_device")]
pub fn open(name: &str) -> Result<Context<'static>> {
    let list = devices()?;
    let device = list
        .iter()
        .find(|device| device.name() == name)
        .ok_or_else(|| no_such_name(name, &list).or_unusable(Unusable::without_provider(name)))?;
    device.open_alone()
}

/// Opens the first device of [`devices`] that can be opened. The context borrows no list.
///
/// Devices that the process registered come before the kernel's. With feature `tracing`, an event names each device that
/// was passed over, with the reason.
///
/// # Errors
///
/// Those of [`devices`]; those of [`Device::open`] for the first device, with the names and reasons of all;
/// `ENODEV`: there is no device, with the reason of [`DeviceList::why_empty`].
///
/// ```
/// # let soft0 = ibverbs_software::Device::builder().build().unwrap();
/// # soft0.register();
/// let context = ibverbs::open_first()?;
/// let domain = context.alloc_pd()?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
pub fn open_first() -> Result<Context<'static>> {
    let list = devices()?;
    let mut failed = Vec::new();
    for device in &list {
        match device.open_alone() {
            Ok(context) => return Ok(context),
            Err(error) => {
                trace::device_passed_over(device.name(), &error);
                failed.push((device.name(), error));
            }
        }
    }
    match *failed {
        [] => Err(no_devices(OPEN, &devices_folder())),
        [(_, error)] => Err(error),
        [(_, first), ..] => {
            let reasons = failed.iter().map(|(name, error)| format!("; {name}: {error}"));
            let text = format!("no device can be opened{}", reasons.collect::<String>());
            Err(Error::with_text(OPEN, first.errno(), text, "no device can be opened"))
        }
    }
}

impl Context<'_> {
    /// `ibv_import_device`: imports a device by the [file descriptor](Context::command_fd) that another
    /// process has passed (`SCM_RIGHTS`).
    ///
    /// To use an object in both processes, make it in one, and import it in the other by the kernel's number
    /// of it: [`ProtectionDomain::import`](crate::ProtectionDomain::import),
    /// [`RawMemoryRegion::import`](crate::memory::RawMemoryRegion::import),
    /// [`DeviceMemory::import`](crate::memory::DeviceMemory::import).
    ///
    /// The caller keeps its descriptor: this duplicates it. After a failure the duplicate may stay open, as
    /// libibverbs does not report whether it closed it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the descriptor is not a device's.
    ///  - `ENODEV`: there is no such RDMA device.
    ///  - `EOPNOTSUPP`: the device cannot be imported; in v55.0 only mlx5 can.
    ///  - `EMFILE`: the process has no descriptor left.
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_import_device")]
    pub fn import(command: BorrowedFd<'_>) -> Result<Context<'static>> {
        const VERB: &str = "ibv_import_device";
        let errno = |error: io::Error| Error::new(VERB, error.raw_os_error().unwrap_or(libc::EIO));
        let file = fs::File::from(command.try_clone_to_owned().map_err(errno)?);
        if !file.metadata().map_err(errno)?.file_type().is_char_device() {
            return Err(Error::invalid(VERB, "the file is not that of a device"));
        }
        // The verb lists the devices, and a process's first list may call `ibv_fork_init`. So list first, and open
        // without the lock.
        drop(devices());
        *fork::exclusive() = true;
        // SAFETY: the descriptor is open and given away. After a failure C may have closed it, and closing it again
        // could hit another file.
        let raw = unsafe { ffi::ibv_import_device(file.into_raw_fd()) };
        let raw = ffi::object(VERB, raw)?;
        // SAFETY: the context is live and ours alone.
        unsafe { Context::from_raw(raw.as_ptr()) }
    }

    /// The descriptor of the kernel's verbs, which another process needs to [import](Context::import) the
    /// device.
    pub fn command_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is live, and keeps its descriptor open for as long.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).cmd_fd) }
    }
}

const OPEN: &str = "ibv_open_device";

#[cold]
fn no_such_name(name: &str, list: &DeviceList) -> Error {
    let short: String = name.chars().take(64).collect();
    let names: Vec<_> = list.iter().take(32).map(|device| device.name().to_owned()).collect();
    let text = if names.is_empty() {
        format!(
            "there is no RDMA device {short:?}, and no other one (the crate ibverbs-software brings one; \
             dropping the guard of `register_if_none` takes it away)"
        )
    } else {
        format!("there is no RDMA device {short:?}; there are: {}", names.join(", "))
    };
    out_of_files("ibv_get_device_list").unwrap_or_else(|| {
        Error::with_text(OPEN, libc::ENODEV, text, "there is no RDMA device of that name")
    })
}

#[cold]
fn no_device(verb: &'static str, reason: &'static str) -> Error {
    out_of_files("ibv_get_device_list").unwrap_or(Error::with_reason(verb, libc::ENODEV, reason))
}

#[cfg(feature = "rdmacm")]
#[cold]
pub(crate) fn no_device_for(verb: &'static str) -> Error {
    match devices() {
        Err(error) => error,
        Ok(list) if list.is_empty() => no_devices(verb, &devices_folder()),
        Ok(_) => no_device(verb, "no RDMA device can be used")
            .or_unusable(Unusable::first().or_else(Unusable::elsewhere)),
    }
}

#[cold]
fn no_devices(verb: &'static str, class: &Path) -> Error {
    let reason = match fs::read_dir(class).map(|mut devices| devices.next().is_some()) {
        Ok(true) => {
            "the kernel has RDMA devices, but this process can use none of them: their /dev/infiniband/uverbs* were \
             not passed to this container, may not be opened, or are those of an earlier driver; the module ib_uverbs \
             is not loaded; or this build of the crate lacks their providers (cargo features such as mlx5)"
        }
        Ok(false) => {
            "the kernel supports RDMA, but shows this process no device: the adapter's driver is not loaded, \
             the device is in another network namespace (`rdma system`), or there is no adapter (`rdma link add rxe0 type rxe netdev eth0` adds Soft-RoCE; the \
             crate ibverbs-software needs neither root nor the kernel; dropping the guard of \
             `register_if_none` takes its device away)"
        }
        Err(_) if !sysfs().join("class").is_dir() => {
            "this process sees no /sys, by which RDMA devices are found: mount it in this container or chroot"
        }
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            "the process may not read /sys/class/infiniband, by which RDMA devices are found"
        }
        Err(_) => {
            "the kernel has no RDMA devices: no driver is loaded (modprobe mlx5_ib), or the kernel was built without \
             (the crate ibverbs-software brings a device that needs neither root nor the kernel; dropping the guard of \
             `register_if_none` takes it away)"
        }
    };
    let first = names(class).into_iter().next();
    let unusable = first.and_then(|name| Unusable::without_provider(&name));
    no_device(verb, reason).or_unusable(unusable.or_else(Unusable::elsewhere))
}

/// A snapshot of the RDMA devices: see [`devices`].
#[doc(alias = "ibv_free_device_list")]
pub struct DeviceList {
    listed: Option<NonNull<*mut ffi::ibv_device>>,
    /// libibverbs' and the registered ones, which are given out for as long as the list is borrowed.
    devices: Vec<Device<'static>>,
    registered: Registered,
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if let Some(listed) = self.listed {
            // SAFETY: `ibv_get_device_list` made the list, which is freed once.
            unsafe { ffi::ibv_free_device_list(listed.as_ptr()) }
        }
    }
}

// SAFETY: nothing writes the finished list, and libibverbs counts references under a lock.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl DeviceList {
    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Why the list is empty: the kernel has no devices, or this process cannot use them. `None` if it is not
    /// empty.
    pub fn why_empty(&self) -> Option<Error> {
        self.is_empty().then(|| no_devices(OPEN, &devices_folder()))
    }

    /// The device at `index`.
    pub fn get(&self, index: usize) -> Option<Device<'_>> {
        self.devices.get(index).copied()
    }

    /// The devices, one after the other.
    pub fn iter(&self) -> Copied<slice::Iter<'_, Device<'_>>> {
        self.devices.iter().copied()
    }
}

impl fmt::Debug for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl<'list> IntoIterator for &'list DeviceList {
    type Item = Device<'list>;
    type IntoIter = Copied<slice::Iter<'list, Device<'list>>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "calls libibverbs")]
    fn what_is_no_rdma_device_is_not_imported() {
        let file = fs::File::open("Cargo.toml").unwrap();
        let error = Context::import(file.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        let null = fs::File::open("/dev/null").unwrap();
        let error = Context::import(null.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        assert!(null.metadata().is_ok(), "it is still open");
    }

    #[test]
    #[cfg_attr(miri, ignore = "uses the file system")]
    fn devices_without_files_are_an_error_that_says_so() {
        let folder = std::env::temp_dir().join(format!("ibverbs-devices-{}", std::process::id()));
        let (class, files) = (folder.join("class"), folder.join("dev"));
        assert_eq!(without_device_files(&class, &files), None, "no RDMA in the kernel");
        fs::create_dir_all(&class).unwrap();
        assert_eq!(without_device_files(&class, &files), None, "no devices");
        fs::create_dir(class.join("rxe0")).unwrap();
        let error = without_device_files(&class, &files).unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        assert!(error.to_string().contains("pass that folder"), "{error}");
        fs::create_dir(&files).unwrap();
        assert_eq!(without_device_files(&class, &files), None, "only the provider may be missing");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "uses the file system")]
    fn an_empty_list_says_why() {
        let class = std::env::temp_dir().join(format!("ibverbs-class-{}", std::process::id()));
        assert!(no_devices(OPEN, &class).to_string().contains("the kernel has no RDMA devices"));
        fs::create_dir(&class).unwrap();
        assert!(no_devices(OPEN, &class).to_string().contains("shows this process no device"));
        fs::create_dir(class.join("mlx5_0")).unwrap();
        let error = no_devices(OPEN, &class);
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert!(error.to_string().contains("lacks their providers"), "{error}");
        fs::remove_dir_all(class).unwrap();
    }

    #[test]
    #[cfg_attr(miri, ignore = "calls libibverbs")]
    fn listing_never_panics_and_names_its_verb() {
        match devices() {
            Ok(list) => {
                assert_eq!(list.iter().len(), list.len());
                assert_eq!(list.is_empty(), list.get(0).is_none());
                assert!(list.get(list.len()).is_none());
                assert_eq!(list.is_empty(), list.why_empty().is_some());
                assert_eq!(
                    list.is_empty(),
                    open_first().is_err_and(|e| e.verb() == "ibv_open_device")
                );
            }
            Err(error) => assert_eq!(error.verb(), "ibv_get_device_list"),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "calls libibverbs")]
    fn an_unknown_name_is_not_found() {
        let error = open("no such device").unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::ENODEV) | Some(libc::ENOSYS)), "{error}");
    }
}
