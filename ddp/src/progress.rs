//! Progress and the log of a run, on standard error: a bar on a terminal, a line now and then
//! elsewhere.
//!
//! Only rank 0 shows progress. Other ranks log only errors, with their number in front. The bar is
//! cleared while a line is written.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::writer::MakeWriterExt;

use ddp_kernels::panics;

use crate::config::{LogLevel, When};
use crate::metrics_log::StepEvent;
use crate::shown::{shown_lines, significant};
use crate::units;

/// How often a line is shown without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Narrower terminals show no bar and no rate.
const WIDE_COLUMNS: u16 = 100;
/// Narrower terminals show loss and accuracy only.
const MEDIUM_COLUMNS: u16 = 72;

/// How often a bar is drawn.
const REDRAWS_PER_S: u8 = 20;

/// The bar on the screen.
static BAR: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Progress of one run, or through files.
#[derive(Debug)]
pub struct Progress {
    /// It is drawn only where it is shown. It also knows the time that is left.
    bar: ProgressBar,
    shown: Shown,
    /// The width of the terminal.
    columns: u16,
}

#[derive(Debug)]
enum Shown {
    Nothing,
    Bar,
    /// When the last line was shown.
    Lines(Option<Instant>),
}

impl Progress {
    /// Progress of a run of `steps` steps, of which `taken` were before this process, for rank 0.
    pub fn new(when: When, taken: u64, steps: u64) -> Progress {
        Progress::with_bar(when, |target, columns| bar([taken, steps], target, columns))
    }

    /// Progress through files that are read.
    pub fn of_files(when: When) -> Progress {
        let template = "{msg}  {bar:10} {decimal_bytes}/{decimal_total_bytes}  \
                        {decimal_bytes_per_sec}  {eta} left";
        Progress::with_bar(when, |target, _| styled(None, target, template))
    }

    fn with_bar(when: When, bar: impl FnOnce(ProgressDrawTarget, u16) -> ProgressBar) -> Progress {
        let (_, columns) = Term::stderr().size();
        let shown = match when {
            When::Never => Shown::Nothing,
            When::Auto if !io::stderr().is_terminal() => Shown::Lines(None),
            When::Auto | When::Always => Shown::Bar,
        };
        let target = match shown {
            // indicatif's own target draws nothing without a terminal.
            Shown::Bar => on_terminal(),
            _ => ProgressDrawTarget::hidden(),
        };
        let bar = bar(target, columns);
        Progress {
            bar,
            shown,
            columns,
        }
    }

    /// Called after every step: it is cheap.
    pub fn step(&self, step: u64) {
        self.bar.set_position(step);
    }

