//! `docs/performance.md`: its tables and charts are generated from the numbers that are kept beside it, so
//! that they always agree.

use std::fs;
use std::path::{Path, PathBuf};

use crate::expected::{self, Row};
use crate::points::{self, Point};
use crate::{REFERENCE, channels, chart};

/// The files of the numbers, and the page. Charts go to the folder of the measurements.
pub(crate) struct Sources {
    /// Instructions per operation.
    pub(crate) expected: PathBuf,
    /// The results of `growth`. Beside it are those of the servers in `servers.tsv`, of many channels in `channels.tsv`, and of
    /// `script/compare streams` in `compare.tsv`.
    pub(crate) growth: PathBuf,
    pub(crate) page: PathBuf,
}

/// Writes the tables into the page, and the charts beside it.
pub(crate) fn write(sources: &Sources) -> Result<(), String> {
    for (file, text) in make(sources)? {
        if fs::read_to_string(&file).ok().as_ref() != Some(&text) {
            fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?;
            println!("written to {}", file.display());
        }
    }
    Ok(())
}

/// Fails if the page or a chart differs from what the numbers give.
pub(crate) fn check(sources: &Sources) -> Result<(), String> {
    for (file, text) in make(sources)? {
        if read(&file)? != text {
            let file = file.display();
            return Err(format!("{file} is not what the numbers say: script/bench page"));
        }
    }
    println!("{} says what the numbers say", sources.page.display());
    Ok(())
}

/// The contents of the page and the charts.
fn make(sources: &Sources) -> Result<Vec<(PathBuf, String)>, String> {
    let rows = expected::read(&sources.expected)?;
    let text = read(&sources.growth)? + &read(&sources.growth.with_file_name("servers.tsv"))?;
    let about = |error| format!("{}, or servers.tsv: {error}", sources.growth.display());
    let mut points = points::parse(&text).map_err(about)?;
    points.extend(requests(&rows));
    let mut page = read(&sources.page)?;
    for (name, table) in [
        ("glance", glance(&rows)),
        ("instructions", instructions(&rows)),
        ("channels", channels::table(&read(&sources.growth.with_file_name("channels.tsv"))?)),
        ("machines", machines(&text)),
        ("connections", connections(&points)),
    ] {
        let table = table.map_err(|error| format!("{name}: {error}"))?;
        page = replace(&page, name, &table)
            .map_err(|error| format!("{}: {error}", sources.page.display()))?;
    }
    let folder = sources.growth.parent().unwrap_or(Path::new(""));
    let mut files = vec![(sources.page.clone(), page)];
    let bars = bars(&rows)?;
    files.push((folder.join("glance.svg"), chart::bars(&bars, "instructions, C = 1")?));
    let compared = folder.join("compare.tsv");
    let bars = ratios(&read(&compared)?).map_err(|e| format!("{}: {e}", compared.display()))?;
    let svg = chart::bars(&bars, "time, TCP by threads = 1")?;
    files.push((compared.with_extension("svg"), svg));
    for (name, svg) in chart::draw(&points).map_err(about)? {
        files.push((folder.join(name).with_extension("svg"), svg));
    }
    Ok(files)
}

fn read(file: &Path) -> Result<String, String> {
    fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))
}

/// Puts `text` between the two comments that mark its place.
fn replace(page: &str, name: &str, text: &str) -> Result<String, String> {
    let (begin, end) =
        (format!("<!-- {name}: by script/bench -->\n"), format!("<!-- {name} ends -->"));
    let missing = |mark: &str| format!("there is no line {}", mark.trim_end());
    let (before, rest) = page.split_once(&begin).ok_or_else(|| missing(&begin))?;
    let (_, after) = rest.split_once(&end).ok_or_else(|| missing(&end))?;
    // Without empty lines around it, a table would be taken for part of the comments.
    Ok(format!("{before}{begin}\n{}\n\n{end}{after}", text.trim_end()))
}

/// The columns of the table at the head of the page, after C.
const LAYERS: [&str; 4] = ["verbs", "channel", "loop", "futures"];

/// A row: what a program does, its workload, and the workload and the layer of each column.
type GlanceRow = (&'static str, &'static str, [(&'static str, &'static str); LAYERS.len()]);

/// The rows of that table.
#[rustfmt::skip]
const GLANCE: &[GlanceRow] = &[
    (
        "send 64 bytes, and wait",
        "W6",
        [
            ("W1", "verbs prepared"),
            ("W6", "channel blocking"),
            ("W6", "loop"),
            ("W12", "futures, one task on one thread"),
        ],
    ),
    (
        "a send, sixteen of which are in flight",
        "W10",
        [
            ("W3", "verbs prepared"),
            ("W10", "channel all at once"),
            ("W10", "loop"),
            ("W13", "futures"),
        ],
    ),
    (
        "read 4 KiB, 64 reads in flight",
        "W17",
        [("", ""), ("W17", "channel scoped"), ("W17", "loop"), ("", "")],
    ),
    (
        "answer a message, on one of 1,000 connections",
        "W14-1000",
        [("", ""), ("", ""), ("W14-1000", "loop"), ("W14-1000", "futures, one thread")],
    ),
    (
        "the same, from another buffer (loop: of a `BufferCache`)",
        "W20-1000",
        [("", ""), ("", ""), ("W20-1000", "loop, cache"), ("W20-1000", "futures, one thread")],
    ),
    (
        "look for what has ended, in vain",
        "W18",
        [("", ""), ("", ""), ("W18", "loop"), ("W18", "futures, one thread")],
    ),
];

