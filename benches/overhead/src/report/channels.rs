//! Operations on many channels in turn: their instructions, and how often they find data in no cache.

use std::fs;
use std::path::Path;

use crate::REFERENCE;
use crate::measure::Measured;

/// What is done, its workload without the number of channels, and the layers.
const DONE: [(&str, &str, &[&str]); 2] = [
    ("a send", "W27", &[REFERENCE, "C, a lock each", "loop", "loop, a sender each"]),
    ("a message answered", "W14", &[REFERENCE, "loop", "futures, one thread"]),
];
const CHANNELS: [u32; 3] = [10, 1000, 10_000];

/// A number is worse if it is this much above the expected one: a share of it, and a part of an event.
const TOLERANCE: [f64; 2] = [0.03, 0.5];

/// The contenders to measure.
pub(crate) fn contenders() -> Vec<String> {
    let of = |&(_, workload, layers): &(&str, &'static str, &'static [&'static str])| {
        let named =
            move |count| layers.iter().map(move |layer| format!("{workload}-{count} {layer}"));
        CHANNELS.into_iter().flat_map(named)
    };
    DONE.iter().flat_map(of).collect()
}

/// Instructions, and misses of both levels, outside of the device; then the misses in it.
#[derive(Debug, PartialEq)]
pub(crate) struct Line {
    name: String,
    events: [f64; 5],
}

impl Line {
    pub(crate) fn of(measured: &Measured) -> Self {
        let Measured { workload, layer, own, misses: [of_own, of_device], .. } = measured;
        let [[first, last], [its_first, its_last]] = [of_own, of_device];
        let events = [*own, *first, *last, *its_first, *its_last];
        Self { name: format!("{workload} {layer}"), events }
    }

    fn to_text(&self) -> String {
        let [own, misses @ ..] = self.events;
        let misses = misses.map(|count| format!("\t{count:.2}"));
        format!("{}\t{own:.1}{}\n", self.name, misses.concat())
    }

    fn from_text(line: &str) -> Option<Self> {
        let (name, events) = line.split_once('\t')?;
        let events: Option<Vec<_>> = events.split('\t').map(|event| event.parse().ok()).collect();
        Some(Self { name: name.to_owned(), events: events?.try_into().ok()? })
    }
}

const HEAD: &str = "# An operation on many channels in turn, with LTO: script/bench channels --write
# contender\tinstructions\tmisses of the first level\tof the last\tin the device: of the first level\tof the last
";

pub(crate) fn text(lines: &[Line]) -> String {
    HEAD.to_owned() + &lines.iter().map(Line::to_text).collect::<String>()
}

pub(crate) fn write(file: &Path, lines: &[Line]) -> Result<(), String> {
    fs::write(file, text(lines)).map_err(|e| format!("{}: {e}", file.display()))
}

fn read(text: &str) -> Result<Vec<Line>, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| Line::from_text(line).ok_or_else(|| format!("what is {line}?"))).collect()
}

/// Fails if a number is above that of the file.
pub(crate) fn check(file: &Path, lines: &[Line]) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let worse = worse(&read(&text)?, lines);
    let is_fine = if worse.is_empty() { Ok(()) } else { Err(worse) };
    is_fine.map_err(|worse| format!("not as in {}:\n{worse}", file.display()))
}

fn worse(expected: &[Line], lines: &[Line]) -> String {
    let [share, part] = TOLERANCE;
    let is_worse = |now: &f64, before: &f64| *now > before * (1.0 + share) + part;
    let describe = |line: &Line| match expected.iter().find(|before| before.name == line.name) {
        None => Some(format!("    {}: was not there\n", line.name)),
        // What C takes is up to its compiler.
        Some(_) if line.name.contains(" C") => None,
        Some(before) => {
            let mut both = line.events.iter().zip(&before.events);
            let is_any = both.any(|(now, before)| is_worse(now, before));
            is_any.then(|| format!("    now {}    was {}", line.to_text(), before.to_text()))
        }
    };
    lines.iter().filter_map(describe).collect()
}

/// Contenders are rows, numbers of channels are columns.
pub(crate) fn table(text: &str) -> Result<String, String> {
    let lines = read(text)?;
    let mut table = "| | | 10 channels | 1,000 | 10,000 |\n|---|---|---:|---:|---:|".to_owned();
    for (done, workload, layers) in DONE {
        for (at, layer) in layers.iter().enumerate() {
            table += &format!("\n| {} | {layer} |", if at == 0 { done } else { "" });
            for count in CHANNELS {
                let name = format!("{workload}-{count} {layer}");
                let line = lines.iter().find(|line| line.name == name);
                let [own, first, last, its_first, its_last] =
                    line.ok_or_else(|| format!("no {name}"))?.events;
                table +=
                    &format!(" {own:.0}; {first:.1} + {its_first:.1}; {last:.1} + {its_last:.1} |");
            }
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_it_all_and_what_is_worse_is_named() {
        let line = |own, first| {
            let events = [own, first, 0.0, 4.25, 0.5];
            Line { name: "W27-10 loop".to_owned(), events }
        };
        let text = line(100.0, 2.0).to_text();
        assert_eq!(Line::from_text(text.trim_end()), Some(line(100.0, 2.0)));
        assert_eq!(Line::from_text("W27-10 loop\t1"), None);
        let check = |own, first| worse(&[line(100.0, 2.0)], &[line(own, first)]);
        assert_eq!((&*check(102.0, 2.5), &*check(90.0, 0.0)), ("", ""));
        assert!(check(104.0, 2.0).contains("104.0") && check(100.0, 2.6).contains("2.60"));
        assert!(worse(&[], &[line(1.0, 1.0)]).contains("was not there"));
    }

    #[test]
    fn each_contender_has_a_cell() {
        let line = |name: &String| format!("{name}\t104.2\t1.00\t0.25\t3.00\t0.00\n");
        let text: String = contenders().iter().map(line).collect();
        let table = table(&text).unwrap();
        assert_eq!(table.matches("104; 1.0 + 3.0; 0.2 + 0.0 |").count(), contenders().len());
        assert!(super::table("").is_err());
    }
}
