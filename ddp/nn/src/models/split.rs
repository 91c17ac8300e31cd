//! Splits a model over several devices; each gets consecutive layers. Names, initial weights, the
//! numbers with which dropout draws, and so the saved model, are those of the unsplit model.
//!
//! Cuts are before layers with parameters: a layer without (an activation, dropout) stays with the
//! layer below, which can still apply the activation. Parts have about equal numbers of parameters,
//! which is their memory, and for linear layers their work too.
//!
//! Layers of a `Tie` may come to different parts. The first part that uses the parameter owns it,
//! and later ones borrow it: `Params::loans`. It counts in each layer that uses it. Layers that
//! share a parameter by `Build::share` stay together, with all layers between them.

use std::ops::Range;

use ddp_kernels::Device;

use super::model::Model;
use crate::build::{Declarations, UseIndex};
use crate::error::{Error, Result};
use crate::params::Params;
use crate::setting::DEVICES_PER_RANK;
use crate::{Build, Layer, Sequential};

impl Model {
    /// Splits the layers of `root`, for rows of `input_shape`, over `devices`. Returns a model for
    /// each, from the input to the output. `make` makes one from its layers, the shape of a row of
    /// their input, and the device. Whoever runs them copies what they borrow (`Params::loans`).
    pub fn split(
        root: Sequential,
        input_shape: &[usize],
        devices: &[Device],
        mut make: impl FnMut(Box<dyn Layer>, &[usize], Device) -> Result<Model>,
    ) -> Result<Vec<Model>> {
        let parts = split(root, input_shape, devices.len())?;
        let mut shape = input_shape.to_vec();
        let one = |(layers, &device): (Sequential, &Device)| {
            let model = make(Box::new(layers), &shape, device)?;
            shape.clone_from(&model.output_shape);
            Ok(model)
        };
        let models = parts.into_iter().zip(devices).map(one);
        let mut models = models.collect::<Result<Vec<Model>>>()?;
        for part in 1..models.len() {
            let (below, rest) = models.split_at_mut(part);
            let below: Vec<&mut Params> = below.iter_mut().map(|model| &mut model.params).collect();
            rest[0].params.borrow_from(below);
        }
        Ok(models)
    }
}

/// Cuts `layers`, for rows of `input_shape`, into this many parts.
fn split(mut layers: Sequential, input_shape: &[usize], parts: usize) -> Result<Vec<Sequential>> {
    if parts == 1 {
        return Ok(vec![layers]);
    }
    // Built only to learn where parameters are used.
    let mut declarations = Declarations::new();
    Layer::build(&mut layers, &mut Build::new(&mut declarations), input_shape)?;
    let units = units(&layers, &declarations);
    if parts == 0 || parts > units.len() {
        let count = units.len();
        return Err(Error::Usage(format!(
            "a model over {parts} devices: expected from 1 to {count}, because it has {count} layers \
             with parameters, got {parts}; help: lower {DEVICES_PER_RANK}, or add layers"
        )));
    }
    let weights: Vec<usize> = units.iter().map(|unit| unit.elements).collect();
    let parts = even_parts(&weights, parts);
    let ranges: Vec<_> = parts
        .iter()
        .map(|part| units[part.start].layers.start..units[part.end - 1].layers.end)
        .collect();
    let lent = |point: UseIndex| -> Vec<String> {
        let before = UseIndex::default().range_to(point);
        let declared = declarations.uses[before]
            .iter()
            .map(|id| &declarations.list[id.0]);
        let tied = declared.filter(|declared| declared.is_tied);
        tied.map(|declared| declared.name.clone()).collect()
    };
    Ok(layers.cut(&ranges, lent))
}

/// Consecutive layers that stay together.
#[derive(Debug)]
struct Unit {
    layers: Range<usize>,
    /// The elements of parameters that are declared in these layers, and of tied ones.
    elements: usize,
    /// Their uses of parameters, numbered in the order of a forward pass.
    uses: Range<usize>,
}

fn units(layers: &Sequential, declarations: &Declarations) -> Vec<Unit> {
    let (uses, list) = (&declarations.uses, &declarations.list);
    let first_use = |at: usize| {
        uses.iter()
            .position(|id| *id == uses[at])
            .expect("each use is in the list")
    };
    let begins = layers.begins();
    let mut units: Vec<Unit> = Vec::new();
    for (index, ends) in begins.windows(2).enumerate() {
        let layer_uses = ends[0].range_to(ends[1]);
        let is_tied = |at: usize| list[uses[at].0].is_tied;
        let elements = |at: usize| {
            let before = &uses[layer_uses.start..at];
            if first_use(at) == at || is_tied(at) && !before.contains(&uses[at]) {
                list[uses[at].0].shape.iter().product()
            } else {
                0usize
            }
        };
        let mut unit = Unit {
            layers: index..index + 1,
            elements: layer_uses.clone().map(elements).sum(),
            uses: layer_uses.clone(),
        };
        let earliest = layer_uses
            .clone()
            .filter(|&at| !is_tied(at))
            .map(first_use)
            .min()
            .unwrap_or(layer_uses.start);
        // Without parameters it joins the layer below; with a shared one that is not tied, all
        // layers from the first that uses it.
        while let Some(below) = units.pop_if(|below| {
            unit.uses.is_empty() || below.uses.is_empty() || below.uses.end > earliest
        }) {
            unit.layers.start = below.layers.start;
            unit.uses.start = below.uses.start;
            unit.elements += below.elements;
        }
        units.push(unit);
    }
    units.retain(|unit| !unit.uses.is_empty());
    units
}

/// Cuts `weights` into `parts` runs, none empty. The heaviest run is as light as possible; of all
/// such cuts, the sum of the squared weights of the runs is the least.
fn even_parts(weights: &[usize], parts: usize) -> Vec<Range<usize>> {
    assert!(
        (1..=weights.len()).contains(&parts),
        "{parts} parts of {} pieces",
        weights.len()
    );
    let mut before = vec![0u128];
    for &weight in weights {
        before.push(before[before.len() - 1] + weight as u128);
    }
    let weight = |part: Range<usize>| before[part.end] - before[part.start];
    let heaviest = |below: u128, part| Some(below.max(weight(part)));
    let (cap, _) = best_cuts(weights.len(), parts, &heaviest);
    let squares = |below: u128, part| {
        let weight = weight(part);
        (weight <= cap).then(|| below + weight * weight)
    };
    best_cuts(weights.len(), parts, &squares).1
}

/// The cheapest cuts of this many pieces into parts, none empty, and their cost. `cost` is that of
/// the parts so far and of one more; None if it may not be.
fn best_cuts(
    pieces: usize,
    parts: usize,
    cost: &dyn Fn(u128, Range<usize>) -> Option<u128>,
) -> (u128, Vec<Range<usize>>) {
    // By number of parts and of pieces covered: the least cost, and the last part's start.
    let mut best: Vec<Vec<Option<(u128, usize)>>> = vec![vec![None; pieces + 1]; parts + 1];
    best[0][0] = Some((0, 0));
    for count in 1..=parts {
        for end in count..=pieces {
            let with = |start: usize| Some((cost(best[count - 1][start]?.0, start..end)?, start));
            best[count][end] = (count - 1..end).filter_map(with).min();
        }
    }
    let last = |count: usize, end: usize| best[count][end].expect("there are enough pieces");
    let (mut end, mut cuts) = (pieces, Vec::with_capacity(parts));
    for count in (1..=parts).rev() {
        let (_, start) = last(count, end);
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    (last(parts, pieces).0, cuts)
}

#[cfg(test)]
mod tests;
