//! Targets with musl, whose C library comes without the kernel's headers.
//!
//! Debian's `musl-gcc` searches musl's own folder only. rdma-core needs the kernel's headers too, which are
//! the same for every C library. So the compiler gets a folder with links to just these, after musl's own:
//! no header of glibc is ever found.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::done;
use crate::tools::finds;

/// The variable that lists folders which GCC and Clang search after those of their flags.
const SEARCHED: &str = "C_INCLUDE_PATH";

/// The folders of the kernel's headers.
const FOLDERS: [&str; 4] = ["asm", "asm-generic", "linux", "rdma"];

/// Lets the C compiler find the kernel's headers, if the target is musl, and it does not yet. By a variable: a flag could
/// not name a folder with a space.
///
/// It is called before any thread is started.
pub(crate) fn add_kernel_headers(out: &Path) {
    let musl = env::var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("musl");
    // Without a compiler, the check for tools says so.
    if !musl || finds(&["stdlib.h"]).is_err() || finds(&["linux/types.h"]).is_ok() {
        return;
    }
    let folder = out.join("kernel-headers");
    // If there are none, the check for tools says so.
    if done(&folder, link_headers(&folder)) {
        let given = env::var_os(SEARCHED).unwrap_or_default();
        let mut folders: Vec<_> = env::split_paths(&given).collect();
        folders.push(folder);
        if let Ok(folders) = env::join_paths(folders) {
            // SAFETY: this is the only thread.
            unsafe { env::set_var(SEARCHED, folders) };
        }
    }
}

/// Links to the machine's headers of the kernel. Returns whether there are any.
fn link_headers(folder: &Path) -> io::Result<bool> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    // Debian has the headers of each architecture in a folder of their own.
    let include = Path::new("/usr/include");
    let places = [include.join(format!("{arch}-linux-gnu")), include.to_owned()];
    let found = |name: &str| -> Option<PathBuf> {
        let mut folders = places.iter().map(|place| place.join(name));
        folders.find(|folder| folder.is_dir())
    };
    let Some(sources) = FOLDERS.iter().map(|name| found(name)).collect::<Option<Vec<_>>>() else {
        return Ok(false);
    };
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    for (name, source) in FOLDERS.iter().zip(sources) {
        symlink(source, folder.join(name))?;
    }
    Ok(true)
}
