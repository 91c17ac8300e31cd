//! Built-in data, which are normalized already.

use std::sync::Arc;

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::glyphs::Glyphs;
use crate::request::{Data, DataRequest, Trained};
use crate::spec::DataSpec;
use crate::synthetic::Synthetic;

pub(super) fn built_in(request: &DataRequest) -> Result<Data> {
    let (train, held_out): (Arc<dyn Dataset>, Arc<dyn Dataset>) = match &request.data {
        DataSpec::Glyphs(spec) => (
            Arc::new(Glyphs::train(spec)),
            Arc::new(Glyphs::held_out(spec)),
        ),
        DataSpec::Synthetic(spec) => {
            let (train, held_out) = Synthetic::pair(spec);
            (Arc::new(train), Arc::new(held_out))
        }
        DataSpec::Files(_) | DataSpec::Tokens(_) => {
            return Err(Error::Internal("files are not built in".into()));
        }
    };
    if let Some(trained) = &request.trained {
        check_trained(trained, &request.data, &*train)?;
    }
    let understood = format!(
        "{}, {} features a row",
        train.task(),
        train.spec().inputs.elements()
    );
    let description = Data::describe(request.data.name(), &*train, &*held_out, &understood);
    Ok(Data::new(train, held_out, description))
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
    match trained.normalization {
        None => Ok(()),
        Some(_) => Err(Error::Data(format!(
            "`data` {spec}: expected files, since the model was trained on normalized features"
        ))),
    }
}
