//! How many steps suit a small table: five folds, each held out once while a model is trained on
//! the others. The run itself then trains on all rows, for the median of the folds' best numbers
//! of steps, and these models' losses say how good it will be on other rows.
//!
//! A fold is trained by one rank alone, on the CPU: the result does not depend on how many ranks
//! there are.

use std::sync::Arc;

use ddp_comm::{Group, World};
use ddp_data::{Data, Dataset, InMemory, InOrder, Loader, Sampler, Source, TaskSpec, read_rows};
use ddp_kernels::{DType, Device, Tensor, heartbeat};
use ddp_nn::optim::{Optimizer, Schedule};
use ddp_nn::params::Precision;
use serde::{Deserialize, Serialize};

use super::division::eval_rows;
use crate::config::Config;
use crate::error::Result;
use crate::exchange;
use crate::metrics_log::OutOfFold;
use crate::model::data_shape;
use crate::reducer::ReducerOptions;
use crate::step::{StageSpec, Step, StepOptions};
use crate::tasks;

/// The folds.
pub(super) const FOLDS: u64 = 5;
/// The steps of each.
pub(super) const STEPS: u64 = 1_000;
/// Steps between evaluations.
pub(super) const EVAL_EVERY: u64 = 20;

/// Loss and accuracy of a fold's rows after 0, `EVAL_EVERY`, … steps, and how many rows it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Fold {
    rows: u64,
    curve: Vec<(f64, Option<f64>)>,
}

/// Trains all folds. Ranks share them.
pub(super) fn find(options: &Config, data: &Data, world: &World) -> Result<OutOfFold> {
    let rows = Rows::read(&*data.train, options.seed)?;
    let mine = (0..FOLDS).filter(|fold| *fold as usize % world.size() == world.rank());
    let mine = mine.map(|fold| Ok((fold, rows.train(fold, options, data)?)));
    let mine: Result<Vec<(u64, Fold)>> = mine.collect();
    let mut all: Vec<(u64, Fold)> = exchange::outcomes(&world.group("folds")?, mine)?
        .into_iter()
        .flatten()
        .collect();
    all.sort_by_key(|(fold, _)| *fold);
    Ok(judge(
        &all.into_iter().map(|(_, fold)| fold).collect::<Vec<_>>(),
    ))
}

/// The median of the best steps, and what the folds' models reach there.
fn judge(folds: &[Fold]) -> OutOfFold {
    let best = |fold: &Fold| {
        let losses = fold.curve.iter().map(|(loss, _)| *loss);
        let losses = losses.enumerate().filter(|(_, loss)| loss.is_finite());
        losses
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .map_or(0, |it| it.0)
    };
    let mut bests: Vec<usize> = folds.iter().map(best).collect();
    bests.sort_unstable();
    let at = bests[bests.len() / 2];
    let rows: u64 = folds.iter().map(|fold| fold.rows).sum();
    let mean = |of: &dyn Fn(&Fold) -> f64| {
        let sums = folds.iter().map(|fold| of(fold) * fold.rows as f64);
        sums.sum::<f64>() / rows as f64
    };
    let loss = mean(&|fold| fold.curve[at].0);
    let accuracy = folds[0].curve[at].1;
    OutOfFold {
        steps: at as u64 * EVAL_EVERY,
        loss,
        folds: folds.iter().map(|fold| fold.curve[at].0).collect(),
        accuracy: accuracy.map(|_| mean(&|fold| fold.curve[at].1.unwrap_or(0.0))),
    }
}

/// All rows, in an order that gives every fold the same part of each class.
struct Rows {
    inputs: Vec<f32>,
    targets: Targets,
    width: usize,
    task: TaskSpec,
    order: Vec<usize>,
}

enum Targets {
    Classes(Vec<i64>),
    Numbers(Vec<f32>),
}

impl Rows {
    fn read(data: &dyn Dataset, seed: u64) -> Result<Rows> {
        let count = data.rows();
        let [inputs, targets] = read_rows(data, &(0..count).collect::<Vec<_>>())?;
        let task = data.task().clone();
        let shuffled = Sampler::new(count, count, seed, false)?.permutation(0);
        let mut order: Vec<usize> = (0..count).map(|at| shuffled.row(at) as usize).collect();
        let targets = match targets.dtype() {
            DType::I64 => {
                let classes = targets.to_vec::<i64>()?;
                order.sort_by_key(|row| classes[*row]);
                Targets::Classes(classes)
            }
            _ => Targets::Numbers(targets.to_vec()?),
        };
        Ok(Rows {
            width: data.spec().inputs.elements(),
            inputs: inputs.to_vec()?,
            targets,
            task,
            order,
        })
    }

