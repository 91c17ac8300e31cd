//! The lines of the metrics log: those of steps, and what was moved.

use ddp_kernels::Device;
use ddp_kernels::transfer::{Phase, in_phase};

use super::TrainingRun;
use crate::audit;
use crate::digest::{self, StepDigests};
use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{LogEvent, StepEvent};
use crate::process;
use crate::step::StepReport;
use crate::trainer::{matmuls, nonfinite};

impl TrainingRun<'_> {
    /// Reads the statistics of the last step. Ends the run if they are not finite.
    pub(super) fn log(&mut self, number: u64, epoch: u64, learning_rate: f64) -> Result<()> {
        faults::at(FaultPoint::Log)?;
        self.record_saved()?;
        let report = self.rank_run.step.report()?;
        self.check_finite(&report)?;
        // If rank 0 is lost before it has written the line, another one does.
        let is_elastic = self.world.is_elastic();
        let [gradients, weights] = self
            .rank_run
            .step
            .digests(report.stats.weight_sum, is_elastic)?;
        let [_, share] = self.rank_run.clock.shares();
        let rates = self.rank_run.clock.rates();
        // As many whole rows as were computed.
        let rows_per_s = share * rates.samples_per_s;
        let tflops = self.flop_of_a_row.map(|flop| rows_per_s * flop / 1e12);
        if tflops.is_some() && self.rank_run.clock.has_rates && self.matmul_tflops.is_none() {
            let measure = || matmuls::tflops(self.rank_run.step.stages(), self.world);
            self.matmul_tflops = Some(in_phase(Phase::Setup, measure)?);
            self.rank_run.clock.restart();
        }
        let loss = report.stats.loss();
        self.rank_run.totals.last_loss = Some(loss);
        if self.metrics_log.is_none() && !is_elastic {
            return Ok(());
        }
        let share = tflops.zip(self.matmul_tflops).map(|(own, of)| own / of);
        let is_on_cpu = self.run.devices.iter().all(|it| *it == Device::Cpu);
        let event = StepEvent {
            step: number,
            epoch: epoch + 1,
            loss,
            accuracy: self.task.accuracy(&report.stats),
            figures: self.task.figures(loss).into_iter().collect(),
            lr: learning_rate,
            grad_norm: report.grad_norm,
            tokens_per_s: self.tokens_per_s(rows_per_s),
            tflops,
            matmul_share: share.filter(|share| share.is_finite()),
            // On GPUs the host does not wait for reductions.
            reduce_ms: rates.reduce_ms.filter(|_| is_on_cpu),
            device_peak_mb: process::devices_peak_mb(&self.run.devices),
            digests: Some(StepDigests {
                batch: digest::of_batch(&mut self.loader, number - 1),
                gradients,
                weights,
            }),
            ..rates
        };
        if let Some(log) = self.metrics_log {
            self.program.logged(&event)?;
            log.write(&LogEvent::Step(event.clone()))?;
        }
        if is_elastic {
            self.rank_run.totals.line = (number, LogEvent::Step(event).to_line());
        }
        Ok(())
    }

    pub(super) fn check_finite(&mut self, report: &StepReport) -> Result<()> {
        let (step, loader) = (&mut self.rank_run.step, &mut self.loader);
        let error = nonfinite::explain(report, step, loader, &*self.task, self.world)?;
        error.map_or(Ok(()), Err)
    }

    /// Sums up what all ranks moved between devices and between each other.
    pub(super) fn audit(&mut self) -> Result<()> {
        let audit = audit::audit(self.world, self.rank_run.workload, &self.run.devices)?;
        if let (Some(audit), Some(log)) = (audit, &mut *self.metrics_log) {
            if audit.is_worth_a_line() {
                self.program.note(&audit.to_string());
            }
            log.write(&LogEvent::Placement(&audit))?;
        }
        Ok(())
    }

    /// Whole rows a second as tokens a second, if the model predicts at each token of a row.
    pub(super) fn tokens_per_s(&self, rows_per_s: f64) -> Option<f64> {
        let model = self.rank_run.step.stages().last()?.model();
        let (_, tokens) = model.output_shape.split_last()?;
        let in_row: usize = tokens.iter().product();
        (!tokens.is_empty()).then_some(rows_per_s * in_row as f64)
    }
}
