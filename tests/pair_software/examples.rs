//! Programs on both ends that connect by themselves: our examples, which check what arrives, and those of librdmacm.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use crate::kernel::{Kernel, kill};
use crate::memory::Result;
use crate::two_machines::PATIENCE;
use crate::{KERNEL, SOFTWARE};

fn folder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(program.ancestors().nth(2).ok_or("no folder of the build")?.into())
}

fn path(name: &str) -> Result<String> {
    Ok(folder()?.join("examples").join(name).display().to_string())
}

/// Runs an example; the server is here, or on the other machine.
pub(crate) fn run(
    kernel: &mut Kernel,
    name: &str,
    arguments: &str,
    family: usize,
    serves: bool,
) -> Result<()> {
    let path = path(name)?;
    let (here, there) = (SOFTWARE[family], KERNEL[family]);
    // A client may start before its server listens.
    let run = |again: &str, device: &str, host: &str| {
        format!("{again} {path} -d {device} {arguments} {host}")
    };
    kernel.start(&if serves { run("again", "rxe1", here) } else { run("", "rxe1", "") })?;
    let ours = if serves { run("", "soft0", "") } else { run("again", "soft0", there) };
    let ours = bash(&ours, here).output()?;
    kernel.finish()?;
    succeeded(&ours)
}

fn bash(command: &str, here: &str) -> Command {
    let mut bash = Command::new("bash");
    bash.args(["-c", command]).env("IBVERBS_SOFTWARE", format!("soft0={here}"));
    bash
}

fn succeeded(ours: &Output) -> Result<()> {
    if ours.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", ours.status, said(ours)).into())
}

/// What a program printed, on both of its outputs: each of them tells of failures on another one.
fn said(ours: &Output) -> String {
    [&ours.stdout, &ours.stderr].map(|it| String::from_utf8_lossy(it)).concat()
}

/// A server and a client that meet by librdmacm. In what follows the name, `@` is the server's address, and `[@]` that in
/// brackets if it is of IPv6.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Managed {
    pub(crate) name: &'static str,
    pub(crate) server: &'static str,
    pub(crate) client: &'static str,
    /// An example of ours, whose server does not end.
    pub(crate) is_ours: bool,
}

impl Managed {
    /// Runs it; the server is here, or on the other machine.
    pub(crate) fn run(self, kernel: &mut Kernel, family: usize, serves: bool) -> Result<()> {
        let (here, there) = (SOFTWARE[family], KERNEL[family]);
        let address = if serves { here } else { there };
        let brackets = if address.contains(':') { format!("[{address}]") } else { address.into() };
        let command = |is_here: bool, arguments: &str| {
            let arguments = arguments.replace("[@]", &brackets).replace('@', address);
            let program = match (self.is_ours, is_here) {
                (true, _) => path(self.name)?,
                (false, true) => {
                    let run =
                        folder()?.parent().ok_or("no folder of the build")?.join("libibverbs/run");
                    format!("{} {}", run.display(), self.name)
                }
                (false, false) => self.name.into(),
            };
            // Our server is killed, and must leave no child behind.
            let limit = if self.is_ours { "" } else { "timeout 60" };
            Ok::<_, Box<dyn std::error::Error>>(format!("exec {limit} {program} {arguments}"))
        };
        if serves {
            // In a group of its own, so that it can be killed with what it has started.
            let mut server = bash(&command(true, self.server)?, here);
            let mut server =
                server.process_group(0).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
            let client = command(false, self.client)?;
            let played = until_it_listens(|| {
                kernel.start(&client)?;
                kernel.finish()
            });
            if self.is_ours || played.is_err() {
                kill(&mut server);
            }
            let server = server.wait_with_output()?;
            played.map_err(|client| format!("{client}; the server: {}", said(&server)))?;
            if self.is_ours { Ok(()) } else { succeeded(&server) }
        } else {
            kernel.start(&command(false, self.server)?)?;
            let client = command(true, self.client)?;
            until_it_listens(|| {
                let ours = bash(&client, here).output()?;
                succeeded(&ours)?;
                Ok(said(&ours))
            })?;
            if self.is_ours {
                kernel.kill();
                Ok(())
            } else {
                kernel.finish().map(drop)
            }
        }
    }
}

/// What clients say where nobody listens: of a connection, a datagram end, and an rsocket.
const REFUSED: [&str; 4] = ["REJECTED", "Rejected", "UNREACHABLE", "Connection refused"];

/// Runs a client again while it is refused: its server may not listen yet.
fn until_it_listens(mut client: impl FnMut() -> Result<String>) -> Result<()> {
    let start = Instant::now();
    loop {
        let (succeeded, said) = match client() {
            Ok(said) => (true, said),
            Err(error) => (false, error.to_string()),
        };
        let is_refused = REFUSED.iter().any(|it| said.contains(it));
        if !is_refused && succeeded {
            return Ok(());
        } else if !is_refused || start.elapsed() > PATIENCE {
            return Err(said.into());
        }
    }
}
