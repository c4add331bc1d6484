//! A user of RDMA, built on this crate: `ours_open` registers memory on a device, and `ours_work` moves bytes in
//! it. `c/neighbour.c` has the same functions on the system's libibverbs. They have C's calling convention, since this
//! library is also built as a plug-in, with a copy of this crate of its own.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::memory::RawMemoryRegion;
use ibverbs::{
    AccessFlags, Channel, CompletionQueue, MemoryRegion, ProtectionDomain, QueuePair, Rc,
    WorkCompletion,
};

/// Bytes of a message. The message is at the start of a user's part of the memory, and arrives behind itself.
pub const MESSAGE: usize = 64;

/// The longest time for an operation.
const PATIENCE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The objects that the program or a plug-in has open on one device.
#[derive(Debug)]
struct User {
    queue: Arc<CompletionQueue<'static>>,
    queue_pair: QueuePair<'static>,
    /// The memory that all users register.
    shared: RawMemoryRegion<'static>,
    channel: Channel<'static>,
    own: MemoryRegion<'static, u8>,
}

impl User {
    /// # Safety
    ///
    /// The memory is valid until the user is closed, and nothing refers to it.
    unsafe fn open(device: &str, memory: *mut u8, length: usize) -> Outcome<Self> {
        let domain = Arc::new(ProtectionDomain::new(ibverbs::open(device)?)?);
        // SAFETY: the caller vouches for the memory.
        let shared = unsafe {
            RawMemoryRegion::new(domain.clone(), memory, length, AccessFlags::LOCAL_WRITE)?
        };
        let queue = Arc::new(CompletionQueue::new(domain.context_parent(), 4)?);
        let prepared =
            ibverbs::QueuePairBuilder::new(domain.clone(), queue.clone(), queue.clone(), Rc)
                .build()?;
        let itself = prepared.endpoint();
        let queue_pair = prepared.handshake(itself)?;
        let prepared = Channel::builder(domain.clone()).build()?;
        let itself = prepared.endpoint();
        let channel = prepared.handshake(itself)?;
        Ok(Self {
            queue,
            queue_pair,
            shared,
            channel,
            own: MemoryRegion::new(domain, 2 * MESSAGE)?,
        })
    }

    /// Moves a message by the queue pair, in the shared memory, and one by the channel.
    fn work(&mut self, start: usize) -> Outcome<()> {
        let deadline = Instant::now() + PATIENCE;
        // SAFETY: the memory stays valid until the completions are polled, and nothing refers to it.
        unsafe {
            let arrival = start + MESSAGE..start + 2 * MESSAGE;
            self.queue_pair.post_receive(&mut self.shared, arrival, 1)?;
            self.queue_pair.post_send(&self.shared, start..start + MESSAGE, 2)?;
        }
        let mut completed = 0;
        while completed < 2 {
            let mut completions = [WorkCompletion::default(); 2];
            let polled = self.queue.poll(&mut completions)?;
            if Instant::now() > deadline {
                return Err("no completion arrives".into());
            }
            for completion in polled {
                completion.result()?;
            }
            completed += polled.len();
        }
        let value = self.own[MESSAGE].wrapping_add(1);
        self.own[..MESSAGE].fill(value);
        let (message, arrival) = self.own.slice_mut(..)?.split_at(MESSAGE)?;
        self.channel.scope_until(deadline, |s| {
            let receive = s.post_receive(arrival)?;
            s.post_send(message)?.wait()?;
            receive.wait()?;
            Ok::<_, ibverbs::TransportError>(())
        })?;
        if self.own.iter().any(|&byte| byte != value) {
            return Err("the channel's message is not right".into());
        }
        Ok(())
    }

    fn close(self) -> Outcome<()> {
        self.channel.close()?;
        self.own.close()?;
        self.queue_pair.close()?;
        self.shared.close()?;
        Ok(())
    }
}

/// Turns a result into C's: 0, or -1 after a message.
fn status(what: &str, outcome: Outcome<()>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ours: {what}: {error}");
            -1
        }
    }
}

/// Prepares for forks; 0 if it succeeds.
#[unsafe(no_mangle)]
pub extern "C" fn ours_fork_init() -> c_int {
    status("fork_init", ibverbs::device::fork_init().map_err(Into::into))
}

/// Opens a device; null if that fails.
///
/// # Safety
///
/// The name is a C string. The memory is valid until `ours_close`, and nothing refers to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ours_open(
    device: *const c_char,
    memory: *mut c_void,
    length: usize,
) -> *mut c_void {
    // SAFETY: the caller vouches for the name.
    let device = unsafe { CStr::from_ptr(device) }.to_string_lossy();
    // SAFETY: the caller vouches for the memory.
    match unsafe { User::open(&device, memory.cast(), length) } {
        Ok(user) => Box::into_raw(Box::new(user)).cast(),
        Err(error) => {
            eprintln!("ours: open: {error}");
            std::ptr::null_mut()
        }
    }
}

/// Moves messages; 0 if all of them arrive.
///
/// # Safety
///
/// `user` comes from `ours_open` of this library, is not closed, and nobody else uses it. `start` leaves room for
/// two messages in its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ours_work(user: *mut c_void, start: usize) -> c_int {
    // SAFETY: the caller vouches for it.
    let user = unsafe { &mut *user.cast::<User>() };
    status("work", user.work(start))
}

/// Closes what `ours_open` has opened; 0 if nothing fails.
///
/// # Safety
///
/// As `ours_work`, and it is the last use of `user`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ours_close(user: *mut c_void) -> c_int {
    // SAFETY: the caller vouches for it.
    let user = unsafe { Box::from_raw(user.cast::<User>()) };
    status("close", user.close())
}
