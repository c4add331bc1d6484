//! Reads the output of `growth`: a point of a chart on each line.

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) chart: String,
    pub(crate) series: String,
    pub(crate) x: f64,
    pub(crate) y: f64,
}

pub(crate) fn parse(text: &str) -> Result<Vec<Point>, String> {
    text.lines().filter(|line| !line.starts_with('#')).map(point).collect()
}

fn point(line: &str) -> Result<Point, String> {
    let fields: Vec<_> = line.split('\t').collect();
    let [chart, series, x, y] = fields[..] else {
        return Err(format!("what does this mean: {line}"));
    };
    let number = |text: &str| text.parse::<f64>().map_err(|e| format!("{line}: {e}"));
    let (chart, series) = (chart.to_owned(), series.to_owned());
    Ok(Point { chart, series, x: number(x)?, y: number(y)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_point() {
        let points = parse("# comment\na\tone\t1\t2.5\n").unwrap();
        let (chart, series) = ("a".to_owned(), "one".to_owned());
        assert_eq!(points, [Point { chart, series, x: 1.0, y: 2.5 }]);
        assert!(parse("a\tone\t1\n").is_err());
        assert!(parse("a\tone\t1\tmany\n").is_err());
    }
}
