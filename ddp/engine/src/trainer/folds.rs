//! How many steps suit a small table: five folds, each held out once while a model is trained on
//! the others. The run itself then trains on all rows, for as many steps as make the mean loss of
//! the rows held out least, and that loss says how good it will be on other rows.
//!
//! A fold is trained by one rank alone, on the CPU: the result does not depend on how many ranks
//! there are.

use std::sync::{Arc, Mutex, PoisonError};

use ddp_comm::{Group, World};
use ddp_data::{Data, Dataset, InOrder, Loader, RowSpec, Sampler, Source, read_rows};
use ddp_kernels::panics::lock;
use ddp_kernels::{Device, Tensor, heartbeat, threads};
use ddp_nn::optim::{Optimizer, Schedule};
use ddp_nn::params::Precision;
use serde::{Deserialize, Serialize};

use super::division::eval_rows;
use super::linear_start;
use crate::config::Config;
use crate::error::Result;
use crate::exchange;
use crate::metrics_log::OutOfFold;
use crate::model::data_shape;
use crate::reducer::ReducerOptions;
use crate::step::{StageSpec, Step, StepOptions};
use crate::tasks::{self, Baselines, LinearModels};

/// The folds.
pub(super) const FOLDS: u64 = 5;
/// The steps of each.
pub(super) const STEPS: u64 = 1_000;
/// Steps between evaluations. During the warm-up 20 steps may be too few and 40 too many.
const EVAL_EVERY: u64 = 10;
/// A fold ends after so many steps without a better evaluation.
const PATIENCE: u64 = 300;

/// Loss and accuracy of a fold's rows after 0, `EVAL_EVERY`, … steps, and how many rows it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Fold {
    rows: u64,
    curve: Vec<(f64, Option<f64>)>,
    /// How good other models are.
    others: Option<Baselines>,
    /// Of its labels, if these are one number.
    variance: Option<f64>,
}

/// The penalties among which folds choose one: the powers of √10 from a hundredth to a thousand.
const PENALTIES: [f64; 11] = [
    0.01,
    0.031_622_776_601_683_79,
    0.1,
    0.316_227_766_016_837_94,
    1.0,
    3.162_277_660_168_379_5,
    10.0,
    31.622_776_601_683_793,
    100.0,
    316.227_766_016_837_96,
    1000.0,
];

/// The penalty with which linear models have the least loss on rows that they were not fitted to;
/// None if there is no such model. Rank 0 chooses.
pub(super) fn penalty(options: &Config, data: &Data, world: &World) -> Result<Option<f64>> {
    exchange::broadcast(world, 0, || {
        let rows = Rows::of(data, options.seed)?;
        let mut losses = [0.0; PENALTIES.len()];
        for fold in 0..FOLDS {
            let Some(models) = LinearModels::of(&*rows.part(fold, false))? else {
                return Ok(None);
            };
            let fitted = PENALTIES.map(|penalty| models.fit(penalty));
            let more = models.losses(&fitted, &*rows.part(fold, true))?;
            let sums = losses.iter_mut().zip(more);
            sums.for_each(|(sum, more)| *sum += more);
        }
        let all = PENALTIES.into_iter().zip(losses);
        let least = all
            .filter(|(_, loss)| loss.is_finite())
            .min_by(|a, b| a.1.total_cmp(&b.1));
        Ok(least.map(|(penalty, _)| penalty))
    })
}

