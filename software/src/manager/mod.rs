//! The connection manager as librdmacm sees it: the commands of `rdma_user_cm.h`, which are answered by the kernel for
//! devices of hardware. The protocol is [`transport::connection`](crate::transport::connection)'s.
//!
//! One lock for the process, taken before those of devices, and of queues of events, into which devices put events with
//! their own lock held. It is not held while a thread sleeps.

mod abi;
mod bind;
mod connect;
mod events;
mod file;
mod id;
mod names;
mod places;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use self::abi::{Answer, Command, Kind, Request};
use self::file::{Inlet, Queue, What};
use self::id::{Id, State, kind_of};
use crate::driver::Shared;
use crate::event_files;
use crate::files::wait_for;
use crate::transport::connection::{Event, Owner};

/// A multicast group that an identifier has joined.
#[derive(Debug)]
struct Group {
    owner: u32,
    uid: u64,
    address: IpAddr,
    reported: u32,
}

#[derive(Debug)]
struct Manager {
    process: u32,
    files: BTreeMap<c_int, Arc<Queue>>,
    /// The files of the parent process, by their numbers, with what tells them from others.
    inherited: BTreeMap<c_int, u64>,
    ids: BTreeMap<u32, Id>,
    /// The identifiers that have a port: its space, the port, the identifier.
    ports: BTreeSet<(u16, u16, u32)>,
    groups: BTreeMap<u32, Group>,
    last: u32,
}

static MANAGER: Mutex<Manager> = Mutex::new(Manager::new(0));

/// A child of `fork` begins with nothing: the devices are its parent's.
fn manager() -> MutexGuard<'static, Manager> {
    let mut manager = MANAGER.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if manager.process != process {
        let files = std::mem::take(&mut manager.files);
        manager.inherited = files.iter().map(|(file, queue)| (*file, queue.inode())).collect();
        // The parent's locks may be held forever here.
        std::mem::forget((std::mem::take(&mut manager.ids), files));
        manager.ports.clear();
        manager.groups.clear();
        manager.process = process;
    }
    manager
}

/// Opens a file for commands; `None` if this process has no device that is registered.
pub(crate) fn open() -> Option<c_int> {
    let devices = places::devices();
    // A thread that sleeps on the file lets devices work: those of a simulated network, if there is one.
    let simulated = devices.iter().find(|device| device.driver().membership().is_some());
    let device = simulated.or(devices.first())?;
    let queue = match Queue::new() {
        Ok(queue) => queue,
        Err(e) => {
            crate::ffi::set_errno(e.raw_os_error().unwrap_or(libc::EMFILE));
            return Some(-1);
        }
    };
    let file = queue.file();
    event_files::add(file, device);
    manager().files.insert(file, queue);
    at_exit();
    Some(file)
}

/// The program is about to close a file, perhaps one of these.
pub(crate) fn close(file: c_int) {
    let mut manager = manager();
    manager.inherited.remove(&file);
    manager.forget_file(file);
}

/// Answers a command that the program writes to a file. `None`: it is none of these files.
///
/// # Safety
///
/// The bytes are readable, and the answer's address that a command has is writable for as many bytes as it says, as for the
/// kernel's file.
pub(crate) unsafe fn write(file: c_int, bytes: *const c_void, length: usize) -> Option<isize> {
    let queue = {
        let mut manager = manager();
        if let Some(&inode) = manager.inherited.get(&file) {
            if event_files::inode(file) != Some(inode) {
                manager.inherited.remove(&file);
                return None;
            }
            crate::ffi::set_errno(libc::EBADF);
            return Some(-1);
        }
        let queue = manager.files.get(&file)?.clone();
        if !queue.is_open() {
            // The file was closed without notice, and its descriptor is another file's.
            manager.forget_file(file);
            return None;
        }
        queue
    };
    // SAFETY: the caller vouches for it.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
    let done = Request::parse(bytes).and_then(|request| {
        let answer = match request.command {
            Command::GetEvent => next_event(&queue)?,
            Command::SetOption { level, option, value, length } => {
                let mut bytes = [0; 4];
                let size = bytes.len().min(length as usize);
                // SAFETY: the caller vouches for it.
                unsafe {
                    std::ptr::copy_nonoverlapping(value as *const u8, bytes.as_mut_ptr(), size);
                }
                let mut manager = manager();
                let id = manager.id(&queue, request.id)?;
                id.set_option(level, option, &bytes[..size], length)?;
                Answer::nothing()
            }
            _ => manager().answer(&queue, &request)?,
        };
        let size = answer.0.len().min(request.room.into());
        if size > 0 {
            // SAFETY: the caller vouches for it.
            unsafe {
                std::ptr::copy_nonoverlapping(answer.0.as_ptr(), request.response as *mut u8, size);
            }
        }
        Ok(())
    });
    Some(match done {
        Ok(()) => length as isize,
        Err(errno) => {
            crate::ffi::set_errno(errno);
            -1
        }
    })
}

