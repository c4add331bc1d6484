//! The table that is kept in the repository.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// A layer is worse if its instructions and their ratio to C both grow by more than this share.
const TOLERANCE: f64 = 0.02;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) profile: String,
    pub(crate) workload: String,
    pub(crate) layer: String,
    /// Instructions per operation outside of the device.
    pub(crate) own: f64,
    /// Instructions per operation in the device.
    pub(crate) device: f64,
    /// `own` over that of the reference.
    pub(crate) ratio: f64,
}

impl Row {
    fn key(&self) -> (&str, &str, &str) {
        (&self.profile, &self.workload, &self.layer)
    }

    /// The contenders in C: how many instructions they take is up to C's compiler, and another version has another number.
    fn is_c(&self) -> bool {
        self.layer.starts_with("C ") || self.layer.starts_with("C,")
    }

    fn to_line(&self) -> String {
        let Self { profile, workload, layer, own, ratio, device } = self;
        format!("{profile}\t{workload}\t{layer}\t{own:.2}\t{ratio:.3}\t{device:.2}\n")
    }

    fn from_line(line: &str) -> Option<Self> {
        let fields: Vec<_> = line.split('\t').collect();
        let [profile, workload, layer, own, ratio, device] = fields[..] else { return None };
        Some(Self {
            profile: profile.to_owned(),
            workload: workload.to_owned(),
            layer: layer.to_owned(),
            own: own.parse().ok()?,
            ratio: ratio.parse().ok()?,
            device: device.parse().ok()?,
        })
    }
}

const HEAD: &str = "# Instructions per operation, and their ratio to tuned C: script/bench --write
# profile\tworkload\tlayer\town\tratio\tdevice
";

pub(crate) fn write(file: &Path, rows: &[Row]) -> Result<(), String> {
    let text = HEAD.to_owned() + &rows.iter().map(Row::to_line).collect::<String>();
    fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
}

pub(crate) fn read(file: &Path) -> Result<Vec<Row>, String> {
    let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let row = |line| Row::from_line(line).ok_or_else(|| format!("{}: {line}", file.display()));
    lines.map(row).collect()
}

/// Fails if a layer takes more instructions, also beside C, or if the two tables have different contenders for a profile that
/// was measured.
pub(crate) fn check(file: &Path, rows: &[Row]) -> Result<(), String> {
    let expected = read(file)?;
    match differences(&expected, rows) {
        (worse, better) if worse.is_empty() => {
            print!("{better}");
            let count = rows.iter().filter(|row| !row.is_c()).count();
            println!("{count} numbers, none more than 2 % above {}", file.display());
            Ok(())
        }
        (worse, better) => Err(format!("these are not as in {}:\n{worse}{better}", file.display())),
    }
}

/// Lists the rows that are worse or missing, and those that are better than expected.
fn differences(expected: &[Row], rows: &[Row]) -> (String, String) {
    let (mut worse, mut better) = (String::new(), String::new());
    let line = |out: &mut String, row: &Row, what: &str| {
        let Row { profile, workload, layer, .. } = row;
        // Writing to a string does not fail.
        let _ = writeln!(out, "    {profile} {workload} {layer}: {what}");
    };
    for row in rows {
        let Some(before) = expected.iter().find(|before| before.key() == row.key()) else {
            line(&mut worse, row, "was not there");
            continue;
        };
        let what = format!("{:.1} instructions, was {:.1}", row.own, before.own);
        if row.is_c() {
            continue;
        }
        let has_grown = |now: f64, before: f64| now > before * (1.0 + TOLERANCE);
        // Another C library takes more below all layers, also below C.
        if has_grown(row.own, before.own) && has_grown(row.ratio, before.ratio) {
            line(&mut worse, row, &what);
        } else if row.own < before.own * (1.0 - TOLERANCE) {
            line(&mut better, row, &format!("{what} (better: script/bench --write)"));
        }
    }
    let is_measured = |before: &&Row| rows.iter().any(|row| row.profile == before.profile);
    for before in expected.iter().filter(is_measured) {
        if !rows.iter().any(|row| row.key() == before.key()) {
            line(&mut worse, before, "is gone");
        }
    }
    (worse, better)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(layer: &str, ratio: f64) -> Row {
        let (profile, workload) = ("lto".to_owned(), "W1".to_owned());
        Row { profile, workload, layer: layer.to_owned(), own: ratio * 20.0, device: 80.0, ratio }
    }

    #[test]
    fn a_line_says_it_all() {
        let row = row("verbs", 1.25);
        assert_eq!(Row::from_line(row.to_line().trim_end()), Some(row));
        assert_eq!(Row::from_line("lto\tW1"), None);
    }

    #[test]
    fn only_what_is_worse_or_missing_counts() {
        let before = ["a", "b", "c", "d", "C tuned", "C, z"].map(|layer| row(layer, 1.0));
        let now =
            [("a", 1.019), ("b", 1.021), ("c", 0.5), ("e", 1.0), ("C tuned", 1.1), ("C, z", 0.9)]
                .map(|(layer, ratio)| row(layer, ratio));
        let (worse, better) = differences(&before, &now);
        let names = |text: &str| -> Vec<char> {
            text.lines().filter_map(|line| line.split(':').next()?.chars().last()).collect()
        };
        assert_eq!((names(&worse), names(&better)), (vec!['b', 'e', 'd'], vec!['c']));
        let fine = differences(&before, &before);
        assert_eq!(fine, (String::new(), String::new()));
    }

    #[test]
    fn what_c_takes_too_makes_no_layer_worse() {
        let before = ["a", "b", "c"].map(|layer| row(layer, 1.0));
        let now = [
            Row { ratio: 1.05, ..row("a", 1.01) },
            Row { ratio: 1.01, ..row("b", 1.05) },
            Row { ratio: 1.04, ..row("c", 1.03) },
        ];
        let (worse, better) = differences(&before, &now);
        assert_eq!((worse.trim(), &*better), ("lto W1 c: 20.6 instructions, was 20.0", ""));
    }
}
