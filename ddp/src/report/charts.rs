//! The curves of a run, as SVG that needs no script: a picture of 1000 × 1000 units that is stretched over its place, with lines that keep
//! their width, and its numbers in HTML around it, so that they are readable at any width.
//!
//! `script.js` draws the same again from the numbers that the page carries, when somebody zooms; so what is drawn here and there is
//! alike.

use std::fmt::Write;

use super::points::{Point, averaged, range, thinned};
use super::read::{Run, StepLine};
use super::scale::{Form, Scale, TICKS_MAX};
use super::text::{count, escaped, figure, in_script, percent, plural, push_number, shortened};

/// The most ticks along the steps: what a phone has room for.
const STEP_TICKS_MAX: usize = 5;
/// The most checkpoints that are marked.
const CHECKPOINTS_MAX: usize = 200;
/// The most resume points.
const RESUMES_MAX: usize = 100;

/// One chart.
#[derive(Debug)]
pub(super) struct Chart {
    id: &'static str,
    title: &'static str,
    unit: &'static str,
    form: Form,
    /// Whether series are parts that lie on each other and make one.
    is_stacked: bool,
    has_log: bool,
    /// Whether heights begin at 0.
    is_from_zero: bool,
    /// Over the whole width.
    is_wide: bool,
    series: Vec<Series>,
}

#[derive(Debug)]
struct Series {
    name: &'static str,
    /// Which of the page's colours.
    colour: usize,
    /// Few points that are to be seen each.
    has_dots: bool,
    points: Vec<Point>,
    /// Of a stack: milliseconds, and the part of all of them.
    told_ms: Vec<f64>,
    mean: Option<f64>,
}

/// All charts of a run over the same steps.
#[derive(Debug)]
pub(super) struct Charts {
    charts: Vec<Chart>,
    steps: Scale,
    resumes: Vec<(u64, String)>,
    checkpoints: Vec<u64>,
    /// What is not shown, and why.
    pub(super) notes: Vec<&'static str>,
}

impl Charts {
    pub(super) fn of(run: &Run) -> Charts {
        let mut notes = Vec::new();
        let held_out = |value: &dyn Fn(&super::read::EvalLine) -> Option<f64>| -> Vec<Point> {
            thinned(&run.evals.iter().map(|line| (line.step as f64, value(line))).collect::<Vec<_>>())
        };
        let of_steps = |value: &dyn Fn(&StepLine) -> Option<f64>| -> Vec<Point> {
            thinned(&run.steps.iter().map(|line| (line.step as f64, value(line))).collect::<Vec<_>>())
        };
        let curve =
            |name, colour, points| Series { name, colour, has_dots: false, points, told_ms: vec![], mean: None };
        let dots = |name, colour, points| Series { has_dots: true, ..curve(name, colour, points) };
        let chart = |id, title, unit, form, series| Chart {
            id,
            title,
            unit,
            form,
            is_stacked: false,
            has_log: false,
            is_from_zero: false,
            is_wide: false,
            series,
        };
        let loss =
            vec![curve("training", 0, of_steps(&|line| line.loss)), dots("held out", 1, held_out(&|line| line.loss))];
        let rate = of_steps(&|line| line.samples_per_s);
        let mut charts = vec![
            Chart { has_log: true, is_wide: true, ..chart("loss", "Loss", "", Form::Plain, loss) },
            chart(
                "accuracy",
                "Accuracy",
                "held-out rows",
                Form::Percent,
                vec![dots("held out", 1, held_out(&|line| line.accuracy))],
            ),
            Chart {
                is_from_zero: true,
                ..chart(
                    "lr",
                    "Learning rate",
                    "",
                    Form::Plain,
                    vec![curve("learning rate", 2, of_steps(&|line| line.lr))],
                )
            },
            Chart {
                has_log: true,
                ..chart(
                    "norm",
                    "Gradient norm",
                    "before clipping",
                    Form::Plain,
                    vec![curve("gradient norm", 3, of_steps(&|line| line.grad_norm))],
                )
            },
            chart(
                "rate",
                "Throughput",
                "samples a second, all ranks",
                Form::Rate,
                vec![curve("samples a second", 0, rate)],
            ),
            Chart {
                is_stacked: true,
                ..chart("time", "Time of a step", "rank 0, parts of it", Form::Percent, time_shares(&run.steps))
            },
        ];
        charts.retain_mut(|chart| {
            chart.series.retain(|series| series.points.iter().any(|point| point.1.is_some()));
            !chart.series.is_empty()
        });
        let has = |id: &str| charts.iter().any(|chart| chart.id == id);
        if run.is_simulated() {
            notes.push("On simulated GPUs times say nothing: none were recorded.");
        } else if has("time") && run.steps.iter().all(|line| line.reduce_ms.is_none()) {
            notes.push(
                "On GPUs the host does not wait for reductions: they are part of computing in the times of a step.",
            );
        }
        if charts.len() % 2 == 0
            && let Some(last) = charts.last_mut()
        {
            last.is_wide = true;
        }
        let at = run.steps.iter().map(|line| line.step).chain(run.evals.iter().map(|line| line.step));
        let (first, last) = range(at.map(|step| step as f64)).unwrap_or((0.0, 1.0));
        let steps = Scale::exactly(if first < 0.05 * last { 0.0 } else { first }, last);
        let resumes = run.resumes.iter().map(|resume| {
            let ranks = resume.ranks.map_or(String::new(), |ranks| format!(" on {}", plural(ranks, "rank")));
            let changed: Vec<String> = resume.overridden.iter().take(12).map(|name| shortened(name, 100)).collect();
            let changed = if changed.is_empty() { String::new() } else { format!(", with {}", changed.join(", ")) };
            (resume.step, format!("went on after step {}{ranks}{changed}", count(resume.step)))
        });
        let resumes = resumes.take(RESUMES_MAX).collect();
        let thin = run.checkpoints.len().div_ceil(CHECKPOINTS_MAX).max(1);
        let checkpoints = run.checkpoints.iter().rev().step_by(thin).rev().copied().collect();
        Charts { charts, steps, resumes, checkpoints, notes }
    }

