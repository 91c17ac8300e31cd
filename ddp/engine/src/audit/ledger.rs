//! The ledger of one rank, for rank 0. Bounded: the lines that move most, and the sums of
//! the rest.

use std::collections::BTreeMap;

use ddp_kernels::Device;
use ddp_kernels::transfer::{Hint, Ledger, Phase, TransferKind};
use serde::{Deserialize, Serialize};

use crate::devices;
use ddp_data::Batch;

/// The most lines of a rank: more than a training has, and few enough for thousands of ranks.
pub(super) const LINES_MAX: usize = 64;
/// The most hints of a rank.
const HINTS_MAX: usize = 16;
/// The most characters of a source line's name; a longer one is cut at its start.
const SITE_CHARS_MAX: usize = 160;

/// The name of `Phase::Step`.
pub(super) const STEP: &str = "step";
/// The name of `TransferKind::Collective`.
pub const BETWEEN_RANKS: &str = "between ranks";

/// The kinds in the order in which they are printed.
pub(super) const KINDS: [TransferKind; 6] = [
    TransferKind::Upload,
    TransferKind::Download,
    TransferKind::Peer,
    TransferKind::Staged,
    TransferKind::Collective,
    TransferKind::ScalarRead,
];
/// The phases other than the step, in order.
pub(super) const OTHER_PHASES: [Phase; 4] = [
    Phase::Setup,
    Phase::Log,
    Phase::Evaluation,
    Phase::Checkpoint,
];

/// One rank's part of the training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Steps, the same on every rank.
    pub steps: u64,
    /// This rank's rows, over all steps.
    pub rows: u64,
    /// Micro-batches that this rank ran.
    pub passes: u64,
}

impl Workload {
    /// Counts a step on `batch`.
    pub fn count(&mut self, batch: &Batch) {
        self.steps += 1;
        self.rows += batch.mine as u64;
        self.passes += batch.micro_count() as u64;
    }
}

/// Transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// Their number.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Amount {
    pub(super) fn add(&mut self, other: Amount) {
        self.count = self.count.saturating_add(other.count);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// Everything that one source line moved in one phase and of one kind, between any devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) phase: String,
    pub(super) kind: String,
    /// The source line; empty for the sum of many.
    pub(super) at: String,
    /// Whether a policy moved it, not a call.
    pub(super) implicit: bool,
    pub(super) announced: Option<String>,
    pub(super) amount: Amount,
}

/// The ledger of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankLedger {
    pub(super) devices: Vec<String>,
    pub(super) simulated: bool,
    pub(super) workload: Workload,
    pub(super) lines: Vec<Line>,
    /// The sums of lines that were cut, by phase and kind.
    pub(super) rest: Vec<Line>,
    pub(super) hints: Vec<RankedHint>,
}

impl RankLedger {
    pub(super) fn new(ledger: &Ledger, workload: Workload, devices: &[Device]) -> RankLedger {
        let mut all: BTreeMap<(Phase, TransferKind, String, bool), Line> = BTreeMap::new();
        for row in ledger.rows() {
            let at = ending(row.place().to_string(), SITE_CHARS_MAX);
            let (phase, kind) = (row.phase.to_string(), row.kind.to_string());
            let (implicit, announced) = (row.implicit, row.announced.map(str::to_string));
            let key = (row.phase, row.kind, at.clone(), implicit);
            let line = Line {
                phase,
                kind,
                at,
                implicit,
                announced,
                amount: Amount::default(),
            };
            all.entry(key).or_insert(line).amount.add(Amount {
                count: row.count,
                bytes: row.bytes,
            });
        }
        let (lines, rest) = bounded(all.into_values().collect());
        RankLedger {
            devices: devices.iter().map(|it| devices::described(*it)).collect(),
            simulated: devices.iter().any(|it| devices::is_simulated(*it)),
            workload,
            lines,
            rest,
            hints: ledger.hints().iter().take(HINTS_MAX).map(hint).collect(),
        }
    }
}

/// The lines that are kept: those of the step first, then the largest. And the sums of the others.
pub(super) fn bounded(mut lines: Vec<Line>) -> (Vec<Line>, Vec<Line>) {
    lines.sort_by_key(|line| {
        (
            line.phase != STEP,
            std::cmp::Reverse((line.amount.bytes, line.amount.count)),
        )
    });
    let mut rest: BTreeMap<(String, String), Line> = BTreeMap::new();
    for line in lines.split_off(lines.len().min(LINES_MAX)) {
        let sum = rest.entry((line.phase.clone(), line.kind.clone()));
        let sum = sum.or_insert_with(|| Line {
            phase: line.phase,
            kind: line.kind,
            ..Line::default()
        });
        sum.amount.add(line.amount);
    }
    (lines, rest.into_values().collect())
}

/// A hint of the ledger, with the ranks that have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankedHint {
    /// The pattern.
    pub pattern: String,
    /// The source lines.
    pub lines: Vec<String>,
    /// The ranks; empty in a rank's own ledger.
    pub ranks: Vec<usize>,
    /// How often it occurred on all ranks.
    pub count: u64,
    /// The text of the rank on which it occurred most often.
    pub text: String,
}

fn hint(hint: &Hint) -> RankedHint {
    let lines = hint.lines.iter();
    RankedHint {
        pattern: hint.pattern.to_string(),
        lines: lines
            .map(|line| ending(line.clone(), SITE_CHARS_MAX))
            .collect(),
        ranks: Vec::new(),
        count: hint.count,
        text: hint.to_string(),
    }
}

/// The last characters of a text, if it has more than `chars_max`.
fn ending(text: String, chars_max: usize) -> String {
    let too_many = text.chars().count().saturating_sub(chars_max);
    if too_many == 0 {
        text
    } else {
        format!("…{}", text.chars().skip(too_many + 1).collect::<String>())
    }
}
