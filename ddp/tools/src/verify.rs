//! `ddp-train verify RUN`: repeats steps of a run that somebody else trained, and says whether they
//! give what its log and its checkpoints claim.
//!
//! `claims.rs` reads what the folder claims, `intervals.rs` chooses the steps, `settings.rs` keeps
//! the claimed settings that affect bits, `repeat.rs` repeats the steps by the machinery of
//! `compare --replay`, and `causes.rs` names possible causes of a difference. Everything in the
//! folder comes from a stranger. What one rank alone finds is exchanged before it decides anything.

mod causes;
mod claims;
mod intervals;
mod repeat;
mod settings;

use std::path::PathBuf;

use ddp_comm::{Field, World};
use ddp_kernels::files;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::causes::{causes, found_text};
use self::claims::Claims;
pub use self::intervals::Choice;
use self::intervals::{Interval, Verifier, all, chosen};
use self::repeat::{Difference, Repeats, described};
pub use self::settings::Given;
use self::settings::settled;
use crate::compare::MakeProgram;
use crate::error::{Error, Result};
use crate::exchange;
use crate::metrics_log::FoundHead;
use crate::output::Say;
use crate::shown::shown;
use crate::units::plural;

/// The file that a verdict is written to.
pub const VERDICT_FILE: &str = "verdict.json";

/// What is to be verified.
#[derive(Clone, Debug)]
pub struct Request {
    /// The folder of the run.
    pub run: PathBuf,
    /// The head that was published.
    pub head: Option<String>,
    /// Which steps are repeated.
    pub choice: Choice,
    /// Data and machine.
    pub given: Given,
    /// Whether another build of the program is accepted.
    pub accepts_other: bool,
    /// The folder for the verdict.
    pub out: Option<PathBuf>,
    /// Whether it is printed as JSON.
    pub as_json: bool,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Outcome {
    #[default]
    #[serde(rename = "as claimed")]
    AsClaimed,
    #[serde(rename = "not as claimed")]
    NotAsClaimed,
    #[serde(rename = "cannot be told here")]
    Untold,
}

/// The verdict, as it is printed and written.
#[derive(Debug, Default, Serialize)]
struct Verdict {
    verdict: Outcome,
    /// What is not as claimed, or why it cannot be told.
    why: Vec<String>,
    /// What may have caused it.
    causes: Vec<String>,
    /// What was not checked, and what to know of the rest.
    notes: Vec<String>,
    /// Those that were repeated, up to the first difference.
    intervals: Vec<Interval>,
    cannot_repeat: Vec<Interval>,
    steps: u64,
    steps_of_run: u64,
    steps_that_cannot_be_repeated: u64,
    steps_compared: u64,
    #[serde(flatten)]
    facts: Value,
}

/// Verifies a run. All ranks call it together. A verdict other than `as claimed` is an error.
pub fn verify(request: &Request, make: MakeProgram, world: &World, say: Say<'_>) -> Result<()> {
    let mut verdict = Verdict {
        facts: json!({
            "run": request.run.to_string_lossy(),
            "seed": match &request.choice {
                Choice::Drawn { seed, .. } => Some(seed),
                _ => None,
            },
            "lines": null,
            "head": null,
            "published_head": null,
            "program": null,
            "program_blake3": null,
            "ranks": world.size(),
            "first_difference": null,
        }),
        ..Verdict::default()
    };
    let mut printed = |line: &str| {
        if request.as_json {
            return Ok(());
        }
        say(&shown(line))
    };
    let found = verdict.find(request, (make, world), &mut printed);
    let all_are_here = found.is_ok();
    match found {
        // All ranks end alike; rank 0 says why.
        Ok(()) => verdict.verdict = exchange::gather(world, &verdict.verdict)?[0],
        Err(error) if verdict.ends_without(&error) => return Err(error),
        Err(error) => verdict.because(Outcome::Untold, error.to_string()),
    }
    verdict.lines().iter().try_for_each(|line| printed(line))?;
    let written = verdict.write(request, world, say);
    if all_are_here {
        agreed(world, written)?;
    } else {
        written?;
    }
    let text = format!("{}: {}", verdict.name(), verdict.why.join("; "));
    match verdict.verdict {
        Outcome::AsClaimed => Ok(()),
        Outcome::NotAsClaimed => Err(Error::NotAsClaimed(text)),
        Outcome::Untold => Err(Error::Untold(text)),
    }
}

/// What this rank has, or the error of the first rank that has one. All ranks call it together.
fn agreed<T>(world: &World, mine: Result<T>) -> Result<T> {
    let outcome = match &mine {
        Ok(_) => Ok(&[][..]),
        Err(error) => Err((error.exit_code(), error.to_string())),
    };
    let all = world.share_outcome(outcome)?;
    // Alone, a rank keeps the kind of its error.
    if world.size() > 1 {
        all?;
    }
    mine
}

/// Prints a line.
type Printed<'a> = &'a mut dyn FnMut(&str) -> Result<()>;

impl Verdict {
    /// Says what is not as claimed, or why it cannot be told. What is false stays false.
    fn because(&mut self, outcome: Outcome, why: impl Into<String>) {
        if self.verdict != Outcome::NotAsClaimed {
            self.verdict = outcome;
        }
        self.why.push(why.into());
    }

