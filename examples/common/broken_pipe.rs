//! What a program does when nobody reads its output any more, as in `devinfo | head`.

/// Makes the next write to a pipe that nobody reads end the program quietly, as it ends programs in C.
///
/// Rust's start-up code lets programs ignore the signal `SIGPIPE`; such a write is then an error, at which
/// `println!` panics. Sockets are not concerned: the standard library writes to them without the signal.
pub(crate) fn end_quietly() {
    // SAFETY: this installs no handler, and the signal's default action runs no code of the program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}
