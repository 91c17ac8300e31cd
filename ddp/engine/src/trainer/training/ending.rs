//! The end of a training run on one rank: in which order, what it says and writes.

use std::mem;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_data::setting::VAL_SPLIT;
use ddp_kernels::transfer::Ledger;

use super::TrainingRun;
use crate::checkpoint::{self, Best, MODEL_FILE};
use crate::elastic::loss;
use crate::error::{Error, Result};
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, EVENTS_FILE, RunOutcome};
use crate::process;
use crate::setting::STOP_AFTER;
use crate::trainer::program;
use crate::trainer::run::Meet;

/// How long the metrics log and the report may delay the message of what failed.
const CLOSING_MAX: Duration = Duration::from_secs(10);

impl TrainingRun<'_> {
    /// Ends the run, of which `result` is the folder of the model. The metrics log's last line says
    /// how it ended, also after an error. If rank 0 is lost before that, the ranks meet again.
    pub(super) fn finish(mut self, result: Result<PathBuf>) -> Result<Option<Meet>> {
        if let Err(error) = &result {
            loss::leave_if_alone(error, self.world);
        }
        let (reason, exit_code) = match &result {
            Ok(_) => (self.early().unwrap_or_else(|| metrics_log::DONE.into()), 0),
            Err(Error::Remote(error)) if error.rank > 0 => {
                (format!("rank {}: {error}", error.rank), error.exit_code)
            }
            Err(error) => (error.to_string(), error.exit_code()),
        };
        let all_know = matches!(result, Err(Error::Stopped(_) | Error::NonFinite(_)));
        let has_failed = result.is_err() && !all_know;
        // The cause, such as a disk that does not answer, may hold up the metrics log too.
        let ending = has_failed.then(|| self.world.fail_after(CLOSING_MAX, &reason, exit_code));
        let outcome = match &result {
            Ok(_) if self.early().is_some() => RunOutcome::Early,
            _ => RunOutcome::of_exit_code(exit_code),
        };
        let closed = self.close(outcome, &reason, exit_code);
        let report = self.report();
        drop(ending);
        if has_failed {
            // Threads of the run may wait forever: the caller reports the error and ends the
            // process without waiting for them.
            mem::forget(self);
            return result.map(|_| None);
        }
        if all_know {
            // The first rank to leave ends the others, so all close their files first. The first
            // error is the one that counts.
            _ = self.world.barrier();
            if matches!(result, Err(Error::Stopped(_))) && self.world.rank() > 0 {
                // Rank 0 says it, after its progress: launchers mix the lines of several ranks.
                _ = self.world.barrier();
            }
        }
        let saved = result.and_then(|saved| closed.map(|()| saved))?;
        if self.world.is_elastic()
            && let Err(error) = self.world.barrier().map_err(Error::from)
            && self.metrics_log.is_none()
        {
            // Rank 0 may be lost before it has closed the metrics log: another one does it then.
            return if self.continues_after(&error) {
                Ok(Some(self.leave(Some(error))))
            } else {
                Err(error)
            };
        }
        if self.world.rank() == 0 {
            self.say_end(&saved, report);
        }
        Ok(None)
    }

    /// Says where the results are.
    fn say_end(&mut self, saved: &Path, report: Option<PathBuf>) {
        let (model, log) = (
            saved.join(MODEL_FILE),
            self.run.settled.out.join(EVENTS_FILE),
        );
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
            self.program
                .note(&describe_best(&self.run.settled.out, best));
        }
        if let Some(report) = report {
            self.program.note(&format!("report {}", report.display()));
        }
        self.program.finish();
    }

    /// After which step the run has stopped early, and why.
    fn early(&self) -> Option<String> {
        let (step, steps) = (self.run.plan.steps, self.state.schedule.steps);
        let [_, figure] = self.run.settled.best.names();
        let most = self.run.settled.patience().filter(|_| step < steps)?;
        Some(format!(
            "stopped early after step {step} of {steps}: the held-out {figure} has not become \
             better ({STOP_AFTER} {most})"
        ))
    }

    /// Writes the metrics log's last line.
    fn close(&mut self, outcome: RunOutcome, reason: &str, exit_code: u8) -> Result<()> {
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
    fn report(&self) -> Option<PathBuf> {
        self.metrics_log.as_ref()?;
        program::report(self.program, &self.run.settled.out)
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
