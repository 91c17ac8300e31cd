//! The curves of a run as SVG. Each plot is 1000 × 1000 units, stretched over its frame; lines keep
//! their width. Axis labels are HTML, so that they stay readable at any width. `script.js` shows
//! values.

use serde_json::{Value, json};

use super::html::{count, escaped, plural, shortened};
use super::read::{EvalLine, ResumeLine, Run, StepLine};
use super::scale::{Form, Scale, TICKS_MAX};

/// The most points of a curve: what a screen can show.
const POINTS_MAX: usize = 1000;
/// The most labels of the step axis: what a phone has room for.
const STEP_TICKS_MAX: usize = 5;
/// The most resumes that are marked.
const RESUMES_MAX: usize = 100;

/// A step and a value; no value where it was missing or not finite.
pub(crate) type Point = (f64, Option<f64>);

struct Chart {
    id: &'static str,
    title: &'static str,
    unit: &'static str,
    form: Form,
    is_from_zero: bool,
    series: Vec<Series>,
}

struct Series {
    name: String,
    /// Which of the page's colors.
    color: usize,
    /// Whether each point gets a dot.
    has_dots: bool,
    points: Vec<Point>,
}

/// All charts of a run, over the same steps.
pub(super) struct Charts {
    charts: Vec<Chart>,
    steps: Scale,
    resumes: Vec<(u64, String)>,
    note: Option<&'static str>,
    /// Whether series are runs, over one another.
    several: bool,
}

impl Charts {
    pub(super) fn of(run: &Run) -> Charts {
        let note = if run.is_simulated() {
            Some("Times on simulated GPUs mean nothing and are not recorded.")
        } else if run.steps.iter().all(|line| line.reduce_ms.is_none()) && !run.steps.is_empty() {
            Some("On GPUs the host does not wait for reductions: the step's time contains them.")
        } else {
            None
        };
        Charts {
            charts: with_values(charts(run)),
            steps: step_axis(std::slice::from_ref(&run)),
            several: false,
            resumes: run.resumes.iter().take(RESUMES_MAX).map(resumed).collect(),
            note,
        }
    }

    /// The curves of several runs, each with its name.
    pub(super) fn of_runs(runs: &[(String, Run)]) -> Charts {
        let all: Vec<&Run> = runs.iter().map(|(_, run)| run).collect();
        Charts {
            charts: with_values(charts_of_runs(runs)),
            steps: step_axis(&all),
            resumes: Vec::new(),
            note: None,
            several: true,
        }
    }

    pub(super) fn html(&self) -> String {
        if self.charts.is_empty() {
            return "<p class=\"none\">No step was recorded.</p>".to_string();
        }
        let note = self
            .note
            .map(|note| format!("<p class=\"note\">{note}</p>"));
        let charts: String = self.charts.iter().map(|chart| self.figure(chart)).collect();
        let marks: String = self
            .resumes
            .iter()
            .map(|(_, text)| format!("<li class=\"resume\">{}</li>", escaped(text)))
            .collect();
        format!(
            "{}<div class=\"charts\">{charts}</div><ul class=\"legend marks\">{marks}</ul>",
            note.unwrap_or_default()
        )
    }

    fn figure(&self, chart: &Chart) -> String {
        let Chart {
            id, title, unit, ..
        } = chart;
        let heights = chart.heights();
        let mut legend = String::new();
        if chart.series.len() > 1 {
            for Series { color, name, .. } in &chart.series {
                legend += &format!("<li class=\"s{color}\">{}</li>", escaped(name));
            }
        }
        let (mut ys, mut grid) = (String::new(), String::new());
        for tick in heights.ticks(TICKS_MAX + 1) {
            let (bottom, text) = (heights.at(tick) * 100.0, chart.form.tick(tick));
            ys += &format!("<span style=\"bottom:{bottom:.2}%\">{text}</span>");
            grid += &format!("M0 {:.1}h1000", 1000.0 - bottom * 10.0);
        }
        let curves: String = chart
            .series
            .iter()
            .map(|series| self.curve(series, heights))
            .collect();
        format!(
            "<figure class=\"chart\" id=\"chart-{id}\"><figcaption><h3>{title}</h3>\
             <span class=\"unit\">{unit}</span><ul class=\"legend\">{legend}</ul></figcaption>\
             <div class=\"frame\"><div class=\"ys\" aria-hidden=\"true\">{ys}</div>\
             <div class=\"plot\" role=\"img\" aria-label=\"{}\">\
             <svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" aria-hidden=\"true\">\
             <path class=\"grid\" d=\"{grid}\"/>{}{curves}</svg></div>\
             <div class=\"xs\" aria-hidden=\"true\">{}<i>step</i></div></div></figure>",
            escaped(&chart.label()),
            self.marks(),
            self.step_labels(),
        )
    }

