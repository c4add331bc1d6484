//! Copies a file, or memory, between two machines over all rails.
//!
//!     rcopy receive [-d DEVICE].. [-p PORT] FILE|-m SIZE       waits for a sender, and writes FILE
//!     rcopy send [-d DEVICE].. [-p PORT] FILE|-m SIZE HOST     sends FILE
//!     rcopy plot FILE.svg                                      draws the throughput of four rails, one of which dies
//!
//! `-m 10G` is memory instead of a file: the sender sends 10 GiB of random bytes, and the receiver accepts at most 10 GiB. No
//! disk is in the way then, and no copy in memory.
//!
//! Without `-d`, all devices with an active port are taken. A bar shows what each rail carries. A copy of a file that was
//! interrupted goes on where it was: the receiver keeps `FILE.part`. Each part has a checksum, and so has the whole.
//!
//! `plot` does not need devices: it is a simulated network in virtual time.

#![forbid(unsafe_code)]

mod bars;
mod copy;
mod plot;

use std::path::PathBuf;
use std::process::ExitCode;

use copy::Data;
use ibverbs_rails::Rails;
use lexopt::prelude::*;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const USAGE: &str =
    "usage: rcopy receive|send [-d DEVICE].. [-p PORT] FILE|-m SIZE [HOST], or rcopy plot FILE.svg";

/// A number of bytes, such as `10G`.
fn size(text: &str) -> Result<u64> {
    let number = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match &text[number.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        unit => return Err(format!("{unit} is no unit: K, M, G").into()),
    };
    let bytes = number.parse::<u64>()?.checked_mul(1 << shift);
    Ok(bytes.filter(|&bytes| bytes > 0).ok_or("the size must be within 1..=2^64 - 1 bytes")?)
}

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
    let (mut port, mut words, mut memory) = (18515, Vec::new(), None);
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('d') | Long("device") => rails = rails.device(arguments.value()?.string()?),
            Short('p') | Long("port") => port = arguments.value()?.parse()?,
            Short('m') | Long("memory") => memory = Some(size(&arguments.value()?.string()?)?),
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
    let _software = if is_plot { None } else { Some(ibverbs_software::register_if_none()?) };
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let file = |name: &str| Data::File(PathBuf::from(name));
    match (&words[..], memory) {
        (["receive", name], None) => copy::receive(rails.build()?, port, &file(name)),
        (["receive"], Some(size)) => copy::receive(rails.build()?, port, &Data::Memory(size)),
        (["send", name, host], None) => copy::send(rails.build()?, (host, port), &file(name)),
        (["send", host], Some(size)) => {
            copy::send(rails.build()?, (host, port), &Data::Memory(size))
        }
        (["plot", name], None) => plot::draw(name.as_ref()),
        _ => Err(USAGE.into()),
    }
}
