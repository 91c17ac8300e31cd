//! Built-in data: normalized if that is asked for, or as a trained model expects them.

use std::sync::Arc;

use crate::dataset::{Dataset, read_rows};
use crate::error::{Error, Result};
use crate::glyphs::Glyphs;
use crate::normalize::{Normalization, Normalize, Normalized};
use crate::ranks::Ranks;
use crate::request::{Data, DataRequest, Trained};
use crate::scan::{self, Rows};
use crate::spec::DataSpec;
use crate::synthetic::Synthetic;

/// The most bytes of generated features that are made to find their moments.
const GENERATED_BYTES_MAX: u64 = 256 << 20;

pub(super) fn built_in(request: &DataRequest, ranks: &dyn Ranks) -> Result<Data> {
    let (train, held_out): (Arc<dyn Dataset>, Arc<dyn Dataset>) = match &request.data {
        DataSpec::Glyphs(spec) => (
            Arc::new(Glyphs::train(spec)),
            Arc::new(Glyphs::held_out(spec)),
        ),
        DataSpec::Synthetic(spec) => {
            let (train, held_out) = Synthetic::pair(spec);
            (Arc::new(train), Arc::new(held_out))
        }
        DataSpec::Files(_) => return Err(Error::Internal("files are not built in".into())),
    };
    let normalization = match &request.trained {
        Some(trained) => {
            check_trained(trained, &request.data, &*train)?;
            trained.normalization.clone()
        }
        None if request.normalize == Normalize::None => None,
        None => {
            let found = scan::features(&Generated(&*train), &|_| true, ranks, GENERATED_BYTES_MAX)?;
            Normalization::of(request.normalize, &found.moments)
        }
    };
    let normalized = |of: Arc<dyn Dataset>| -> Arc<dyn Dataset> {
        match normalization.clone() {
            None => of,
            Some(by) => Arc::new(Normalized { of, by }),
        }
    };
    let (train, held_out) = (normalized(train), normalized(held_out));
    Ok(Data {
        description: Data::describe(request.data.name(), &*train, &*held_out),
        train,
        held_out,
        normalization,
        columns: None,
        label: None,
    })
}

/// The features of a dataset, for their moments.
struct Generated<'a>(&'a dyn Dataset);

impl Rows for Generated<'_> {
    fn rows(&self) -> u64 {
        self.0.rows()
    }

    fn width(&self) -> usize {
        self.0.spec().inputs.elements()
    }

    fn read(&self, first: u64, into: &mut [f32]) -> Result<()> {
        let count = into.len() / self.width();
        let rows: Vec<u64> = (first..first + count as u64).collect();
        let [inputs, _] = read_rows(self.0, &rows)?;
        Ok(inputs.with_slice(|x: &[f32]| into.copy_from_slice(x))?)
    }
}

/// An error if a trained model cannot take these data.
fn check_trained(trained: &Trained, spec: &DataSpec, data: &dyn Dataset) -> Result<()> {
    let expected = trained.row_shape.iter().product::<usize>();
    let (got, task) = (data.spec().inputs.elements(), data.task());
    if expected != got || *task != trained.task {
        return Err(Error::Data(format!(
            "`data` {spec}: expected {expected} features a row and {}, as the model was trained on, got {got} and {task}",
            trained.task
        )));
    }
    trained.check_normalization()
}