    fn step_labels(&self) -> String {
        let ticks = self.steps.ticks(STEP_TICKS_MAX);
        let apart = ticks.get(1).map_or(0.0, |second| second - ticks[0]);
        let text = |tick: f64| match apart {
            1000.0.. => Form::Rate.tick(tick),
            1.0.. => count(tick.max(0.0) as u64),
            _ => Form::Plain.tick(tick),
        };
        let label = |&tick: &f64| {
            let left = self.steps.at(tick) * 100.0;
            format!("<span style=\"left:{left:.2}%\">{}</span>", text(tick))
        };
        ticks.iter().map(label).collect()
    }

    /// Resumes, over the whole height.
    fn marks(&self) -> String {
        let across = |step: u64| self.steps.at(step as f64) * 1000.0;
        let mark = |(step, _): &(u64, String)| format!("M{:.1} 0V1000", across(*step));
        let resumes: String = self.resumes.iter().map(mark).collect();
        format!("<path class=\"resume\" d=\"{resumes}\"/>")
    }

    /// A line from point to point, interrupted where values are missing.
    fn curve(&self, series: &Series, heights: Scale) -> String {
        let (mut line, mut dots, mut is_drawing) = (String::new(), String::new(), false);
        for (x, y) in &series.points {
            if let Some(y) = y {
                let (x, y) = (self.steps.at(*x) * 1000.0, 1000.0 - heights.at(*y) * 1000.0);
                line += &format!("{}{x:.1} {y:.1}", if is_drawing { 'L' } else { 'M' });
                dots += &format!("M{x:.1} {y:.1}h0");
            }
            is_drawing = y.is_some();
        }
        let color = series.color;
        let mut svg = format!("<path class=\"line s{color}\" d=\"{line}\"/>");
        if series.has_dots || series.points.len() == 1 {
            svg += &format!("<path class=\"dots s{color}\" d=\"{dots}\"/>");
        }
        svg
    }

    /// What `script.js` shows values from.
    pub(super) fn json(&self) -> Value {
        let series = |series: &Series| {
            let (x, y): (Vec<f64>, Vec<Option<f64>>) = series.points.iter().copied().unzip();
            json!({"name": series.name, "color": series.color, "x": x, "y": y})
        };
        let chart = |chart: &Chart| {
            let series: Vec<Value> = chart.series.iter().map(series).collect();
            let (percent, heights) = (chart.form == Form::Percent, chart.heights());
            let (bottom, top) = (heights.low(), heights.high());
            json!({"id": chart.id, "percent": percent, "bottom": bottom, "top": top, "series": series})
        };
        let charts: Vec<Value> = self.charts.iter().map(chart).collect();
        let (low, high) = (self.steps.low(), self.steps.high());
        json!({"low": low, "high": high, "several": self.several, "charts": charts})
    }
}

impl Chart {
    fn heights(&self) -> Scale {
        let points = self.series.iter().flat_map(|series| &series.points);
        let Some((low, high)) = range(points.filter_map(|point| point.1)) else {
            return Scale::exactly(0.0, 1.0);
        };
        let scale = Scale::around(if self.is_from_zero { low.min(0.0) } else { low }, high);
        match self.form {
            Form::Percent if low >= 0.0 && high <= 1.0 => {
                Scale::exactly(scale.low().max(0.0), scale.high().min(1.0))
            }
            _ => scale,
        }
    }

    /// The chart in words, for screen readers.
    fn label(&self) -> String {
        let describe = |series: &Series| {
            let values = || series.points.iter().filter_map(|point| point.1);
            let (low, high) = range(values()).unwrap_or_default();
            let text = |value: Option<f64>| self.form.figure(value.unwrap_or(f64::NAN));
            format!(
                "{} from {} to {}, between {} and {}",
                series.name,
                text(values().next()),
                text(values().next_back()),
                text(Some(low)),
                text(Some(high))
            )
        };
        let series: Vec<String> = self.series.iter().map(describe).collect();
        format!("{} by step: {}.", self.title, series.join("; "))
    }
}

