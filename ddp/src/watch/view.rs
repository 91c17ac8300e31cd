//! Draws a run: how far it is, two charts, figures, the last events and the last text. Words are
//! wrapped, not cut.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph};

use super::follow::Followed;
use super::summary;
use crate::report::charts::{OfEval, OfStep, Point, r2, range, rate, thinned};
use crate::report::read::Run;
use crate::report::results::Figure;
use crate::shown::{shown, significant};
use crate::units::count;

/// Below this height there is no room for charts.
const CHART_ROWS_MIN: u16 = 6;
/// Screens of fewer rows show figures without notes and one line of a sample.
const TALL_ROWS: u16 = 30;
/// The borders of a panel.
const BORDERS: u16 = 2;

/// Draws `followed` on the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, followed: &Followed) {
    let (run, screen) = (followed.run(), frame.area());
    let inside = (screen.width / 2).saturating_sub(BORDERS);
    let sample = run.texts.last();
    let is_tall = screen.height >= TALL_ROWS;
    let sample_rows = match sample {
        None => 0,
        Some(_) if !is_tall => 1 + BORDERS,
        Some(_) => 3 + BORDERS,
    };
    // Three lines are the title, the bar and the keys.
    let room = screen
        .height
        .saturating_sub(3 + CHART_ROWS_MIN + sample_rows + BORDERS);
    let now = now(run, inside.into(), room.into(), is_tall);
    let events = summary::events(run).into_iter();
    let events: Vec<String> = events
        .flat_map(|event| wrapped(&event, inside.into()))
        .collect();
    let rows = match is_tall {
        true => now.len().max(events.len()) as u16,
        false => now.len() as u16,
    };
    let rows = rows.min(room);
    let [top, bar, charts, below, sample_area, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(rows + BORDERS),
        Constraint::Length(sample_rows),
        Constraint::Length(1),
    ])
    .areas(screen);

    let name = shown(&followed.folder.to_string_lossy());
    let title = format!("{name}: {}", summary::state(followed));
    frame.render_widget(Line::from(title).bold(), top);
    let (step, steps) = summary::steps(run);
    let gauge = Gauge::default()
        .ratio((step as f64 / steps.max(1) as f64).clamp(0.0, 1.0))
        .label(summary::progress(run))
        .gauge_style(Style::new().fg(Color::Blue).bg(Color::DarkGray));
    frame.render_widget(gauge, bar);
    if charts.height >= CHART_ROWS_MIN {
        draw_charts(frame, charts, run);
    }

    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).areas(below);
    let panel = |lines: Vec<Line<'static>>, title: String| {
        Paragraph::new(lines).block(Block::bordered().title(title))
    };
    frame.render_widget(panel(now, "now".into()), left);
    let first = events.len().saturating_sub(rows.into());
    let newest = events.into_iter().skip(first).map(Line::from).collect();
    frame.render_widget(panel(newest, "last events".into()), right);
    if let Some(sample) = sample {
        let width = screen.width.saturating_sub(BORDERS);
        let lines = wrapped(&summary::sample(sample), width.into());
        let title = format!("sample after step {}", count(sample.step));
        let lines = lines.into_iter().map(Line::from).collect();
        frame.render_widget(panel(lines, title), sample_area);
    }
    let help = match run.end {
        None => "q ends this view, and the run goes on",
        Some(_) => "q ends this view",
    };
    frame.render_widget(Line::from(help).dim(), keys);
}

/// The figures in lines of `width`, at most `rows` of them: with notes if wanted and there is room.
fn now(run: &Run, width: usize, rows: usize, has_notes: bool) -> Vec<Line<'static>> {
    let figures = summary::figures(run);
    let lines = |has_notes: bool| -> Vec<Line<'static>> {
        let line = |figure: &Figure| {
            let Figure { name, value, note } = figure;
            let text = match has_notes && !note.is_empty() {
                true => format!("{name} {value}, {note}"),
                false => format!("{name} {value}"),
            };
            let (name, mut lines) = (*name, wrapped(&text, width).into_iter());
            let first = lines.next().unwrap_or_default();
            let first = match first.strip_prefix(name) {
                Some(rest) => Line::from(vec![name.dim(), rest.to_string().into()]),
                None => Line::from(first),
            };
            std::iter::once(first)
                .chain(lines.map(Line::from))
                .collect::<Vec<_>>()
        };
        figures.iter().flat_map(line).collect()
    };
    let mut shown = lines(has_notes);
    if shown.len() > rows {
        shown = lines(false);
        shown.truncate(rows);
    }
    shown
}