    fn name(&self) -> &'static str {
        match self.verdict {
            Outcome::AsClaimed => "as claimed",
            Outcome::NotAsClaimed => "not as claimed",
            Outcome::Untold => "cannot be told here",
        }
    }

    /// Whether the command fails without a verdict: wrong flags, a lost rank, a stop, or no log.
    fn ends_without(&self, error: &Error) -> bool {
        let is_of_job = matches!(error, Error::Comm(_) | Error::Stopped(_));
        let has_log = !self.facts["head"].is_null();
        // Another rank's error has only the code of its kind.
        is_of_job || [2, 75].contains(&error.exit_code()) || error.exit_code() == 74 && !has_log
    }

    /// Compares the run with its claims. All ranks call it together.
    fn find(
        &mut self,
        request: &Request,
        (make, world): (MakeProgram, &World),
        say: Printed<'_>,
    ) -> Result<()> {
        let read = Claims::read(&request.run, request.head.as_deref());
        let claims = agreed(world, read)?;
        let verifier = agreed(world, Verifier::here(world, request.accepts_other))?;
        let of_flags = format!(
            "{:?}, head {:?}, another program {}, as logged {}",
            request.choice, request.head, request.accepts_other, request.given.as_logged
        );
        let (folder, flags) = (
            "give every rank the same folder",
            "give every rank the same",
        );
        world.handshake(&[
            Field::must_match("the log", &*claims.head, folder),
            Field::must_match("the checkpoints", format!("{:?}", claims.there), folder),
            Field::must_match("the program's file", &*verifier.blake3, flags),
            Field::must_match("the flags of verify", of_flags, flags),
        ])?;
        self.facts["lines"] = json!(claims.lines);
        self.facts["head"] = json!(claims.head);
        self.facts["published_head"] = json!(claims.published);
        self.facts["program"] = json!(verifier.version);
        self.facts["program_blake3"] = json!(verifier.blake3);
        self.check_head(request, &claims, say)?;
        if self.verdict == Outcome::AsClaimed {
            self.repeat(request, &claims, &verifier, (make, world), say)?;
        }
        Ok(())
    }

    /// Writes and prints it as JSON, where that is wanted.
    fn write(&self, request: &Request, world: &World, say: Say<'_>) -> Result<()> {
        if world.rank() > 0 {
            return Ok(());
        }
        let text = json!(self);
        if let Some(out) = &request.out {
            files::make_folder(out)?;
            files::replace_with(&out.join(VERDICT_FILE), format!("{text:#}\n").as_bytes())?;
        }
        if request.as_json {
            say(&text)?;
        }
        Ok(())
    }