/// A cell of that table: instructions of the first profile, and their ratio to C.
fn cell<'r>(rows: &'r [Row], workload: &str, layer: &str) -> Result<&'r Row, String> {
    let first = rows.first().ok_or("there are no numbers")?;
    let is_it = |row: &&Row| {
        (&row.profile, &*row.workload, &*row.layer) == (&first.profile, workload, layer)
    };
    rows.iter().find(is_it).ok_or_else(|| format!("no {workload} {layer}"))
}

/// The cost of each layer beside C.
fn glance(rows: &[Row]) -> Result<String, String> {
    let mut table =
        format!("| instructions, and their ratio to C's | C | {} |", LAYERS.join(" | "));
    table += &format!("\n|---|{}", "---:|".repeat(1 + LAYERS.len()));
    for (what, workload, layers) in GLANCE {
        table += &format!("\n| {what} | {:.0} |", cell(rows, workload, REFERENCE)?.own);
        for (workload, layer) in layers {
            table += &match layer.is_empty() {
                true => " |".to_owned(),
                false => {
                    let cell = cell(rows, workload, layer)?;
                    format!(" {:.0} ({:.1}) |", cell.own, cell.ratio)
                }
            };
        }
    }
    Ok(table)
}

/// The ratios of [`glance`], each with its name.
fn bars(rows: &[Row]) -> Result<Vec<(String, f64)>, String> {
    let mut bars = Vec::new();
    for (what, _, layers) in GLANCE {
        for ((workload, layer), name) in layers.iter().zip(LAYERS) {
            if !layer.is_empty() {
                bars.push((format!("{what}: {name}"), cell(rows, workload, layer)?.ratio));
            }
        }
    }
    Ok(bars)
}

/// The servers of requests with one receive for each connection, by the number of these, with the first profile.
fn requests(rows: &[Row]) -> Vec<Point> {
    let first = rows.first().map(|row| &row.profile);
    let point = |row: &Row| {
        let x = row.workload.strip_prefix("W20-")?.parse().ok()?;
        let (chart, series) = ("requests".to_owned(), row.layer.clone());
        Some(Point { chart, series, x, y: row.own })
    };
    rows.iter().filter(|row| Some(&row.profile) == first).filter_map(point).collect()
}

/// Lines of a name, a tab and a ratio.
fn ratios(text: &str) -> Result<Vec<(String, f64)>, String> {
    let ratio = |line: &str| {
        let (name, ratio) = line.split_once('\t')?;
        Some((name.to_owned(), ratio.parse().ok()?))
    };
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| ratio(line).ok_or_else(|| format!("what does this mean: {line}"))).collect()
}

/// Workloads and layers are rows, profiles are columns.
fn instructions(rows: &[Row]) -> Result<String, String> {
    let mut profiles: Vec<&str> = Vec::new();
    for row in rows {
        if !profiles.contains(&row.profile.as_str()) {
            profiles.push(&row.profile);
        }
    }
    let first = profiles.first().ok_or("there are no numbers")?;
    let mut table = String::from("| workload | layer |");
    table.extend(profiles.iter().map(|profile| format!(" `{profile}` |")));
    table += "\n|---|---|";
    table.extend(profiles.iter().map(|_| "---:|"));
    for row in rows.iter().filter(|row| row.profile == *first) {
        let (workload, layer) = (&row.workload, &row.layer);
        table += &format!("\n| {workload} | {layer} |");
        for profile in &profiles {
            let same = |other: &&Row| {
                (other.profile.as_str(), &other.workload, &other.layer)
                    == (*profile, workload, layer)
            };
            let cell = rows.iter().find(same);
            let cell = cell.ok_or_else(|| format!("no {workload} {layer} in {profile}"))?;
            let ratio =
                if *layer == REFERENCE { "1".to_owned() } else { format!("{:.2}", cell.ratio) };
            table += &format!(" {:.1} ({ratio}) |", cell.own);
        }
    }
    Ok(table)
}

/// The machine and versions of a measurement: the comments at the head of the data.
fn machines(text: &str) -> Result<String, String> {
    let comments = text.lines().filter_map(|line| line.strip_prefix("# ")?.split_once(": "));
    let list: Vec<_> = comments
        .filter(|(what, _)| ["the crate", "Soft-RoCE"].contains(what))
        .map(|(what, machine)| format!("- **{what}**: {machine}"))
        .collect();
    if list.len() == 2 { Ok(list.join("\n")) } else { Err("it is not said where".to_owned()) }
}

