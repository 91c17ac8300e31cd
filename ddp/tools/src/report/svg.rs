//! Pictures without scripts: curves for other documents, and answers against labels in the page.

use super::charts::{Chart, Point};
use super::html::{escaped, figure, joined};

/// The size of a plot, and the margins in which its labels are: left, top, right, bottom.
const SIZE: [f64; 2] = [420.0, 280.0];
const MARGINS: [f64; 4] = [56.0, 34.0, 18.0, 40.0];
/// The page's colors, between those on light and on dark ground.
const COLORS: [&str; 8] = [
    "#0b72c9", "#d05800", "#0a8a66", "#8a5fb3", "#c0307b", "#7b7a00", "#00838d", "#6b6f78",
];

/// These charts side by side, on white.
pub(super) fn picture(charts: &[Chart]) -> String {
    let plot = |(at, chart): (usize, &Chart)| {
        let left = SIZE[0] * at as f64;
        format!("<g transform=\"translate({left} 0)\">{}</g>", curves(chart))
    };
    let plots: String = charts.iter().enumerate().map(plot).collect();
    let [width, height] = [SIZE[0] * charts.len() as f64, SIZE[1]];
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" color=\"#18202c\"><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>{plots}</svg>\n"
    )
}

fn curves(chart: &Chart) -> String {
    let points = || chart.curves.iter().flat_map(|curve| &curve.points);
    let steps = Axis::of(points().map(|(step, _)| *step as f64), false);
    let axes = [
        steps,
        Axis::of(points().filter_map(|(_, value)| *value), chart.is_percent),
    ];
    let mut svg = grid(&axes, &joined(&[chart.title, &chart.unit]), "step");
    let mut right = SIZE[0] - MARGINS[2];
    for curve in chart.curves.iter().rev() {
        let (color, name) = (COLORS[curve.color % COLORS.len()], escaped(&curve.name));
        let pen = |(_, value): &Point| value.is_some();
        for part in curve.points.chunk_by(|one, next| pen(one) && pen(next)) {
            let place = |(step, value): &Point| Some(place(&axes, [*step as f64, (*value)?]));
            let places: Vec<String> = part
                .iter()
                .filter_map(place)
                .map(|[x, y]| format!("{x:.1} {y:.1}"))
                .collect();
            svg += &format!(
                "\n<path d=\"M{}h0\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" stroke-linecap=\"round\"/>",
                places.join("L")
            );
        }
        svg += &format!(
            "\n<text x=\"{right}\" y=\"20\" text-anchor=\"end\" fill=\"{color}\">{name}</text>"
        );
        right -= 7.0 * curve.name.chars().count() as f64 + 10.0;
    }
    svg
}

/// Answers of a model against the labels of some rows: labels first, then answers.
pub(super) fn answers(rows: &[[f64; 2]]) -> String {
    let axis = || Axis::of(rows.iter().flatten().copied(), false);
    let axes = [axis(), axis()];
    let [low, high] = axes[0].ends.map(|end| place(&axes, [end, end]));
    let mut svg = grid(&axes, "predicted", "in the data");
    svg += &format!(
        "<path d=\"M{} {}L{} {}\" stroke=\"currentColor\" stroke-dasharray=\"4 3\"/>",
        low[0], low[1], high[0], high[1]
    );
    for [x, y] in rows.iter().map(|row| place(&axes, *row)) {
        svg += &format!(
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\" fill-opacity=\".6\"/>",
            COLORS[0]
        );
    }
    let [width, height] = SIZE;
    format!(
        "<svg class=\"answers\" viewBox=\"0 0 {width} {height}\" font-size=\"12\" role=\"img\" aria-label=\"predicted against what is in the data\">{svg}</svg>"
    )
}

/// An axis with round numbers at its ends and between them.
struct Axis {
    ends: [f64; 2],
    ticks: Vec<f64>,
    is_percent: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, is_percent: bool) -> Axis {
        let [low, high] = values.fold([f64::MAX, f64::MIN], |[low, high], value| {
            [low.min(value), high.max(value)]
        });
        // From 0 if most of the height stays; equal values get some room.
        let low = if low > 0.0 && low < 0.5 * high {
            0.0
        } else {
            low
        };
        let room = (high - low).max(high.abs().max(1e-9) / 100.0);
        let power = 10f64.powi((room / 5.0).log10().floor() as i32);
        let step = [1.0, 2.0, 5.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|step| *step >= 0.999 * room / 5.0);
        let step = step.unwrap_or(10.0 * power);
        let [first, last] = [
            (low / step + 1e-9).floor(),
            ((low + room) / step - 1e-9).ceil(),
        ];
        let ticks = (0..=(last - first) as i32).map(|at| (first + f64::from(at)) * step);
        Axis {
            ends: [first * step, last * step],
            ticks: ticks.collect(),
            is_percent,
        }
    }

    fn part(&self, value: f64) -> f64 {
        (value - self.ends[0]) / (self.ends[1] - self.ends[0])
    }

    fn label(&self, value: f64) -> String {
        let text = figure(Some(if self.is_percent {
            100.0 * value
        } else {
            value
        }));
        let is_decimal = text.contains('.') && !text.contains('e');
        let text = if is_decimal {
            text.trim_end_matches('0').trim_end_matches('.')
        } else {
            &text
        };
        format!("{text}{}", if self.is_percent { "%" } else { "" })
    }
}

fn place([x, y]: &[Axis; 2], at: [f64; 2]) -> [f64; 2] {
    let ([left, top, right, bottom], [width, height]) = (MARGINS, SIZE);
    [
        left + x.part(at[0]) * (width - left - right),
        height - bottom - y.part(at[1]) * (height - top - bottom),
    ]
}

/// The lines and numbers of the axes, a title, and the name of the horizontal axis.
fn grid(axes: &[Axis; 2], title: &str, below: &str) -> String {
    let ([left, _, right, bottom], [width, height]) = (MARGINS, SIZE);
    let text = |x: f64, y: f64, anchor: &str, text: &str| {
        format!(
            "\n<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"currentColor\">{}</text>",
            escaped(text)
        )
    };
    let mut svg = text(left, 20.0, "start", title)
        + &text((left + width - right) / 2.0, height - 6.0, "middle", below);
    for tick in &axes[1].ticks {
        let y = place(axes, [0.0, *tick])[1];
        svg += &text(left - 8.0, y + 4.0, "end", &axes[1].label(*tick));
        svg += &format!(
            "<path d=\"M{left} {y:.1}H{}\" stroke=\"currentColor\" stroke-opacity=\".15\"/>",
            width - right
        );
    }
    for tick in &axes[0].ticks {
        svg += &text(
            place(axes, [*tick, 0.0])[0],
            height - bottom + 16.0,
            "middle",
            &axes[0].label(*tick),
        );
    }
    svg
}
