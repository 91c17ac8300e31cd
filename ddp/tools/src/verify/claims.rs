//! What a run folder claims, which comes from a stranger: its log, the head of it, which
//! checkpoints it names, and with which settings, program and ranks it was trained. No link is
//! followed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ddp_kernels::files::read_up_to;

use crate::checkpoint::{self, CHECKPOINTS, Opened};
use crate::compare::Logged;
use crate::config::Config;
use crate::config::values::Schedule;
use crate::error::{Error, Result};
use crate::metrics::{Run, check_run};
use crate::metrics_log::{EVENTS_FILE, FoundHead, HeadError, ResumeEvent, find_head, head_of};

/// Longer logs are refused unread.
const LOG_BYTES_MAX: u64 = 1 << 30;
const LINES_MAX: usize = 4 << 20;
/// The greatest step: JSON numbers are exact up to here.
const STEP_MAX: u64 = 1 << 53;

/// What a run claims.
pub(super) struct Claims {
    pub(super) logged: Logged,
    /// The number of lines of the log, and its head.
    pub(super) lines: u64,
    pub(super) head: String,
    /// Where the published head is in the log, if one was given and is there.
    pub(super) published: Option<FoundHead>,
    /// Why the log cannot be one that only this program wrote, if it cannot.
    pub(super) forged: Option<String>,
    /// The checkpoints of the log that are there.
    pub(super) there: BTreeSet<u64>,
    /// What resumes changed after the published head: settings or data, and what changes no bit.
    pub(super) changed_later: Vec<String>,
    pub(super) noted_later: Vec<String>,
    /// The start, as a resume after step 0, and each resume that says how it was.
    pub(super) eras: Vec<ResumeEvent>,
}

impl Claims {
    /// Reads the run in `folder`, and looks for the head that was published.
    pub(super) fn read(folder: &Path, wanted: Option<&str>) -> Result<Claims> {
        let (log, saved) = (folder.join(EVENTS_FILE), folder.join(CHECKPOINTS));
        check_no_link(&log)?;
        check_no_link(&saved)?;
        let help = "give the folder of a run";
        let bytes = read_up_to(&log, LOG_BYTES_MAX).map_err(Error::io("read", &log, help))?;
        let bytes = bytes.ok_or_else(|| {
            let log = log.display();
            Error::Data(format!(
                "{log}: expected at most {LOG_BYTES_MAX} bytes, got more; help: verify a shorter run"
            ))
        })?;
        let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
        if lines > LINES_MAX {
            let log = log.display();
            let text = format!(
                "{log}: expected at most {LINES_MAX} lines, got {lines}; help: verify a shorter run"
            );
            return Err(Error::Data(text));
        }
        let head = head_of(&bytes[..], None).map_err(Error::io("read", &log, help))?;
        let (published, mut forged) = match find_head(&bytes, wanted) {
            Ok(found) => (found, None),
            Err(HeadError::Forged(why)) => (None, Some(why)),
            Err(HeadError::TooLarge(why)) => {
                let log = log.display();
                return Err(Error::Data(format!("{log}: {why}")));
            }
        };
        drop(bytes);
        let logged = Logged::read(folder)?;
        let run = &logged.run;
        if forged.is_none() && run.starts_at != [1] {
            let at = run.starts_at.last().expect("it has begun");
            forged = Some(format!("line {at} is a start, which only line 1 is"));
        }
        let steps = logged.steps.keys().chain(&run.checkpoints);
        let steps = steps.chain(run.resumes.iter().map(|it| &it.step));
        if let Some(step) = steps.chain(run.ranks.iter().map(|it| &it.0)).max()
            && *step > STEP_MAX
        {
            let text = format!("the log names step {step}: expected at most {STEP_MAX}");
            return Err(Error::Data(text));
        }
        let eras = eras(run);
        let since = published.map_or(u64::MAX, |it| it.still_there as u64);
        let [changed_later, noted_later] = later_changes(&eras, since);
        let mut steps = logged.steps.values();
        if let Some(step) = steps.find(|step| step.digests.is_none()) {
            return Err(Error::Data(format!(
                "the log has no digests of step {}, which version 0.6 and older did not write: only \
                 its loss could be compared",
                step.step
            )));
        }
        let named: BTreeSet<u64> = run.checkpoints.iter().copied().collect();
        let is_there = |step: &u64| fs::symlink_metadata(checkpoint::folder(folder, *step)).is_ok();
        Ok(Claims {
            there: named
                .into_iter()
                .filter(|step| *step > 0 && is_there(step))
                .collect(),
            lines: head.lines,
            head: head.text(),
            changed_later,
            noted_later,
            eras: eras.into_iter().map(|era| era.1).collect(),
            logged,
            published,
            forged,
        })
    }