    /// The figures, and what marks mean.
    pub(super) fn html(&self) -> String {
        let mut html = String::new();
        if self.charts.is_empty() {
            html += "<p class=\"none\">No step was recorded.</p>";
        }
        for note in &self.notes {
            write!(html, "<p class=\"note\">{}</p>", escaped(note)).expect("a text takes all");
        }
        html += "<div class=\"charts\">";
        self.charts.iter().for_each(|chart| self.figure(chart, &mut html));
        html += "</div>";
        let mut marks = Vec::new();
        if !self.resumes.is_empty() && !self.charts.is_empty() {
            marks.extend(self.resumes.iter().map(|(_, text)| format!("<li class=\"resume\">{}</li>", escaped(text))));
        }
        if !self.checkpoints.is_empty() && !self.charts.is_empty() {
            marks.push("<li class=\"saved\">checkpoint</li>".to_string());
        }
        if !marks.is_empty() {
            write!(html, "<ul class=\"legend marks\">{}</ul>", marks.concat()).expect("a text takes all");
        }
        html
    }

    fn figure(&self, chart: &Chart, html: &mut String) {
        let Chart { id, title, unit, form, .. } = chart;
        let heights = chart.heights();
        let wide = if chart.is_wide { " wide" } else { "" };
        let mut add = |text: &str| html.push_str(text);
        add(&format!("<figure class=\"chart{wide}\" id=\"chart-{id}\"><figcaption><h3>{title}</h3>"));
        if !unit.is_empty() {
            add(&format!("<span class=\"unit\">{unit}</span>"));
        }
        if chart.series.len() > 1 || chart.is_stacked {
            let entry = |series: &Series| {
                let mean = series.mean.map_or(String::new(), |mean| format!(" <b>{}</b>", percent(Some(mean))));
                format!("<li class=\"s{}\">{}{mean}</li>", series.colour, series.name)
            };
            add(&format!("<ul class=\"legend\">{}</ul>", chart.series.iter().map(entry).collect::<String>()));
        }
        if chart.has_log {
            add("<button type=\"button\" class=\"log\" aria-pressed=\"false\" hidden>log</button>");
        }
        add("</figcaption><div class=\"frame\"><div class=\"ys\" aria-hidden=\"true\">");
        let ticks = heights.ticks(TICKS_MAX + 1);
        for tick in &ticks {
            add(&format!("<span style=\"bottom:{:.2}%\">{}</span>", heights.at(*tick) * 100.0, form.tick(*tick)));
        }
        let label = escaped(&chart.label());
        add(&format!(
            "</div><div class=\"plot\" role=\"img\" aria-label=\"{label}\"><svg viewBox=\"0 0 1000 1000\" \
             preserveAspectRatio=\"none\" aria-hidden=\"true\" focusable=\"false\">"
        ));
        let lines: String = ticks.iter().map(|tick| format!("M0 {}h1000", down(heights.at(*tick)))).collect();
        add(&format!("<path class=\"grid\" d=\"{lines}\"/>"));
        add(&self.marks());
        add(&self.drawn(chart, heights));
        add("</svg></div><div class=\"xs\" aria-hidden=\"true\">");
        let ticks = self.steps.ticks(STEP_TICKS_MAX);
        let apart = if ticks.len() > 1 { ticks[1] - ticks[0] } else { ticks.first().copied().unwrap_or(0.0) };
        for tick in ticks {
            let text = if apart >= 1000.0 {
                Form::Rate.tick(tick)
            } else if apart < 1.0 {
                Form::Plain.tick(tick)
            } else {
                count(tick.max(0.0) as u64)
            };
            add(&format!("<span style=\"left:{:.2}%\">{text}</span>", self.steps.at(tick) * 100.0));
        }
        add("<i>step</i></div></div></figure>");
    }