    /// Shows figures: in the bar, or as a line now and then.
    pub fn figures(&mut self, figures: &StepEvent) {
        let (step, steps) = (figures.step, self.bar.length().unwrap_or(0));
        let text = format!("step {step} of {steps}  {}", describe(figures, usize::MAX));
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::Bar if step == steps => show(&text),
            Shown::Bar => {
                // Beside the message are the bar, `12/785` and `59m left`.
                let others = 25 + 2 * steps.to_string().len();
                let room = usize::from(self.columns).saturating_sub(others);
                self.bar.set_message(describe(figures, room));
            }
            Shown::Lines(last) => {
                if step < steps && last.is_some_and(|last| last.elapsed() < LINE_EVERY) {
                    return;
                }
                *last = Some(Instant::now());
                let left = match self.bar.eta().as_secs_f64() {
                    0.0 => String::new(),
                    left => format!("  {} left", units::duration(left)),
                };
                show(&format!("{text}{left}"));
            }
        }
    }

    /// This many of all bytes have been read.
    pub fn read(&mut self, what: &'static str, bytes: u64, of: u64) {
        self.bar.set_message(what);
        self.bar.set_length(of);
        self.bar.set_position(bytes);
        if let Shown::Lines(last) = &mut self.shown {
            let last = last.get_or_insert_with(Instant::now);
            if last.elapsed() >= LINE_EVERY {
                *last = Instant::now();
                let [read, of] = [bytes, of].map(|bytes| bytes as f64 / 1e6);
                show(&format!("{what}: {read:.0} of {of:.0} MB read"));
            }
        }
    }

    /// Prints a line that stays.
    pub fn note(&self, line: &str) {
        if !matches!(self.shown, Shown::Nothing) {
            // Folders may have any names.
            show(&shown_lines(line));
        }
    }

    /// Removes the bar. Later output is lines.
    pub fn finish(&mut self) {
        if let Shown::Bar = self.shown {
            clear_bar();
            self.shown = Shown::Lines(None);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn bar([taken, steps]: [u64; 2], target: ProgressDrawTarget, columns: u16) -> ProgressBar {
    let template = match columns {
        WIDE_COLUMNS.. => "{bar:10} {pos}/{len}  {wide_msg}  {eta} left",
        MEDIUM_COLUMNS.. => "{pos}/{len}  {wide_msg}  {eta} left",
        _ => "{pos}/{len}  {wide_msg}  {eta}",
    };
    let bar = styled(Some(steps), target, template);
    // The time that is left follows from the steps of this process.
    bar.set_position(taken);
    bar.tick();
    bar.reset_eta();
    bar
}

fn on_terminal() -> ProgressDrawTarget {
    let screen = Term::read_write_pair(io::stdin(), Screen);
    ProgressDrawTarget::term_like_with_hz(Box::new(screen), REDRAWS_PER_S)
}

/// The terminal of standard error. One that is suspended, as by Ctrl-S, does not hold up the run.
#[derive(Debug)]
struct Screen;

impl AsRawFd for Screen {
    fn as_raw_fd(&self) -> RawFd {
        io::stderr().as_raw_fd()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        ddp_comm::print_now(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bar that is cleared while a line is written.
fn styled(length: Option<u64>, target: ProgressDrawTarget, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the template is right");
    let style = style.progress_chars("━╸─");
    let bar = ProgressBar::with_draw_target(length, target).with_style(style);
    *panics::lock(&BAR) = Some(bar.downgrade());
    bar
}

/// Removes the bar, if there is one, before the process prints its last error.
pub fn clear_bar() {
    let bar = panics::lock(&BAR).take();
    if let Some(bar) = bar.and_then(|bar| bar.upgrade()) {
        bar.finish_and_clear();
    }
}

/// `training loss 0.3124, accuracy 93.1%  epoch 1  41,200 samples/s`, or as many of these parts as
/// fit into `room` columns; without a rate the GPU is simulated.
fn describe(figures: &StepEvent, room: usize) -> String {
    let (epoch, loss) = (figures.epoch, significant(figures.loss, 4));
    let accuracy = figures.accuracy.map(|part| part * 100.0);
    let accuracy = |before: &str| accuracy.map_or(String::new(), |it| format!("{before}{it:.1}%"));
    let (rate, unit) = match figures.tokens_per_s {
        Some(tokens) => (tokens, "tokens/s"),
        None => (figures.samples_per_s, "samples/s"),
    };
    let rate = if rate.is_nan() {
        "simulated".to_string()
    } else {
        format!("{} {unit}", units::count(rate.round() as u64))
    };
    let percent = |share| format!(" ({:.0}% of a large matmul)", share * 100.0);
    let share = figures.matmul_share.map(percent).unwrap_or_default();
    let tflops = figures.tflops.map(|tflops| significant(tflops, 3));
    let tflops = tflops.map(|tflops| format!("  {tflops} TFLOP/s{share}"));
    let (exactly, tflops) = (accuracy(", accuracy "), tflops.unwrap_or_default());
    let mut text = format!("training loss {loss}{exactly}  epoch {epoch}  {rate}{tflops}");
    while text.chars().count() > room {
        match text.rfind("  ") {
            Some(end) => text.truncate(end),
            None => return format!("loss {loss}{}", accuracy("  ")),
        }
    }
    text
}

/// Writes a line while the bar is cleared, at once, so that lines of several ranks do not mix. A
/// closed standard error, and a full one that is not read, must not hold up the run: what does not
/// fit is dropped.
fn show(line: &str) {
    let write = || ddp_comm::print_progress(&format!("{line}\n"));
    let bar = panics::lock(&BAR);
    match bar.as_ref().and_then(WeakProgressBar::upgrade) {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Sends the log of this process to standard error: from `level` on rank 0, only errors on others.
/// Does nothing if there is a subscriber already.
pub fn start_log(level: LogLevel, rank: usize) {
    let colours = io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let is_shown = |about: &Metadata<'_>| *about.level() == Level::ERROR || ddp_comm::is_rank_0();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level.filter())
        .with_ansi(colours)
        .with_target(level.filter() > LevelFilter::INFO)
        .with_timer(Uptime(Instant::now(), ddp_comm::job_age()))
        .with_writer((move || EventWriter { rank }).with_filter(is_shown));
    // A program's own subscriber stays.
    let _ = subscriber.try_init();
}

/// Seconds since the job began: when this log did, and for how long the job had run then.
struct Uptime(Instant, Duration);

impl FormatTime for Uptime {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        let since = self.0.elapsed() + self.1;
        write!(writer, "{:9.3} s", since.as_secs_f64())
    }
}

/// Shows an event of this rank, which is written as a whole.
struct EventWriter {
    rank: usize,
}

impl Write for EventWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        match self.rank {
            0 => show(text.trim_end()),
            rank => show(&format!("rank {rank}: {}", text.trim_end())),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
