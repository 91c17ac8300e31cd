//! `ddp-train watch DIR`: a live view of a run in the terminal, from its metrics log alone. So it
//! works over ssh, on another host that shares the folder, and after the run.
//!
//! `summary.rs` puts the log into lines of text.

mod summary;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::thread;
use std::time::Duration;

use console::Term;
use ddp_comm::World;

use self::summary::{Followed, open};
use crate::error::Result;
use crate::output::Say;

/// How often it checks for a signal; each fifth time it reads the log.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Shows the run in `folder` until a signal comes. Without a terminal prints one summary.
pub fn watch(folder: &Path, world: &World, say: Say<'_>) -> Result<()> {
    let mut followed = open(folder)?;
    if !io::stdout().is_terminal() {
        return summary::lines(&followed)
            .iter()
            .try_for_each(|line| say(line));
    }
    let stops = world.catch_stop();
    for look in 0u64.. {
        if stops.requested().is_some() {
            break;
        }
        if look % 5 == 0 {
            followed.refresh();
            say(&screen(&followed, Term::stdout().size()))?;
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// The lines, cut to the rows and columns of a terminal, after the codes that clear it.
fn screen(followed: &Followed, (rows, columns): (u16, u16)) -> String {
    let mut lines = summary::lines(followed);
    lines.truncate(usize::from(rows).saturating_sub(2));
    lines.push("Ctrl-C ends this view, and a run continues".into());
    let cut = |line: &String| console::truncate_str(line, columns.into(), "").into_owned();
    let lines: Vec<String> = lines.iter().map(cut).collect();
    format!("\x1b[H\x1b[J{}", lines.join("\n"))
}

#[cfg(test)]
mod tests;