    /// Where it went on, over the whole height; where it saved, as short lines at the bottom.
    fn marks(&self) -> String {
        let across = |step: u64| across(self.steps.at(step as f64));
        let resumes: String = self.resumes.iter().map(|(step, _)| format!("M{} 0V1000", across(*step))).collect();
        let saved: String = self.checkpoints.iter().map(|step| format!("M{} 970V1000", across(*step))).collect();
        let path = |class: &str, d: &str| match d {
            "" => String::new(),
            _ => format!("<path class=\"{class}\" d=\"{d}\"/>"),
        };
        path("saved", &saved) + &path("resume", &resumes)
    }

    fn drawn(&self, chart: &Chart, heights: Scale) -> String {
        let place = |point: (f64, f64)| (across(self.steps.at(point.0)), down(heights.at(point.1)));
        let mut svg = String::new();
        if chart.is_stacked {
            let rows = chart.series[0].points.len();
            let mut floor = vec![0.0; rows];
            for Series { colour, points, .. } in &chart.series {
                let top: Vec<f64> =
                    points.iter().zip(&floor).map(|(point, floor)| point.1.unwrap_or(0.0) + floor).collect();
                let edge = |heights: &[f64]| -> Vec<(String, String)> {
                    let mut edge: Vec<_> =
                        points.iter().zip(heights).map(|(point, &height)| place((point.0, height))).collect();
                    // The first value is that of all steps up to it.
                    if let Some(first) = edge.first().cloned() {
                        edge.insert(0, ("0".to_string(), first.1));
                    }
                    edge
                };
                let along = edge(&top).into_iter().chain(edge(&floor).into_iter().rev());
                let corners: Vec<String> = along.map(|(x, y)| format!("{x} {y}")).collect();
                svg += &format!("<path class=\"area s{colour}\" d=\"M{}z\"/>", corners.join("L"));
                floor = top;
            }
            return svg;
        }
        for Series { colour, has_dots, points, .. } in &chart.series {
            svg += &format!("<path class=\"line s{colour}\" d=\"{}\"/>", line(points, &place));
            if *has_dots || points.len() == 1 {
                let dots = points.iter().filter_map(|point| Some(place((point.0, point.1?))));
                let dots: String = dots.map(|(x, y)| format!("M{x} {y}h0")).collect();
                svg += &format!("<path class=\"dots s{colour}\" d=\"{dots}\"/>");
            }
        }
        svg
    }

    /// What the script draws again from.
    pub(super) fn json(&self) -> String {
        let mut json = format!("{{\"steps\":[{},{}],\"charts\":[", self.steps.low(), self.steps.high());
        for (index, chart) in self.charts.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let (kind, form) = (if chart.is_stacked { "stack" } else { "lines" }, chart.form.name());
            json += &format!(
                "{comma}{{\"id\":\"{}\",\"kind\":\"{kind}\",\"form\":\"{form}\",\"zero\":{},\"series\":[",
                chart.id, chart.is_from_zero
            );
            for (index, series) in chart.series.iter().enumerate() {
                let Series { name, colour, has_dots, points, told_ms, .. } = series;
                let comma = if index > 0 { "," } else { "" };
                json += &format!("{comma}{{\"name\":\"{name}\",\"colour\":{colour},\"dots\":{has_dots}");
                push_list(&mut json, "x", points.iter().map(|point| point.0));
                push_list(&mut json, "y", points.iter().map(|point| point.1.unwrap_or(f64::NAN)));
                push_list(&mut json, "ms", told_ms.iter().copied());
                json.push('}');
            }
            json += "]}";
        }
        json.push(']');
        push_list(&mut json, "resumes", self.resumes.iter().map(|(step, _)| *step as f64));
        push_list(&mut json, "checkpoints", self.checkpoints.iter().map(|step| *step as f64));
        json.push('}');
        in_script(&json)
    }
}

