//! How a program ends when nothing reads its output any more, as in `devinfo | head`.

/// Makes the next write to a pipe without a reader end the program quietly, as in C.
///
/// Rust's start-up code makes programs ignore the signal `SIGPIPE`. Such a write is then an error, and
/// `println!` panics. Sockets are not affected: the standard library writes to them without the signal.
pub(crate) fn end_quietly() {
    // SAFETY: this installs no handler, and the signal's default action runs no code of the program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
