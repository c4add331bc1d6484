//! Forking while memory is registered. It is a separate program, because `fork_init` must come
//! before all other calls.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/software.rs"]
mod software;

use figures::figure;
use ibverbs::device::{ForkStatus, fork_init, is_fork_initialized};
use software::Software;

#[test]
fn the_parent_goes_on_after_a_fork() {
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
