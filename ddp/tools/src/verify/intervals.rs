//! Which steps of a run are repeated: intervals from a checkpoint that is there, or from the seed,
//! to the next one, and why some of them cannot be repeated here.

use ddp_comm::World;
use ddp_kernels::setting::SettingName;
use serde::Serialize;

use super::claims::Claims;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::metrics_log::ResumeEvent;
use crate::setting::SAME_BITS;
use crate::trainer::{program_blake3, program_version};
use crate::units::plural;

/// Which intervals are repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Every one.
    All,
    /// So many, drawn by a text that was not known when the head was published.
    Drawn {
        /// How many.
        count: usize,
        /// The text.
        seed: String,
    },
    /// Those that have steps after the first number, up to the second; None for the last step.
    Steps(u64, Option<u64>),
}

/// Steps of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Interval {
    /// From the checkpoint after this step, or from the seed if it is 0.
    pub(super) from: u64,
    /// To this one.
    pub(super) to: u64,
    /// Whether it ends with a checkpoint that is there.
    pub(super) is_saved: bool,
    /// Why it cannot be repeated here.
    pub(super) why_not: Option<String>,
}

impl Interval {
    pub(super) fn steps(&self) -> u64 {
        self.to - self.from
    }
}

/// Who verifies.
pub(super) struct Verifier {
    pub(super) version: String,
    pub(super) blake3: String,
    pub(super) ranks: u64,
    /// Whether another build of the program is accepted.
    pub(super) accepts_other: bool,
}

impl Verifier {
    pub(super) fn here(world: &World, accepts_other: bool) -> Result<Verifier> {
        Ok(Verifier {
            version: program_version(world),
            blake3: program_blake3()?,
            ranks: world.size() as u64,
            accepts_other,
        })
    }

    /// Whether the log names another build. Version 0.8 and older named none.
    pub(super) fn is_other(&self, era: &ResumeEvent) -> bool {
        ![&*self.blake3, ""].contains(&&*era.blake3.program_blake3)
    }
}

/// All intervals of a run, up to step `to`.
pub(super) fn all(claims: &Claims, verifier: &Verifier, to: u64) -> Vec<Interval> {
    let saved = claims.there.range(..=to);
    let mut ends: Vec<u64> = saved.copied().collect();
    if ends.last().is_none_or(|last| *last < to) {
        ends.push(to);
    }
    let starts = [0].into_iter().chain(ends.clone());
    let pairs = starts.zip(ends).filter(|(from, to)| from < to);
    let interval = |(from, to)| Interval {
        from,
        to,
        is_saved: claims.there.contains(&to),
        why_not: why_not(claims, verifier, [from, to]),
    };
    pairs.map(interval).collect()
}

/// Why the steps between these cannot be repeated here.
fn why_not(claims: &Claims, verifier: &Verifier, [from, to]: [u64; 2]) -> Option<String> {
    let (era, run) = (claims.era_after(from), &claims.logged.run);
    let version = era.versions.get("program").map_or("", String::as_str);
    if version != verifier.version {
        return Some(format!(
            "{version} trained it, and this is {}; help: verify it with the program that trained it",
            verifier.version
        ));
    }
    if verifier.is_other(era) && !verifier.accepts_other {
        return Some(format!(
            "another build of {version} trained it: its file has the BLAKE3 {}, this one {}; help: \
             get that build, or accept this one by {}",
            era.blake3.program_blake3,
            verifier.blake3,
            SettingName("other-program")
        ));
    }
    let mut within = claims
        .eras
        .iter()
        .filter(|it| from < it.step && it.step < to);
    let is_other = |it: &&ResumeEvent| {
        !it.overridden.is_empty() || it.blake3.program_blake3 != era.blake3.program_blake3
    };
    if let Some(other) = within.find(is_other) {
        let step = other.step;
        return Some(format!(
            "it was resumed after step {step} with other settings or another program, and that \
             checkpoint is not there"
        ));
    }
    let config = Config::from_checkpoint(&era.config);
    if config.is_ok_and(|config| config.same_bits.is_some()) {
        return None;
    }
    let since = run.ranks.partition_point(|(step, _)| *step <= from);
    let mut ranks = run.ranks[since.saturating_sub(1)..].iter();
    let first = ranks.next().map_or(1, |(_, ranks)| *ranks);
    if let Some((step, other)) = ranks.find(|it| it.0 < to && it.1 != first) {
        let other = plural(*other, "rank");
        return Some(format!(
            "{other} continued after step {step}, and without {SAME_BITS} their sums have other \
             roundings"
        ));
    }
    (first != verifier.ranks).then(|| {
        let (own, here) = (plural(first, "rank"), verifier.ranks);
        format!(
            "{own} trained it without {SAME_BITS}, and here are {here}; help: start as many, by {} \
             {first}",
            SettingName("ranks")
        )
    })
}

/// Those of `all` that are chosen. Only what can be repeated is drawn.
pub(super) fn chosen(all: &[Interval], choice: &Choice, head: &str) -> Result<Vec<Interval>> {
    match choice {
        Choice::All => Ok(all.to_vec()),
        Choice::Steps(from, to) => {
            let last = all.last().map_or(0, |it| it.to);
            let to = to.unwrap_or(last);
            if *from >= to || to > last {
                return Err(Error::Usage(format!(
                    "verify {} {from} {} {to}: expected steps of the run, which has {last}; help: \
                     give smaller ones, the first below the second",
                    SettingName("from"),
                    SettingName("to")
                )));
            }
            let within = all.iter().filter(|it| it.to > *from && it.from < to);
            Ok(within.cloned().collect())
        }
        Choice::Drawn { count, seed } => {
            let can = all.iter().filter(|it| it.why_not.is_none());
            let mut drawn: Vec<_> = can.cloned().collect();
            // Whoever made the log could not foresee which ones these are.
            drawn.sort_by_cached_key(|it| {
                let text = format!("{seed}\n{head}\n{} {}", it.from, it.to);
                *blake3::hash(text.as_bytes()).as_bytes()
            });
            drawn.truncate(*count);
            drawn.sort_by_key(|it| it.from);
            Ok(drawn)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_and_head_and_leave_out_what_cannot_be_repeated() {
        let interval = |at: u64| Interval {
            from: 10 * at,
            to: 10 * at + 10,
            is_saved: true,
            why_not: (at == 3).then(String::new),
        };
        let all: Vec<_> = (0..40).map(interval).collect();
        let draw = |seed: &str, head: &str| {
            let choice = Choice::Drawn {
                count: 5,
                seed: seed.into(),
            };
            let drawn = chosen(&all, &choice, head).unwrap();
            assert!(drawn.len() == 5 && drawn.iter().all(|it| it.from != 30));
            Vec::from_iter(drawn.into_iter().map(|it| it.from))
        };
        assert_eq!(draw("a", "b"), draw("a", "b"));
        assert!(draw("a", "b") != draw("c", "b") && draw("a", "b") != draw("a", "c"));
        let of = |from, to| chosen(&all, &Choice::Steps(from, to), "");
        let steps = Vec::from_iter(of(25, Some(41)).unwrap().iter().map(|it| it.from));
        // What cannot be repeated is chosen, too: the verdict then says why.
        assert_eq!(steps, [20, 30, 40]);
        for (from, to) in [(400, None), (7, Some(7)), (0, Some(401))] {
            assert_eq!(of(from, to).unwrap_err().exit_code(), 2);
        }
    }
}
