//! A run that is resumed and finished already: nothing is trained. What its record and folder lack, because it was killed behind its last
//! checkpoint, is written.

use ddp_kernels::transfer::Ledger;

use super::desk::warn_of_gap;
use crate::checkpoint::Opened;
use crate::config::Config;
use crate::error::Result;
use crate::metrics::{CheckpointEvent, End, Held, Record};
use crate::report;

/// On the rank that holds the record, if there is one. What only the process knew that was killed stays unknown: times and transfers.
pub(super) fn complete(config: &Config, held: Option<Held>, last: &Opened) -> Result<()> {
    let (out, state) = (&config.out, &last.state);
    tracing::info!(
        "--resume {}: the run in {} has taken all its {} steps: nothing is left to do",
        config.resume,
        out.display(),
        state.step
    );
    let Some(held) = held else { return Ok(()) };
    let unfinished = Record::of_finished(held, state.step)?;
    if let Some((mut record, kept)) = unfinished {
        warn_of_gap(out, kept, state);
        if kept.saved != Some(state.step) {
            let folder = last.folder.strip_prefix(out).unwrap_or(&last.folder).to_string_lossy();
            record.checkpoint(&CheckpointEvent { step: state.step, folder: &folder })?;
        }
        let end = End {
            reason: "done",
            exit_code: 0,
            steps: state.step,
            samples: state.samples,
            seconds: f64::NAN,
            samples_per_s: f64::NAN,
            loss: kept.last_loss,
            eval_loss: state.last.map(|last| last.loss),
            accuracy: state.last.and_then(|last| last.accuracy),
            peak_mb: None,
            device_peak_mb: None,
        };
        record.end(&end, &Ledger::new())?;
        tracing::info!("it was ended before it had said so: its record is complete now");
    } else if out.join(report::REPORT_FILE).exists() {
        return Ok(());
    }
    // As of every run: one that cannot be made changes nothing about how it ended.
    match report::make(out) {
        Ok(report) => tracing::info!("report {}", report.display()),
        Err(error) => tracing::warn!("there is no report: {error}"),
    }
    Ok(())
}
