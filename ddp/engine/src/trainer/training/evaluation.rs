//! Evaluations between steps, and the text that a sample continues.

use ddp_data::setting::NORMALIZE;
use ddp_data::{Classes, LabelName, Scaling};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{Phase, in_phase};

use super::TrainingRun;
use crate::checkpoint::Best;
use crate::confusion::{ClassCounts, Confusion, balanced_accuracy, largest_class};
use crate::error::Result;
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{EvalEvent, LogEvent, SampleEvent, SampleText};
use crate::setting::{CLASS_WEIGHTS, EPOCHS, LR};
use crate::shown::{shown, significant};
use crate::tasks::{BestBy, beside, figures_text, numbers_figures};
use crate::trainer::agree;

/// What a trace shows.
const EVALUATE: Label = Label::new(Lane::Evaluation, "evaluate");

/// The most predictions that are logged, of rows spread over all.
const PREDICTIONS_MAX: u64 = 400;

/// What an evaluation measures: its figures, its answers by class, and some predictions.
type Measured = (EvalEvent, Option<ClassCounts>, Vec<[f32; 2]>);

/// Who takes fewer steps only tries something.
const FEW_STEPS: u64 = 20;

impl TrainingRun<'_> {
    /// Evaluates the model on held-out rows, if there are any, over all ranks.
    pub(super) fn evaluate(&mut self, number: u64) -> Result<()> {
        let evaluate = || in_phase(Phase::Evaluation, || self.evaluate_now(number));
        trace::record(EVALUATE, evaluate)?;
        self.rank_run.totals.evaluated = number;
        Ok(())
    }

    fn evaluate_now(&mut self, number: u64) -> Result<()> {
        faults::at(FaultPoint::Evaluation)?;
        if self.world.is_elastic() {
            self.rank_run.step.settle()?;
        }
        self.sample(number)?;
        if self.run.data.held_out.rows() == 0 {
            return Ok(());
        }
        self.compare_replicas(number)?;
        // The report shows the last evaluation.
        let is_last = self.run.plan.is_over(number);
        let (event, class_counts, predictions) = self.measure(number, is_last)?;
        let score = event.accuracy.or_else(|| {
            let figure = |name| event.figures.get(name).copied();
            figure("r2").or(figure("mean_r2"))
        });
        if let Some(why) = learned_nothing(&event, class_counts.as_ref()).filter(|_| is_last)
            && self.metrics_log.is_some()
            && number >= FEW_STEPS
        {
            let normalize = match self.run.settled.normalize {
                Some(Scaling::Standard) => String::new(),
                None | Some(Scaling::None | Scaling::Unit) => format!("{NORMALIZE} standard, "),
            };
            tracing::warn!(
                "step {number}: {why}; help: {normalize}more {EPOCHS}, or another {LR}; or the features may not predict \
                 the labels"
            );
        }
        let evaluation = self.compared(&event);
        let evaluation = exchange::broadcast(self.world, 0, || Ok(evaluation))?;
        if let Some(log) = &mut *self.metrics_log
            && !log.has("eval", number)
        {
            let result = describe(&event);
            self.program
                .note(&format!("step {number}: held-out {result}"));
            self.program.evaluated(&event)?;
            if !event.loss.is_finite() {
                tracing::warn!(
                    "step {number}: the held-out loss is not finite, and this evaluation is not \
                     compared with others; help: look for extreme numbers in the held-out rows"
                );
            }
            log.write(&LogEvent::Eval(event))?;
        }
        if let (Some(counts), Some(log)) =
            (class_counts.filter(|_| is_last), &mut *self.metrics_log)
        {
            let classes = self.run.data.train.task().classes();
            let names = classes.map(Classes::names).unwrap_or_default();
            log.write(&LogEvent::Confusion(&Confusion::of(number, names, &counts)))?;
        }
        let totals = &mut self.rank_run.totals;
        totals.note_evaluation(number, evaluation);
        if totals.best.is_some_and(|best| best.step == number) {
            totals.score = score;
        }
        if is_last {
            self.compare_with_others(number, &predictions)?;
        }
        self.rank_run.clock.restart();
        Ok(())
    }

    /// Writes how good simple models of a table are on the same rows, and some predictions.
    fn compare_with_others(&mut self, number: u64, predictions: &[[f32; 2]]) -> Result<()> {
        let data = &self.run.data;
        let Some(log) = self.metrics_log.as_mut() else {
            return Ok(());
        };
        if !predictions.is_empty() {
            log.write(&LogEvent::Predictions {
                step: number,
                rows: predictions,
            })?;
        }
        if data.columns.is_none() || log.has("baselines", number) {
            return Ok(());
        }
        let Some(others) = beside(&*data.train, &*data.held_out)? else {
            return Ok(());
        };
        let totals = &self.rank_run.totals;
        let best = totals.best;
        // After a resume the score follows from what the checkpoint keeps of the best evaluation.
        let kept = match &*others.figure {
            "accuracy" => best.and_then(|best| best.accuracy),
            "r2" => best
                .zip(others.variance)
                .map(|(best, variance)| 1.0 - best.loss / variance),
            _ => None,
        };
        let model = totals.score.or(kept);
        self.program
            .note(&others.text("on the held-out rows", model));
        log.write(&LogEvent::Baselines {
            step: number,
            model,
            others: &others,
        })
    }

    /// An evaluation as it is compared with others; None if it has a figure that is not finite.
    fn compared(&self, event: &EvalEvent) -> Option<Best> {
        let by = event.best_by;
        let figure = match by {
            BestBy::Accuracy => event.accuracy,
            by => event.figures.get(by.names()[0]).copied(),
        };
        let evaluation = Best {
            step: event.step,
            loss: event.loss,
            accuracy: event.accuracy,
            by: (!by.is_loss()).then_some((by, figure.unwrap_or(f64::NAN))),
        };
        Some(evaluation).filter(Best::is_finite)
    }

    /// The figures of all held-out rows, and what was collected of them, over all ranks.
    fn measure(&mut self, number: u64, is_last: bool) -> Result<Measured> {
        let data = &self.run.data;
        let targets = &data.held_out.spec().targets;
        let (best_by, measures) = (self.run.settled.best, self.task.measures(targets));
        let counts = best_by == BestBy::Balanced || measures.contains(&BestBy::Auc);
        let mut class_counts = self.task.class_counts(targets);
        class_counts = class_counts.filter(|_| is_last || counts);
        let labels = data.label.as_ref().map(LabelName::columns);
        let mut differences = self.task.differences(labels);
        if let Some(differences) = differences
            .as_mut()
            .filter(|_| is_last && targets.elements() == 1)
        {
            differences.kept_every = data.held_out.rows().div_ceil(PREDICTIONS_MAX);
        }
        let step = &mut self.rank_run.step;
        let stats = match (&mut class_counts, &mut differences) {
            (None, None) => step.evaluate(&mut self.held_out, &self.main)?,
            (class_counts, differences) => {
                let mut see = |shard, batch: &_, output: &_| {
                    if let Some(class_counts) = class_counts {
                        class_counts.see(batch, output)?;
                    }
                    if let Some(differences) = differences {
                        let normalization = data.target_normalization.as_ref();
                        differences.see(shard, batch, output, normalization)?;
                    }
                    Ok(())
                };
                step.evaluate_with(&mut self.held_out, &self.main, &mut see)?
            }
        };
        let (columns, predictions) = match differences {
            Some(mut differences) => {
                let kept = if is_last {
                    differences.kept(self.world)?
                } else {
                    Vec::new()
                };
                (differences.together(self.world)?, kept)
            }
            None => Default::default(),
        };
        self.rank_run.totals.evaluation = Some(stats);
        let rows_of_classes = data.held_out.rows_of_classes();
        let mut figures = self.task.figures(stats.loss());
        figures.extend(numbers_figures(&columns));
        if let Some(class_counts) = &mut class_counts {
            class_counts.add_up(&self.main)?;
            if counts && stats.loss().is_finite() {
                let balanced = balanced_accuracy(&class_counts.scores());
                figures.push(("balanced_accuracy", balanced));
                figures.extend(class_counts.auc().map(|auc| ("auc", auc)));
            }
        }
        let event = EvalEvent {
            step: number,
            loss: stats.loss(),
            accuracy: self.accuracy(),
            largest_class: rows_of_classes.and_then(|rows| largest_class(&rows)),
            best_by,
            figures: figures.into_iter().collect(),
            columns: match &columns[..] {
                [_] => Vec::new(),
                _ => columns,
            },
        };
        Ok((event, class_counts, predictions))
    }

    /// Writes texts with the model as it is. One that fails is only warned of.
    fn sample(&mut self, number: u64) -> Result<()> {
        if self.run.settled.sample.is_none() && self.run.settled.sample_held_out == 0 {
            return Ok(());
        }
        self.rank_run.step.gather()?;
        if let (Some(sample), Some(log)) = (&self.run.sample, &mut *self.metrics_log)
            && !log.has("sample", number)
        {
            match sample.texts(&self.rank_run.step) {
                Ok((first, more)) => {
                    let step = number;
                    let event = SampleEvent { step, first, more };
                    for SampleText { prompt, text, .. } in event.texts() {
                        let line = shown(&format!("{prompt}{text}"));
                        self.program.note(&format!("step {number}: sample {line}"));
                    }
                    log.write(&LogEvent::Sample(event))?;
                }
                Err(error) => tracing::warn!("step {number}: no sample: {error}"),
            }
        }
        self.rank_run.clock.restart();
        Ok(())
    }

    pub(super) fn compare_replicas(&mut self, number: u64) -> Result<()> {
        self.rank_run.compared = Some(number);
        agree::compare_replicas(&mut self.rank_run.step, self.world, number)
    }

    /// That of the last evaluation.
    pub(super) fn accuracy(&self) -> Option<f64> {
        let evaluation = self.rank_run.totals.evaluation.as_ref();
        evaluation.and_then(|stats| self.task.accuracy(stats))
    }
}

