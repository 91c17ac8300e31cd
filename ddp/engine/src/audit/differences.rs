//! What ranks do differently in their steps although they run the same program.
//!
//! Only steps are compared, because rank 0 also saves and logs. All ranks must make the same
//! collectives with the same bytes, unless the trainer announced that it gives ranks unequal parts,
//! such as partial sums along a tree: what is announced between ranks is not compared. For other
//! transfers, a source line may move more on a rank in proportion to its rows or to its passes
//! through the model. Where these are equal, lines are compared exactly. A line that only some
//! ranks have is a difference, unless the others had no rows.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ledger::{Amount, BETWEEN_RANKS, RankLedger, STEP, Workload};

/// A source line that moves more on some ranks than on others, which their rows do not explain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Difference {
    /// The kind: `device to host` …
    pub kind: String,
    /// The source line.
    pub at: String,
    /// Whether a policy moved it, not a call.
    pub implicit: bool,
    /// The announced reason, if there is one.
    pub announced: Option<String>,
    /// Over the run, by rank.
    pub amounts: Vec<Amount>,
}

impl Difference {
    /// How far apart the ranks are: in bytes, and in transfers.
    pub(super) fn size(&self) -> (u64, u64) {
        let apart = |of: fn(&Amount) -> u64| {
            let all = || self.amounts.iter().map(of);
            all().max().unwrap_or(0) - all().min().unwrap_or(0)
        };
        (apart(|amount| amount.bytes), apart(|amount| amount.count))
    }
}

/// Compares the ranks' ledgers, in the order of ranks. The largest difference first.
pub(super) fn find(ledgers: &[RankLedger]) -> Vec<Difference> {
    let mut lines: BTreeMap<(&str, &str, bool), Difference> = BTreeMap::new();
    for (rank, ledger) in ledgers.iter().enumerate() {
        for line in ledger.lines.iter().filter(|line| line.phase == STEP) {
            let difference = lines
                .entry((&line.kind, &line.at, line.implicit))
                .or_insert_with(|| Difference {
                    kind: line.kind.clone(),
                    at: line.at.clone(),
                    implicit: line.implicit,
                    announced: line.announced.clone(),
                    amounts: vec![Amount::default(); ledgers.len()],
                });
            difference.amounts[rank].add(line.amount);
        }
    }
    let workloads: Vec<Workload> = ledgers.iter().map(|ledger| ledger.workload).collect();
    let mut found: Vec<Difference> = lines.into_values().collect();
    found.retain(|line| !is_explained(line, &workloads));
    found.sort_by_key(|difference| std::cmp::Reverse(difference.size()));
    found
}

fn is_explained(line: &Difference, workloads: &[Workload]) -> bool {
    // The least and the most of any rank.
    let range = |of: fn(&Amount, &Workload) -> u64| {
        let ranks = || line.amounts.iter().zip(workloads);
        let values = || ranks().map(|(amount, workload)| of(amount, workload));
        let ends = [values().min(), values().max()];
        ends.map(|end| u128::from(end.unwrap_or(0)))
    };
    let reasons = [range(|_, of| of.rows), range(|_, of| of.passes)];
    // Whether values differ by no larger a part than their reason. Integers make this exact.
    let is_within =
        |[least, most]: [u128; 2], reason: &[u128; 2]| least * reason[1] >= most * reason[0];
    let may_vary = line.kind != BETWEEN_RANKS;
    if !may_vary && line.announced.is_some() {
        return true;
    }
    let is_explained = |amount: [u128; 2]| {
        amount[0] == amount[1] || may_vary && reasons.iter().any(|reason| is_within(amount, reason))
    };
    is_explained(range(|amount, _| amount.bytes)) && is_explained(range(|amount, _| amount.count))
}

#[cfg(test)]
mod tests;