/// A value of each logged step.
pub(crate) type OfStep = fn(&StepLine) -> Option<f64>;
/// A value of each evaluation.
pub(crate) type OfEval = fn(&EvalLine) -> Option<f64>;

/// A curve: of steps, or of evaluations, whose points have dots.
fn series(name: &str, color: usize, run: &Run, of: Result<OfStep, OfEval>) -> Series {
    Series {
        name: shortened(name, 60),
        color,
        has_dots: of.is_err(),
        points: match of {
            Ok(value) => thinned(run.steps.iter().map(|line| (line.step, value(line)))),
            Err(value) => thinned(run.evals.iter().map(|line| (line.step, value(line)))),
        },
    }
}

/// R², or its mean over columns.
pub(crate) fn r2(line: &EvalLine) -> Option<f64> {
    line.figure("r2").or_else(|| line.figure("mean_r2"))
}

/// The unit and the value of throughput: in tokens if a run has them.
pub(crate) fn rate<'a>(mut runs: impl Iterator<Item = &'a Run>) -> (&'static str, OfStep) {
    let has_tokens = |run: &Run| run.steps.iter().any(|line| line.tokens_per_s.is_some());
    match runs.any(has_tokens) {
        true => ("tokens a second, all ranks", |line| line.tokens_per_s),
        false => ("samples a second, all ranks", |line| line.samples_per_s),
    }
}

/// Every chart that a run may have, with or without values.
fn charts(run: &Run) -> Vec<Chart> {
    let steps = |name: &str, color, value: OfStep| series(name, color, run, Ok(value));
    let evals = |value: OfEval| series("held out", 1, run, Err(value));
    let loss = vec![
        steps("training", 0, |line| line.loss),
        evals(|line| line.loss),
    ];
    let accuracy = vec![
        steps("training", 0, |line| line.accuracy),
        evals(|line| line.accuracy),
    ];
    let (unit, value) = rate(std::iter::once(run));
    let time = vec![
        steps("whole step", 0, |line| line.step_ms),
        steps("waiting for rows", 1, |line| line.data_ms),
        steps("waiting for reductions", 2, |line| line.reduce_ms),
        steps("saving", 3, |line| line.save_ms.filter(|ms| *ms > 0.0)),
    ];
    let lr = vec![steps("learning rate", 2, |line| line.lr)];
    let norm = vec![steps("gradient norm", 3, |line| line.grad_norm)];
    let rate = vec![steps("all ranks", 0, value)];
    let share = vec![steps("share", 0, |line| line.product_share)];
    let matmul = "of what a large matmul reaches";
    vec![
        chart("loss", "Loss", "", Form::Plain, loss),
        chart("accuracy", "Accuracy", "", Form::Percent, accuracy),
        chart("r2", "R²", "held out", Form::Plain, vec![evals(r2)]),
        chart("lr", "Learning rate", "", Form::Plain, lr),
        chart(
            "norm",
            "Gradient norm",
            "before clipping",
            Form::Plain,
            norm,
        ),
        chart("rate", "Throughput", unit, Form::Rate, rate),
        chart("share", "Speed of a step", matmul, Form::Percent, share),
        chart("time", "Time of a step", "ms, on rank 0", Form::Plain, time),
    ]
}

fn chart(
    id: &'static str,
    title: &'static str,
    unit: &'static str,
    form: Form,
    series: Vec<Series>,
) -> Chart {
    Chart {
        id,
        title,
        unit,
        form,
        is_from_zero: matches!(id, "lr" | "time"),
        series,
    }
}

