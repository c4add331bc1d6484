//! Copies a file between two machines over all rails.
//!
//!     rcopy receive [-d DEVICE].. [-p PORT] FILE        waits for a sender, and writes FILE
//!     rcopy send [-d DEVICE].. [-p PORT] FILE HOST      sends FILE
//!     rcopy plot FILE.svg                               draws the throughput of four rails, one of which dies
//!
//! Without `-d`, all devices with an active port are taken. A bar shows what each rail carries. A copy that was
//! interrupted goes on where it was: the receiver keeps `FILE.part`. Each part has a checksum, and so has the whole.
//!
//! `plot` does not need devices: it is a simulated network in virtual time.

#![forbid(unsafe_code)]

mod bars;
mod copy;
mod plot;

use std::path::PathBuf;
use std::process::ExitCode;

use ibverbs_rails::Rails;
use lexopt::prelude::*;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const USAGE: &str =
    "usage: rcopy receive|send [-d DEVICE].. [-p PORT] FILE [HOST], or rcopy plot FILE.svg";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rcopy: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut rails = Rails::builder();
    let (mut port, mut words) = (18515, Vec::new());
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('d') | Long("device") => rails = rails.device(arguments.value()?.string()?),
            Short('p') | Long("port") => port = arguments.value()?.parse()?,
            Value(word) => words.push(word.string()?),
            Short('h') | Long("help") => {
                println!("{USAGE}");
                return Ok(());
            }
            other => return Err(other.unexpected().into()),
        }
    }
    // A device made of software, if the machine has no RDMA device.
    let is_plot = words.first().is_some_and(|word| word == "plot");
    let _software = if is_plot { Vec::new() } else { ibverbs_software::register_if_none()? };
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["receive", file] => copy::receive(rails.build()?, port, PathBuf::from(file)),
        ["send", file, host] => copy::send(rails.build()?, (host, port), PathBuf::from(file)),
        ["plot", file] => plot::draw(file.as_ref()),
        _ => Err(USAGE.into()),
    }
}
