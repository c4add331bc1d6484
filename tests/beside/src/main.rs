//! Several users of RDMA in one process: this program, and libraries, of which some have this crate in them and others use
//! the system's libibverbs. All of them open the same device, register the same memory and move messages in it, in turn,
//! also after a fork.
//!
//! `beside DEVICE LIBRARY..`: a library is `local:PATH` or `global:PATH`, to be loaded with `RTLD_LOCAL` or
//! `RTLD_GLOBAL`, or `linked` for one that the program was linked with.

use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use ibverbs_beside::{MESSAGE, ours_close, ours_fork_init, ours_open, ours_work};

/// Bytes of memory for each user.
const PART: usize = 4096;

type Outcome<T> = Result<T, Box<dyn Error>>;
type ForkInit = extern "C" fn() -> c_int;
type Open = unsafe extern "C" fn(*const c_char, *mut c_void, usize) -> *mut c_void;
type Work = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The functions of a library.
struct Library {
    name: String,
    fork_init: ForkInit,
    open: Open,
    work: Work,
    close: Close,
}

impl Library {
    fn load(what: &str) -> Outcome<Self> {
        let handle = match what.split_once(':') {
            Some((how @ ("local" | "global"), path)) => {
                let path = CString::new(path)?;
                let flags = if how == "local" { libc::RTLD_LOCAL } else { libc::RTLD_GLOBAL };
                // SAFETY: the library's constructors have no conditions.
                unsafe { libc::dlopen(path.as_ptr(), flags | libc::RTLD_NOW) }
            }
            _ if what == "linked" => libc::RTLD_DEFAULT,
            _ => return Err(format!("what is {what}?").into()),
        };
        if handle.is_null() && what != "linked" {
            // SAFETY: `dlopen` has failed, so that there is a message.
            let message = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(message.to_string_lossy().into());
        }
        // The program has functions of the name `ours_..` too; of a linked library, the others are meant.
        let ours = what != "linked" && symbol(handle, "ours_open").is_some();
        let function = |name: &str| {
            let name = format!("{}_{name}", if ours { "ours" } else { "theirs" });
            symbol(handle, &name).ok_or_else(|| format!("{what} has no {name}"))
        };
        // SAFETY: `lib.rs` and `neighbour.c` define functions of these types.
        unsafe {
            Ok(Self {
                name: what.to_owned(),
                fork_init: std::mem::transmute::<*mut c_void, ForkInit>(function("fork_init")?),
                open: std::mem::transmute::<*mut c_void, Open>(function("open")?),
                work: std::mem::transmute::<*mut c_void, Work>(function("work")?),
                close: std::mem::transmute::<*mut c_void, Close>(function("close")?),
            })
        }
    }
}

fn symbol(handle: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: the handle comes from `dlopen`, or is `RTLD_DEFAULT`.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Memory that every user registers, with a part for each.
struct Memory {
    start: *mut u8,
    length: usize,
}

impl Memory {
    fn new(parts: usize) -> Outcome<Self> {
        let length = parts * PART;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping affects nothing else.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Self { start: start.cast(), length })
    }

    fn set(&self, index: usize, value: u8) {
        assert!(index < self.length);
        // SAFETY: it is within the mapping.
        unsafe { self.start.add(index).write_volatile(value) }
    }

    fn get(&self, index: usize) -> u8 {
        assert!(index < self.length);
        // SAFETY: it is within the mapping.
        unsafe { self.start.add(index).read_volatile() }
    }
}

/// Every user moves a message of its own.
fn round(users: &[(Library, *mut c_void)], memory: &Memory, value: u8) -> Outcome<()> {
    for index in 0..memory.length {
        memory.set(index, 0);
    }
    for (number, (library, user)) in users.iter().enumerate() {
        let start = number * PART;
        (start..start + MESSAGE).for_each(|index| memory.set(index, value));
        // SAFETY: the user is open, and there is room for two messages.
        if unsafe { (library.work)(*user, start) } != 0 {
            return Err(format!("{}: it moves no message", library.name).into());
        }
        for index in 0..PART {
            let wanted = if index < 2 * MESSAGE { value } else { 0 };
            if memory.get(start + index) != wanted {
                return Err(format!("{}: byte {index} is not right", library.name).into());
            }
        }
    }
    Ok(())
}

/// A child writes to all the memory. That changes nothing here.
fn fork(memory: &Memory) -> Outcome<()> {
    // SAFETY: the child only writes to memory and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        (0..memory.length).for_each(|index| memory.set(index, 0xff));
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut how = 0;
    // SAFETY: the child is ours, and `how` is writable.
    if child < 0 || unsafe { libc::waitpid(child, &mut how, 0) } != child {
        return Err(std::io::Error::last_os_error().into());
    }
    // The child has a copy of the memory or, with a kernel before 5.12, none.
    let copy = libc::WIFEXITED(how) && libc::WEXITSTATUS(how) == 0;
    let none = libc::WIFSIGNALED(how) && libc::WTERMSIG(how) == libc::SIGSEGV;
    if !copy && !none {
        return Err(format!("the child ends with {how:#x}").into());
    }
    let changed = (0..memory.length).any(|index| memory.get(index) == 0xff);
    if changed { Err("the child has written to this memory".into()) } else { Ok(()) }
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let device = CString::new(arguments.next().ok_or("usage: beside DEVICE LIBRARY..")?)?;
    let mut libraries = vec![Library {
        name: "the program".to_owned(),
        fork_init: ours_fork_init,
        open: ours_open,
        work: ours_work,
        close: ours_close,
    }];
    for argument in arguments {
        libraries.push(Library::load(&argument)?);
    }
    let memory = Memory::new(libraries.len())?;
    let mut users = Vec::new();
    for library in libraries {
        if (library.fork_init)() != 0 {
            return Err(format!("{}: it does not prepare for forks", library.name).into());
        }
        // SAFETY: the memory is never unmapped, and no reference to it exists.
        let user = unsafe { (library.open)(device.as_ptr(), memory.start.cast(), memory.length) };
        if user.is_null() {
            return Err(format!("{}: it does not open the device", library.name).into());
        }
        users.push((library, user));
    }
    round(&users, &memory, 1)?;
    round(&users, &memory, 2)?;
    fork(&memory)?;
    round(&users, &memory, 3)?;
    // The others go on when one has closed the device.
    while !users.is_empty() {
        let (library, user) = users.remove(0);
        // SAFETY: the user is open, and is not used again.
        if unsafe { (library.close)(user) } != 0 {
            return Err(format!("{}: it does not close", library.name).into());
        }
        round(&users, &memory, 4)?;
    }
    println!("all of them work");
    Ok(())
}
