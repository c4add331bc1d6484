//! Our examples on both ends. They check what arrives.

use std::path::PathBuf;
use std::process::Command;

use crate::kernel::Kernel;
use crate::memory::Result;
use crate::{KERNEL, SOFTWARE};

fn path(name: &str) -> Result<PathBuf> {
    let folder = std::env::current_exe()?;
    let folder = folder.ancestors().nth(2).ok_or("no folder of the build")?.join("examples");
    Ok(folder.join(name))
}

/// Runs an example; the server is here, or on the other machine.
pub(crate) fn run(
    kernel: &mut Kernel,
    name: &str,
    arguments: &str,
    family: usize,
    serves: bool,
) -> Result<()> {
    let program = path(name)?;
    let path = program.to_str().ok_or("a path that is not text")?;
    let (here, there) = (SOFTWARE[family], KERNEL[family]);
    // A client may start before its server listens.
    let run = |again: &str, device: &str, host: &str| {
        format!("{again} {path} -d {device} {arguments} {host}")
    };
    kernel.start(&if serves { run("again", "rxe1", here) } else { run("", "rxe1", "") })?;
    let ours = if serves { run("", "soft0", "") } else { run("again", "soft0", there) };
    let ours = Command::new("bash")
        .args(["-c", &ours])
        .env("IBVERBS_SOFTWARE", format!("soft0={here}"))
        .output()?;
    let output = String::from_utf8_lossy(&ours.stderr).into_owned();
    kernel.finish()?;
    if ours.status.success() { Ok(()) } else { Err(format!("{}: {output}", ours.status).into()) }
}
