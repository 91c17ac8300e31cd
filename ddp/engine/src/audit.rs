//! The placement audit at the end of a run: what crossed devices in a step, on which rank, at which
//! source line; where ranks differ though they should not; and hints.
//!
//! Every rank sums up its ledger (`audit/ledger.rs`). Rank 0 compares the sums
//! (`audit/differences.rs`) and prints them (`audit/show.rs`).

mod differences;
mod ledger;
mod show;

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_kernels::Device;
use ddp_kernels::transfer::Ledger;
use serde::{Deserialize, Serialize};

pub use self::differences::Difference;
pub use self::ledger::{Amount, BETWEEN_RANKS, Workload};
use self::ledger::{HintLine, RankLedger, STEP};
use crate::error::Result;

/// What the ranks of a run moved. `Display` is for people, serde for the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Audit {
    /// Steps of the run.
    pub steps: u64,
    /// Whether any device is simulated.
    pub simulated: bool,
    /// The sums of each rank, in rank order.
    pub ranks: Vec<RankSums>,
    /// Differences between ranks in their steps.
    pub differences: Vec<Difference>,
    /// Patterns that waste time, each once for all ranks.
    pub hints: Vec<RankedHint>,
}

/// What one rank moved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankSums {
    /// The rank.
    pub rank: usize,
    /// Its devices.
    pub devices: Vec<String>,
    /// Rows that it trained on.
    pub rows: u64,
    /// Micro-batches that it ran.
    pub passes: u64,
    /// Per step, by kind: only inside steps.
    pub per_step: BTreeMap<String, PerStep>,
    /// Over the run, by phase and kind.
    pub phases: BTreeMap<String, BTreeMap<String, Amount>>,
}

/// Transfers of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerStep {
    /// Their number.
    pub count: f64,
    /// Their bytes.
    pub bytes: f64,
}

/// A hint of the ledger, with the ranks that have it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankedHint {
    /// The pattern.
    pub pattern: String,
    /// The source lines.
    pub lines: Vec<String>,
    /// The ranks.
    pub ranks: Vec<usize>,
    /// How often it occurred on all ranks.
    pub count: u64,
    /// The text of the rank on which it occurred most often.
    pub text: String,
}

/// Gathers what all ranks moved and returns the audit on rank 0. `workload` is this rank's part of
/// the training, on `devices`.
///
/// All ranks call it together after a successful run; after a failure, ranks may be gone. It reads
/// the ledger of the caller.
pub fn audit(world: &World, workload: Workload, devices: &[Device]) -> Result<Option<Audit>> {
    let mine = RankLedger::new(&Ledger::current(), workload, devices).to_text()?;
    let all = world.all_gather_bytes(&mine)?;
    if world.rank() != 0 {
        return Ok(None);
    }
    let ledgers = all
        .iter()
        .enumerate()
        .map(|(rank, text)| RankLedger::from_text(text, rank))
        .collect::<Result<Vec<_>>>()?;
    Ok(Some(Audit::of(&ledgers)))
}

impl Audit {
    /// Compares the ranks' ledgers, in the order of ranks.
    fn of(ledgers: &[RankLedger]) -> Audit {
        let ranks: Vec<RankSums> = ledgers
            .iter()
            .enumerate()
            .map(|(rank, ledger)| RankSums::of(rank, ledger))
            .collect();
        Audit {
            steps: ledgers.first().map_or(0, |ledger| ledger.workload.steps),
            simulated: ledgers.iter().any(|ledger| ledger.simulated),
            ranks,
            differences: differences::find(ledgers),
            hints: merged(ledgers),
        }
    }
}

impl RankSums {
    fn of(rank: usize, ledger: &RankLedger) -> RankSums {
        let mut phases: BTreeMap<String, BTreeMap<String, Amount>> = BTreeMap::new();
        for line in ledger.lines.iter().chain(&ledger.rest) {
            let kinds = phases.entry(line.phase.clone()).or_default();
            kinds.entry(line.kind.clone()).or_default().add(line.amount);
        }
        let Workload {
            steps,
            rows,
            passes,
        } = ledger.workload;
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
            devices: ledger.devices.clone(),
            rows,
            passes,
            per_step,
            phases,
        }
    }
}

/// The hints of all ranks, the most frequent first. The same pattern at the same lines is one hint.
fn merged(ledgers: &[RankLedger]) -> Vec<RankedHint> {
    let mut most: Vec<(u64, RankedHint)> = Vec::new();
    for (rank, ledger) in ledgers.iter().enumerate() {
        for HintLine {
            pattern,
            lines,
            count,
            text,
        } in &ledger.hints
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
