//! Fills a model with the values of a folder.

use std::collections::BTreeSet;
use std::path::Path;

use ddp_nn::params::{Parameter, Params};

use super::architecture::Architecture;
use super::config::{DescribedModel, describe};
use super::folder::{FoundTensor, Tensors};
use super::names::{self, TensorPart};
use crate::checkpoint::{Foreign, PIECE, fill, initial, refuse};
use crate::error::Result;
use crate::shown::some_of;

/// What the folder's `config.json` says. Refuses one whose files of tensors are missing or damaged,
/// by their headers, or hold a model of another size.
pub fn checked(folder: &Path) -> Result<DescribedModel> {
    let described = describe(folder)?;
    let (architecture, spec) = (described.architecture, &described.spec);
    let tensors = Tensors::open(folder, architecture)?;
    let [name, _] = names::tied(architecture);
    let got = tensors.found.get(&name).map(|found| &found.shape);
    let checked = check_shape(&name, got, &[spec.vocab, spec.width]);
    checked.map_err(|why| refuse(folder, why))?;
    Ok(described)
}

fn check_shape(name: &str, got: Option<&Vec<usize>>, expected: &[usize]) -> Result<(), String> {
    match got.filter(|got| **got != expected) {
        None => Ok(()),
        Some(got) => Err(format!(
            "{name} has the shape {got:?}, and {expected:?} in the model; help: give the \
             config.json that belongs to it"
        )),
    }
}

/// Fills the model `params`, which may be in several parts, with the values of the folder. Names,
/// shapes and dtypes of all tensors are checked before anything changes. Returns a digest of the
/// values.
pub fn load(folder: &Path, params: &[&Params]) -> Result<String> {
    let described = describe(folder)?;
    let architecture = described.architecture;
    let tensors = Tensors::open(folder, architecture)?;
    let list = initial(params);
    let parameters = list.iter().map(|(_, parameter)| *parameter);
    let sources = sources(&described, parameters);
    let sources = sources.map_err(|why| refuse(folder, why))?;
    let checked = check(architecture, &tensors, &sources, described.spec.context);
    checked.map_err(|why| refuse(folder, why))?;
    if described.spec.tied {
        check_tied(folder, architecture, &tensors)?;
    }
    let (mut read, mut foreign) = (Read::default(), Foreign::default());
    for ((params, parameter), parts) in list.iter().zip(&sources) {
        let mut rows = 0..0;
        for part in parts {
            rows = rows.end..rows.end + part.shape[0];
            let mut first = 0;
            fill(params, parameter, rows.clone(), |values| {
                read.part(&tensors, part, first, values)?;
                first += values.len();
                let plausible = foreign.check(&part.name, values);
                plausible.map_err(|why| refuse(folder, why))
            })?;
        }
    }
    Ok(foreign.digest())
}

/// The tensors that make each parameter.
fn sources<'a>(
    described: &DescribedModel,
    parameters: impl Iterator<Item = &'a Parameter>,
) -> Result<Vec<Vec<TensorPart>>, String> {
    let of = |parameter: &Parameter| {
        let DescribedModel {
            architecture, spec, ..
        } = described;
        let parts = names::parts(architecture, spec, &parameter.name, &parameter.shape);
        parts.ok_or_else(|| {
            format!(
                "{} has nothing for {}; help: leave the model's settings out: they follow from \
                 the folder",
                architecture.class(),
                parameter.name
            )
        })
    };
    parameters.map(of).collect()
}

/// Refuses a folder whose tensors are not exactly those of its config.json, with this many
/// positions.
fn check(
    architecture: &Architecture,
    tensors: &Tensors,
    sources: &[Vec<TensorPart>],
    positions: usize,
) -> Result<(), String> {
    let parts = || sources.iter().flatten();
    let mut missing: Vec<&str> = parts().map(|part| part.name.as_str()).collect();
    missing.retain(|name| !tensors.found.contains_key(*name));
    if !missing.is_empty() {
        let missing = some_of(&missing, 4);
        return Err(format!("it lacks {missing}; help: give a whole folder"));
    }
    let mut known: BTreeSet<&str> = parts().map(|part| part.name.as_str()).collect();
    let [_, head] = names::tied(architecture);
    known.insert(&head);
    let names = tensors.found.keys().map(String::as_str);
    let others: Vec<&str> = names.filter(|name| !known.contains(name)).collect();
    if !others.is_empty() {
        let others = some_of(&others, 4);
        return Err(format!(
            "it has {others}, which a model of its config.json does not have; help: give the \
             config.json that belongs to it"
        ));
    }
    for part in parts() {
        let (got, mut expected) = (&tensors.found[&part.name].shape, part.shape_there());
        if part.is_of_positions() {
            // The model may see fewer.
            expected[0] = positions;
        }
        check_shape(&part.name, Some(got), &expected)?;
    }
    Ok(())
}

/// Refuses a head that differs from the embedding where both are one weight.
fn check_tied(folder: &Path, architecture: &Architecture, tensors: &Tensors) -> Result<()> {
    let [embedding, head] = names::tied(architecture);
    let (Some(embedding), Some(head)) = (tensors.found.get(&embedding), tensors.found.get(&head))
    else {
        return Ok(());
    };
    let count: usize = head.shape.iter().product();
    let piece = |found: &FoundTensor, first: usize| -> Result<Vec<f32>> {
        let mut values = vec![0.0; PIECE.min(count - first)];
        tensors.read(found, first, &mut values, &mut Vec::new())?;
        Ok(values)
    };
    let mut is_same = head.shape == embedding.shape;
    for first in (0..count).step_by(PIECE) {
        is_same = is_same && piece(head, first)? == piece(embedding, first)?;
    }
    if is_same {
        return Ok(());
    }
    let why = "lm_head.weight: expected the values of the embedding, as tie_word_embeddings says, \
               got others; help: set tie_word_embeddings to false in config.json if both are used";
    Err(refuse(folder, why.into()))
}

/// Scratch memory for reading.
#[derive(Default)]
struct Read {
    bytes: Vec<u8>,
    there: Vec<f32>,
    /// The part, if it is transposed there.
    here: Vec<f32>,
}

impl Read {
    /// Reads values of a tensor, which has them as rows of a parameter, from the one at `first` on.
    fn part(
        &mut self,
        tensors: &Tensors,
        part: &TensorPart,
        first: usize,
        here: &mut [f32],
    ) -> Result<()> {
        let found = &tensors.found[&part.name];
        if !part.is_transposed {
            tensors.read(found, first, here, &mut self.bytes)?;
        } else {
            if first == 0 {
                let count = part.shape.iter().product();
                self.there.resize(count, 0.0);
                self.here.resize(count, 0.0);
                tensors.read(found, 0, &mut self.there, &mut self.bytes)?;
                transpose(&self.there, &mut self.here, part.shape[0]);
            }
            here.copy_from_slice(&self.here[first..][..here.len()]);
        }
        if part.shift != 0.0 {
            here.iter_mut().for_each(|value| *value += part.shift);
        }
        Ok(())
    }
}

/// Transposes `from`, which has `columns` columns, into `to`.
pub(super) fn transpose(from: &[f32], to: &mut [f32], columns: usize) {
    let rows = from.len() / columns.max(1);
    for (row, values) in from.chunks_exact(columns.max(1)).enumerate() {
        for (column, value) in values.iter().enumerate() {
            to[column * rows + row] = *value;
        }
    }
}
