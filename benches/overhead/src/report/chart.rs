//! Draws charts as SVG.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::points::Point;

/// The properties of a chart that do not depend on its points.
struct Chart {
    name: &'static str,
    title: &'static str,
    x: (&'static str, Scale),
    y: (&'static str, Scale),
}

#[derive(Clone, Copy, PartialEq)]
enum Scale {
    /// Begins at 0.
    Linear,
    /// Logarithmic, with a tick at each power of 10.
    Decades,
    /// Logarithmic, with ticks at powers of 2.
    Doublings,
    /// Logarithmic, with ticks at powers of 2, for numbers of bytes.
    Bytes,
}

const CHARTS: &[Chart] = &[
    Chart {
        name: "poll",
        title: "A completion, by how many are polled at a time",
        x: ("completions per poll, at most", Scale::Doublings),
        y: ("ns per completion", Scale::Linear),
    },
    Chart {
        name: "outstanding",
        title: "An operation, by how many others are outstanding",
        x: ("operations outstanding", Scale::Doublings),
        y: ("ns per operation, posted and completed", Scale::Linear),
    },
    Chart {
        name: "channels",
        title: "A send on each of many channels in turn, by their number",
        x: ("channels", Scale::Decades),
        y: ("ns per send, posted and completed", Scale::Decades),
    },
    Chart {
        name: "making",
        title: "Making, connecting and closing one more channel, by how many there are",
        x: ("channels", Scale::Decades),
        y: ("us per channel", Scale::Decades),
    },
    Chart {
        name: "queue-pair-time",
        title: "Making and connecting one more queue pair, by how many there are",
        x: ("queue pairs", Scale::Decades),
        y: ("us per queue pair", Scale::Decades),
    },
    Chart {
        name: "queue-pair-bytes",
        title: "Memory of a queue pair with two queues of 16, by how many there are",
        x: ("queue pairs", Scale::Decades),
        y: ("bytes per queue pair", Scale::Decades),
    },
    Chart {
        name: "registration-time",
        title: "Registering memory, by size",
        x: ("size of the region", Scale::Bytes),
        y: ("us per registration", Scale::Decades),
    },
    Chart {
        name: "registration-memory",
        title: "Memory that a registration takes, by size",
        x: ("size of the region", Scale::Bytes),
        y: ("KiB per registration", Scale::Decades),
    },
    Chart {
        name: "requests",
        title: "A request that is answered from another buffer, by the server's connections",
        x: ("connections", Scale::Decades),
        y: ("instructions outside of the device", Scale::Decades),
    },
    Chart {
        name: "servers",
        title: "Messages of 64 bytes that a server sends back, by its connections",
        x: ("connections", Scale::Decades),
        y: ("thousands per second and core", Scale::Linear),
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
        series => Ok((chart.name, svg(chart, &series)?)),
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

/// Colours that colour-blind people can tell apart (Okabe and Ito).
const COLOURS: [RGBColor; 5] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
];

/// An axis in the form of plotters, whose own logarithmic axis may leave out the first tick.
#[derive(Clone)]
struct Axis {
    scale: Scale,
    /// The range of the values; on a logarithmic axis, of their logarithms.
    linear: RangedCoordf64,
}

impl Axis {
    /// Takes all values, except 0 on a logarithmic axis.
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| scale == Scale::Linear || *value > 0.0) {
            low = low.min(scale.place(value));
            high = high.max(scale.place(value));
        }
        let range = match scale {
            Scale::Linear => 0.0..1.05 * high,
            _ => low.floor()..high.ceil().max(low.floor() + 1.0),
        };
        Self { scale, linear: range.into() }
    }
}

impl Scale {
    fn place(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Decades => value.log10(),
            Self::Doublings | Self::Bytes => value.log2(),
        }
    }

