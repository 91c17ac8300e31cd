//! A resumed run that is already finished: nothing is trained. A run that was killed after its last
//! checkpoint gets the rest of its record, and its report.

use ddp_kernels::transfer::Ledger;

use super::opening::warn_of_gap;
use super::options::RunOptions;
use super::program::Program;
use crate::checkpoint::Opened;
use crate::error::Result;
use crate::record::{CheckpointEvent, End, Held, REPORT_FILE, Record};

/// Completes record and report on the rank that holds the record. Times and transfers, which only
/// the killed process knew, stay unknown.
pub(super) fn complete(
    options: &RunOptions,
    program: &dyn Program,
    held: Option<Held>,
    opened: &Opened,
) -> Result<()> {
    let (out, state) = (&options.out, &opened.state);
    tracing::info!(
        "the run in {} has taken all its {} steps: nothing is left to do",
        out.display(),
        state.step
    );
    let Some(held) = held else { return Ok(()) };
    let unfinished = Record::of_finished(held, state.step)?;
    if let Some((mut record, kept)) = unfinished {
        warn_of_gap(out, kept, opened);
        if kept.saved != Some(state.step) {
            let folder = opened.folder.strip_prefix(out).unwrap_or(&opened.folder);
            record.checkpoint(&CheckpointEvent {
                step: state.step,
                folder: &folder.to_string_lossy(),
            })?;
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
        tracing::info!("the record lacked its end, and is complete now");
    } else if out.join(REPORT_FILE).exists() {
        return Ok(());
    }
    match program.report(out) {
        Ok(report) => tracing::info!("report {}", report.display()),
        Err(error) => tracing::warn!("there is no report: {error}"),
    }
    Ok(())
}