/// Trains all folds. Ranks share them.
pub(super) fn find(options: &Config, data: &Data, world: &World) -> Result<OutOfFold> {
    let rows = Rows::of(data, options.seed)?;
    let mine = (0..FOLDS).filter(|fold| *fold as usize % world.size() == world.rank());
    let mine: Vec<u64> = mine.collect();
    let done = Mutex::new(Vec::new());
    // A model is small: a fold takes one thread, and other folds the others.
    threads::run(mine.len(), |at| {
        let fold = rows.train(mine[at], options, data);
        lock(&done).push(fold.map(|fold| (mine[at], fold)));
    });
    let done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mine: Result<Vec<(u64, Fold)>> = done.into_iter().collect();
    let mut all: Vec<(u64, Fold)> = exchange::outcomes(&world.group("folds")?, mine)?
        .into_iter()
        .flatten()
        .collect();
    all.sort_by_key(|(fold, _)| *fold);
    Ok(judge(
        &all.into_iter().map(|(_, fold)| fold).collect::<Vec<_>>(),
    ))
}

/// The steps at which the rows' mean loss is least, each row by the model that was not trained on
/// it, and what the folds' models reach there.
fn judge(folds: &[Fold]) -> OutOfFold {
    let rows: u64 = folds.iter().map(|fold| fold.rows).sum();
    let mean = |of: &dyn Fn(&Fold) -> f64| {
        let sums = folds.iter().map(|fold| of(fold) * fold.rows as f64);
        sums.sum::<f64>() / rows as f64
    };
    let loss = |at: usize| mean(&|fold| fold.curve[at].0);
    let losses = (0..folds[0].curve.len()).map(|at| (at, loss(at)));
    let best = losses
        .filter(|(_, loss)| loss.is_finite())
        .min_by(|a, b| a.1.total_cmp(&b.1));
    let (at, loss) = best.unwrap_or((0, loss(0)));
    let accuracy = folds[0].curve[at].1;
    let others: Vec<_> = folds
        .iter()
        .map(|fold| (fold.rows, fold.others.clone()))
        .collect();
    let score = |fold: &Fold| {
        let (loss, accuracy) = fold.curve[at];
        let r2 = fold.variance.map(|variance| 1.0 - loss / variance);
        accuracy.or(r2).unwrap_or(f64::NAN)
    };
    OutOfFold {
        score: Some(mean(&score)).filter(|score| score.is_finite()),
        others: tasks::mean_of_folds(&others),
        steps: at as u64 * EVAL_EVERY,
        loss,
        folds: folds.iter().map(|fold| fold.curve[at].0).collect(),
        accuracy: accuracy.map(|_| mean(&|fold| fold.curve[at].1.unwrap_or(0.0))),
    }
}

/// All rows, in an order that gives every fold the same part of each class.
struct Rows {
    all: Arc<dyn Dataset>,
    order: Vec<u64>,
}

/// Some of them.
#[derive(Debug)]
struct SomeRows {
    of: Arc<dyn Dataset>,
    rows: Vec<u64>,
}

impl Dataset for SomeRows {
    fn rows(&self) -> u64 {
        self.rows.len() as u64
    }

    fn spec(&self) -> &RowSpec {
        self.of.spec()
    }

    fn fingerprint(&self) -> ddp_data::Result<String> {
        self.of.fingerprint()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> ddp_data::Result<()> {
        let rows: Vec<u64> = rows.iter().map(|row| self.rows[*row as usize]).collect();
        self.of.gather(&rows, inputs, targets)
    }
}

impl Rows {
    fn of(data: &Data, seed: u64) -> Result<Rows> {
        let (all, count) = (data.train.clone(), data.train.rows());
        let shuffled = Sampler::new(count, count, seed, false)?.permutation(0);
        let mut order: Vec<u64> = (0..count).map(|at| shuffled.row(at)).collect();
        if all.task().classes().is_some() {
            let [_, classes] = read_rows(&*all, &(0..count).collect::<Vec<_>>())?;
            let classes = classes.to_vec::<i64>()?;
            order.sort_by_key(|row| classes[*row as usize]);
        }
        Ok(Rows { all, order })
    }

