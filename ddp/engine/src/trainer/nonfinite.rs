//! Non-finite losses: the bad step is repeated to name the rows. The model is still as it was
//! before that step, because the optimizer does nothing from then on. If only a gradient is not
//! finite and the norm was not measured, the optimizer leaves that parameter as it is, and updates
//! the others for the last time.

use std::cell::RefCell;
use std::rc::Rc;

use ddp_comm::World;
use ddp_data::Loader;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};
use ddp_nn::params::Params;
use ddp_nn::pass::{Observer, observed};

use crate::error::{Error, Result};
use crate::exchange;
use crate::setting::{GRAD_CLIP, LR, WARMUP_STEPS};
use crate::step::{Step, StepReport};
use crate::tasks::Task;

/// The most rows that are named.
const ROWS_NAMED: usize = 8;

/// The error that ends the run after a non-finite step, the same on all ranks: it names the step,
/// the rank and the rows. None after a finite step.
pub(super) fn explain(
    report: &StepReport,
    step: &mut Step,
    loader: &mut Loader,
    task: &dyn Task,
    world: &World,
) -> Result<Option<Error>> {
    let Some(bad_step) = report.bad_step else {
        return Ok(None);
    };
    let mine = if report.own_bad_step == Some(bad_step) {
        bad_rows(bad_step, step, loader, task)?
    } else {
        String::new()
    };
    let all = exchange::gather(world, &mine)?;
    let named = all.iter().enumerate().filter(|(_, text)| !text.is_empty());
    let named = named.map(|(rank, text)| format!("rank {rank}, {text}"));
    let named: Vec<String> = named.collect();
    let (cause, model) = if named.is_empty() {
        let cause = "a gradient, or the sum of losses, with every row's loss finite".to_string();
        (cause, "was not trained after that step")
    } else {
        (named.join("; "), "is as it was before that step")
    };
    Ok(Some(Error::NonFinite(format!(
        "step {bad_step}: the loss or its gradient is not finite: {cause}. The model \
         {model}, and nothing was saved since; help: if training diverged, use a lower {LR}, a \
         longer {WARMUP_STEPS} or {GRAD_CLIP} 1; else look at those rows"
    ))))
}

/// This rank's rows of that step whose losses are not finite, by their numbers in the data.
fn bad_rows(
    bad_step: u64,
    step: &mut Step,
    loader: &mut Loader,
    task: &dyn Task,
) -> Result<String> {
    let batch = loader.load(bad_step - 1)?.clone();
    check_numbers(bad_step, "inputs", &batch.x, loader.rows())?;
    check_numbers(bad_step, "targets", &batch.targets, loader.rows())?;
    let first = Rc::<RefCell<Option<String>>>::default();
    let seen = first.clone();
    let observer: Observer = Box::new(move |name, value| {
        // A value that cannot be copied must not hide the error.
        if seen.borrow().is_none() && is_bad(value).unwrap_or(false) {
            *seen.borrow_mut() = Some(name);
        }
        Ok(())
    });
    let losses = observed(observer, || step.losses_of(&batch))?;
    let targets = announced("the targets of bad rows", || batch.targets.to(Device::Cpu))?;
    let targets = targets.to_dtype(DType::F64)?.to_vec::<f64>()?;
    // A loss may have several targets.
    let is_one_each = targets.len() == losses.len();
    let why = |index: usize| {
        is_one_each
            .then(|| task.wrong_target(targets[index]))
            .flatten()
    };
    let mut named = named_rows(&losses, loader.rows(), &why);
    if let (Some(first), false) = (first.take(), named.is_empty()) {
        named += &format!(", first NaN or +∞: {first}");
    }
    Ok(named)
}

/// Whether a value has NaN or +∞. Masks of attention have −∞.
fn is_bad(value: &Tensor) -> ddp_kernels::Result<bool> {
    if !value.dtype().is_float() {
        return Ok(false);
    }
    let host = announced("which value is not finite", || {
        value.to((Device::Cpu, DType::F64))
    })?;
    let is_bad = |it: f64| it.is_nan() || it == f64::INFINITY;
    Ok(host.to_vec::<f64>()?.into_iter().any(is_bad))
}