    fn check_head(&mut self, request: &Request, claims: &Claims, say: Printed<'_>) -> Result<()> {
        let Claims { lines, head, .. } = claims;
        say(&format!(
            "run {}: {lines} lines, head {head}",
            request.run.display()
        ))?;
        if let Some(why) = &claims.forged {
            self.because(Outcome::NotAsClaimed, format!("the log was changed: {why}"));
            return Ok(());
        }
        let Some(wanted) = &request.head else {
            let text = "no published head was given, so the log may have been written afterwards";
            self.notes.push(text.into());
            return Ok(());
        };
        match claims.published {
            Some(FoundHead {
                lines, before_line, ..
            }) => {
                self.notes.extend(claims.noted_later.iter().cloned());
                for text in &claims.changed_later {
                    let help = "help: give a head that was published after it";
                    self.because(Outcome::Untold, format!("{text}; {help}"));
                }
                let was = |line| format!(", as they were before line {line}, where it was resumed");
                let was = before_line.map_or(String::new(), was);
                say(&format!(
                    "the published head is that of its first {lines} lines{was}"
                ))
            }
            None => {
                let text = "the log never had the published head";
                self.because(Outcome::NotAsClaimed, format!("{text} {wanted}"));
                let cause = "a line of the log was changed, added or removed since the head was \
                             published, or it is the head of another run";
                self.causes.push(cause.into());
                Ok(())
            }
        }
    }

    fn repeat(
        &mut self,
        request: &Request,
        claims: &Claims,
        verifier: &Verifier,
        (make, world): (MakeProgram, &World),
        say: Printed<'_>,
    ) -> Result<()> {
        let last = match request.choice {
            Choice::Steps(_, Some(to)) => to.min(claims.last()),
            _ => claims.last(),
        };
        if claims.logged.run.start.blake3.program_blake3.is_empty() {
            let text = "the log has no BLAKE3 of program, data and checkpoints: version 0.8 or older \
                        wrote it";
            self.notes.push(text.into());
        }
        let intervals = all(claims, verifier, last);
        // Lines that were added since must not decide what is drawn.
        let head = request.head.as_ref().unwrap_or(&claims.head);
        let chosen = chosen(&intervals, &request.choice, head)?;
        let is_drawn = matches!(request.choice, Choice::Drawn { .. });
        let wanted = if is_drawn { &intervals } else { &chosen };
        let cannot = wanted.iter().filter(|it| it.why_not.is_some());
        self.cannot_repeat = cannot.cloned().collect();
        let can = || chosen.iter().filter(|it| it.why_not.is_none());
        self.steps = can().map(Interval::steps).sum();
        self.steps_of_run = claims.last();
        self.steps_that_cannot_be_repeated = self.cannot_repeat.iter().map(Interval::steps).sum();
        self.announce(&request.choice, [can().count(), intervals.len()], say)?;
        if can().count() == 0 || !is_drawn && !self.cannot_repeat.is_empty() {
            let whys = self.cannot_repeat.iter();
            let mut whys: Vec<String> = whys.filter_map(|it| it.why_not.clone()).collect();
            whys.dedup();
            if whys.is_empty() {
                whys.push("the run has no steps to repeat".into());
            }
            whys.into_iter()
                .for_each(|why| self.because(Outcome::Untold, why));
        }
        for interval in can() {
            let before = self.why.len();
            self.repeat_one(request, claims, verifier, (make, world), interval)?;
            // Only rank 0 has the reasons.
            if exchange::gather(world, &(self.why.len() > before))?.contains(&true) {
                break;
            }
            say(&format!("as the log says: {}", described(interval)))?;
        }
        Ok(())
    }