    /// The rows at these places.
    fn part(&self, is_wanted: impl Fn(usize) -> bool) -> Result<Arc<dyn Dataset>> {
        let places = (0..self.order.len()).filter(|place| is_wanted(*place));
        let rows: Vec<usize> = places.map(|place| self.order[place]).collect();
        fn taken<T: Copy>(all: &[T], rows: &[usize], width: usize) -> Vec<T> {
            let of_row = |row: &usize| &all[row * width..(row + 1) * width];
            rows.iter().flat_map(of_row).copied().collect()
        }
        let (count, outputs) = (rows.len(), self.task.outputs());
        let inputs = taken(&self.inputs, &rows, self.width);
        let inputs = Tensor::from_slice(&inputs, &[count, self.width], Device::Cpu)?;
        let targets = match &self.targets {
            Targets::Classes(all) => {
                Tensor::from_slice(&taken(all, &rows, 1), &[count], Device::Cpu)?
            }
            Targets::Numbers(all) => {
                let numbers = taken(all, &rows, outputs);
                Tensor::from_slice(&numbers, &[count, outputs], Device::Cpu)?
            }
        };
        Ok(Arc::new(InMemory::new(inputs, targets, self.task.clone())?))
    }

    /// Trains on all rows but those of this fold, which it is evaluated on.
    fn train(&self, fold: u64, options: &Config, data: &Data) -> Result<Fold> {
        let is_of_fold = |place: usize| place as u64 % FOLDS == fold;
        let (train, held_out) = (self.part(|it| !is_of_fold(it))?, self.part(is_of_fold)?);
        let (rows, cpu) = (held_out.rows(), [Device::Cpu; 2]);
        let mut step = self.step(options, data)?;
        // A batch that is not full is trained on, whatever the run does with it.
        let sampler = Sampler::new(train.rows(), options.batch_rows(), options.seed, false)?;
        let mut loader = Loader::new(Source::new(train, cpu), sampler, 0, 1, options.micro_batch)?;
        loader.ends_before(STEPS);
        let size = eval_rows(held_out.spec());
        let mut held_out = InOrder::new(Source::new(held_out, cpu), 0, 1, size)?;
        let (peak, warmup) = (options.peak_lr(), options.warmup_steps.unwrap_or_default());
        let of_schedule = options.schedule_steps.unwrap_or(STEPS);
        let schedule = Schedule::new(options.schedule, peak, options.min_lr, warmup, of_schedule)?;
        let (task, group) = (tasks::of(&self.task), Group::alone());
        let mut curve = Vec::new();
        for number in 0..=STEPS {
            if number > 0 {
                step.run(loader.load(number - 1)?, schedule.learning_rate(number - 1))?;
            }
            if number % EVAL_EVERY == 0 {
                heartbeat::beat(heartbeat::Work::ReadsData);
                let stats = step.evaluate(&mut held_out, &group)?;
                curve.push((stats.loss(), task.accuracy(&stats)));
            }
        }
        Ok(Fold { rows, curve })
    }

    /// The model in training, as the run will have it.
    fn step(&self, options: &Config, data: &Data) -> Result<Step> {
        let shape = data_shape(data.train.spec());
        let mut model = options.model_options();
        (model.precision, model.recompute_parts) = (Precision::F32, 0);
        let frozen = |name: &str| options.is_frozen(name);
        let mut models = model.models(&shape, &[Device::Cpu], &frozen, 1)?;
        let model = models.pop().expect("a model for one device");
        let (reducer, group) = (ReducerOptions::default(), Group::alone());
        let [owned, kept] = &reducer.ranges(&model.params, reducer.slicing(0, [0, 1]));
        let groups = options.groups()?;
        let optimizer =
            Optimizer::of_groups(options.rule(), &groups, &model.params, [owned, kept])?;
        let task = tasks::of(&self.task);
        let settled = task.settled(&options.loss_options(), data, options.data.name())?;
        let loss = task.loss(&settled, Device::Cpu)?;
        let part = StageSpec {
            model,
            optimizer,
            group,
        };
        let step_options = StepOptions {
            reducer,
            clip_norm: options.grad_clip.unwrap_or_default(),
            seed: options.seed,
            ..StepOptions::default()
        };
        Step::of_agreeing(vec![part], loss.into(), &step_options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_the_best_steps_counts_and_its_loss_is_that_of_all_rows() {
        let fold = |rows, losses: &[f64]| Fold {
            rows,
            curve: losses
                .iter()
                .map(|loss| (*loss, Some(1.0 - loss)))
                .collect(),
        };
        let folds = [
            fold(2, &[0.9, 0.5, 0.6]),
            fold(1, &[0.9, 0.2, 0.1]),
            fold(1, &[0.3, 0.4, f64::NAN]),
        ];
        let found = judge(&folds);
        assert_eq!(found.steps, EVAL_EVERY);
        assert!((found.loss - 0.4).abs() < 1e-12, "{found:?}");
        assert!((found.accuracy.unwrap() - 0.6).abs() < 1e-12, "{found:?}");
        assert_eq!(found.folds, [0.5, 0.2, 0.4]);
        // By 0.03 on average, with a standard error of 0.015 and of 0.06.
        let simpler = |apart: [f64; 3]| {
            let folds = found
                .folds
                .iter()
                .zip(apart)
                .map(|(loss, apart)| loss + apart);
            let simpler = OutOfFold {
                folds: folds.collect(),
                ..found.clone()
            };
            simpler.suffices_beside(&found)
        };
        assert!(!simpler([0.03, 0.06, 0.0]) && simpler([0.15, -0.06, 0.0]));
        assert!(simpler([0.0; 3]) && simpler([-0.1; 3]) && !simpler([0.1; 3]));
    }
}
