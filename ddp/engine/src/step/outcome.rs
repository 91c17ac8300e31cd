//! The outcome of a step, which every device needs before it updates: the number to multiply
//! gradients by, and whether the step was finite. It follows from all gradients and from the
//! losses, so it is computed on the last device, where the losses are.
//!
//! With several devices, each sums the squares of its gradients by quantum, and these sums go to
//! the last device: 8 bytes for 1,024 gradients. There they are in the order of a model on one
//! device (the last layers first), so the norm has the same bits. Scale and flag go back.

use ddp_kernels::ops::{self, STEP_FLAGS, StepMarks};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Tensor};
use ddp_nn::optim::Clip;

use super::stage::Stage;
use crate::error::Result;

/// Measures gradients, and holds scale, norm and the first bad step.
#[derive(Debug)]
pub(super) struct StepOutcome {
    /// By stage: measures its gradients. The last one also computes scale and norm of all.
    clips: Vec<Clip>,
    /// With several stages: where their sums of squares meet.
    squares: Option<Squares>,
    /// i64 (3), on the last device: the flags of the step (`ops::STEP_FLAGS`).
    bad_step: Tensor,
    /// By stage: scale and first bad step on its device.
    local: Vec<LocalOutcome>,
}

/// The sums of squares of all stages, on the last device. Letters: Q quanta of all stages.
#[derive(Debug)]
struct Squares {
    /// f64 (Q), those of the last stage first.
    all: Tensor,
    /// By stage: its part of them.
    parts: Vec<Tensor>,
}

/// What the optimizer of a stage reads, on its device: the last stage's tensors or copies of them.
#[derive(Debug)]
struct LocalOutcome {
    /// (2): scale and norm.
    scale: Tensor,
    /// i64 (3).
    bad_step: Tensor,
}

impl StepOutcome {
    pub(super) fn new(stages: &[Stage], clip_norm: f64) -> Result<StepOutcome> {
        let last = stages.last().expect("a step has a stage");
        let clip =
            |stage: &Stage| Clip::of_slices(clip_norm, &stage.model.params, stage.reducer.owned());
        let clips = stages.iter().map(clip).collect::<Result<Vec<_>, _>>()?;
        let bad_step =
            Tensor::zeros(&[STEP_FLAGS], DType::I64, last.device())?.named("first bad step");
        let scale = clips[clips.len() - 1].out();
        let local = |stage: &Stage| -> Result<LocalOutcome> {
            let here = |of: &Tensor, name: &str| -> Result<Tensor> {
                if stage.device() == of.device() {
                    return Ok(of.clone());
                }
                Ok(Tensor::zeros(of.shape(), of.dtype(), stage.device())?.named(name))
            };
            Ok(LocalOutcome {
                scale: here(scale, "gradient scale and norm")?,
                bad_step: here(&bad_step, "first bad step")?,
            })
        };
        Ok(StepOutcome {
            local: stages.iter().map(local).collect::<Result<Vec<_>>>()?,
            squares: match stages.len() {
                1 => None,
                _ => Some(Squares::new(&clips, last)?),
            },
            clips,
            bad_step,
        })
    }

    /// Computes scale, norm and flag, once gradients and `stats` are sums over the ranks. These are
    /// equal on all ranks, so all decide alike. Marks `own_bad_step` if `stats` are not finite.
    pub(super) fn decide(
        &self,
        stages: &mut [Stage],
        stats: &Tensor,
        own_bad_step: Option<&Tensor>,
        measure_norm: bool,
    ) -> Result<()> {
        let weights = stats.slice(1..2)?;
        // With several devices always: the norm tells the last one of a non-finite gradient.
        // With whole matrices always: one such gradient would reach all of its matrix.
        let has_whole = |stage: &Stage| stage.optimizer.rule().hidden.is_some();
        let wants_norm = measure_norm || stages.iter().any(has_whole);
        let measured = self.squares.is_some() || self.clip().measures(wants_norm);
        if measured {
            // In the order of a backward: collectives have the same order on all ranks.
            for (stage, clip) in stages.iter_mut().zip(&self.clips).rev() {
                let reducer = &mut stage.reducer;
                clip.measure(&stage.model.params, |partials| Ok(reducer.sum(partials)?))?;
            }
        }
        let squares = match &self.squares {
            Some(squares) => Some(squares.collect(&self.clips)?),
            None => measured.then_some(self.clip().partials()),
        };
        // A gradient may overflow where the loss does not. The norm shows it, or else the optimizer
        // meets it.
        let marks = StepMarks {
            flags: &self.bad_step,
            own: own_bad_step,
            stats,
            step: stages[stages.len() - 1].scalars.step(),
        };
        self.clip().finish(squares, Some(&weights), Some(marks))?;
        self.copy_to_stages()
    }

    /// Copies scale and flag to the other devices.
    fn copy_to_stages(&self) -> Result<()> {
        let device = self.bad_step.device();
        let others = self.local.iter().filter(|o| o.scale.device() != device);
        announced("scale and first bad step to every device", || {
            for other in others {
                other.scale.copy_from(self.clip().out())?;
                other.bad_step.copy_from(&self.bad_step)?;
            }
            Ok(())
        })
    }

    /// Updates the parameters of all stages. After a bad step the optimizers do nothing.
    pub(super) fn update(&self, stages: &mut [Stage]) -> Result<()> {
        let stages = stages.iter_mut().zip(&self.local);
        for (stage, LocalOutcome { scale, bad_step }) in stages.filter(|(s, _)| s.trains()) {
            let (model, optimizer, ranks) = (&stage.model, &stage.optimizer, &mut stage.reducer);
            ops::with_f32_math(model.f32_math(), || {
                optimizer.apply(&model.params, ranks, Some(scale), Some(bad_step))
            })?;
        }
        Ok(())
    }

    /// Of the last stage: whether gradients are clipped, and the scale and norm of all.
    pub(super) fn clip(&self) -> &Clip {
        &self.clips[self.clips.len() - 1]
    }

    /// i64 (3): the flags of the step.
    pub(super) fn bad_step(&self) -> &Tensor {
        &self.bad_step
    }
}

impl Squares {
    fn new(clips: &[Clip], last: &Stage) -> Result<Squares> {
        let count = clips.iter().map(|clip| clip.partials().count()).sum();
        let all =
            Tensor::zeros(&[count], DType::F64, last.device())?.named("squares of all gradients");
        let mut end = count;
        let part = |clip: &Clip| -> Result<Tensor> {
            let part = end - clip.partials().count()..end;
            end = part.start;
            Ok(all.slice(part)?)
        };
        let parts = clips.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Squares { all, parts })
    }

    /// Copies the sums of all stages to the last device.
    fn collect(&self, clips: &[Clip]) -> Result<&Tensor> {
        let pairs = self.parts.iter().zip(clips);
        announced("squares of gradients to the last device", || {
            pairs
                .filter(|(part, _)| part.count() > 0)
                .try_for_each(|(part, clip)| part.copy_from(clip.partials()))
        })?;
        Ok(&self.all)
    }
}