    /// Says what is repeated, and what cannot be.
    fn announce(&self, choice: &Choice, [chosen, all]: [usize; 2], say: Printed<'_>) -> Result<()> {
        let (all, steps) = (plural(all as u64, "interval"), plural(self.steps, "step"));
        let drawn = match choice {
            Choice::Drawn { seed, .. } => format!(", drawn by '{seed}'"),
            _ => String::new(),
        };
        say(&format!(
            "repeats {chosen} of {all}{drawn}: {steps} from checkpoints that are there, or from the \
             seed"
        ))?;
        let text = |it: &Interval| {
            let why = it.why_not.as_ref()?;
            Some(format!("cannot repeat {}: {why}", described(it)))
        };
        let mut lines = self.cannot_repeat.iter().filter_map(text);
        lines.try_for_each(|line| say(&line))
    }

    fn repeat_one(
        &mut self,
        request: &Request,
        claims: &Claims,
        verifier: &Verifier,
        (make, world): (MakeProgram, &World),
        interval: &Interval,
    ) -> Result<()> {
        let mut saved = None;
        for step in [interval.from, interval.to] {
            if !claims.there.contains(&step) {
                continue;
            }
            let opened = agreed(world, claims.open(step))?;
            // A host may have other files than the next.
            let whys = exchange::gather(world, &opened.as_ref().err().cloned())?;
            if let Some(why) = whys.into_iter().flatten().next() {
                self.because(Outcome::NotAsClaimed, why);
                let cause = "a file of the checkpoint or a line of the log was changed or damaged";
                self.causes.push(cause.into());
                return Ok(());
            }
            saved = opened.ok().filter(|_| step == interval.to);
        }
        let era = claims.era_after(interval.from);
        let place = era.devices.first().map_or("cpu", String::as_str);
        let settled = settled(&era.config, &request.given, place, world.local_size());
        let settled = agreed(world, settled)?;
        let repeats = Repeats {
            claims,
            make,
            world,
            settled: &settled,
            interval,
            saved: saved.as_ref(),
        };
        // The settings are the run's: that they are refused here says nothing of the command line.
        let found = repeats.run().map_err(|error| match error.exit_code() {
            2 => Error::Data(error.to_string()),
            _ => error,
        })?;
        self.steps_compared += found.compared;
        self.intervals.push(interval.clone());
        for text in &found.other_data {
            self.because(Outcome::NotAsClaimed, text.clone());
        }
        let mut others = found.other_machine.clone();
        if verifier.is_other(era) {
            others.push("this is another build of the program".into());
        }
        for text in &others {
            if !self.notes.contains(text) {
                self.notes.push(text.clone());
            }
        }
        let Some(difference) = &found.difference else {
            return Ok(());
        };
        self.facts["first_difference"] = match difference {
            Difference::Step(parting, _) => json!(parting),
            Difference::Saved(step, others) => json!({ "step": step, "checkpoint": others }),
        };
        let text = found_text(difference);
        self.causes = causes(difference, &found, &others);
        let is_unlike = found.other_data.is_empty() && !others.is_empty();
        if found.is_unsteady || is_unlike {
            self.because(Outcome::Untold, text);
        } else {
            self.because(Outcome::NotAsClaimed, text);
        }
        Ok(())
    }

    /// For people.
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let list = |name: &str, of: &[String]| {
            of.iter()
                .map(|text| format!("{name}: {text}"))
                .collect::<Vec<_>>()
        };
        lines.extend(list("note", &self.notes));
        lines.extend(list(self.name(), &self.why));
        lines.extend(list("possible cause", &self.causes));
        if self.verdict == Outcome::AsClaimed {
            let (steps, compared) = (plural(self.steps, "step"), self.steps_compared);
            let saved = self.intervals.iter().filter(|it| it.is_saved).count();
            let saved = plural(saved as u64, "checkpoint");
            let (all, cannot) = (self.steps_of_run, self.steps_that_cannot_be_repeated);
            let cannot = match cannot {
                0 => String::new(),
                cannot => format!("; {cannot} of the {all} cannot be repeated here"),
            };
            lines.push(format!(
                "as claimed: {steps} of {all} repeated, {compared} of them compared with the log, \
                 and {saved} bit by bit{cannot}"
            ));
        }
        lines
    }
}
