//! The placement audit at the end of a run: what crossed devices in a step, on which rank, at which
//! source line; where ranks differ but should not; and hints.
//!
//! Every rank sums up its ledger (`audit/ledger.rs`). Rank 0 compares the sums
//! (`audit/differences.rs`) and prints them (`audit/show.rs`).

mod differences;
mod ledger;
mod show;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_kernels::Device;
use ddp_kernels::transfer::Ledger;
use serde::{Deserialize, Serialize};

pub use self::differences::Difference;
pub use self::ledger::{Amount, RankedHint, Workload};
use self::ledger::{RankLedger, STEP};
use crate::error::Result;
use crate::exchange;

/// What the ranks of a run moved. `Display` is for people, serde for the metrics log.
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

/// Gathers what all ranks moved and returns the audit on rank 0. `workload` is this rank's part of
/// the training, on `devices`.
///
/// All ranks call it together after a successful run; after a failure, ranks may be gone. It reads
/// the ledger of the caller.
pub fn audit(world: &World, workload: Workload, devices: &[Device]) -> Result<Option<Audit>> {
    let mine = RankLedger::new(&Ledger::current(), workload, devices);
    let all = exchange::gather(world, &mine)?;
    Ok((world.rank() == 0).then(|| Audit::of(&all)))
}

impl Audit {
    /// Compares the ranks' ledgers, in the order of ranks.
    fn of(ledgers: &[RankLedger]) -> Audit {
        let ranks = ledgers.iter().enumerate();
        // Those of ranks that came later say nothing of the program.
        let steps = ledgers.iter().map(|ledger| ledger.workload.steps);
        let differences = if steps.clone().min() == steps.max() {
            differences::find(ledgers)
        } else {
            Vec::new()
        };
        Audit {
            steps: ledgers.first().map_or(0, |ledger| ledger.workload.steps),
            simulated: ledgers.iter().any(|ledger| ledger.simulated),
            ranks: ranks.map(|(rank, own)| RankSums::of(rank, own)).collect(),
            differences,
            hints: merged(ledgers),
        }
    }
}

impl RankSums {
    fn of(rank: usize, ledger: &RankLedger) -> RankSums {
        let mut phases: BTreeMap<String, BTreeMap<String, Amount>> = BTreeMap::new();
        for line in &ledger.lines {
            let kinds = phases.entry(line.phase.clone()).or_default();
            kinds.entry(line.kind.clone()).or_default().add(line.amount);
        }
        let Workload { steps, .. } = ledger.workload;
        let a_step = |of_run: u64| of_run as f64 / steps as f64;
        let per_step = |amount: &Amount| PerStep {
            count: a_step(amount.count),
            bytes: a_step(amount.bytes),
        };
        let in_steps = phases.get(STEP).filter(|_| steps > 0).into_iter().flatten();
        let per_step = in_steps.map(|(kind, amount)| (kind.clone(), per_step(amount)));
        RankSums {
            rank,
            devices: ledger.devices.clone(),
            rows: ledger.workload.rows,
            passes: ledger.workload.passes,
            per_step: per_step.collect(),
            phases,
        }
    }
}

/// The hints of all ranks, the most frequent first. The same pattern at the same lines is one hint.
fn merged(ledgers: &[RankLedger]) -> Vec<RankedHint> {
    let ranks = ledgers.iter().enumerate();
    let all = ranks.flat_map(|(rank, own)| own.hints.iter().map(move |hint| (rank, hint)));
    let mut all: Vec<(usize, &RankedHint)> = all.collect();
    all.sort_by_key(|(_, hint)| Reverse(hint.count));
    let mut hints: Vec<RankedHint> = Vec::new();
    for (rank, hint) in all {
        let same = |known: &&mut RankedHint| {
            (&known.pattern, &known.lines) == (&hint.pattern, &hint.lines)
        };
        match hints.iter_mut().find(same) {
            Some(known) => {
                known.ranks.push(rank);
                known.count += hint.count;
            }
            None => hints.push(RankedHint {
                ranks: vec![rank],
                ..hint.clone()
            }),
        }
    }
    hints.iter_mut().for_each(|hint| hint.ranks.sort());
    hints.sort_by_key(|hint| Reverse(hint.count));
    hints
}

#[cfg(test)]
mod tests;
