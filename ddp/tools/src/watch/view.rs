//! Draws a run: its progress, two charts, figures, the last events and the last text. Lines break
//! only between words.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph};

use super::summary::{self, Followed};
use crate::metrics::Run;
use crate::report::charts;
use crate::report::results::{Figure, figures};
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
    let (run, screen) = (&followed.run, frame.area());
    let inside = (screen.width / 2).saturating_sub(BORDERS);
    let sample = run.texts.last();
    let is_tall = screen.height >= TALL_ROWS;
    let sample_rows = match sample {
        None => 0,
        Some(_) if !is_tall => 1 + BORDERS,
        Some(_) => 3 + BORDERS,
    };
    // Three lines are the title, the bar and the keys.
    let others = 3 + CHART_ROWS_MIN + sample_rows + BORDERS;
    let room = screen.height.saturating_sub(others);
    let now = now(run, inside.into(), room.into(), is_tall);
    let lines = |event: &String| wrapped(event, inside.into());
    let events: Vec<String> = summary::events(run).iter().flat_map(lines).collect();
    let rows = match is_tall {
        true => now.len().max(events.len()) as u16,
        false => now.len() as u16,
    };
    let rows = rows.min(room);
    let line = Constraint::Length(1);
    let [below, sample_area] = [rows + BORDERS, sample_rows].map(Constraint::Length);
    let areas = [line, line, Constraint::Fill(1), below, sample_area, line];
    let [top, bar, charts, below, sample_area, keys] = Layout::vertical(areas).areas(screen);

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
    let help = match run.end() {
        None => "q ends this view, and the run continues",
        Some(_) => "q ends this view",
    };
    frame.render_widget(Line::from(help).dim(), keys);
}

/// The figures in lines of `width`, at most `rows` of them: with notes if wanted and there is room.
fn now(run: &Run, width: usize, rows: usize, has_notes: bool) -> Vec<Line<'static>> {
    let all = figures(run);
    let lines = |has_notes: bool| -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for Figure { name, value, note } in &all {
            let note = Some(format!(", {note}")).filter(|_| has_notes && !note.is_empty());
            let text = format!("{name} {value}{}", note.unwrap_or_default());
            let line = |line: String| match line.strip_prefix(*name) {
                Some(rest) => Line::from(vec![name.dim(), rest.to_string().into()]),
                None => Line::from(line),
            };
            lines.extend(wrapped(&text, width).into_iter().map(line));
        }
        lines
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

/// The first two charts: the loss beside the accuracy, R² or the throughput.
fn draw_charts(frame: &mut Frame<'_>, area: Rect, run: &Run) {
    let areas: [Rect; 2] = Layout::horizontal([Constraint::Fill(1); 2]).areas(area);
    let charts = charts::of_run(run);
    let none = Paragraph::new("no values yet").block(Block::bordered());
    for (index, area) in areas.into_iter().enumerate() {
        match charts.get(index) {
            Some(chart) => draw_chart(frame, area, chart),
            None => frame.render_widget(&none, area),
        }
    }
}

fn draw_chart(frame: &mut Frame<'_>, area: Rect, chart: &charts::Chart) {
    let known = |curve: &charts::Curve| -> Vec<(f64, f64)> {
        let points = curve.points.iter();
        let known = points.filter_map(|(step, value)| Some((*step as f64, (*value)?)));
        known.collect()
    };
    let series: Vec<Vec<(f64, f64)>> = chart.curves.iter().map(known).collect();
    let colors = [Color::Cyan, Color::LightRed];
    // The names of the curves are in the title, where they cover nothing.
    let mut title = vec![Span::from(charts::joined(&[chart.title, &chart.unit]))];
    for (curve, color) in chart.curves.iter().zip(colors) {
        if !curve.name.is_empty() {
            title.push(format!(" – {}", curve.name).fg(color));
        }
    }
    let range = |of: fn(&(f64, f64)) -> f64| {
        let values = || series.iter().flatten().map(of);
        let low = values().fold(f64::INFINITY, f64::min);
        let high = values().fold(f64::NEG_INFINITY, f64::max);
        match high > low {
            true => [low, high],
            false => [low - 0.5, high + 0.5],
        }
    };
    let (x, y) = (range(|point| point.0), range(|point| point.1));
    let datasets = series.iter().zip(colors).map(|(points, color)| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(color))
            .data(points)
    });
    let steps = x.map(|step| count(step.max(0.0) as u64));
    let values = [y[0], f64::midpoint(y[0], y[1]), y[1]].map(|value| significant(value, 3));
    let chart = Chart::new(datasets.collect())
        .block(Block::bordered().title(Line::from(title)))
        .legend_position(None)
        .x_axis(Axis::default().bounds(x).labels(steps))
        .y_axis(Axis::default().bounds(y).labels(values));
    frame.render_widget(chart, area);
}