    fn value(self, place: f64) -> f64 {
        match self {
            Self::Linear => place,
            Self::Decades => 10_f64.powf(place),
            Self::Doublings | Self::Bytes => place.exp2(),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        // A value of 0 is drawn at the lower end of a logarithmic axis.
        self.linear.map(&self.scale.place(*value).max(self.linear.range().start), limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if self.scale == Scale::Linear {
            return self.linear.key_points(hint);
        }
        let Range { start, end } = self.linear.range();
        let step = if end - start > 12.0 { 2 } else { 1 };
        (start as i32..=end as i32).step_by(step).map(|n| self.scale.value(n.into())).collect()
    }

    fn range(&self) -> Range<f64> {
        let Range { start, end } = self.linear.range();
        self.scale.value(start)..self.scale.value(end)
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        match *value {
            bytes if self.scale == Scale::Bytes => {
                let units = ["B", "KiB", "MiB", "GiB"];
                let unit = ((bytes.log2() / 10.0) as usize).min(units.len() - 1);
                format!("{} {}", bytes / 1024_f64.powi(unit as i32), units[unit])
            }
            value if value >= 1e6 => format!("{}M", value / 1e6),
            value if value >= 1e4 => format!("{}k", value / 1e3),
            value => format!("{}", (value * 1e6).round() / 1e6),
        }
    }
}

/// Bars of ratios, each with its name, and a line at 1, which the axis explains.
pub(crate) fn bars(bars: &[(String, f64)], axis_says: &str) -> Result<String, String> {
    const HEIGHT: u32 = 24;
    let mut text = String::new();
    {
        let size = (800, HEIGHT * bars.len() as u32 + 60);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| format!("the bars: {error}");
        area.fill(&WHITE).map_err(|e| failed(&e))?;
        let most = bars.iter().fold(1.0_f64, |most, bar| most.max(bar.1)) * 1.1;
        let least = bars.iter().fold(0.5_f64, |least, bar| least.min(bar.1));
        let axis = Axis::of(Scale::Doublings, [least, most].into_iter());
        let low = axis.range().start;
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(40)
            .build_cartesian_2d(axis, 0.0..bars.len() as f64)
            .map_err(|e| failed(&e))?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_y_mesh().disable_y_axis().x_desc(axis_says).label_style(LABELS);
        mesh.draw().map_err(|e| failed(&e))?;
        for (index, (name, ratio)) in bars.iter().enumerate() {
            let top = (bars.len() - index) as f64;
            let bar = Rectangle::new(
                [(low, top - 0.9), (*ratio, top - 0.1)],
                COLOURS[0].mix(0.3).filled(),
            );
            chart.draw_series([bar]).map_err(|e| failed(&e))?;
            let name = Text::new(format!("{name}: {ratio:.1}"), (low * 1.02, top - 0.25), LABELS);
            chart.draw_series([name]).map_err(|e| failed(&e))?;
        }
        let c = PathElement::new([(1.0, 0.0), (1.0, bars.len() as f64)], COLOURS[1]);
        chart.draw_series([c]).map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))?;
    }
    Ok(text)
}

const LABELS: (&str, u32) = ("sans-serif", 15);

fn svg(chart: &Chart, series: &[Series]) -> Result<String, String> {
    let mut text = String::new();
    draw_on(SVGBackend::with_string(&mut text, (720, 400)), chart, series)
        .map_err(|error| format!("{}: {error}", chart.name))?;
    Ok(text)
}

fn draw_on(
    backend: SVGBackend<'_>,
    about: &Chart,
    series: &[Series],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || series.iter().flat_map(|one| &one.points);
    let x = Axis::of(about.x.1, points().map(|point| point.0));
    let y = Axis::of(about.y.1, points().map(|point| point.1));
    let legend = legend(series, &x, &y);
    let area = backend.into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(about.title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    let light = RGBColor(0xdd, 0xdd, 0xdd);
    chart
        .configure_mesh()
        .x_desc(about.x.0)
        .y_desc(about.y.0)
        .label_style(LABELS)
        .axis_desc_style(LABELS)
        .bold_line_style(light)
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (one, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(one.points.iter().copied(), style).point_size(3))?
            .label(&one.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(legend)
        .label_font(LABELS)
        .background_style(WHITE.mix(0.85))
        .border_style(light)
        .draw()?;
    area.present()?;
    Ok(())
}

/// Puts the legend on the left, at the top or the bottom: where there are fewer points.
fn legend(series: &[Series], x: &Axis, y: &Axis) -> SeriesLabelPosition {
    let places = series.iter().flat_map(|one| &one.points);
    let places = places.map(|(a, b)| (x.map(a, (0, 100)), y.map(b, (0, 100))));
    let left: Vec<_> = places.filter(|place| place.0 < 50).collect();
    let upper = left.iter().filter(|place| place.1 > 50).count();
    if 2 * upper <= left.len() {
        SeriesLabelPosition::UpperLeft
    } else {
        SeriesLabelPosition::LowerLeft
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_ticks() {
        let ticks = |axis: &Axis| -> Vec<String> {
            axis.key_points(10).iter().map(|tick| axis.format_ext(tick)).collect()
        };
        let linear = Axis::of(Scale::Linear, [3.0, 17.0].into_iter());
        assert_eq!(ticks(&linear)[..3], ["0", "2", "4"]);
        let decades = Axis::of(Scale::Decades, [0.4, 90.0, 0.0].into_iter());
        assert_eq!(ticks(&decades), ["0.1", "1", "10", "100"]);
        assert_eq!(decades.map(&1.0, (0, 300)), 100);
        assert_eq!(decades.map(&0.0, (0, 300)), 0);
        let bytes = Axis::of(Scale::Bytes, [4096.0, 65536.0].into_iter());
        assert_eq!(ticks(&bytes), ["4 KiB", "8 KiB", "16 KiB", "32 KiB", "64 KiB"]);
    }

    #[test]
    fn points_belong_to_their_series() {
        let text = "a\tone\t1\t2\nb\tone\t1\t9\na\ttwo\t1\t3\na\tone\t2\t4\n";
        let points = crate::points::parse(text).unwrap();
        let series = series(&points, "a");
        assert_eq!(series[0].points, [(1.0, 2.0), (2.0, 4.0)]);
        assert_eq!((series.len(), series[1].name.as_str()), (2, "two"));
        assert!(draw(&points).is_err());
        let drawn = svg(&CHARTS[0], &series).unwrap();
        assert!(drawn.contains("two\n</text>") && drawn.trim_end().ends_with("</svg>"), "{drawn}");
        assert_eq!(drawn.matches("<circle").count(), 3);
    }
}
