//! How many rows each class has.

use std::cmp::Reverse;

use ddp_data::{Classes, TaskSpec};
use ddp_kernels::{DType, Tensor};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::shown::{shown, table};
use crate::tasks::task::Survey;

/// Classes that are listed for people.
const CLASSES_SHOWN: usize = 20;

/// The rows of each class.
pub(super) struct RowsOfClasses {
    classes: Classes,
    rows: Vec<u64>,
}

impl RowsOfClasses {
    pub(super) fn of(classes: &Classes) -> RowsOfClasses {
        RowsOfClasses {
            classes: classes.clone(),
            rows: vec![0; classes.count()],
        }
    }
}

impl Survey for RowsOfClasses {
    fn count(&mut self, first: u64, targets: &Tensor) -> Result<()> {
        let each = targets.count() / targets.shape()[0].max(1);
        let targets = targets.to_dtype(DType::I64)?.to_vec::<i64>()?;
        for (index, class) in targets.into_iter().enumerate() {
            let known = usize::try_from(class).ok();
            let count = known.and_then(|class| self.rows.get_mut(class));
            *count.ok_or_else(|| {
                let row = first + (index / each) as u64;
                Error::Data(format!("row {row}: the label {class} is not a class"))
            })? += 1;
        }
        Ok(())
    }

    /// The most frequent first, if there are many.
    fn text(&self) -> String {
        let mut classes: Vec<usize> = (0..self.rows.len()).collect();
        let left_out = classes.len().saturating_sub(CLASSES_SHOWN);
        if left_out > 0 {
            classes.sort_by_key(|&class| Reverse(self.rows[class]));
            classes.truncate(CLASSES_SHOWN);
        }
        let line = |&class: &usize| {
            let rows = format!("{} rows", self.rows[class]);
            vec![shown(&self.classes.name(class)), rows]
        };
        let mut lines = vec![TaskSpec::Classification(self.classes.clone()).to_string()];
        lines.extend(table(&classes.iter().map(line).collect::<Vec<_>>(), 1));
        if left_out > 0 {
            lines.push(format!(
                "and {left_out} more classes, each with at most as many rows"
            ));
        }
        lines.join("\n")
    }

    fn json(&self) -> (&'static str, Value) {
        let class = |(class, rows): (usize, &u64)| json!({ "name": self.classes.name(class), "rows": rows });
        ("classes", self.rows.iter().enumerate().map(class).collect())
    }
}
