//! Threads of ours.

/// Blocks all signals on this thread: the program's own threads handle them.
pub(crate) fn without_signals(work: impl FnOnce()) {
    // SAFETY: the set is a live variable. Faults stay unblocked: they concern this thread.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigfillset(&mut signals);
        for fault in
            [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP]
        {
            libc::sigdelset(&mut signals, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
    }
    work();
}