    pub(super) fn folder(&self) -> &PathBuf {
        &self.logged.folder
    }

    /// The last step that the log names.
    pub(super) fn last(&self) -> u64 {
        let logged = self.logged.steps.last_key_value().map_or(0, |it| *it.0);
        self.there.last().map_or(logged, |saved| logged.max(*saved))
    }

    /// How the step after step `step` was started.
    pub(super) fn era_after(&self, step: u64) -> &ResumeEvent {
        let mut eras = self.eras.iter().rev();
        let found = eras.find(|era| era.step <= step);
        found.unwrap_or(&self.eras[0])
    }

    /// A checkpoint with every byte checked. The inner error says why it is not that of the log.
    pub(super) fn open(&self, step: u64) -> Result<Result<Opened, String>> {
        let folder = checkpoint::folder(self.folder(), step);
        check_no_link(&folder)?;
        for entry in fs::read_dir(&folder).map_err(checkpoint::unreadable(&folder))? {
            check_no_link(&entry.map_err(checkpoint::unreadable(&folder))?.path())?;
        }
        let changed =
            |why: String| format!("the checkpoint of step {step} is not that of the log: {why}");
        let opened = match checkpoint::open(&folder) {
            Err(Error::Data(why)) => return Ok(Err(changed(why))),
            opened => opened?,
        };
        let named = self.logged.run.manifests.get(&step);
        if let Some(named) = named.filter(|named| **named != opened.manifest_blake3) {
            return Ok(Err(changed(format!(
                "its manifest has the BLAKE3 {}, in the log it is {named}",
                opened.manifest_blake3
            ))));
        }
        match check_run(&opened) {
            Err(Error::Data(why)) => Ok(Err(changed(why))),
            checked => checked.map(|()| Ok(opened)),
        }
    }
}

/// The line of each era, and how it began.
fn eras(run: &Run) -> Vec<(u64, ResumeEvent)> {
    let start = run.start.clone();
    let first = ResumeEvent {
        config: start.config,
        versions: start.versions,
        blake3: start.blake3,
        devices: start.devices,
        steps: start.steps,
        ..ResumeEvent::default()
    };
    let resumes = run
        .resumes_at
        .iter()
        .copied()
        .zip(run.resumes.iter().cloned());
    let resumes = resumes.filter(|it| !it.1.config.is_empty());
    std::iter::once((1, first)).chain(resumes).collect()
}

/// What eras that begin after line `since` changed: settings and data, and programs and held-out
/// data. What the lines themselves say of it is not believed.
fn later_changes(eras: &[(u64, ResumeEvent)], since: u64) -> [Vec<String>; 2] {
    let (mut changed, mut noted) = (Vec::new(), Vec::new());
    for pair in eras.windows(2).filter(|pair| pair[1].0 > since) {
        let (then, (line, now)) = (&pair[0].1, &pair[1]);
        let at = format!("line {line}, a resume after the published head, changes");
        let configs = [then, now].map(|era| Config::from_checkpoint(&era.config));
        if let [Ok(before), Ok(after)] = &configs {
            changed.extend(after.changes(before).iter().map(|it| format!("{at} {it}")));
            let is_fixed = after.schedule == Schedule::Constant && after.warmup_steps.is_some();
            let is_longer = then.steps != now.steps && !is_fixed;
            if is_longer || after.warmup_steps != before.warmup_steps {
                let text = "the number of steps or warm-up steps, on which learning rates depend";
                changed.push(format!("{at} {text}"));
            }
        } else if then.config != now.config {
            changed.push(format!("{at} settings that cannot be read"));
        }
        let of = |era: &ResumeEvent| {
            let contents = era.blake3.clone();
            [
                contents.data_blake3,
                contents.program_blake3,
                contents.held_out_blake3,
            ]
        };
        let names = ["the training data", "the program", "the held-out data"];
        for (name, (then, now)) in names.into_iter().zip(of(then).into_iter().zip(of(now))) {
            let list = if name == names[0] {
                &mut changed
            } else {
                &mut noted
            };
            list.extend((then != now).then(|| format!("{at} {name}")));
        }
    }
    [changed, noted]
}

/// Refuses a symbolic link, which may lead out of the folder.
fn check_no_link(path: &Path) -> Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink()) {
        return Err(Error::Data(format!(
            "{}: expected a file or folder of the run, got a symbolic link, which may lead anywhere; \
             help: copy what you trust in its place",
            path.display()
        )));
    }
    Ok(())
}