    /// The rows of this fold, or all others.
    fn part(&self, fold: u64, is_fold: bool) -> Arc<dyn Dataset> {
        let numbered = (0..).zip(&self.order);
        let part = numbered.filter(|(place, _)| (place % FOLDS == fold) == is_fold);
        Arc::new(SomeRows {
            of: self.all.clone(),
            rows: part.map(|(_, row)| *row).collect(),
        })
    }

    /// Trains on all rows but those of this fold, which it is evaluated on.
    fn train(&self, fold: u64, options: &Config, data: &Data) -> Result<Fold> {
        let (train, held_out) = (self.part(fold, false), self.part(fold, true));
        let (rows, cpu) = (held_out.rows(), [Device::Cpu; 2]);
        let others = tasks::beside(&train, &held_out)?;
        let mut step = self.step(options, data)?;
        if let Some(start) = linear_start::of(options, &*train)? {
            linear_start::set(options, &start, &step.params().collect::<Vec<_>>())?;
        }
        // A batch that is not full is trained on, whatever the run does with it.
        let sampler = Sampler::new(train.rows(), options.batch_rows(), options.seed, false)?;
        let mut loader = Loader::new(Source::new(train, cpu), sampler, 0, 1, options.micro_batch)?;
        loader.ends_before(STEPS);
        let size = eval_rows(held_out.spec());
        let mut held_out = InOrder::new(Source::new(held_out, cpu), 0, 1, size)?;
        let (peak, warmup) = (options.peak_lr(), options.warmup_steps.unwrap_or_default());
        let of_schedule = options.schedule_steps.unwrap_or(STEPS);
        let schedule = Schedule::new(options.schedule, peak, options.min_lr, warmup, of_schedule)?;
        let (task, group) = (tasks::of(self.all.task()), Group::alone());
        let (mut curve, mut best) = (Vec::new(), (f64::INFINITY, 0));
        for number in 0..=STEPS {
            if number > 0 {
                step.run(loader.load(number - 1)?, schedule.learning_rate(number - 1))?;
            }
            if !number.is_multiple_of(EVAL_EVERY) {
                continue;
            }
            heartbeat::beat(heartbeat::Work::ReadsData);
            let stats = step.evaluate(&mut held_out, &group)?;
            curve.push((stats.loss(), task.accuracy(&stats)));
            if stats.loss() < best.0 {
                best = (stats.loss(), number);
            } else if number - best.1 >= PATIENCE {
                break;
            }
        }
        // It would hardly become better again.
        let last = curve[curve.len() - 1];
        curve.resize((STEPS / EVAL_EVERY + 1) as usize, last);
        Ok(Fold {
            rows,
            curve,
            variance: others.as_ref().and_then(|others| others.variance),
            others,
        })
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
        let task = tasks::of(self.all.task());
        let settled = task.with_weights(&options.loss_options(), data, options.data.name())?;
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
        let mut step = Step::of_agreeing(vec![part], loss.into(), &step_options)?;
        step.clip_outputs(data.target_ranges());
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_step_of_the_least_mean_loss_of_all_rows_counts() {
        let fold = |rows, losses: &[f64]| Fold {
            rows,
            others: None,
            variance: None,
            curve: losses
                .iter()
                .map(|loss| (*loss, Some(1.0 - loss)))
                .collect(),
        };
        let folds = [
            fold(2, &[0.9, 0.5, 0.45, 0.1]),
            fold(1, &[0.9, 0.2, 0.1, 0.1]),
            fold(1, &[0.3, 0.4, 0.9, f64::NAN]),
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
                accuracy: Some(0.59),
                ..found.clone()
            };
            simpler.suffices_beside(&found)
        };
        assert!(!simpler([0.03, 0.06, 0.0]) && simpler([0.15, -0.06, 0.0]));
        assert!(simpler([0.0; 3]) && simpler([-0.1; 3]) && !simpler([0.1; 3]));
        let as_right = OutOfFold {
            folds: vec![1.0; 3],
            ..found.clone()
        };
        assert!(as_right.suffices_beside(&found));
    }
}
