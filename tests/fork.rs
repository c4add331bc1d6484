//! Forking while memory is registered. It is a program of its own, since `fork_init` must come
//! before anything else.

use ibverbs::{Context, ForkStatus, fork_init, is_fork_initialized};
use ibverbs_test_device::TestDevice;

#[test]
fn the_parent_goes_on_after_a_fork() {
    fork_init().unwrap();
    let status = is_fork_initialized();
    assert!(matches!(status, ForkStatus::Enabled | ForkStatus::Unneeded), "{status:?}");

    let device = TestDevice::model();
    // SAFETY: the context is live and handed over.
    let context = unsafe { Context::from_raw(device.open().unwrap()) }.unwrap();
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
    region.close().unwrap();
    drop(domain);
    drop(context);
    device.assert_clean();
}
