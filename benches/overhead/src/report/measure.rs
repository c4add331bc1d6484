//! Runs the contenders under callgrind.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::callgrind::{self, Cost, INSTRUCTIONS, MISSES};

/// The difference of the two runs of a contender, in operations.
const OPERATIONS: u64 = 2048;
/// Operations where misses are counted: each run touches each of 10,000 channels twice at least.
const LONG: u64 = 20_480;
/// The caches, so that each machine counts the same: their bytes, ways, and bytes of a line.
const CACHES: [&str; 4] =
    ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=8388608,16,64"];
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
    /// Misses of the first and of the last level of the caches: outside of the device, and in it.
    pub(crate) misses: [[f64; 2]; 2],
}

/// Runs `binary` under callgrind, which writes to `folder`: all workloads, or only these. With caches, it counts misses.
pub(crate) fn measure(
    binary: &Path,
    folder: &Path,
    only: &[String],
    with_caches: bool,
) -> Result<Vec<Measured>, String> {
    fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let out = folder.join("out");
    let operations = if with_caches { LONG } else { OPERATIONS };
    let mut option = std::ffi::OsString::from("--callgrind-out-file=");
    option.push(&out);
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--dump-before=overhead_section"].map(OsStr::new))
        .arg("--instr-atstart=no") // the program says when: src/main.rs
        .args(if with_caches { &CACHES[..] } else { &[] })
        .args([option.as_os_str(), binary.as_os_str()])
        .args(["run", &operations.to_string()])
        .args(only)
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    if !output.status.success() {
        return Err(format!("valgrind: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8(output.stdout).map_err(|e| e.to_string())?;
    let sections = text.lines().map(|line| section(line, &out, with_caches));
    let sections = sections.collect::<Result<Vec<_>, _>>()?;
    if sections.is_empty() || sections.len() % 3 != 0 {
        return Err(format!("{} sections", sections.len()));
    }
    Ok(sections
        .chunks_exact(3)
        .map(|runs| {
            let (one, two) = (&runs[1], &runs[2]);
            let per = |event: usize, f: fn(Cost) -> u64| {
                let more = f(two.costs[event]) as f64 - f(one.costs[event]) as f64;
                more / (two.operations - one.operations) as f64
            };
            let own = |event| per(event, |c| c.total - c.device);
            let device = |event| per(event, |c| c.device);
            Measured {
                workload: one.workload.clone(),
                layer: one.layer.clone(),
                own: own(0),
                device: device(0),
                misses: [[own(1), own(2)], [device(1), device(2)]],
            }
        })
        .collect())
}

struct Section {
    workload: String,
    layer: String,
    operations: u64,
    /// Of instructions, and of misses of both levels, if they were counted.
    costs: [Cost; 3],
}

/// One line of the output of `overhead run`, with its dump.
fn section(line: &str, out: &Path, with_caches: bool) -> Result<Section, String> {
    let fields: Vec<_> = line.split('\t').collect();
    let [number, workload, layer, operations] = fields[..] else {
        return Err(format!("what does this mean: {line}"));
    };
    let number: u64 = number.parse().map_err(|e| format!("{line}: {e}"))?;
    let operations = operations.parse().map_err(|e| format!("{line}: {e}"))?;
    // Two dumps for each section: what precedes it, and the section. They count from 1.
    let dump = format!("{}.{}", out.display(), 2 * number + 2);
    let text = fs::read_to_string(&dump).map_err(|e| format!("{dump}: {e}"))?;
    let mut costs = [Cost::default(); 3];
    let events = [INSTRUCTIONS, MISSES[0], MISSES[1]];
    for (cost, events) in costs.iter_mut().zip(events).take(if with_caches { 3 } else { 1 }) {
        *cost = callgrind::parse(&text, DEVICE, events).map_err(|e| format!("{dump}: {e}"))?;
    }
    Ok(Section { workload: workload.to_owned(), layer: layer.to_owned(), operations, costs })
}
