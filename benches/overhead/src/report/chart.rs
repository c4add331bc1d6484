//! Draws charts as SVG.

use std::fmt::Write as _;

use crate::points::Point;

/// What is known of a chart beforehand.
struct Chart {
    name: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
}

#[derive(Clone, Copy)]
struct Axis {
    label: &'static str,
    scale: Scale,
}

#[derive(Clone, Copy, PartialEq)]
enum Scale {
    /// From 0.
    Linear,
    /// A tick at each power of 10.
    Decades,
    /// Ticks at powers of 2; numbers of bytes if so.
    Doublings { bytes: bool },
}

const CHARTS: &[Chart] = &[
    Chart {
        name: "poll",
        title: "A completion, by how many are polled at a time",
        x: Axis {
            label: "completions per poll, at most",
            scale: Scale::Doublings { bytes: false },
        },
        y: Axis { label: "ns per completion", scale: Scale::Linear },
    },
    Chart {
        name: "outstanding",
        title: "An operation, by how many others are outstanding",
        x: Axis { label: "operations outstanding", scale: Scale::Doublings { bytes: false } },
        y: Axis { label: "ns per operation, posted and completed", scale: Scale::Linear },
    },
    Chart {
        name: "queue-pair-time",
        title: "Making and connecting one more queue pair, by how many there are",
        x: Axis { label: "queue pairs", scale: Scale::Decades },
        y: Axis { label: "us per queue pair", scale: Scale::Decades },
    },
    Chart {
        name: "queue-pair-bytes",
        title: "Memory of a queue pair with two queues of 16, by how many there are",
        x: Axis { label: "queue pairs", scale: Scale::Decades },
        y: Axis { label: "bytes per queue pair", scale: Scale::Decades },
    },
    Chart {
        name: "registration-time",
        title: "Registering memory, by size",
        x: Axis { label: "size of the region", scale: Scale::Doublings { bytes: true } },
        y: Axis { label: "us per registration", scale: Scale::Decades },
    },
    Chart {
        name: "registration-memory",
        title: "Memory that a registration takes, by size",
        x: Axis { label: "size of the region", scale: Scale::Doublings { bytes: true } },
        y: Axis { label: "KiB per registration", scale: Scale::Decades },
    },
];

struct Series {
    name: String,
    points: Vec<(f64, f64)>,
}

/// The charts, each with its name.
pub(crate) fn draw(points: &[Point]) -> Result<Vec<(&'static str, String)>, String> {
    let draw = |chart: &Chart| match series(points, chart.name) {
        series if series.is_empty() => Err(format!("nothing about {}", chart.name)),
        series => Ok((chart.name, svg(chart, &series))),
    };
    CHARTS.iter().map(draw).collect()
}

/// The series of one chart, in the order in which they appear.
fn series(points: &[Point], chart: &str) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for Point { series, x, y, .. } in points.iter().filter(|point| point.chart == chart) {
        match all.iter_mut().find(|one| one.name == *series) {
            Some(one) => one.points.push((*x, *y)),
            None => all.push(Series { name: series.clone(), points: vec![(*x, *y)] }),
        }
    }
    all
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 60.0;
/// To be told apart by all eyes (Okabe and Ito).
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// The ends of an axis, and where it has ticks.
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Range {
    fn of(scale: Scale, values: impl Iterator<Item = f64> + Clone) -> Self {
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        match scale {
            Scale::Linear => {
                // The smallest step of 1, 2 or 5 that takes at most 8 ticks.
                let raw = most / 8.0;
                let power = 10_f64.powf(raw.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power);
                let step = step.into_iter().find(|step| *step >= raw).unwrap_or(most);
                let count = (most / step).ceil() as u32;
                let ticks: Vec<_> = (0..=count).map(|n| f64::from(n) * step).collect();
                Self { scale, low: 0.0, high: f64::from(count) * step, ticks }
            }
            Scale::Decades => {
                let (low, high) = (least.log10().floor() as i32, most.log10().ceil() as i32);
                let high = high.max(low + 1);
                let ticks = (low..=high).map(|n| 10_f64.powi(n)).collect();
                Self { scale, low: 10_f64.powi(low), high: 10_f64.powi(high), ticks }
            }
            Scale::Doublings { .. } => {
                let (low, high) = (least.log2().floor() as i32, most.log2().ceil() as i32);
                let step = if high - low > 12 { 2 } else { 1 };
                let ticks = (low..=high).step_by(step).map(|n| 2_f64.powi(n)).collect();
                Self { scale, low: 2_f64.powi(low), high: 2_f64.powi(high), ticks }
            }
        }
    }

    /// Where a value is, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            // What is 0 is drawn at the lower end.
            _ => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
        }
    }

    fn name(&self, tick: f64) -> String {
        match self.scale {
            Scale::Doublings { bytes: true } => {
                let units = ["B", "KiB", "MiB", "GiB"];
                let unit = ((tick.log2() / 10.0) as usize).min(units.len() - 1);
                format!("{} {}", tick / 1024_f64.powi(unit as i32), units[unit])
            }
            _ if tick >= 1e6 => format!("{}M", tick / 1e6),
            _ if tick >= 1e4 => format!("{}k", tick / 1e3),
            _ => format!("{}", (tick * 1e6).round() / 1e6),
        }
    }
}

