//! When a loss is no number any more: whose rows it was, found out by doing the bad step once more. The model is still
//! what it was before that step, since the optimizer has done nothing from then on.

use ddp_kernels::{DType, Tensor, ops, transfer};

use super::Trainer;
use crate::data::Task;
use crate::error::{Error, Result};

/// The most rows that are named.
const ROWS_NAMED: usize = 8;

impl Trainer<'_> {
    /// The error that ends the run, the same on all ranks: the step, the rank and the rows.
    pub(super) fn explain_nonfinite(&mut self, bad_step: u64, own_bad_step: Option<u64>) -> Result<Error> {
        let mine = if own_bad_step == Some(bad_step) { self.bad_rows(bad_step)? } else { String::new() };
        let all = self.world.all_gather_bytes(mine.as_bytes())?;
        let of_ranks = all.iter().enumerate().filter(|(_, text)| !text.is_empty());
        let named: Vec<String> =
            of_ranks.map(|(rank, text)| format!("rank {rank}, {}", String::from_utf8_lossy(text))).collect();
        let where_from = if named.is_empty() {
            // Every loss is a number: the gradients were too large for one.
            "the norm of the gradients, with every row's loss finite".to_string()
        } else {
            named.join("; ")
        };
        Ok(Error::NonFinite(format!(
            "step {bad_step}: the loss or its gradient is not finite: {where_from}. The model is as it was before that \
             step, and nothing was saved from there on. A lower --lr, a longer --warmup-steps or --grad-clip 1 help where training \
             diverged; look at those rows where it did not.",
        )))
    }

    /// This rank's rows of that step whose losses are not finite, by their numbers in the data.
    fn bad_rows(&mut self, bad_step: u64) -> Result<String> {
        let batch = self.loader.load(bad_step - 1)?.clone();
        let losses = self.step.losses_of(&batch)?;
        let classes = match self.task {
            Task::Classification { classes, .. } => {
                let targets = transfer::announced("whether the targets are classes", || batch.targets.to_vec::<i64>())?;
                Some((targets, classes))
            }
            Task::Regression { .. } => None,
        };
        Ok(named_rows(&losses, self.loader.rows(), classes.as_ref().map(|(targets, count)| (&targets[..], *count))))
    }

    /// Refuses to save values that are not finite, as they are after step `number`.
    pub(super) fn check_values(&self, number: u64) -> Result<()> {
        let mut bad = false;
        for stage in self.step.stages() {
            let values = stage.model().params.values();
            let flag = Tensor::zeros(&[1], DType::I64, values.device())?;
            let one = Tensor::ones(&[1], DType::I64, values.device())?;
            ops::mark_nonfinite(&flag, values, &one)?;
            bad |= transfer::announced("whether the model is finite", || flag.to_vec::<i64>())?[0] != 0;
        }
        if !bad {
            return Ok(());
        }
        Err(Error::NonFinite(format!(
            "after step {number}: the model has values that are not finite, and is not saved. A lower --lr or --grad-clip \
             1 helps where training diverged."
        )))
    }
}

/// Names the rows whose losses are not finite, and each target that is none of so many classes: the CPU refuses such a target at
/// once, a GPU makes its row's loss NaN.
fn named_rows(losses: &[f64], rows: &[u64], classes: Option<(&[i64], usize)>) -> String {
    let name = |(index, row): (usize, &u64)| {
        let target = classes.map(|(targets, count)| (targets[index], count));
        match target.filter(|&(target, count)| !(0..count as i64).contains(&target)) {
            Some((target, count)) => format!("{row} (whose target {target} is no class: there are {count}, from 0)"),
            None => row.to_string(),
        }
    };
    let pairs = losses.iter().zip(rows.iter().enumerate());
    let bad: Vec<(usize, &u64)> = pairs.filter(|(loss, _)| !loss.is_finite()).map(|(_, row)| row).collect();
    let named: Vec<String> = bad.iter().take(ROWS_NAMED).copied().map(name).collect();
    let more = bad.len().saturating_sub(ROWS_NAMED);
    let and_more = if more > 0 { format!(" and {more} more") } else { String::new() };
    match bad.len() {
        0 => "whose rows' losses are finite one by one and not in sum".to_string(),
        1 => format!("row {}", named[0]),
        _ => format!("rows {}{and_more}", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_rows_are_named_with_targets_that_are_no_classes() {
        let (nan, rows) = (f64::NAN, [40, 7, 1, 12]);
        assert_eq!(named_rows(&[0.5, nan, 0.5, 0.1], &rows, None), "row 7");
        let targets = [3, 10, 9, -1];
        let text = named_rows(&[nan, nan, 0.5, f64::INFINITY], &rows, Some((&targets, 10)));
        assert_eq!(
            text,
            "rows 40, 7 (whose target 10 is no class: there are 10, from 0), 12 (whose target -1 is no class: there are \
             10, from 0)"
        );
        assert!(named_rows(&[0.5; 4], &rows, Some((&targets, 10))).contains("finite one by one"));
        let many: Vec<u64> = (0..11).collect();
        assert_eq!(named_rows(&[nan; 11], &many, None), "rows 0, 1, 2, 3, 4, 5, 6, 7 and 3 more");
    }
}
