//! Reads the output of callgrind: <https://valgrind.org/docs/manual/cl-format.html>.

use std::collections::{HashMap, HashSet};

/// The cost of one section.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    /// All that occurred.
    pub(crate) total: u64,
    /// The events in the device and in all functions that it calls.
    pub(crate) device: u64,
}

/// Instructions.
pub(crate) const INSTRUCTIONS: &[&str] = &["Ir"];
/// Reads and writes of data that were in no cache of the first level, or of the last.
pub(crate) const MISSES: [&[&str]; 2] = [&["D1mr", "D1mw"], &["DLmr", "DLmw"]];

/// Adds up these events of a dump. The device's functions are those whose source is in the folder `device_folder`.
pub(crate) fn parse(dump: &str, device_folder: &str, events: &[&str]) -> Result<Cost, String> {
    let names = dump.lines().find_map(|line| line.strip_prefix("events: "));
    let names: Vec<_> = names.ok_or("no events")?.split_ascii_whitespace().collect();
    let place = |event: &&str| names.iter().position(|name| name == event);
    let columns = events.iter().map(place).collect::<Option<_>>();
    let columns = columns.ok_or_else(|| format!("{events:?} are not among {names:?}"))?;
    let mut parser = Parser { columns, ..Parser::default() };
    for (number, line) in dump.lines().enumerate() {
        parser.line(line, device_folder).ok_or_else(|| format!("line {}: {line}", number + 1))?;
    }
    let Parser { total, calls, device, .. } = parser;
    let into_device = calls
        .iter()
        .filter(|((from, to), _)| device.contains(to) && !device.contains(from))
        .map(|(_, cost)| cost)
        .sum();
    Ok(Cost { total, device: into_device })
}

/// Functions by the number that the dump gives them.
#[derive(Default)]
struct Parser {
    /// The columns of the events, behind the line number.
    columns: Vec<usize>,
    files: HashMap<u64, String>,
    /// The file of the next function.
    file: u64,
    function: u64,
    callee: u64,
    /// The next line of costs is the inclusive cost of a call.
    in_call: bool,
    total: u64,
    calls: HashMap<(u64, u64), u64>,
    device: HashSet<u64>,
}

impl Parser {
    fn line(&mut self, line: &str, device_folder: &str) -> Option<()> {
        if let Some((key, value)) = line.split_once('=') {
            match key {
                "fl" => self.file = self.name_file(value)?,
                "fi" | "fe" | "cfi" | "cfl" => drop(self.name_file(value)?),
                "fn" => {
                    self.function = id(value)?;
                    if self.files.get(&self.file)?.contains(device_folder) {
                        self.device.insert(self.function);
                    }
                }
                "cfn" => self.callee = id(value)?,
                "calls" => self.in_call = true,
                _ => {}
            }
        } else if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            // A line number, and how often each event occurred. What is missing at the end did not occur.
            let mut cost = 0;
            for &column in &self.columns {
                if let Some(count) = line.split_ascii_whitespace().nth(column + 1) {
                    cost += count.parse::<u64>().ok()?;
                }
            }
            if self.in_call {
                *self.calls.entry((self.function, self.callee)).or_default() += cost;
                self.in_call = false;
            } else {
                self.total += cost;
            }
        }
        Some(())
    }

    fn name_file(&mut self, value: &str) -> Option<u64> {
        let id = id(value)?;
        if let Some((_, name)) = value.split_once(") ") {
            self.files.insert(id, name.to_owned());
        }
        Some(id)
    }
}

/// The name of `(17) name`, or of `(17)` if the name was defined before.
fn id(value: &str) -> Option<u64> {
    value.strip_prefix('(')?.split_once(')')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_into_the_device_count_with_what_they_call() {
        let dump = "\
version: 1
events: Ir
fl=(1) /tests/function_device/lean.c
fn=(1) post_send
10 7
+2 3
cfi=(3) libc.c
cfn=(4) write
calls=1 0
+1 50

fl=(2) main.rs
fn=(2) w1
5 20
cfi=(1)
cfn=(1)
calls=2 10
* 60
fi=(5) inlined.rs
8 4
fe=(2)

fl=(3)
fn=(4)
1 50
totals: 84
";
        let count = |dump, events| parse(dump, "tests/function_device/", events);
        assert_eq!(count(dump, INSTRUCTIONS), Ok(Cost { total: 84, device: 60 }));
        assert!(count(dump, MISSES[0]).is_err());
        assert!(count("events: Ir\nfn=(1) without a file\n", INSTRUCTIONS).is_err());
        assert!(count("events: Ir\nfl=(1) a\nfn=(1) b\n1 many\n", INSTRUCTIONS).is_err());
    }

    #[test]
    fn events_are_found_by_their_names() {
        let dump = "\
events: Ir D1mr D1mw DLmr DLmw
fl=(1) /tests/function_device/lean.c
fn=(1) post_send
10 7 2 1
fl=(2) main.rs
fn=(2) w1
5 20 3 0 0 4
cfi=(1)
cfn=(1)
calls=1 10
* 7 2 1
";
        let count = |events| parse(dump, "tests/function_device/", events);
        assert_eq!(count(INSTRUCTIONS), Ok(Cost { total: 27, device: 7 }));
        assert_eq!(count(MISSES[0]), Ok(Cost { total: 6, device: 3 }));
        assert_eq!(count(MISSES[1]), Ok(Cost { total: 4, device: 0 }));
    }
}
