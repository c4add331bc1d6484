//! Forking while memory is registered. It is a separate program, because `fork_init` must come
//! before all other calls.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/software.rs"]
mod software;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use figures::figure;
use ibverbs::device::{ForkStatus, fork_init, forks, is_fork_initialized};
use software::Software;

type Handler = Option<unsafe extern "C" fn()>;

static REGISTERS: AtomicBool = AtomicBool::new(false);
static GOES_ON: AtomicBool = AtomicBool::new(false);

fn until(flag: &AtomicBool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !flag.load(Ordering::SeqCst) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}

/// In place of the C library's: the first caller is held up, and nothing is registered.
#[unsafe(no_mangle)]
extern "C" fn pthread_atfork(_: Handler, _: Handler, _: Handler) -> c_int {
    if !REGISTERS.swap(true, Ordering::SeqCst) {
        until(&GOES_ON);
    }
    0
}

/// The thread is in the call, and the child has not the thread.
fn a_child_of_the_first_call_of_forks_does_not_wait() {
    let first = thread::spawn(forks);
    until(&REGISTERS);
    // SAFETY: the child calls what it may: atomics, the function above, `alarm` and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no memory is involved, and it ends the child at once.
        unsafe {
            libc::alarm(20);
            forks();
            libc::_exit(0);
        }
    }
    let mut how = 0;
    // SAFETY: the child is ours, and `how` is writable.
    assert_eq!(unsafe { libc::waitpid(child, &mut how, 0) }, child);
    GOES_ON.store(true, Ordering::SeqCst);
    first.join().unwrap();
    assert_eq!(how, 0, "the child waits");
}

#[test]
fn the_parent_goes_on_after_a_fork() {
    a_child_of_the_first_call_of_forks_does_not_wait();
    fork_init().unwrap();
    let status = is_fork_initialized();
    assert!(matches!(status, ForkStatus::Enabled | ForkStatus::Unneeded), "{status:?}");

    let device = Software::new();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let mut region = domain.allocate::<u8>(4096).unwrap();
    region.fill(7);
    // SAFETY: the child calls nothing but `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    region.fill(9);
    let mut how = 0;
    // SAFETY: the child is ours, and `how` is writable.
    assert_eq!(unsafe { libc::waitpid(child, &mut how, 0) }, child);
    assert!(libc::WIFEXITED(how) && libc::WEXITSTATUS(how) == 0, "{how:#x}");
    assert!(region.iter().all(|&byte| byte == 9));
    // A child that writes to registered memory writes to its own copy.
    let address = region.as_mut_ptr();
    // SAFETY: the child writes to memory that is its own, if it has it, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            address.write_volatile(1);
            libc::_exit(0);
        }
    }
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    // SAFETY: as above.
    assert_eq!(unsafe { libc::waitpid(child, &mut how, 0) }, child);
    assert!(libc::WIFEXITED(how) && libc::WEXITSTATUS(how) == 0, "{how:#x}");
    assert!(region.iter().all(|&byte| byte == 9), "the parent's memory has changed");
    figure(
        "fork",
        &format!(
            "fork status {status:?} (software device): a child that writes to registered memory writes to a copy; the \
             parent's is as it was, and is deregistered"
        ),
    );
    region.close().unwrap();
    drop(domain);
    drop(context);
    device.assert_clean();
}