/// Says so if one answer for all rows would be as good.
fn learned_nothing(event: &EvalEvent, counts: Option<&ClassCounts>) -> Option<String> {
    let figure = |name: &str| event.figures.get(name).copied();
    if let Some(r2) = figure("r2").or(figure("mean_r2")).filter(|r2| *r2 < 0.01) {
        let r2 = significant(r2, 4);
        return Some(format!(
            "R² is {r2} on held-out rows; predicting their mean would give 0"
        ));
    }
    let (accuracy, counts) = (event.accuracy?, counts?);
    let rows = counts.rows();
    let answered = counts.answers().iter().filter(|it| **it > 0).count();
    match rows.iter().filter(|it| **it > 0).count() {
        0 => return None,
        1 if rows.len() > 1 => return None,
        _ if answered == 1 => {
            return Some(format!(
                "one class is the answer to all held-out rows; {CLASS_WEIGHTS} may help"
            ));
        }
        _ => {}
    }
    let all = rows.iter().sum::<u64>() as f64;
    let shares = rows
        .iter()
        .map(|it| *it as f64 / all)
        .filter(|it| *it > 0.0);
    // The loss of a model that knows the shares of the classes alone.
    let of_shares: f64 = shares.map(|it| -it * it.ln()).sum();
    let largest = *rows.iter().max()? as f64 / all;
    // With class weights fewer answers may be right, but of all classes.
    let knows_classes = balanced_accuracy(&counts.scores()) > 1.2 / rows.len() as f64;
    let ranks_rows = counts.auc().is_some_and(|auc| auc > 0.6);
    let knows_more = event.loss < 0.97 * of_shares;
    (accuracy <= largest && !knows_classes && !ranks_rows && !knows_more).then(|| {
        format!(
            "accuracy on held-out rows is {:.2}%; always answering the largest class would give {:.2}%",
            accuracy * 100.0,
            largest * 100.0
        )
    })
}

