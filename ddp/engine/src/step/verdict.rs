//! What every device has to know before it updates: what to multiply gradients by, and whether the step was good. It follows
//! from all gradients and from the losses, so it is reached on the last device, where the losses are.
//!
//! Where there are several devices, each sums the squares of its gradients by quantum, and these sums cross to the last one: 8 bytes for
//! 1,024 gradients. There they are put behind each other as they would lie were the model on one device (the last layers first), so
//! the norm has the same bits. What follows from it, a scale and a flag, crosses back.

use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Tensor, ops};

use super::Stage;
use crate::error::Result;
use ddp_nn::optim::Clip;

/// How it is reached, and what it is.
#[derive(Debug)]
pub(super) struct Verdict {
    /// By stage: what measures its gradients. The last one's scale and norm are those of all.
    clips: Vec<Clip>,
    /// Where there are several stages.
    squares: Option<Squares>,
    /// i64 [1], on the last device: the first step whose loss (or gradients' norm) was not finite on any rank; 0 for none.
    bad_step: Tensor,
    /// By stage below the last.
    told: Vec<Told>,
}

/// The sums of squares of all stages, on the last device.
#[derive(Debug)]
struct Squares {
    /// f64, one number for each quantum of all stages, those of the last stage first.
    all: Tensor,
    /// By stage: its part of them.
    parts: Vec<Tensor>,
}

/// What a stage below the last is told, where it reads it.
#[derive(Debug)]
struct Told {
    /// \[2\]: scale and norm.
    scale: Tensor,
    bad_step: Tensor,
}

impl Verdict {
    pub(super) fn new(stages: &[Stage], clip_norm: f64) -> Result<Verdict> {
        let (last, below) = stages.split_last().expect("a step has a stage");
        let clip =
            |stage: &Stage| Clip::of_slices(clip_norm, &stage.model.params, stage.reducer.owned());
        let clips = stages.iter().map(clip).collect::<Result<Vec<_>, _>>()?;
        let bad_step = Tensor::zeros(&[1], DType::I64, last.device())?.named("first bad step");
        let scale = clips[clips.len() - 1].out();
        let told = |stage: &Stage| -> Result<Told> {
            if stage.device() == last.device() {
                return Ok(Told {
                    scale: scale.clone(),
                    bad_step: bad_step.clone(),
                });
            }
            let copy = |of: &Tensor, name: &str| {
                Tensor::zeros(of.shape(), of.dtype(), stage.device()).map(|t| t.named(name))
            };
            Ok(Told {
                scale: copy(scale, "gradient scale and norm")?,
                bad_step: copy(&bad_step, "first bad step")?,
            })
        };
        let told = below.iter().map(told).collect::<Result<Vec<_>>>()?;
        let squares = if below.is_empty() {
            None
        } else {
            Some(Squares::new(&clips, last)?)
        };
        Ok(Verdict {
            clips,
            squares,
            bad_step,
            told,
        })
    }

    /// Once all gradients and `stats` are sums over the ranks. All of these are equal on all ranks, so all act alike.
    pub(super) fn reach(
        &mut self,
        stages: &mut [Stage],
        stats: &Tensor,
        measure_norm: bool,
    ) -> Result<()> {
        let weights = stats.slice(1..2)?;
        // Gradients on several devices are always measured: the norm is how the last device hears of one that is not finite.
        let measured = self.squares.is_some() || self.clip().measures(measure_norm);
        if measured {
            // In the order in which a backward goes: collectives have the same order on all ranks.
            for (stage, clip) in stages.iter_mut().zip(&self.clips).rev() {
                clip.measure(&stage.model.params, |partials| {
                    Ok(stage.reducer.sum(partials)?)
                })?;
            }
        }
        let squares = match &self.squares {
            Some(squares) => Some(squares.collect(&self.clips)?),
            None => measured.then_some(self.clip().partials()),
        };
        self.clip().finish(squares, Some(&weights))?;

        let last = &stages[stages.len() - 1];
        let step = last.numbers.step();
        ops::mark_nonfinite(&self.bad_step, stats, step)?;
        // A gradient may overflow where the loss does not; the norm tells, or else a look at all of them.
        let gradients = if measured {
            self.clip().out()
        } else {
            last.model.params.gradients()
        };
        ops::mark_nonfinite(&self.bad_step, gradients, step)?;
        self.tell()
    }

    /// Sends it to the devices below the last.
    fn tell(&self) -> Result<()> {
        let device = self.bad_step.device();
        let others = self
            .told
            .iter()
            .filter(|told| told.scale.device() != device);
        announced("scale and first bad step to every device", || {
            for told in others {
                told.scale.copy_from(self.clip().out())?;
                told.bad_step.copy_from(&self.bad_step)?;
            }
            Ok(())
        })
    }

    /// Updates all parameters accordingly.
    pub(super) fn update(&self, stages: &[Stage]) -> Result<()> {
        let told = self.told.iter().map(|told| (&told.scale, &told.bad_step));
        let all = told.chain([(self.clip().out(), &self.bad_step)]);
        for (stage, (scale, bad_step)) in stages.iter().zip(all).filter(|(stage, _)| stage.trains())
        {
            stage
                .optimizer
                .apply(&stage.model.params, Some(scale), Some(bad_step))?;
        }
        Ok(())
    }

    /// The last device's: whether anything is clipped, scale and norm.
    pub(super) fn clip(&self) -> &Clip {
        &self.clips[self.clips.len() - 1]
    }

    /// i64 \[1\]: the first step that was not good; 0 for none.
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
            end -= clip.partials().count();
            Ok(all.slice(end..end + clip.partials().count())?)
        };
        let parts = clips.iter().map(part).collect::<Result<Vec<_>>>()?;
        Ok(Squares { all, parts })
    }

    /// Brings what each stage's device has measured to the last one.
    fn collect(&self, clips: &[Clip]) -> Result<&Tensor> {
        let pairs = self
            .parts
            .iter()
            .zip(clips)
            .filter(|(part, _)| part.count() > 0);
        announced("squares of gradients to the last device", || {
            pairs
                .into_iter()
                .try_for_each(|(part, clip)| part.copy_from(clip.partials()))
        })?;
        Ok(&self.all)
    }
}
