//! Draws the results by size, as SVG.

use std::path::Path;

use plotters::prelude::*;

use crate::report::{Figures, Report};
use crate::rig::Result;

/// Colours that colour-blind people can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; 4] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
];

struct Series {
    name: &'static str,
    points: Vec<(f64, f64)>,
}

pub(crate) fn draw(report: &Report<'_>, file: &Path) -> Result<()> {
    let (label, series) = series(report);
    let points = || series.iter().flat_map(|one| &one.points);
    let least = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::INFINITY, f64::min);
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
    // The axes show whole powers of 2 and whole decades. A logarithmic axis cannot show 0.
    let (left, right) = (least(|p| p.0), most(|p| p.0));
    let (left, right) = if left < right { (left, right) } else { (left / 2.0, right * 2.0) };
    let decade = |value: f64, round: fn(f64) -> f64| 10_f64.powf(round(value.log10()));
    let low = decade(least(|p| p.1).max(1e-6), f64::floor);
    let high = decade(most(|p| p.1).max(1e-6), f64::ceil).max(low * 10.0);

    let area = SVGBackend::new(file, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let plan = report.plan;
    let title = format!(
        "{} {}, {}, {} layer, {}",
        plan.operation, plan.measure, plan.transport, plan.layer, report.device
    );
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((left..right).log_scale().base(2.0), (low..high).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bytes of a message")
        .y_desc(label)
        .x_label_formatter(&|bytes| size(*bytes))
        .y_label_formatter(&|value| format!("{value}"))
        .x_labels(12)
        .light_line_style(RGBColor(0xee, 0xee, 0xee))
        .bold_line_style(RGBColor(0xcc, 0xcc, 0xcc))
        .draw()?;
    for (one, colour) in series.iter().zip(COLOURS) {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(one.points.iter().copied(), style).point_size(3))?
            .label(one.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(0xcc, 0xcc, 0xcc))
        .draw()?;
    area.present().map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(())
}

/// The series and their unit.
fn series(report: &Report<'_>) -> (&'static str, Vec<Series>) {
    let mut names: &[&str] = &["p50", "p90", "p99", "p99.9"];
    let mut label = "latency in us";
    let mut all: Vec<Series> = Vec::new();
    for row in &report.results {
        let values: Vec<f64> = match &row.figures {
            Figures::Latency(l) => vec![l.p50_us, l.p90_us, l.p99_us, l.p99_9_us],
            Figures::Bandwidth(b) => {
                (names, label) = (&["bandwidth"], "MiB/s");
                vec![b.mib_per_second]
            }
        };
        all.resize_with(values.len(), || Series { name: "", points: Vec::new() });
        for ((one, name), value) in all.iter_mut().zip(names).zip(values) {
            one.name = name;
            one.points.push((f64::from(row.size), value));
        }
    }
    // The user may give sizes in any order; a line goes from left to right.
    for one in &mut all {
        one.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    (label, all)
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes >= 1048576.0 => format!("{} MiB", bytes / 1048576.0),
        bytes if bytes >= 1024.0 => format!("{} KiB", bytes / 1024.0),
        bytes => format!("{bytes} B"),
    }
}