/// An error that blames the data if some `numbers` (R, …) of these rows are not finite.
fn check_numbers(bad_step: u64, what: &str, numbers: &Tensor, rows: &[u64]) -> Result<()> {
    if !numbers.dtype().is_float() {
        return Ok(());
    }
    let numbers = announced("the data of bad rows", || numbers.to(Device::Cpu))?;
    let numbers = numbers.to_dtype(DType::F64)?.to_vec::<f64>()?;
    let Some(index) = numbers.iter().position(|number| !number.is_finite()) else {
        return Ok(());
    };
    let width = numbers.len() / rows.len();
    Err(Error::Data(format!(
        "step {bad_step}, row {} of the data: its {what} have {}, at position {}; files are checked before \
         training, so they may have changed since; help: correct the data, and start again",
        rows[index / width],
        numbers[index],
        index % width
    )))
}

/// Refuses to save a model with non-finite values after step `number`.
pub(super) fn check_values(step: &Step, number: u64) -> Result<()> {
    let mut is_bad = false;
    for values in step.params().map(Params::values) {
        let flag = Tensor::zeros(&[1], DType::I64, values.device())?;
        let one = Tensor::ones(&[1], DType::I64, values.device())?;
        ops::mark_nonfinite(&flag, values, &one)?;
        let flag = announced("whether the model is finite", || flag.to_vec::<i64>())?;
        is_bad |= flag[0] != 0;
    }
    if !is_bad {
        return Ok(());
    }
    Err(Error::NonFinite(format!(
        "after step {number}: the model has non-finite values and is not saved; help: use a lower \
         {LR}, or {GRAD_CLIP} 1"
    )))
}

/// Names the rows whose losses are not finite, and if a row has several losses, the position of
/// the first of these: attention spreads it to all after it. `why` says what is wrong with a
/// target: the CPU refuses such a target at once, a GPU makes its loss NaN.
fn named_rows(losses: &[f64], rows: &[u64], why: &dyn Fn(usize) -> Option<String>) -> String {
    let positions = losses.len() / rows.len().max(1);
    let first_bad = |(row, losses): (usize, &[f64])| {
        let mut bad = (0..positions).filter(|&position| !losses[position].is_finite());
        Some((row, bad.next()?, bad.count()))
    };
    let name = |&(row, position, later): &(usize, usize, usize)| {
        let mut name = rows[row].to_string();
        if positions > 1 {
            name += &format!(" at position {position}");
        }
        match later {
            0 => {}
            1 => name += " and 1 later one",
            _ => name += &format!(" and {later} later ones"),
        }
        match why(row * positions + position) {
            Some(why) => format!("{name} ({why})"),
            None => name,
        }
    };
    let of_rows = losses.chunks(positions.max(1)).enumerate();
    let bad: Vec<_> = of_rows.filter_map(first_bad).collect();
    let named: Vec<String> = bad.iter().take(ROWS_NAMED).map(name).collect();
    let more = bad.len().saturating_sub(ROWS_NAMED);
    let and_more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    match bad.len() {
        // Their sum is not finite.
        0 => String::new(),
        1 => format!("row {}", named[0]),
        _ => format!("rows {}{and_more}", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use ddp_data::TaskSpec;

    use super::*;
    use crate::tasks;

    fn named_with(targets: &[i64], losses: &[f64], rows: &[u64]) -> String {
        let task = tasks::of(&TaskSpec::numbered_classes(10));
        named_rows(losses, rows, &|index| {
            task.wrong_target(targets[index] as f64)
        })
    }

    #[test]
    fn bad_rows_are_named_with_targets_that_are_not_classes() {
        let (nan, rows) = (f64::NAN, [40, 7, 1, 12]);
        assert_eq!(named_rows(&[0.5, nan, 0.5, 0.1], &rows, &|_| None), "row 7");
        let targets = [3, 10, 9, -1];
        assert_eq!(
            named_with(&targets, &[nan, nan, 0.5, f64::INFINITY], &rows),
            "rows 40, 7 (target 10: expected a class from 0 to 9), 12 (target -1: expected a class \
             from 0 to 9)"
        );
        assert_eq!(named_with(&targets, &[0.5; 4], &rows), "");
        let many: Vec<u64> = (0..11).collect();
        assert_eq!(
            named_rows(&[nan; 11], &many, &|_| None),
            "rows 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
        );
    }

    #[test]
    fn bad_positions_within_rows_are_named() {
        let (nan, rows) = (f64::NAN, [40, 7]);
        let losses = [0.5, 0.5, nan, 0.1, nan, 0.2];
        assert_eq!(
            named_with(&[0, 1, 2, 3, 11, 5], &losses, &rows),
            "rows 40 at position 2, 7 at position 1 (target 11: expected a class from 0 to 9)"
        );
        let losses = [0.5, nan, nan, 0.1, 0.2, 0.2];
        assert_eq!(
            named_rows(&losses, &rows, &|_| None),
            "row 40 at position 1 and 1 later one"
        );
    }
}
