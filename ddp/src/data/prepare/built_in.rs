//! Data that are built in, as `prepare` gives them: normalized if that is asked for, or as a trained model expects them.

use std::sync::Arc;

use ddp_comm::World;

use super::{check_normalization, describe, of_files};
use crate::config::Normalize;
use crate::data::glyphs::Glyphs;
use crate::data::normalize::Normalized;
use crate::data::scan::{self, Rows};
use crate::data::synthetic::Synthetic;
use crate::data::{Data, DataRequest, DataSpec, Dataset, Normalization, Targets, Task, Trained};
use crate::error::{Error, Result};

/// The most bytes of generated features that are made to find their moments.
const GENERATED_BYTES_MAX: u64 = 256 << 20;

/// Data that are built in.
pub(super) fn built_in(request: &DataRequest, world: &World) -> Result<Data> {
    let (train, held_out): (Arc<dyn Dataset>, Arc<dyn Dataset>) = match &request.data {
        DataSpec::Glyphs(spec) => (Arc::new(Glyphs::train(spec)), Arc::new(Glyphs::held_out(spec))),
        DataSpec::Synthetic(spec) => {
            let (train, held_out) = Synthetic::pair(spec);
            (Arc::new(train), Arc::new(held_out))
        }
        DataSpec::Files(spec) => return of_files(request, spec, world),
    };
    let normalization = match &request.trained {
        Some(trained) => {
            check_trained(trained, &request.data, train.row_shape(), train.task())?;
            trained.normalization.clone()
        }
        None if request.normalize == Normalize::None => None,
        None => {
            let found = scan::features(&Generated(&*train), &|_| true, world, GENERATED_BYTES_MAX)?;
            Normalization::of(request.normalize, &found.moments)
        }
    };
    let normalized = |of: Arc<dyn Dataset>| -> Arc<dyn Dataset> {
        match &normalization {
            None => of,
            Some(by) => Arc::new(Normalized { of, by: by.clone() }),
        }
    };
    let (train, held_out) = (normalized(train), normalized(held_out));
    let description = describe(request.data.name(), &*train, &*held_out);
    Ok(Data { train, held_out, description, normalization, columns: None, label: None })
}

/// Rows of a dataset, for looking at their features.
struct Generated<'a>(&'a dyn Dataset);

impl Rows for Generated<'_> {
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    fn width(&self) -> usize {
        self.0.row_shape().iter().product()
    }

    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        let rows: Vec<u64> = (first..first + (into.len() / self.width()) as u64).collect();
        match self.0.task() {
            Task::Classification { .. } => self.0.gather(&rows, into, Targets::Classes(&mut vec![0; rows.len()])),
            Task::Regression { outputs } => {
                self.0.gather(&rows, into, Targets::Values(&mut vec![0.0; rows.len() * outputs]))
            }
        }
    }
}

/// Built-in data for a model that is trained already.
fn check_trained(trained: &Trained, data: &DataSpec, shape: &[usize], task: &Task) -> Result<()> {
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    if count(shape) != count(&trained.row_shape) || *task != trained.task {
        return Err(Error::Data(format!(
            "--data {data}: expected rows of {} features for {}, as the model was trained on, got {} for {task}. Give other data",
            count(&trained.row_shape),
            trained.task,
            count(shape)
        )));
    }
    check_normalization(trained)
}
