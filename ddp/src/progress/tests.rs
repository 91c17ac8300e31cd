//! Claims about progress and the log of a run.

use std::sync::{Arc, MutexGuard};

use indicatif::TermLike;

use super::*;

fn event(step: u64) -> StepEvent {
    StepEvent {
        step,
        epoch: 1,
        loss: 0.31236,
        accuracy: Some(0.9312),
        samples_per_s: 41_234.6,
        ..StepEvent::default()
    }
}

#[test]
fn figures_read_as_people_write_them() {
    assert_eq!(
        describe(&event(120), usize::MAX),
        "training loss 0.3124, accuracy 93.1%  epoch 1  41,235 samples/s"
    );
    let without = StepEvent {
        accuracy: None,
        loss: f64::NAN,
        samples_per_s: 999.4,
        ..event(120)
    };
    assert_eq!(
        describe(&without, usize::MAX),
        "training loss NaN  epoch 1  999 samples/s"
    );
    let tokens = StepEvent {
        tokens_per_s: Some(999.4),
        tflops: Some(0.14159),
        matmul_share: Some(0.783),
        ..event(120)
    };
    let text = describe(&tokens, usize::MAX);
    assert!(
        text.ends_with("  999 tokens/s  0.142 TFLOP/s (78% of a large matmul)"),
        "{text}"
    );
}

/// Keeps what is drawn on this many columns.
#[derive(Clone, Debug)]
struct Paper(Arc<Mutex<String>>, u16);

impl Paper {
    fn add(&self, text: &str) -> io::Result<()> {
        self.0.lock().unwrap().push_str(text);
        Ok(())
    }
}

impl TermLike for Paper {
    fn width(&self) -> u16 {
        self.1
    }
    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }
    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }
    fn clear_line(&self) -> io::Result<()> {
        self.add("\n")
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The process has one bar on the screen: only one test at a time may make it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    panics::lock(&ALONE)
}

/// The last line that a run of 785 steps draws on this many columns.
fn drawn(columns: u16, event: &StepEvent) -> String {
    let _alone = alone();
    let paper = Paper(Arc::default(), columns);
    let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
    let bar = bar([0, 785], target, columns);
    let mut progress = Progress {
        bar: bar.clone(),
        shown: Shown::Bar,
        columns,
    };
    progress.step(120);
    progress.figures(event);
    bar.tick();
    let drawn = paper.0.lock().unwrap().clone();
    let last = drawn.lines().rfind(|line| line.contains('/')).unwrap();
    progress.finish();
    assert!(bar.is_finished());
    last.to_string()
}

#[test]
fn the_bar_fits_terminals_of_every_width() {
    let line = drawn(120, &event(120));
    assert!(
        line.contains("120/785  training loss 0.3124, accuracy 93.1%  epoch 1  41,235 samples/s")
            && line.contains("left"),
        "{line}"
    );
    for columns in [40, 60, 71, 72, 80, 200] {
        let line = drawn(columns, &event(120));
        let parts = ["120/785", "loss 0.3124", "93.1%"];
        let has_all = parts.iter().all(|part| line.contains(part));
        let width = line.trim_end().chars().count();
        assert!(has_all && width <= columns.into(), "{columns}: {line}");
        // Not cut in the middle of a number.
        let ends = line.trim_end().ends_with("left") || columns < MEDIUM_COLUMNS;
        assert!(ends, "{columns}: {line}");
    }
}

/// At 110 columns a word was cut.
#[test]
fn the_bar_cuts_no_word_at_any_width() {
    let event = StepEvent {
        tokens_per_s: Some(123_456.0),
        tflops: Some(0.141_59),
        matmul_share: Some(0.783),
        ..event(120)
    };
    let text = format!("120/785 left loss {}", describe(&event, usize::MAX));
    let words = |text: &str| -> Vec<String> {
        let words = text.split_whitespace();
        words
            .map(|word| word.trim_matches([',', '(', ')']).to_string())
            .collect()
    };
    let known = words(&text);
    for columns in 40..=200 {
        let line = drawn(columns, &event);
        let is_cut = |word: &String| {
            let is_time = word.len() <= 3 && word.starts_with(|it: char| it.is_ascii_digit());
            !known.contains(word) && !word.starts_with(['━', '╸', '─']) && !is_time
        };
        let cut = words(&line).into_iter().find(is_cut);
        assert_eq!(cut, None, "{columns}: {line}");
    }
    assert!(drawn(140, &event).contains("of a large matmul)"));
}

/// Of 1,500 steps 684 were taken before the resume, and counted as taken in its first second.
#[test]
fn steps_before_a_resume_are_not_taken_as_made_now() {
    let _alone = alone();
    let paper = Paper(Arc::default(), 120);
    let target = ProgressDrawTarget::term_like(Box::new(paper));
    let bar = bar([684, 1500], target, 120);
    // Sleep: a step that takes at least 20 ms.
    std::thread::sleep(Duration::from_millis(20));
    bar.set_position(685);
    bar.tick();
    // One step took 20 ms or more.
    assert!(bar.per_sec() <= 50.1, "{} steps a second", bar.per_sec());
    assert_eq!(bar.position(), 685);
    bar.finish();
}

#[test]
fn progress_set_to_never_shows_nothing() {
    let _alone = alone();
    let hidden = Progress::new(When::Never, 684, 1500);
    assert!(matches!(hidden.shown, Shown::Nothing));
    assert_eq!(hidden.bar.position(), 684, "taken before");
}

#[test]
fn off_a_terminal_the_first_figures_are_a_line_and_the_next_wait() {
    let _alone = alone();
    let mut progress = Progress {
        bar: bar([0, 200], ProgressDrawTarget::hidden(), 120),
        shown: Shown::Lines(None),
        columns: 120,
    };
    progress.figures(&event(120));
    let last = |progress: &Progress| match progress.shown {
        Shown::Lines(last) => last,
        _ => None,
    };
    assert!(last(&progress).is_some());
    // As if that line came in an hour: however slow the machine is, no other one is due.
    let first = Some(Instant::now() + Duration::from_secs(3600));
    progress.shown = Shown::Lines(first);
    progress.figures(&event(130));
    assert_eq!(
        last(&progress),
        first,
        "less than {LINE_EVERY:?} later nothing is shown"
    );
    progress.figures(&event(200));
    assert_ne!(last(&progress), first, "the last step is shown");
}