/// Waits for an event, unless the file does not block. A thread goes on waiting when another closes the file, as in
/// the kernel: so it has a descriptor of its own.
fn next_event(queue: &Arc<Queue>) -> Result<Answer, c_int> {
    let file = queue.file();
    let mut own: Option<OwnedFd> = None;
    loop {
        {
            // The next event stays the next one until it is read.
            let mut manager = manager();
            if let Some(item) = queue.pop(own.as_ref().map(AsRawFd::as_raw_fd)) {
                return Ok(manager.read(queue, item));
            }
            if own.is_none() {
                let is_same = |other| Arc::ptr_eq(other, queue);
                if !manager.files.get(&file).is_some_and(is_same) {
                    return Err(libc::EBADF);
                }
                // SAFETY: closing takes the file out of these first, with the lock that is held here.
                let borrowed = unsafe { BorrowedFd::borrow_raw(file) };
                let copied = borrowed.try_clone_to_owned();
                own = Some(copied.map_err(|e| e.raw_os_error().unwrap_or(libc::EBADF))?);
            }
        }
        let own = own.as_ref().map_or(file, AsRawFd::as_raw_fd);
        // SAFETY: no memory is involved.
        let flags = unsafe { libc::fcntl(own, libc::F_GETFL) };
        if flags & libc::O_NONBLOCK != 0 {
            return Err(libc::EAGAIN);
        }
        event_files::before_sleep(&[file], None);
        // SAFETY: the structure is live; the call waits without a limit, as the kernel's does.
        if unsafe { libc::poll(&mut wait_for(own), 1, -1) } < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINTR));
        }
    }
}

/// A device was registered. Identifiers that listen at all addresses listen there too.
pub(crate) fn added(device: &Arc<Shared>) {
    if places::add(device) {
        let manager = manager();
        for id in
            manager.ids.values().filter(|id| id.state == State::Listening && id.place.is_none())
        {
            id.listen_on(device);
        }
    }
}

/// A device is no longer registered: no new identifier finds it.
pub(crate) fn forgotten(device: &Shared) {
    places::remove(device);
}

/// A device was removed: identifiers on it learn of it.
pub(crate) fn removed(device: &Shared) {
    manager().tell_of(device, |_| true, Kind::DeviceRemoval);
}

/// A device that nobody has open is freed. Peers of its connections are told that these have ended, its identifiers that the
/// device is gone.
pub(crate) fn freed(device: &Shared) {
    let mut manager = manager();
    let is_on = |id: &&Id| id.place.as_ref().is_some_and(|place| place.is(device));
    manager.ids.values().filter(is_on).for_each(Id::abandon);
    manager.tell_of(device, |_| true, Kind::DeviceRemoval);
}

/// A device has other addresses.
pub(crate) fn moved(device: &Shared, addresses: &[IpAddr]) {
    let is_gone = |address| !addresses.contains(&address);
    manager().tell_of(device, is_gone, Kind::AddressChange);
}

/// Peers of connections that the program leaves learn of its end, as the kernel tells them when it closes the file.
fn at_exit() {
    extern "C" fn leave() {
        // A thread that has it may wait for this one.
        let Ok(manager) = MANAGER.try_lock() else { return };
        if manager.process == std::process::id() {
            // The identifiers stay: destructors that run later may use them.
            manager.ids.values().for_each(Id::abandon);
        }
    }
    static ONCE: Once = Once::new();
    // SAFETY: the function is one of this library, which stays loaded.
    ONCE.call_once(|| unsafe {
        libc::atexit(leave);
    });
}