/// The same curve of each run, in each chart. The held-out loss comes first, at full width.
fn charts_of_runs(runs: &[(String, Run)]) -> Vec<Chart> {
    let all = |of: Result<OfStep, OfEval>| -> Vec<Series> {
        let of_run = |(color, (name, run)): (usize, &(String, Run))| series(name, color, run, of);
        runs.iter().enumerate().map(of_run).collect()
    };
    let steps = |value: OfStep| all(Ok(value));
    let evals = |value: OfEval| all(Err(value));
    let (plain, percent) = (Form::Plain, Form::Percent);
    let (unit, value) = rate(runs.iter().map(|(_, run)| run));
    let time = steps(|line| line.step_ms);
    let norm = steps(|line| line.grad_norm);
    vec![
        chart(
            "held-out",
            "Loss",
            "held out",
            plain,
            evals(|line| line.loss),
        ),
        chart(
            "loss",
            "Loss",
            "in training",
            plain,
            steps(|line| line.loss),
        ),
        chart(
            "accuracy",
            "Accuracy",
            "held out",
            percent,
            evals(|line| line.accuracy),
        ),
        chart("r2", "R²", "held out", plain, evals(r2)),
        chart("rate", "Throughput", unit, Form::Rate, steps(value)),
        chart("time", "Time of a step", "ms, on rank 0", plain, time),
        chart("lr", "Learning rate", "", plain, steps(|line| line.lr)),
        chart("norm", "Gradient norm", "", plain, norm),
    ]
}

/// The charts that have values, without the series that have none.
fn with_values(mut charts: Vec<Chart>) -> Vec<Chart> {
    charts.retain_mut(|chart| {
        let has_values = |series: &Series| series.points.iter().any(|point| point.1.is_some());
        chart.series.retain(has_values);
        !chart.series.is_empty()
    });
    charts
}

/// From the first step of these runs to the last.
fn step_axis(runs: &[&Run]) -> Scale {
    let steps = runs.iter().flat_map(|run| {
        let steps = run.steps.iter().map(|line| line.step);
        steps.chain(run.evals.iter().map(|line| line.step))
    });
    let (first, last) = range(steps.map(|step| step as f64)).unwrap_or((0.0, 1.0));
    Scale::exactly(if first < 0.05 * last { 0.0 } else { first }, last)
}

fn resumed(resume: &ResumeLine) -> (u64, String) {
    let mut text = format!("resumed after step {}", count(resume.step));
    if let Some(ranks) = resume.ranks {
        text += &format!(" on {}", plural(ranks, "rank"));
    }
    for (index, change) in resume.overridden.iter().take(12).enumerate() {
        text += if index == 0 { ", with " } else { ", " };
        text += &shortened(change, 100);
    }
    (resume.step, text)
}

/// Keeps the lowest and the highest point of each of `POINTS_MAX / 2` parts, so that spikes stay,
/// and the first and last point. A part without values keeps one point without a value, so that the
/// gap stays visible.
pub(crate) fn thinned(points: impl Iterator<Item = (u64, Option<f64>)>) -> Vec<Point> {
    let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
    let points: Vec<Point> = points
        .map(|(step, value)| (step as f64, finite(value)))
        .collect();
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

/// The lowest and the highest of these values.
pub(crate) fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_stay_and_order_too() {
        for count in [POINTS_MAX + 1, 12_345, 100_000] {
            let value = |step: usize| match step == count / 3 {
                true => 1e9,
                false => (step as f64).sin(),
            };
            let points: Vec<_> = (0..count)
                .map(|step| (step as u64, Some(value(step))))
                .collect();
            let kept = thinned(points.into_iter());
            assert!(kept.len() <= POINTS_MAX + 2, "{count}: {}", kept.len());
            assert!(kept.contains(&((count / 3) as f64, Some(1e9))), "{count}");
            let ends = [kept[0].0, kept[kept.len() - 1].0];
            assert_eq!(ends, [0.0, (count - 1) as f64]);
            assert!(kept.is_sorted_by(|a, b| a.0 < b.0), "{count}");
        }
    }

    #[test]
    fn a_long_gap_stays_a_gap() {
        let value = |step: u64| (!(3000..6000).contains(&step)).then_some(1.0);
        let kept = thinned((0..9000).map(|step| (step, value(step))));
        let is_gap = |point: &Point| (3000.0..6000.0).contains(&point.0);
        assert!(kept.iter().any(|point| point.1.is_none()));
        assert!(kept.iter().all(|point| point.1.is_none() == is_gap(point)));
    }

    #[test]
    fn few_points_stay_as_they_are() {
        let kept = thinned([(1, Some(2.0)), (2, Some(f64::NAN))].into_iter());
        assert_eq!(kept, [(1.0, Some(2.0)), (2.0, None)]);
    }
}