/// The cost of a connection, and how many can be made in a second.
fn connections(points: &[Point]) -> Result<String, String> {
    let steps: Vec<_> = points.iter().filter(|point| point.chart == "connection").collect();
    let mut table = String::from(
        "| | create, µs | connect, µs | destroy, µs | connections per second |\n\
         |---|---:|---:|---:|---:|",
    );
    // Create, connect, destroy; of each device in turn.
    if steps.is_empty() || steps.len() % 3 != 0 {
        return Err(format!("{} steps", steps.len()));
    }
    for device in steps.chunk_by(|a, b| a.series == b.series) {
        let total: f64 = device.iter().map(|step| step.y).sum();
        table += &format!("\n| {} |", device[0].series);
        table.extend(device.iter().map(|step| format!(" {:.1} |", step.y)));
        table += &format!(" {} |", thousands((1e6 / total).round() as u64));
    }
    Ok(table)
}

/// 12,345: groups of three digits.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> =
        digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group)).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let page = "a\n<!-- x: by script/bench -->\nold\n<!-- x ends -->\nb\n";
        let new = replace(page, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- x: by script/bench -->\n\nnew\n\n<!-- x ends -->\nb\n");
        assert_eq!(replace(&new, "x", "new").unwrap(), new);
        assert!(replace(page, "y", "new").is_err());
    }

    #[test]
    fn the_table_at_the_head_has_the_first_profile() {
        let all = GLANCE.iter().flat_map(|(_, workload, layers)| {
            [(*workload, REFERENCE)].into_iter().chain(*layers).filter(|layer| !layer.1.is_empty())
        });
        let row = |profile: &str, (workload, layer): (&str, &str), own| Row {
            profile: profile.to_owned(),
            workload: workload.to_owned(),
            layer: layer.to_owned(),
            own,
            device: 80.0,
            ratio: own / 20.0,
        };
        let mut rows: Vec<_> = all.clone().map(|layer| row("lto", layer, 21.0)).collect();
        rows.extend(all.clone().map(|layer| row("release", layer, 99.0)));
        let table = glance(&rows).unwrap();
        assert!(
            table.contains("| read 4 KiB, 64 reads in flight | 21 | | 21 (1.1) | 21 (1.1) | |"),
            "{table}"
        );
        assert!(!table.contains("99"), "{table}");
        assert_eq!(bars(&rows).unwrap().len() + GLANCE.len(), all.count());
        rows.remove(1);
        assert!(glance(&rows).is_err());
    }

    #[test]
    fn a_row_of_the_table_has_all_profiles() {
        let line = |profile: &str, layer: &str, own: f64, ratio: f64| Row {
            profile: profile.to_owned(),
            workload: "W1".to_owned(),
            layer: layer.to_owned(),
            own,
            device: 80.0,
            ratio,
        };
        let mut rows = vec![
            line("lto", REFERENCE, 20.0, 1.0),
            line("lto", "ours", 21.0, 1.05),
            line("release", REFERENCE, 20.0, 1.0),
            line("release", "ours", 22.04, 1.102),
        ];
        let table = instructions(&rows).unwrap();
        assert!(table.contains("\n| W1 | C tuned | 20.0 (1) | 20.0 (1) |\n"), "{table}");
        assert!(table.ends_with("\n| W1 | ours | 21.0 (1.05) | 22.0 (1.10) |"), "{table}");
        rows.pop();
        assert!(instructions(&rows).is_err());
    }

    #[test]
    fn a_chart_has_the_servers_of_requests_by_their_connections() {
        let row = |profile: &str, workload: &str, own| Row {
            profile: profile.to_owned(),
            workload: workload.to_owned(),
            layer: REFERENCE.to_owned(),
            own,
            device: 0.0,
            ratio: 1.0,
        };
        let rows = [
            row("lto", "W2", 9.0),
            row("lto", "W20-10", 61.0),
            row("lto", "W20-10x16", 62.0),
            row("release", "W20-10", 63.0),
        ];
        let found: Vec<_> = requests(&rows).iter().map(|point| (point.x, point.y)).collect();
        assert_eq!(found, [(10.0, 61.0)]);
    }

    #[test]
    fn a_bar_has_a_name_and_a_ratio() {
        assert_eq!(ratios("# a\nb: c\t1.5\n").unwrap(), [("b: c".to_owned(), 1.5)]);
        assert!(ratios("b\tmany\n").is_err());
    }

    #[test]
    fn connections_are_counted_by_all_of_their_steps() {
        let data = "connection\tNIC\t1\t100\nconnection\tNIC\t2\t300.04\nconnection\tNIC\t3\t0\n";
        let table = connections(&points::parse(data).unwrap()).unwrap();
        assert!(table.ends_with("\n| NIC | 100.0 | 300.0 | 0.0 | 2,500 |"), "{table}");
        assert!(connections(&[]).is_err());
        assert_eq!([7, 1234, 1_234_567].map(thousands), ["7", "1,234", "1,234,567"]);
    }

    #[test]
    fn both_machines_are_named() {
        let head = "# the crate: a laptop\n# Soft-RoCE: Linux 6.12\n# chart\tseries\n";
        assert_eq!(
            machines(head).unwrap(),
            "- **the crate**: a laptop\n- **Soft-RoCE**: Linux 6.12"
        );
        assert!(machines("# the crate: a laptop\n").is_err());
    }
}
