//! Draws a run: how far it is, two charts, figures and the last events.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::Line;
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, LegendPosition, Paragraph};

use super::follow::Followed;
use super::summary;
use crate::report::charts::{Point, range, thinned};
use crate::report::read::{EvalLine, Run, StepLine};
use crate::shown::{shown, significant};
use crate::units::count;

/// Below this height there is no room for charts.
const CHART_ROWS_MIN: u16 = 6;

/// Draws `followed` on the whole screen.
pub(super) fn draw(frame: &mut Frame<'_>, followed: &Followed) {
    let run = followed.run();
    let figures = summary::figures(run);
    let rows = figures.len() as u16 + 2;
    let [top, bar, charts, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(rows),
        Constraint::Length(1),
    ])
    .areas(frame.area());

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
    let lines: Vec<Line<'_>> = figures
        .into_iter()
        .map(|(name, text)| Line::from(vec![format!("{name} ").dim(), text.into()]))
        .collect();
    frame.render_widget(
        Paragraph::new(lines).block(Block::bordered().title("now")),
        left,
    );
    let events = summary::events(run);
    let room = usize::from(right.height.saturating_sub(2));
    let newest = events[events.len().saturating_sub(room)..].to_vec();
    let events: Vec<Line<'_>> = newest.into_iter().map(Line::from).collect();
    frame.render_widget(
        Paragraph::new(events).block(Block::bordered().title("last events")),
        right,
    );
    let help = match run.end {
        None => "q ends this view, and the run goes on",
        Some(_) => "q ends this view",
    };
    frame.render_widget(Line::from(help).dim(), keys);
}

/// The loss beside the accuracy, or beside the throughput if there is no accuracy.
fn draw_charts(frame: &mut Frame<'_>, area: Rect, run: &Run) {
    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).areas(area);
    let steps = |value: fn(&StepLine) -> Option<f64>| {
        thinned(run.steps.iter().map(|line| (line.step, value(line))))
    };
    let evals = |value: fn(&EvalLine) -> Option<f64>| {
        thinned(run.evals.iter().map(|line| (line.step, value(line))))
    };
    let loss = [
        ("training", steps(|line| line.loss)),
        ("held out", evals(|line| line.loss)),
    ];
    draw_chart(frame, (left, LegendPosition::TopRight), "loss", &loss);
    let accuracy = [
        ("training", steps(|line| line.accuracy)),
        ("held out", evals(|line| line.accuracy)),
    ];
    if accuracy
        .iter()
        .any(|(_, points)| points.iter().any(|point| point.1.is_some()))
    {
        let place = (right, LegendPosition::BottomRight);
        draw_chart(frame, place, "accuracy", &accuracy);
    } else {
        let rate = [("all ranks", steps(|line| line.samples_per_s))];
        let place = (right, LegendPosition::BottomRight);
        draw_chart(frame, place, "samples a second", &rate);
    }
}

fn draw_chart(
    frame: &mut Frame<'_>,
    (area, legend): (Rect, LegendPosition),
    title: &str,
    series: &[(&str, Vec<Point>)],
) {
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
    let block = Block::bordered().title(title);
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
    let colors = [Color::Cyan, Color::LightRed];
    let datasets = series.iter().zip(colors).map(|((name, points), color)| {
        Dataset::default()
            .name(*name)
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(color))
            .data(points)
    });
    let steps = x.map(|step| count(step.max(0.0) as u64));
    let values = [y[0], f64::midpoint(y[0], y[1]), y[1]].map(|value| significant(value, 3));
    let chart = Chart::new(datasets.collect())
        .block(block)
        .legend_position(Some(legend))
        .x_axis(Axis::default().bounds(x).labels(steps))
        .y_axis(Axis::default().bounds(y).labels(values));
    frame.render_widget(chart, area);
}
