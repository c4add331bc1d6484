//! Measures the contenders and compares: `script/bench` is what calls it.
//!
//! `report PROFILE=BINARY .. [--write FILE | --check FILE | WORKLOAD ..]` runs each binary under callgrind, prints a
//! table for each, and writes it down, or compares it with what was written down. It runs these workloads only.
//!
//! `report channels BINARY [--write FILE | --check FILE]` counts instructions and misses of caches of those with many channels.
//!
//! `report --page EXPECTED GROWTH PAGE` writes the tables of the page and the charts that it shows, from
//! what was written down and from what `growth` has measured; `report --check-page ..` fails if they are
//! not that.

mod callgrind;
mod channels;
mod chart;
mod document;
mod expected;
mod measure;
mod points;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use document::Sources;
use expected::Row;
use measure::Measured;

/// The contender that every ratio is relative to.
const REFERENCE: &str = "C tuned";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("report: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1).peekable();
    if let Some(what) = arguments.next_if(|argument| argument.ends_with("-page")) {
        let files: Vec<_> = arguments.map(PathBuf::from).collect();
        let Ok([expected, growth, page]) = <[_; 3]>::try_from(files) else {
            return Err(format!("{what} EXPECTED GROWTH PAGE"));
        };
        let sources = Sources { expected, growth, page };
        return match what.as_str() {
            "--page" => document::write(&sources),
            "--check-page" => document::check(&sources),
            _ => Err(format!("what is {what}?")),
        };
    }
    if arguments.next_if_eq("channels").is_some() {
        return count_misses(&arguments.collect::<Vec<_>>());
    }
    let (mut binaries, mut only, mut write, mut check) = (Vec::new(), Vec::new(), None, None);
    while let Some(argument) = arguments.next() {
        let mut file = || arguments.next().ok_or_else(|| format!("{argument} needs a file"));
        match (argument.as_str(), argument.split_once('=')) {
            ("--write", _) => write = Some(PathBuf::from(file()?)),
            ("--check", _) => check = Some(PathBuf::from(file()?)),
            (_, Some((profile, binary))) => {
                binaries.push((profile.to_owned(), PathBuf::from(binary)));
            }
            _ if argument.starts_with('W') => only.push(argument),
            _ => return Err(format!("what is {argument}?")),
        }
    }
    let mut rows = Vec::new();
    for (profile, binary) in &binaries {
        let folder = binary.with_extension("callgrind");
        let measured = measure::measure(binary, &folder, &only, false)?;
        rows.extend(compare(profile, &measured)?);
    }
    for (profile, _) in &binaries {
        print(profile, &rows);
    }
    if let Some(file) = write {
        expected::write(&file, &rows)?;
        println!("written to {}", file.display());
    }
    if let Some(file) = check {
        expected::check(&file, &rows)?;
    }
    Ok(())
}

fn count_misses(arguments: &[String]) -> Result<(), String> {
    let [binary, rest @ ..] = arguments else { return Err("channels BINARY".to_owned()) };
    let binary = Path::new(binary);
    let folder = binary.with_extension("cachegrind");
    let measured = measure::measure(binary, &folder, &channels::contenders(), true)?;
    let lines: Vec<_> = measured.iter().map(channels::Line::of).collect();
    print!("{}", channels::text(&lines));
    match rest {
        [] => Ok(()),
        [write, file] if write == "--write" => channels::write(Path::new(file), &lines),
        [check, file] if check == "--check" => channels::check(Path::new(file), &lines),
        _ => Err(format!("what is {rest:?}?")),
    }
}

/// Divides each measurement by that of the reference of the same workload.
fn compare(profile: &str, measured: &[Measured]) -> Result<Vec<Row>, String> {
    let row = |one: &Measured| {
        let same = |other: &&Measured| other.workload == one.workload && other.layer == REFERENCE;
        let reference = measured.iter().find(same);
        let reference = reference.ok_or_else(|| format!("{}: no {REFERENCE}", one.workload))?;
        Ok(Row {
            profile: profile.to_owned(),
            workload: one.workload.clone(),
            layer: one.layer.clone(),
            own: one.own,
            device: one.device,
            ratio: one.own / reference.own,
        })
    };
    measured.iter().map(row).collect()
}

fn print(profile: &str, rows: &[Row]) {
    println!("\nInstructions per operation, profile {profile}");
    println!("{:<11}{:<24}{:>8}{:>8}{:>12}", "", "", "own", "ratio", "(device)");
    let mut workload = "";
    for row in rows.iter().filter(|row| row.profile == profile) {
        let first = if row.workload == workload { "" } else { row.workload.as_str() };
        workload = &row.workload;
        let Row { layer, own, ratio, device, .. } = row;
        println!("{first:<11}{layer:<24}{own:>8.1}{ratio:>8.2}{device:>12.1}");
    }
}