/// `loss 0.0312, accuracy 85.10% (the largest class has 84.90% of the rows)`
fn describe(event: &EvalEvent) -> String {
    let mut text = format!("loss {}", significant(event.loss, 4));
    if let Some(accuracy) = event.accuracy {
        text += &format!(", accuracy {:.2}%", accuracy * 100.0);
    }
    if let Some(part) = event.largest_class {
        text += &format!(" (the largest class has {:.2}% of the rows)", part * 100.0);
    }
    text + &figures_text(|name| event.figures.get(name).copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(accuracy: Option<f64>, figures: &[(&'static str, f64)]) -> EvalEvent {
        EvalEvent {
            step: 1,
            loss: 2.0,
            accuracy,
            largest_class: None,
            best_by: BestBy::Loss,
            figures: figures.iter().copied().collect(),
            columns: Vec::new(),
        }
    }

    #[test]
    fn a_model_as_good_as_one_answer_for_all_has_learned_nothing() {
        let says = |figures: &[_]| learned_nothing(&event(None, figures), None);
        assert!(says(&[("r2", -0.1)]).is_some() && says(&[("mean_r2", 0.0)]).is_some());
        assert!(says(&[("r2", 0.02)]).is_none() && says(&[]).is_none());
        // By class, how often each class is the answer, and by how much more it is likely.
        let of = |answers: &[&[u64]], more: f32| {
            let classes = answers.len();
            let mut counts = ClassCounts::of(classes);
            for (class, of_class) in answers.iter().enumerate() {
                for (answer, count) in of_class.iter().enumerate() {
                    let mut logits = vec![0.0; classes];
                    logits[answer] = 5.0;
                    logits[class] += more;
                    (0..*count).for_each(|_| counts.count(class, &logits));
                }
            }
            counts.add_up(&ddp_comm::Group::alone()).unwrap();
            let right: u64 = counts.right().iter().sum();
            let accuracy = right as f64 / counts.rows().iter().sum::<u64>() as f64;
            learned_nothing(&event(Some(accuracy), &[]), Some(&counts))
        };
        assert!(of(&[&[50, 0], &[50, 0]], 0.0).is_some());
        assert!(of(&[&[40, 10], &[20, 30]], 0.0).is_none());
        // It finds the likely rows of the smaller class, but never says so.
        assert!(of(&[&[90, 0], &[10, 0]], 1.0).is_some());
        assert!(of(&[&[85, 5], &[9, 1]], 0.0).is_some());
        assert!(of(&[&[85, 5], &[9, 1]], 1.0).is_none());
        // Of held-out rows of one class a run warns when it begins.
        assert!(of(&[&[9, 1], &[0, 0]], 0.0).is_none());
        // With class weights.
        assert!(of(&[&[78, 6, 6], &[1, 4, 0], &[1, 0, 4]], 0.0).is_none());
    }
}
