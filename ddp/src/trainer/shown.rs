//! What a run leaves to be looked at: which classes are taken for which, samples, and the report.

use std::path::PathBuf;

use super::Trainer;
use crate::data::Task;
use crate::error::Result;
use crate::report;
use crate::report::evidence::Evidence;

impl Trainer<'_> {
    /// Puts together what all ranks have seen in the evaluation after step `number`, and keeps it on the first.
    pub(super) fn keep(&mut self, evidence: Evidence, number: u64) -> Result<()> {
        let names: &[String] = match &self.task {
            Task::Classification { names, .. } => names,
            Task::Regression { .. } => &[],
        };
        let kept = evidence.together(number, names, &self.shown, &self.main, self.world)?;
        if let (Some((confusion, samples)), Some(desk)) = (kept, &mut self.desk) {
            desk.record.confusion(&confusion)?;
            // They are only looked at: a run goes well without them.
            if let Err(error) = samples.and_then(|samples| samples.save(&self.config.out)) {
                tracing::warn!("the report will show no samples: {error}");
            }
        }
        Ok(())
    }

    /// Makes the report, on rank 0, of a run however it ended. One that cannot be made changes nothing about that.
    pub(super) fn report(&self) -> Option<PathBuf> {
        self.desk.as_ref()?;
        report::make(&self.config.out).inspect_err(|error| tracing::warn!("there is no report: {error}")).ok()
    }
}
