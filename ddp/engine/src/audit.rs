//! The placement audit at the end of a run: what crossed devices in a step, on which rank, at which
//! source line; where ranks differ though they should not; and hints.
//!
//! Every rank sums up its ledger (`audit/book.rs`). Rank 0 compares the sums
//! (`audit/differences.rs`) and shows them (`audit/show.rs`).

mod book;
mod differences;
mod show;

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_kernels::Device;
use ddp_kernels::transfer::Ledger;
use serde::{Deserialize, Serialize};

use self::book::{Advice, Book, STEP};
pub use self::book::{Amount, Share};
pub use self::differences::Difference;
use crate::error::Result;

/// What the ranks of a run moved. `Display` is for people, serde for the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Audit {
    /// Steps of the run.
    pub steps: u64,
    /// Whether any device is a simulated one.
    pub simulated: bool,
    /// Each rank's sums, in the order of ranks.
    pub ranks: Vec<RankSums>,
    /// What the ranks do not do alike in their steps.
    pub differences: Vec<Difference>,
    /// What costs time for nothing, each once, however many ranks it was found on.
    pub hints: Vec<RankedHint>,
}

/// What one rank moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankSums {
    /// Which rank.
    pub rank: usize,
    /// What it trains on.
    pub devices: Vec<String>,
    /// Rows that it trained on.
    pub rows: u64,
    /// Times that it went through the model with some of them: micro-batches.
    pub passes: u64,
    /// Per step, by kind: inside steps alone.
    pub per_step: BTreeMap<String, PerStep>,
    /// Over the run, by phase and kind.
    pub phases: BTreeMap<String, BTreeMap<String, Amount>>,
}

/// How often, and how much, in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerStep {
    /// Transfers.
    pub count: f64,
    /// Bytes.
    pub bytes: f64,
}

/// A hint of the ledger, with the ranks that it was found on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankedHint {
    /// Which pattern.
    pub pattern: String,
    /// The lines that make it.
    pub lines: Vec<String>,
    /// On which ranks.
    pub ranks: Vec<usize>,
    /// How often in all.
    pub count: u64,
    /// What to do, in the words of the rank that has it most often.
    pub text: String,
}

/// Gathers what all ranks moved and returns the audit on rank 0. `share` is this rank's part of the
/// training, on `devices`.
///
/// All ranks call it together after a successful run; after a failure, ranks may be gone. It reads
/// the ledger of the caller.
pub fn audit(world: &World, share: Share, devices: &[Device]) -> Result<Option<Audit>> {
    let mine = Book::new(&Ledger::current(), share, devices).to_text()?;
    let all = world.all_gather_bytes(&mine)?;
    if world.rank() != 0 {
        return Ok(None);
    }
    let books = all
        .iter()
        .enumerate()
        .map(|(rank, text)| Book::from_text(text, rank))
        .collect::<Result<Vec<_>>>()?;
    Ok(Some(Audit::of(&books)))
}

impl Audit {
    /// Compares the ranks' books, in the order of ranks.
    fn of(books: &[Book]) -> Audit {
        let ranks: Vec<RankSums> = books
            .iter()
            .enumerate()
            .map(|(rank, book)| RankSums::of(rank, book))
            .collect();
        Audit {
            steps: books.first().map_or(0, |book| book.share.steps),
            simulated: books.iter().any(|book| book.simulated),
            ranks,
            differences: differences::find(books),
            hints: merged(books),
        }
    }
}

impl RankSums {
    fn of(rank: usize, book: &Book) -> RankSums {
        let mut phases: BTreeMap<String, BTreeMap<String, Amount>> = BTreeMap::new();
        for line in book.lines.iter().chain(&book.rest) {
            let kinds = phases.entry(line.phase.clone()).or_default();
            kinds.entry(line.kind.clone()).or_default().add(line.amount);
        }
        let Share {
            steps,
            rows,
            passes,
        } = book.share;
        let a_step = |of_run: u64| of_run as f64 / steps as f64;
        let per_step = |amount: &Amount| PerStep {
            count: a_step(amount.count),
            bytes: a_step(amount.bytes),
        };
        let in_steps = phases.get(STEP).filter(|_| steps > 0).into_iter().flatten();
        let per_step = in_steps
            .map(|(kind, amount)| (kind.clone(), per_step(amount)))
            .collect();
        RankSums {
            rank,
            devices: book.devices.clone(),
            rows,
            passes,
            per_step,
            phases,
        }
    }
}

/// The hints of all ranks, the most frequent first. The same pattern at the same lines is one hint.
fn merged(books: &[Book]) -> Vec<RankedHint> {
    let mut most: Vec<(u64, RankedHint)> = Vec::new();
    for (rank, book) in books.iter().enumerate() {
        for Advice {
            pattern,
            lines,
            count,
            text,
        } in &book.hints
        {
            let known = most
                .iter_mut()
                .find(|(_, hint)| hint.pattern == *pattern && hint.lines == *lines);
            if let Some((most, hint)) = known {
                hint.ranks.push(rank);
                hint.count += count;
                if *count > *most {
                    (*most, hint.text) = (*count, text.clone());
                }
            } else {
                let (pattern, lines, text) = (pattern.clone(), lines.clone(), text.clone());
                most.push((
                    *count,
                    RankedHint {
                        pattern,
                        lines,
                        ranks: vec![rank],
                        count: *count,
                        text,
                    },
                ));
            }
        }
    }
    let mut hints: Vec<RankedHint> = most.into_iter().map(|(_, hint)| hint).collect();
    hints.sort_by_key(|hint| std::cmp::Reverse(hint.count));
    hints
}

#[cfg(test)]
mod tests;
