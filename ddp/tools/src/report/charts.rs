//! The curves of runs, as data: `script.js` draws them in the page, and `watch` in the terminal.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

pub(crate) use super::html::joined;
use super::html::{breakable, count, figure, percent, plural, shortened, table};
use crate::metrics::Run;
use crate::metrics_log::{RanksEvent, ResumeEvent};
use crate::units::relative;

/// The most points of a curve: what a screen can show.
const POINTS_MAX: usize = 1000;
/// The most resumes and changes of ranks that are marked.
const MARKS_MAX: usize = 100;

/// A step and a value; no value where it was missing or not finite.
pub(crate) type Point = (u64, Option<f64>);

/// A chart with curves that have values.
pub(crate) struct Chart {
    pub(crate) title: &'static str,
    pub(crate) unit: String,
    /// Whether values are fractions, written as percentages.
    pub(super) is_percent: bool,
    pub(crate) curves: Vec<Curve>,
}

pub(crate) struct Curve {
    /// Empty for the only curve of a run's chart.
    pub(crate) name: String,
    /// Which of the page's colors.
    pub(super) color: usize,
    /// Evaluations are few: each has a dot.
    has_dots: bool,
    pub(crate) points: Vec<Point>,
}

/// A field of logged steps, or of evaluations.
#[derive(Clone, Copy)]
enum ChartField {
    Step(&'static str),
    Eval(&'static str),
}
use ChartField::{Eval, Step};

/// A curve that a run may have: the title and the unit of its chart, its name there, and its field.
type CurvePlan = (&'static str, &'static str, &'static str, ChartField);

/// Curves with the same title share a chart. Of those that also have the same name, the first that
/// has values is shown. `watch` shows the first two charts.
const CURVES: [CurvePlan; 16] = [
    ("Loss", "", "training", Step("loss")),
    ("Loss", "", "held out", Eval("loss")),
    ("Accuracy", "", "training", Step("accuracy")),
    ("Accuracy", "", "held out", Eval("accuracy")),
    ("AUC", "held out", "", Eval("auc")),
    ("R²", "held out", "", Eval("r2")),
    ("R²", "held out, mean", "", Eval("mean_r2")),
    ("Throughput", "tokens a second", "", Step("tokens_per_s")),
    ("Throughput", "samples a second", "", Step("samples_per_s")),
    ("Learning rate", "", "", Step("lr")),
    ("Gradient norm", "before clipping", "", Step("grad_norm")),
    ("Speed", "of a large matmul", "", Step("matmul_share")),
    ("Time of a step", "ms", "whole step", Step("step_ms")),
    ("Time of a step", "ms", "waiting for rows", Step("data_ms")),
    ("Time of a step", "ms", "reductions", Step("reduce_ms")),
    ("Time of a step", "ms", "saving", Step("save_ms")),
];

/// The charts of a run.
pub(crate) fn of_run(run: &Run) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    for (title, unit, name, field) in CURVES {
        let known = charts.iter_mut().find(|chart| chart.title == title);
        let color = match field {
            Eval(_) => 1,
            Step(_) => known.as_ref().map_or(0, |chart| chart.curves.len()),
        };
        let Some(curve) = curve(run, field, name, color) else {
            continue;
        };
        match known {
            None => charts.push(Chart::new(title, unit.into(), field, vec![curve])),
            Some(chart) if chart.curves.iter().any(|known| known.name == name) => {}
            Some(chart) => chart.curves.push(curve),
        }
    }
    charts.extend(ranks(run));
    charts
}

/// The number of ranks over time, if it changed.
fn ranks(run: &Run) -> Option<Chart> {
    let mut points: Vec<Point> = Vec::new();
    for &(step, ranks) in &run.ranks {
        points.extend(points.last().map(|(_, before)| (step, *before)));
        points.push((step, Some(ranks as f64)));
    }
    let (step, now) = *points.last()?;
    points.push((step.max(run.last_step()), now));
    let has_changed = run.ranks.windows(2).any(|pair| pair[0].1 != pair[1].1);
    let curve = Curve::of("", 0, false, points.into_iter());
    let curve = curve.filter(|_| has_changed);
    curve.map(|curve| Chart::new("Ranks", String::new(), Step("ranks"), vec![curve]))
}

/// The charts of several runs: one for each curve, in which each run has a color. Evaluations come
/// first.
pub(super) fn of_runs(runs: &[(String, Run)]) -> Vec<Chart> {
    let mut charts: Vec<Chart> = Vec::new();
    let mut known: Vec<(&str, &str, &str)> = Vec::new();
    let mut plans = CURVES;
    plans.sort_by_key(|plan| matches!(plan.3, Step(_)));
    // Losses of different scales are not drawn on one axis.
    let scales = BTreeSet::from_iter(runs.iter().map(|(_, run)| run.scale()));
    let plans = plans
        .iter()
        .flat_map(|plan| scales.iter().map(move |scale| (plan, scale)));
    for (&(title, unit, name, field), scale) in plans {
        let is_loss = title == "Loss" && scales.len() > 1;
        let curves = runs.iter().enumerate();
        let curves = curves.filter(|(_, (_, run))| !is_loss || run.scale() == *scale);
        let curves = curves.filter_map(|(color, (name, run))| curve(run, field, name, color));
        let curves: Vec<Curve> = curves.collect();
        let scale = if is_loss { &**scale } else { "" };
        if !curves.is_empty() && !known.contains(&(title, name, scale)) {
            known.push((title, name, scale));
            let unit = joined(&[unit, name, &shortened(scale, 80)]);
            charts.push(Chart::new(title, unit, field, curves));
        }
    }
    charts.extend(APART.into_iter().filter_map(|apart| apart_of(runs, apart)));
    charts
}

/// What shows how far other runs are from the first one: the title of the chart, and the field.
const APART: [(&str, &str); 2] = [
    ("Loss: distance", "loss"),
    ("Weights: distance", "weight_norm"),
];

/// How far the runs are from the first one, at the steps that both logged.
fn apart_of(runs: &[(String, Run)], (title, field): (&'static str, &'static str)) -> Option<Chart> {
    let ((first, of_first), others) = runs.split_first()?;
    let own: BTreeMap<u64, Option<f64>> = of_first.steps.values(field).collect();
    let curve = |(index, (name, run)): (usize, &(String, Run))| {
        let common = |(step, value)| Some((step, Some(relative((*own.get(&step)?)?, value?))));
        let points = run.steps.values(field).filter_map(common);
        let is_alike = field != "loss" || run.scale() == of_first.scale();
        Curve::of(name, index + 1, false, points).filter(|_| is_alike)
    };
    let curves: Vec<Curve> = others.iter().enumerate().filter_map(curve).collect();
    let first = shortened(first, 60);
    let unit = format!("from {first}, relative to the larger value");
    (!curves.is_empty()).then(|| Chart::new(title, unit, Step(field), curves))
}

/// The curve of a run, if it has values.
fn curve(run: &Run, field: ChartField, name: &str, color: usize) -> Option<Curve> {
    match field {
        Step(field) => Curve::of(name, color, false, run.steps.values(field)),
        Eval(field) => Curve::of(name, color, true, run.evals.values(field)),
    }
}

impl Curve {
    /// A curve, if it has values.
    fn of(
        name: &str,
        color: usize,
        has_dots: bool,
        points: impl Iterator<Item = Point>,
    ) -> Option<Curve> {
        let points = thinned(points);
        let has_values = points.iter().any(|point| point.1.is_some());
        has_values.then(|| Curve {
            name: shortened(name, 60),
            color,
            has_dots: has_dots || points.len() == 1,
            points,
        })
    }
}

impl Chart {
    fn new(title: &'static str, unit: String, field: ChartField, curves: Vec<Curve>) -> Chart {
        let (Step(field) | Eval(field)) = field;
        Chart {
            title,
            unit,
            is_percent: matches!(field, "accuracy" | "matmul_share"),
            curves,
        }
    }
}

/// The section of the page: what `script.js` fills, and the values without it.
pub(super) fn html(charts: &[Chart]) -> String {
    if charts.is_empty() {
        return "<p class=\"none\">No step was logged.</p>".to_string();
    }
    let row = |(chart, curve): (&Chart, &Curve)| {
        let text = if chart.is_percent { percent } else { figure };
        let values = || curve.points.iter().filter_map(|point| point.1);
        let (first, last) = (values().next(), values().next_back());
        let (low, high) = (values().reduce(f64::min), values().reduce(f64::max));
        let name = breakable(&joined(&[chart.title, &chart.unit, &curve.name]));
        let mut cells = vec![name];
        cells.extend([first, last, low, high].map(text));
        cells
    };
    let curves = charts.iter();
    let curves = curves.flat_map(|chart| chart.curves.iter().map(move |curve| (chart, curve)));
    let headings = ["curve", "first", "last", "lowest", "highest"];
    format!(
        "<noscript><p class=\"note\">Curves need scripts, which are off.</p></noscript>\
         <div class=\"charts\"></div><details><summary>The curves in figures</summary>{}</details>",
        table("Curves", &headings, 1, curves.map(row))
    )
}

/// What `script.js` draws.
pub(super) fn json(charts: &[Chart], marks: &[(u64, String)], several: bool) -> Value {
    let curve = |of: &Curve| {
        let (x, y): (Vec<u64>, Vec<Option<f64>>) = of.points.iter().copied().unzip();
        json!({"name": of.name, "color": of.color, "dots": of.has_dots, "x": x, "y": y})
    };
    let chart = |of: &Chart| {
        let curves: Value = of.curves.iter().map(curve).collect();
        json!({"title": of.title, "unit": of.unit, "percent": of.is_percent, "series": curves})
    };
    json!({
        "several": several,
        "charts": charts.iter().map(chart).collect::<Value>(),
        "marked": &marks[..marks.len().min(MARKS_MAX)],
    })
}

/// Where the run was resumed, and where ranks were lost or came.
pub(crate) fn marks(run: &Run) -> Vec<(u64, String)> {
    let changed = |change: &RanksEvent| {
        let (step, change) = (change.step, shortened(&change.to_string(), 200));
        (step, format!("{change} after step {}", count(step)))
    };
    let mut marks: Vec<_> = run.resumes.iter().map(resumed).collect();
    marks.extend(run.changes.iter().map(changed));
    marks.sort_by_key(|(step, _)| *step);
    marks
}

fn resumed(resume: &ResumeEvent) -> (u64, String) {
    let mut text = format!("resumed after step {}", count(resume.step));
    if let Some(ranks) = resume.ranks {
        text += &format!(" on {}", plural(ranks, "rank"));
    }
    let changes = resume.overridden.iter().take(12);
    let changes: Vec<String> = changes.map(|change| shortened(change, 100)).collect();
    if !changes.is_empty() {
        text += &format!(", with {}", changes.join(", "));
    }
    (resume.step, text)
}

/// Keeps the lowest and the highest point of each of `POINTS_MAX / 2` parts, so that spikes stay,
/// and the first and last point. A part without values keeps one point without a value, so that the
/// gap stays visible.
fn thinned(points: impl Iterator<Item = (u64, Option<f64>)>) -> Vec<Point> {
    let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
    let points: Vec<Point> = points.map(|(step, value)| (step, finite(value))).collect();
    if points.len() <= POINTS_MAX {
        return points;
    }
    let part = points.len().div_ceil(POINTS_MAX / 2 - 1);
    let mut kept = vec![points[0]];
    for part in points[1..points.len() - 1].chunks(part) {
        let known = || (0..part.len()).filter(|&index| part[index].1.is_some());
        let by_value = |a: &usize, b: &usize| part[*a].1.partial_cmp(&part[*b].1).expect("finite");
        match (known().min_by(by_value), known().max_by(by_value)) {
            (Some(low), Some(high)) if low != high => {
                kept.extend([part[low.min(high)], part[low.max(high)]]);
            }
            (Some(only), _) => kept.push(part[only]),
            _ => kept.push(part[0]),
        }
    }
    kept.push(points[points.len() - 1]);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_stay_and_order_too() {
        for count in [POINTS_MAX + 1, 12_345, 100_000] {
            let value = |step: usize| {
                if step == count / 3 {
                    1e9
                } else {
                    (step as f64).sin()
                }
            };
            let points: Vec<_> = (0..count)
                .map(|step| (step as u64, Some(value(step))))
                .collect();
            let kept = thinned(points.into_iter());
            assert!(kept.len() <= POINTS_MAX + 2, "{count}: {}", kept.len());
            assert!(kept.contains(&((count / 3) as u64, Some(1e9))), "{count}");
            let ends = [kept[0].0, kept[kept.len() - 1].0];
            assert_eq!(ends, [0, (count - 1) as u64]);
            assert!(kept.is_sorted_by(|a, b| a.0 < b.0), "{count}");
        }
    }

    #[test]
    fn a_long_gap_stays_a_gap() {
        let value = |step: u64| (!(3000..6000).contains(&step)).then_some(1.0);
        let kept = thinned((0..9000).map(|step| (step, value(step))));
        let is_gap = |point: &Point| (3000..6000).contains(&point.0);
        assert!(kept.iter().any(|point| point.1.is_none()));
        assert!(kept.iter().all(|point| point.1.is_none() == is_gap(point)));
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let kept = thinned([(1, Some(2.0)), (2, Some(f64::NAN))].into_iter());
        assert_eq!(kept, [(1, Some(2.0)), (2, None)]);
    }
}
