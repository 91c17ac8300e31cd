//! `ddp-train watch DIR`: a live view of a run in the terminal, from its metrics log alone. So it
//! works over ssh, on another host that shares the folder, and after the run.
//!
//! `summary.rs` puts the log into words, `view.rs` draws.

mod summary;
mod view;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, Instant};

use ddp_comm::{Signal, StopSignals, World};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};

use self::summary::{Followed, open};
use crate::error::{Error, Result};
use crate::output::Say;

/// How often the log is read.
const READ_EVERY: Duration = Duration::from_secs(1);
/// How often it checks for keys.
const KEYS_EVERY: Duration = Duration::from_millis(200);

/// Shows the run in `folder` until q is pressed or a signal comes. Without a terminal prints one
/// summary.
pub fn watch(folder: &Path, world: &World, say: Say<'_>) -> Result<()> {
    let mut followed = open(folder)?;
    if !io::stdout().is_terminal() {
        let lines = summary::lines(&followed);
        return lines.iter().try_for_each(|line| say(line));
    }
    // A closed terminal needs no restoring, and waiting for its keys would never end.
    let stops = world.catch_stop().except(Signal::Hangup);
    // This also restores the terminal if the program panics.
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = live(&mut terminal, &mut followed, &stops);
    ratatui::restore();
    shown.map_err(failed)
}

fn failed(source: io::Error) -> Error {
    let help = "pipe the output elsewhere for one summary, as in: ddp-train watch DIR | cat";
    Error::io("show the run on", "the terminal", help)(source)
}

fn live(
    terminal: &mut ratatui::DefaultTerminal,
    followed: &mut Followed,
    stops: &StopSignals,
) -> io::Result<()> {
    let mut read_at = Instant::now();
    while stops.requested().is_none() {
        terminal.draw(|frame| view::draw(frame, followed))?;
        // Wakes up at once for a key and for a new size.
        if event::poll(KEYS_EVERY)?
            && let Event::Key(key) = event::read()?
            && ends(key)
        {
            return Ok(());
        }
        if read_at.elapsed() >= READ_EVERY {
            followed.refresh();
            read_at = Instant::now();
        }
    }
    Ok(())
}

/// Whether a key ends the view: q, Escape or Ctrl-C.
fn ends(key: KeyEvent) -> bool {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => true,
        KeyCode::Char('c') => key.modifiers.contains(KeyModifiers::CONTROL),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