impl Manager {
    const fn new(process: u32) -> Self {
        Self {
            process,
            files: BTreeMap::new(),
            inherited: BTreeMap::new(),
            ids: BTreeMap::new(),
            ports: BTreeSet::new(),
            groups: BTreeMap::new(),
            last: 0,
        }
    }

    fn next_handle(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            let taken = self.ids.contains_key(&self.last) || self.groups.contains_key(&self.last);
            if self.last != 0 && !taken {
                return self.last;
            }
        }
    }

    /// # Errors
    ///
    /// `ENOENT`: there is none. `EINVAL`: it is another file's. `ENODEV`: its device was removed.
    fn id(&mut self, queue: &Arc<Queue>, handle: u32) -> Result<&mut Id, c_int> {
        let id = self.ids.get_mut(&handle).ok_or(libc::ENOENT)?;
        if !Arc::ptr_eq(&id.queue, queue) {
            return Err(libc::EINVAL);
        }
        if id.is_removed {
            return Err(libc::ENODEV);
        }
        Ok(id)
    }

    /// The identifiers that have a port.
    fn at_port(&self, space: u16, port: u16) -> impl Iterator<Item = &Id> {
        let handles = self.ports.range((space, port, 0)..=(space, port, u32::MAX));
        handles.filter_map(|(.., handle)| self.ids.get(handle))
    }

    /// Runs something on an identifier that looks at the others.
    fn with(
        &mut self,
        queue: &Arc<Queue>,
        handle: u32,
        run: impl FnOnce(&Self, &mut Id) -> Result<(), c_int>,
    ) -> Result<Answer, c_int> {
        self.id(queue, handle)?;
        let mut id = self.ids.remove(&handle).ok_or(libc::ENOENT)?;
        let result = run(self, &mut id);
        self.ports.extend(id.port());
        self.ids.insert(handle, id);
        result.map(|()| Answer::nothing())
    }

    fn answer(&mut self, queue: &Arc<Queue>, request: &Request<'_>) -> Result<Answer, c_int> {
        let id = request.id;
        match request.command {
            Command::Create { uid, space, kind } => {
                let kind = kind_of(space, kind).ok_or(libc::EINVAL)?;
                let handle = self.next_handle();
                self.ids.insert(handle, Id::new(handle, uid, queue.clone(), (space, kind)));
                Ok(Answer::number(handle))
            }
            Command::Destroy => {
                let of = self.ids.get(&id).ok_or(libc::ENOENT)?;
                if !Arc::ptr_eq(&of.queue, queue) {
                    return Err(libc::EINVAL);
                }
                Ok(Answer::number(self.destroy(id)))
            }
            Command::Bind(address) => self.with(queue, id, |all, id| all.bind(id, address)),
            Command::Resolve { source, destination } => {
                self.with(queue, id, |all, id| all.resolve(id, source, destination))
            }
            Command::ResolveRoute { timeout } => {
                let id = self.id(queue, id)?;
                if id.state != State::Resolved || timeout == 0 {
                    return Err(libc::EINVAL);
                }
                id.state = State::Routed;
                id.tell(Kind::RouteResolved, 0);
                Ok(Answer::nothing())
            }
            Command::QueryRoute => Ok(self.id(queue, id)?.route()),
            Command::Query { option } => {
                let id = self.id(queue, id)?;
                match option {
                    0 => Ok(id.addresses(false)),
                    1 => Ok(id.paths()),
                    2 => Ok(id.addresses(true)),
                    _ => Err(libc::ENOSYS),
                }
            }
            Command::Connect(parameters) => {
                self.with(queue, id, |all, id| all.connect(id, &parameters))
            }
            Command::Listen { backlog } => self.with(queue, id, |all, id| all.listen(id, backlog)),
            Command::Accept { uid, parameters } => self.id(queue, id)?.accept(uid, &parameters),
            Command::Reject { reason, data } => self.id(queue, id)?.reject(reason, data),
            Command::Disconnect => self.id(queue, id)?.disconnect(),
            Command::Attributes { state } => self.id(queue, id)?.queue_pair_attributes(state),
            Command::Notify { event } => self.id(queue, id)?.notified(event),
            Command::Join { uid, address } => self.join(queue, id, uid, address),
            Command::Leave => {
                let group = self.groups.remove(&id).ok_or(libc::ENOENT)?;
                if let Some(owner) = self.ids.get(&group.owner) {
                    owner.queue.take_back(|item| matches!(item.what, What::Joined(of) if of == id));
                }
                Ok(Answer::number(group.reported))
            }
            Command::Migrate { from } => self.migrate(queue, id, from),
            Command::WriteEvent { event, status, argument } => {
                self.id(queue, id)?;
                queue.push((id, What::Written(event, status as i32, argument)).into());
                Ok(Answer::nothing())
            }
            Command::GetEvent | Command::SetOption { .. } => Err(libc::EINVAL),
        }
    }

    /// Moves an identifier and its unread events to another file of the process.
    fn migrate(&mut self, queue: &Arc<Queue>, handle: u32, from: c_int) -> Result<Answer, c_int> {
        let old = self.files.get(&from).ok_or(libc::EBADF)?.clone();
        let id = self.id(&old, handle)?;
        id.queue = queue.clone();
        let reported = id.reported;
        match (id.state, &id.place) {
            (State::Connected(connection), Some(place)) => {
                if let Some(device) = place.device.upgrade() {
                    let owner = id.owner(&device);
                    device.lock().connections.set_owner(connection, owner);
                }
            }
            (State::Listening, _) => id.listen_everywhere(),
            _ => {}
        }
        for item in old.take_back(|item| item.id == handle) {
            queue.push(item);
        }
        Ok(Answer::number(reported))
    }

    /// Returns how many events of it were read.
    fn destroy(&mut self, handle: u32) -> u32 {
        let Some(id) = self.ids.remove(&handle) else { return 0 };
        id.port().iter().for_each(|port| _ = self.ports.remove(port));
        id.abandon();
        if id.state == State::Listening {
            for device in places::devices() {
                device.lock().connections.stop_listening(handle);
            }
        }
        for item in id.queue.take_back(|item| item.id == handle) {
            // The program will not decide about requests that it has not read.
            let (device, connection) = match &item.what {
                What::Connection(device, Event::Request(request)) => (device, request.connection),
                What::Connection(device, Event::ServiceRequest(request)) => {
                    (device, request.connection)
                }
                _ => continue,
            };
            if let Some(device) = device.upgrade() {
                let mut engine = device.lock();
                let now = engine.core.now();
                engine.connections.abandon(now, connection);
            }
        }
        self.groups.retain(|_, group| group.owner != handle);
        id.reported
    }

    fn forget_file(&mut self, file: c_int) {
        if let Some(queue) = self.files.remove(&file)
            && Arc::strong_count(&queue) > 1
        {
            let of = |id: &&Id| Arc::ptr_eq(&id.queue, &queue);
            let handles: Vec<u32> = self.ids.values().filter(of).map(|id| id.handle).collect();
            for handle in handles {
                self.destroy(handle);
            }
        }
    }

    /// Tells the identifiers that are bound to addresses of a device.
    fn tell_of(&mut self, device: &Shared, concerns: impl Fn(IpAddr) -> bool, kind: Kind) {
        for id in self.ids.values_mut() {
            let Some(place) = &id.place else { continue };
            // An id with a request that was not accepted is not told of anything, and a removal is the last of these.
            if place.is(device) && concerns(place.address) && id.uid != 0 && !id.is_removed {
                id.is_removed |= kind == Kind::DeviceRemoval;
                id.tell(kind, 0);
            }
        }
    }
}

