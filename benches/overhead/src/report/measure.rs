//! Runs the contenders under callgrind.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::callgrind::{self, Cost};

/// The difference of the two runs of a contender, in operations.
const OPERATIONS: u64 = 2048;
/// The sources of the device.
const DEVICE: &str = "tests/function_device/";

/// The cost of one operation of a contender.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) workload: String,
    pub(crate) layer: String,
    /// Instructions outside of the device.
    pub(crate) own: f64,
    /// Instructions in it.
    pub(crate) device: f64,
}

/// Runs `binary` under callgrind, which writes to `folder`: all workloads, or only these.
pub(crate) fn measure(
    binary: &Path,
    folder: &Path,
    only: &[String],
) -> Result<Vec<Measured>, String> {
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let out = folder.join("out");
    let mut option = std::ffi::OsString::from("--callgrind-out-file=");
    option.push(&out);
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--dump-before=overhead_section"].map(OsStr::new))
        .arg("--instr-atstart=no") // the program says when: src/main.rs
        .args([option.as_os_str(), binary.as_os_str()])
        .args(["run", &OPERATIONS.to_string()])
        .args(only)
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    if !output.status.success() {
        return Err(format!("valgrind: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8(output.stdout).map_err(|e| e.to_string())?;
    let sections = text.lines().map(|line| section(line, &out)).collect::<Result<Vec<_>, _>>()?;
    if sections.is_empty() || sections.len() % 3 != 0 {
        return Err(format!("{} sections", sections.len()));
    }
    Ok(sections
        .chunks_exact(3)
        .map(|runs| {
            let (one, two) = (&runs[1], &runs[2]);
            let per = |f: fn(Cost) -> u64| {
                (f(two.cost) as f64 - f(one.cost) as f64) / (two.operations - one.operations) as f64
            };
            Measured {
                workload: one.workload.clone(),
                layer: one.layer.clone(),
                own: per(|c| c.total - c.device),
                device: per(|c| c.device),
            }
        })
        .collect())
}

struct Section {
    workload: String,
    layer: String,
    operations: u64,
    cost: Cost,
}

/// One line of the output of `overhead run`, with its dump.
fn section(line: &str, out: &Path) -> Result<Section, String> {
    let fields: Vec<_> = line.split('\t').collect();
    let [number, workload, layer, operations] = fields[..] else {
        return Err(format!("what does this mean: {line}"));
    };
    let number: u64 = number.parse().map_err(|e| format!("{line}: {e}"))?;
    let operations = operations.parse().map_err(|e| format!("{line}: {e}"))?;
    // Two dumps for each section: what precedes it, and the section. They count from 1.
    let dump = format!("{}.{}", out.display(), 2 * number + 2);
    let text = fs::read_to_string(&dump).map_err(|e| format!("{dump}: {e}"))?;
    let cost = callgrind::parse(&text, DEVICE).map_err(|e| format!("{dump}: {e}"))?;
    Ok(Section { workload: workload.to_owned(), layer: layer.to_owned(), operations, cost })
}
