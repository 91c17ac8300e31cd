//! The end of a training run on one rank: what it says and writes.

use std::path::{Path, PathBuf};

use ddp_data::setting::VAL_SPLIT;
use ddp_kernels::transfer::Ledger;

use super::TrainingRun;
use crate::checkpoint::{self, Best, MODEL_FILE};
use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, EVENTS_FILE, RunOutcome};
use crate::process;
use crate::setting::STOP_AFTER;
use crate::trainer::program;

impl TrainingRun<'_> {
    /// Says where the results are.
    pub(super) fn say_end(&mut self, saved: &Path, report: Option<PathBuf>) {
        let (model, log) = (saved.join(MODEL_FILE), self.options.out.join(EVENTS_FILE));
        let line = format!("model {}, metrics log {}", model.display(), log.display());
        self.program.note(&line);
        let folds = self.run.out_of_fold.as_ref();
        if let Some(beside) = folds.and_then(|folds| folds.beside()) {
            self.program.note(&beside);
        } else if self.run.data.held_out.rows() == 0 {
            let none = "no rows were held out, so all figures are of rows that were trained on";
            self.program
                .note(&format!("{none} ({VAL_SPLIT} 0.2 holds a fifth out)"));
        }
        if let Some(early) = self.early() {
            self.program.note(&early);
        }
        let best = self.rank_run.totals.best;
        if let Some(best) = best.filter(|best| best.step < self.run.plan.steps) {
            self.program.note(&describe_best(&self.options.out, best));
        }
        if let Some(report) = report {
            self.program.note(&format!("report {}", report.display()));
        }
        self.program.finish();
    }

    /// After which step the run has stopped early, and why.
    pub(super) fn early(&self) -> Option<String> {
        let (step, steps) = (self.run.plan.steps, self.state.schedule.steps);
        let [_, figure] = self.options.best.names();
        let most = self.options.patience().filter(|_| step < steps)?;
        Some(format!(
            "stopped early after step {step} of {steps}: the held-out {figure} has not become \
             better ({STOP_AFTER} {most})"
        ))
    }

    /// Writes the metrics log's last line.
    pub(super) fn close(&mut self, outcome: RunOutcome, reason: &str, exit_code: u8) -> Result<()> {
        faults::at(FaultPoint::End)?;
        let (seconds, samples_per_s) = self.rank_run.clock.total();
        let [share, _] = self.rank_run.clock.shares();
        let tokens_per_s = self.tokens_per_s(share * samples_per_s);
        let (accuracy, totals) = (self.accuracy(), &self.rank_run.totals);
        let Some(log) = self.metrics_log else {
            return Ok(());
        };
        log.end(metrics_log::EndEvent {
            time_unix_s: metrics_log::unix_s(),
            outcome,
            reason,
            exit_code,
            steps: totals.steps,
            samples: totals.samples,
            seconds,
            samples_per_s,
            tokens_per_s,
            loss: totals.last_loss,
            eval_loss: totals.evaluation.map(|stats| stats.loss()),
            accuracy,
            peak_mb: process::peak_mb(),
            device_peak_mb: process::devices_peak_mb(&self.run.devices),
            transfers: Ledger::of_process().to_json(),
        })
    }

    /// Makes the report, however the run ended. A report that fails is only warned of.
    pub(super) fn report(&self) -> Option<PathBuf> {
        self.metrics_log.as_ref()?;
        program::report(self.program, &self.options.out)
    }
}

/// Names the folder of the best checkpoint and the figure that decided it.
fn describe_best(out: &Path, best: Best) -> String {
    let folder = checkpoint::folder(out, best.step);
    let (by, figure) = best.by();
    let figure = by.text(figure);
    // Resuming an older checkpoint may have removed it.
    let is_gone = checkpoint::is_gone(&folder);
    let gone = if is_gone { ", which is gone" } else { "" };
    format!("best on held-out rows {}, {figure}{gone}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::BestBy;

    #[test]
    fn the_loss_of_the_best_checkpoint_has_four_digits_however_small_it_is() {
        let mut best = Best {
            step: 12,
            loss: 0.000_481_234,
            ..Best::default()
        };
        assert_eq!(
            describe_best(Path::new("out"), best),
            "best on held-out rows out/checkpoints/step-00000012, loss 0.0004812, which is gone"
        );
        best.by = Some((BestBy::Balanced, 0.7125));
        let text = describe_best(Path::new("out"), best);
        assert!(
            text.ends_with("step-00000012, balanced accuracy 71.25%, which is gone"),
            "{text}"
        );
    }
}