fn svg(chart: &Chart, series: &[Series]) -> String {
    let points = series.iter().flat_map(|one| &one.points);
    let x = Range::of(chart.x.scale, points.clone().map(|point| point.0));
    // A value of 0 has no place on a logarithmic axis, and does not decide where it begins.
    let positive = points.map(|point| point.1).filter(|y| *y > 0.0);
    let y = Range::of(chart.y.scale, positive);
    let at_x = |value: f64| LEFT + x.place(value) * (WIDTH - LEFT - RIGHT);
    let at_y = |value: f64| HEIGHT - BOTTOM - y.place(value) * (HEIGHT - TOP - BOTTOM);
    let mut out = String::new();
    // Writing to a string does not fail.
    let mut line = |text: String| {
        let _ = writeln!(out, "{text}");
    };
    line(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#222">
<rect width="100%" height="100%" fill="#fff"/>
<text x="{}" y="22" text-anchor="middle" font-size="15">{}</text>"##,
        WIDTH / 2.0,
        chart.title
    ));
    let (low, high) = (HEIGHT - BOTTOM, TOP);
    for tick in &x.ticks {
        let (at, name) = (at_x(*tick), x.name(*tick));
        line(format!(r##"<path d="M{at:.1} {low}V{high}" stroke="#ddd"/>"##));
        line(format!(r#"<text x="{at:.1}" y="{}" text-anchor="middle">{name}</text>"#, low + 18.0));
    }
    let (first, last) = (LEFT, WIDTH - RIGHT);
    for tick in &y.ticks {
        let (at, name) = (at_y(*tick), y.name(*tick));
        line(format!(r##"<path d="M{first} {at:.1}H{last}" stroke="#ddd"/>"##));
        line(format!(
            r#"<text x="{}" y="{:.1}" text-anchor="end">{name}</text>"#,
            first - 8.0,
            at + 4.0
        ));
    }
    line(format!(r##"<path d="M{first} {high}V{low}H{last}" fill="none" stroke="#222"/>"##));
    line(format!(
        r#"<text x="{}" y="{}" text-anchor="middle">{}</text>"#,
        (first + last) / 2.0,
        HEIGHT - 14.0,
        chart.x.label
    ));
    let middle = (low + high) / 2.0;
    line(format!(
        r#"<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{}</text>"#,
        chart.y.label
    ));
    for (index, one) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let mut path = String::new();
        for (index, (px, py)) in one.points.iter().enumerate() {
            let command = if index == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", at_x(*px), at_y(*py));
        }
        line(format!(r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"#));
        for (px, py) in &one.points {
            let (cx, cy) = (at_x(*px), at_y(*py));
            line(format!(r#"<circle cx="{cx:.1}" cy="{cy:.1}" r="3" fill="{colour}"/>"#));
        }
    }
    // The legend comes last, on top of everything.
    let height = 18.0 * series.len() as f64 + 8.0;
    let above = legend_goes_above(series, &x, &y);
    let from = if above { high + 6.0 } else { low - height - 6.0 };
    line(format!(
        r##"<rect x="{}" y="{from}" width="270" height="{height}" fill="#fff" fill-opacity="0.85" stroke="#ddd"/>"##,
        first + 10.0
    ));
    for (index, one) in series.iter().enumerate() {
        let (colour, y) = (COLOURS[index % COLOURS.len()], from + 18.0 * index as f64 + 17.0);
        line(format!(
            r#"<path d="M{} {}h20" stroke="{colour}" stroke-width="2"/><text x="{}" y="{y}">{}</text>"#,
            first + 18.0,
            y - 4.0,
            first + 46.0,
            one.name
        ));
    }
    line("</svg>".to_owned());
    out
}

/// Whether the upper left is freer of points than the lower left.
fn legend_goes_above(series: &[Series], x: &Range, y: &Range) -> bool {
    let left = series.iter().flat_map(|one| &one.points).filter(|point| x.place(point.0) < 0.5);
    let upper = left.clone().filter(|point| y.place(point.1) > 0.5).count();
    2 * upper <= left.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_ticks() {
        let linear = Range::of(Scale::Linear, [3.0, 17.0].into_iter());
        assert_eq!((linear.low, linear.high, linear.ticks.len()), (0.0, 20.0, 5));
        let decades = Range::of(Scale::Decades, [0.4, 90.0].into_iter());
        assert_eq!((decades.low, decades.high), (0.1, 100.0));
        assert!((decades.place(1.0) - 1.0 / 3.0).abs() < 1e-9);
        let doublings = Range::of(Scale::Doublings { bytes: true }, [4096.0, 65536.0].into_iter());
        assert_eq!(doublings.name(doublings.ticks[1]), "8 KiB");
    }

    #[test]
    fn points_belong_to_their_series() {
        let text = "a\tone\t1\t2\nb\tone\t1\t9\na\ttwo\t1\t3\na\tone\t2\t4\n";
        let points = crate::points::parse(text).unwrap();
        let series = series(&points, "a");
        assert_eq!(series[0].points, [(1.0, 2.0), (2.0, 4.0)]);
        assert_eq!((series.len(), series[1].name.as_str()), (2, "two"));
        assert!(draw(&points).is_err());
        let drawn = svg(&CHARTS[0], &series);
        assert!(drawn.contains(">two</text>") && drawn.trim_end().ends_with("</svg>"));
    }
}