impl Id {
    /// The peer of its connection learns that it is over.
    fn abandon(&self) {
        if let (State::Connected(connection), Some(place)) = (self.state, &self.place)
            && let Some(device) = place.device.upgrade()
        {
            let mut engine = device.lock();
            let now = engine.core.now();
            engine.connections.abandon(now, connection);
        }
    }

    fn tell(&self, kind: Kind, status: i32) {
        self.queue.push((self.handle, What::Plain(kind, status)).into());
    }

    fn owner(&self, device: &Arc<Shared>) -> Owner {
        let inlet = Inlet { queue: self.queue.clone(), device: device.clone() };
        Owner { id: self.handle, outlet: inlet.outlet() }
    }

    fn set_option(
        &mut self,
        level: u32,
        option: u32,
        value: &[u8],
        length: u32,
    ) -> Result<(), c_int> {
        let first = value.first().copied().unwrap_or_default();
        match (level, option, length) {
            (0, 0, 1) => self.type_of_service = first,
            (0, 1, 4) => self.reuses = value.iter().any(|byte| *byte != 0),
            (0, 2, 4) => self.is_ipv6_only = value.iter().any(|byte| *byte != 0),
            (0, 3, 1) if self.kind == 2 && first < 32 => self.ack_timeout = Some(first),
            (0, 0..=3, _) => return Err(libc::EINVAL),
            // The path that the program has found; the one of the addresses is the same.
            (1, 1, 72..) if self.state == State::Resolved => {
                self.state = State::Routed;
                self.tell(Kind::RouteResolved, 0);
            }
            (1, 1, _) => return Err(libc::EINVAL),
            _ => return Err(libc::ENOSYS),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd as _;

    use super::*;

    #[test]
    fn a_file_that_another_thread_has_closed_is_not_one_that_does_not_block() {
        let queue = Queue::new().unwrap();
        let file = queue.file();
        manager().files.insert(file, queue.clone());
        close(file);
        // SAFETY: the file is this test's.
        unsafe { libc::close(file) };
        assert_eq!(next_event(&queue).err(), Some(libc::EBADF));
    }

    /// A bind among thousands of identifiers looks only at those that have its port.
    #[test]
    fn identifiers_are_found_by_their_port() {
        let queue = Queue::new().unwrap();
        // SAFETY: the file is new, and this test's alone.
        let _file = unsafe { OwnedFd::from_raw_fd(queue.file()) };
        let mut manager = Manager::new(std::process::id());
        let all = Command::Bind(abi::Address::Inet("0.0.0.0:0".parse().unwrap()));
        let mut ports = BTreeSet::new();
        for id in 1..=50 {
            let create = Command::Create { uid: 1, space: abi::PS_TCP, kind: 2 };
            for (id, command) in [(0, create), (id, all)] {
                let request = Request { command, id, response: 0, room: 0 };
                assert!(manager.answer(&queue, &request).is_ok());
            }
            let port = manager.ids[&id].source.unwrap().port();
            assert!(ports.insert(port));
            let found = manager.at_port(abi::PS_TCP, port).map(|id| id.handle);
            assert_eq!(found.collect::<Vec<_>>(), [id]);
            assert_eq!(manager.at_port(abi::PS_IB, port).count(), 0);
        }
        for id in 1..=50 {
            manager.destroy(id);
        }
        assert!(manager.ports.is_empty());
    }

    #[test]
    fn who_waits_waits_on_though_the_file_is_closed() {
        let queue = Queue::new().unwrap();
        let file = queue.file();
        manager().files.insert(file, queue.clone());
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || next_event(&queue).is_ok()
        });
        let is_copied = || {
            let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
            let numbers = files.filter_map(|file| file.file_name().to_str()?.parse().ok());
            let copies = numbers.filter(|other| *other != file);
            copies.into_iter().any(|other| event_files::inode(other) == Some(queue.inode()))
        };
        while !is_copied() {
            std::thread::yield_now();
        }
        close(file);
        // SAFETY: the file is this test's.
        unsafe { libc::close(file) };
        // The thread wakes, finds nothing, and goes on waiting.
        queue.push((1, What::Plain(Kind::Established, 0)).into());
        queue.take_back(|_| true);
        queue.push((1, What::Plain(Kind::Established, 0)).into());
        assert!(waiting.join().unwrap());
    }
}
