//! The ledger of one rank, for rank 0.

use std::collections::BTreeMap;

use ddp_kernels::Device;
use ddp_kernels::transfer::{Hint, Ledger, Phase, TransferKind};
use serde::{Deserialize, Serialize};

use crate::devices;
use ddp_data::Batch;

/// The most hints of a rank.
const HINTS_MAX: usize = 16;

/// The name of `Phase::Step`.
pub(super) const STEP: &str = "step";
/// The name of `TransferKind::Collective`.
pub(crate) const BETWEEN_RANKS: &str = "between ranks";

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
pub(super) struct LedgerLine {
    pub(super) phase: String,
    pub(super) kind: String,
    /// The source line.
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
    pub(super) lines: Vec<LedgerLine>,
    pub(super) hints: Vec<RankedHint>,
}

impl RankLedger {
    pub(super) fn new(ledger: &Ledger, workload: Workload, devices: &[Device]) -> RankLedger {
        let mut all: BTreeMap<(Phase, TransferKind, String, bool), LedgerLine> = BTreeMap::new();
        for row in ledger.rows() {
            let key = (row.phase, row.kind, row.place().to_string(), row.implicit);
            let line = LedgerLine {
                phase: row.phase.to_string(),
                kind: row.kind.to_string(),
                at: key.2.clone(),
                implicit: row.implicit,
                announced: row.announced.map(str::to_string),
                amount: Amount::default(),
            };
            all.entry(key).or_insert(line).amount.add(Amount {
                count: row.count,
                bytes: row.bytes,
            });
        }
        RankLedger {
            devices: devices.iter().map(|it| devices::described(*it)).collect(),
            simulated: devices.iter().any(|it| devices::is_simulated(*it)),
            workload,
            lines: all.into_values().collect(),
            hints: ledger.hints().iter().take(HINTS_MAX).map(hint).collect(),
        }
    }
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
    RankedHint {
        pattern: hint.pattern.to_string(),
        lines: hint.lines.clone(),
        ranks: Vec::new(),
        count: hint.count,
        text: hint.to_string(),
    }
}