/// The words of a text in lines of at most `width` characters; a longer word is cut into several.
pub(super) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let width = width.max(4);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        let used = lines.last().map_or(width, |line| line.chars().count());
        if let Some(line) = lines.last_mut().filter(|_| used + 1 + word.len() <= width) {
            line.push(' ');
            line.extend(word);
            continue;
        }
        // Later lines are indented.
        loop {
            let indent = if lines.is_empty() { "" } else { "  " };
            let rest = word.split_off(word.len().min(width - indent.len()));
            lines.push(indent.chars().chain(word).collect());
            word = rest;
            if word.is_empty() {
                break;
            }
        }
    }
    lines
}

/// The loss beside the accuracy; where there is none, beside R² or the throughput.
fn draw_charts(frame: &mut Frame<'_>, area: Rect, run: &Run) {
    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).areas(area);
    let steps = |value: OfStep| thinned(run.steps.iter().map(|line| (line.step, value(line))));
    let evals = |value: OfEval| thinned(run.evals.iter().map(|line| (line.step, value(line))));
    let has_values =
        |(_, points): &(&str, Vec<Point>)| points.iter().any(|point| point.1.is_some());
    let loss = [
        ("training", steps(|line| line.loss)),
        ("held out", evals(|line| line.loss)),
    ];
    draw_chart(frame, left, "loss", &loss);
    let accuracy = [
        ("training", steps(|line| line.accuracy)),
        ("held out", evals(|line| line.accuracy)),
    ];
    let r2_of_evals = [("held out", evals(r2))];
    if accuracy.iter().any(has_values) {
        draw_chart(frame, right, "accuracy", &accuracy);
    } else if r2_of_evals.iter().any(has_values) {
        draw_chart(frame, right, "R²", &r2_of_evals);
    } else {
        let (unit, value) = rate(std::iter::once(run));
        draw_chart(frame, right, unit, &[("", steps(value))]);
    }
}

fn draw_chart(frame: &mut Frame<'_>, area: Rect, title: &str, series: &[(&str, Vec<Point>)]) {
    let known = |points: &Vec<Point>| -> Vec<(f64, f64)> {
        points
            .iter()
            .filter_map(|(x, y)| Some((*x, (*y)?)))
            .collect()
    };
    let series: Vec<(&str, Vec<(f64, f64)>)> = series
        .iter()
        .map(|(name, points)| (*name, known(points)))
        .collect();
    let all = || series.iter().flat_map(|(_, points)| points);
    let colors = [Color::Cyan, Color::LightRed];
    // The names of the curves are in the title, where they cover nothing.
    let mut names = vec![Span::from(title.to_string())];
    for ((name, points), color) in series.iter().zip(colors) {
        if !points.is_empty() && !name.is_empty() {
            names.push(format!(" – {name}").fg(color));
        }
    }
    let block = Block::bordered().title(Line::from(names));
    let (Some(xs), Some(ys)) = (
        range(all().map(|point| point.0)),
        range(all().map(|point| point.1)),
    ) else {
        return frame.render_widget(Paragraph::new("no values yet").block(block), area);
    };
    let widened = |(low, high): (f64, f64)| match high > low {
        true => [low, high],
        false => [low - 0.5, high + 0.5],
    };
    let (x, y) = (widened(xs), widened(ys));
    let datasets = series.iter().zip(colors).map(|((_, points), color)| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(color))
            .data(points)
    });
    let steps = x.map(|step| count(step.max(0.0) as u64));
    let values = [y[0], f64::midpoint(y[0], y[1]), y[1]].map(|value| significant(value, 3));
    let chart = Chart::new(datasets.collect())
        .block(block)
        .legend_position(None)
        .x_axis(Axis::default().bounds(x).labels(steps))
        .y_axis(Axis::default().bounds(y).labels(values));
    frame.render_widget(chart, area);
}