impl Chart {
    fn heights(&self) -> Scale {
        if self.is_stacked {
            return Scale::exactly(0.0, 1.0);
        }
        let values = self.series.iter().flat_map(|series| &series.points).filter_map(|point| point.1);
        match range(values) {
            Some((low, high)) if self.form == Form::Percent && high <= 1.0 && low >= 0.0 => {
                let scale = Scale::around(low, high);
                Scale::exactly(scale.low().max(0.0), scale.high().min(1.0))
            }
            Some((low, high)) => Scale::around(if self.is_from_zero { low.min(0.0) } else { low }, high),
            None => Scale::exactly(0.0, 1.0),
        }
    }

    /// For those who do not see it.
    fn label(&self) -> String {
        let told = |series: &Series| {
            if let Some(mean) = series.mean {
                return format!("{} {} on average", series.name, percent(Some(mean)));
            }
            let known = || series.points.iter().filter_map(|point| point.1);
            let (low, high) = range(known()).unwrap_or((0.0, 0.0));
            let text = |value: Option<f64>| value.map_or("no number".to_string(), |value| self.form.figure(value));
            let (first, last) = (text(known().next()), text(series.points.last().and_then(|point| point.1)));
            format!("{} from {first} to {last}, between {} and {}", series.name, text(Some(low)), text(Some(high)))
        };
        format!("{} by step: {}.", self.title, self.series.iter().map(told).collect::<Vec<_>>().join("; "))
    }
}

/// Of the time of a step: what was not computing, as rank 0 saw it.
fn time_shares(steps: &[StepLine]) -> Vec<Series> {
    let waits = steps.iter().any(|line| line.reduce_ms.is_some());
    let saves = steps.iter().any(|line| line.save_ms.is_some_and(|ms| ms > 0.0));
    let row = |line: &StepLine| {
        let part = |ms: Option<f64>| ms.filter(|ms| ms.is_finite() && *ms > 0.0).unwrap_or(0.0);
        let whole = line.step_ms.filter(|ms| ms.is_finite() && *ms > 0.0)?;
        let (data, reduce, save) = (part(line.data_ms), part(line.reduce_ms), part(line.save_ms));
        Some((line.step as f64, [(whole - data - reduce - save).max(0.0), data, reduce, save]))
    };
    let rows: Vec<_> = steps.iter().filter_map(row).collect();
    let total: f64 = rows.iter().flat_map(|row| row.1).sum();
    let means: [f64; 4] = std::array::from_fn(|index| rows.iter().map(|row| row.1[index]).sum::<f64>() / total);
    let rows = averaged(&rows);
    let names = [
        ("computing", 0, true),
        ("waiting for rows", 1, true),
        ("waiting for reductions", 2, waits),
        ("saving", 3, saves),
    ];
    let shown = names.into_iter().enumerate().filter(|(_, (_, _, is_shown))| *is_shown);
    let series = shown.map(|(index, (name, colour, _))| Series {
        name,
        colour,
        has_dots: false,
        points: rows.iter().map(|row| (row.0, Some(row.1[index] / row.1.iter().sum::<f64>()))).collect(),
        told_ms: rows.iter().map(|row| row.1[index]).collect(),
        mean: Some(means[index]),
    });
    series.collect()
}

/// A line from point to point, broken where there is no number.
fn line(points: &[Point], place: &dyn Fn((f64, f64)) -> (String, String)) -> String {
    let (mut path, mut is_down) = (String::new(), false);
    for (x, y) in points {
        if let Some(y) = y {
            let (x, y) = place((*x, *y));
            write!(path, "{}{x} {y}", if is_down { 'L' } else { 'M' }).expect("a text takes all");
        }
        is_down = y.is_some();
    }
    path
}

fn across(part: f64) -> String {
    shortly(part * 1000.0)
}

fn down(part: f64) -> String {
    shortly(1000.0 - part * 1000.0)
}

/// To a tenth of a unit: less than a pixel.
fn shortly(units: f64) -> String {
    let text = format!("{units:.1}");
    text.strip_suffix(".0").map(str::to_string).unwrap_or(text)
}

fn push_list(json: &mut String, name: &str, numbers: impl Iterator<Item = f64>) {
    write!(json, ",\"{name}\":[").expect("a text takes all");
    for (index, number) in numbers.enumerate() {
        if index > 0 {
            json.push(',');
        }
        push_number(json, number);
    }
    json.push(']');
}

/// The lowest held-out loss, and after which step.
fn best(run: &Run) -> Option<(f64, u64)> {
    let known = run.evals.iter().filter_map(|line| Some((line.loss.filter(|loss| loss.is_finite())?, line.step)));
    known.reduce(|best, next| if next.0 < best.0 { next } else { best })
}

/// `lowest 0.9050, after step 1,200`
pub(super) fn best_text(run: &Run) -> Option<String> {
    best(run).map(|(loss, step)| format!("lowest {}, after step {}", figure(Some(loss)), count(step)))
}
