//! A chart of the means: a line for each kind, by the number of spinners.

use super::{KINDS, LOOKING, Row};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 130.0;
const BELOW: f64 = 40.0;
const COLORS: [&str; 7] = ["#0a6", "#6c9", "#05c", "#69c", "#999", "#c60", "#fa6"];

pub(crate) fn svg(measured: &[(usize, Vec<Row>)]) -> String {
    let most = measured.iter().flat_map(|(_, rows)| rows).map(|row| row.mean).fold(1.0, f64::max);
    // The scale has powers of ten, since the kinds may be far apart.
    let top = most.log10().ceil().max(1.0);
    let last = measured.last().map_or(1, |(spinners, _)| (*spinners).max(1)) as f64;
    let x = |spinners: usize| LEFT + (WIDTH - LEFT - RIGHT) * spinners as f64 / last;
    let y = |mean: f64| HEIGHT - BELOW - (HEIGHT - BELOW - 20.0) * mean.max(1.0).log10() / top;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n"
    );
    for power in 0..=top as i32 {
        let (value, at) = (10_f64.powi(power), y(10_f64.powi(power)));
        text += &format!(
            "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value} us</text>\n",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0
        );
    }
    for (spinners, _) in measured {
        text += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{spinners} spinners</text>\n",
            x(*spinners),
            HEIGHT - 15.0
        );
    }
    for (kind, color) in KINDS.into_iter().chain(LOOKING).zip(COLORS) {
        let points: Vec<_> = measured
            .iter()
            .filter_map(|(spinners, rows)| {
                let row = rows.iter().find(|row| row.kind == kind)?;
                Some((x(*spinners), y(row.mean)))
            })
            .collect();
        let path: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        text += &format!(
            "<path d=\"M{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n",
            path.join("L")
        );
        if let Some((x, y)) = points.last() {
            text += &format!(
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\">{}</text>\n",
                x + 6.0,
                y + 4.0,
                kind.name()
            );
        }
    }
    text + "</svg>\n"
}
