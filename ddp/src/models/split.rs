//! Splitting a model over several devices: each gets consecutive layers. Names, first values, the numbers that dropout draws, and
//! so the file of the saved model are those of the model in one piece.
//!
//! Parts are cut before layers that have parameters: what has none (an activation, dropout) stays with the layer below it, which
//! can go on applying the activation itself. Layers whose weights are tied stay together, with all between them. Parts are even by their numbers of
//! parameters: that is their memory, and for linear layers also their work.

use std::ops::Range;

use ddp_kernels::Device;

use super::Model;
use crate::error::{Error, Result};
use crate::nn::build::Declarations;
use crate::nn::{Build, Layer, Sequential};

impl Model {
    /// The layers of `root`, for rows of `input_shape`, over `devices`: a model for each, from the input on. `make` makes it
    /// from layers, the shape of their input, and the device.
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
        parts.into_iter().zip(devices).map(one).collect()
    }
}

/// Cuts `layers`, which work on rows of `input_shape`, into as many parts.
pub fn split(mut layers: Sequential, input_shape: &[usize], parts: usize) -> Result<Vec<Sequential>> {
    if parts == 1 {
        return Ok(vec![layers]);
    }
    // Built once only to learn what there is.
    let mut declarations = Declarations::new();
    layers.build(&mut Build::new(&mut declarations), input_shape)?;
    let units = units(&layers, &declarations);
    if parts == 0 || parts > units.len() {
        let count = units.len();
        return Err(Error::Usage(format!(
            "a model over {parts} devices: expected from 1 to {count}, since it has {count} layers with parameters (tied ones count \
             as one), got {parts}. Use fewer devices (--devices-per-rank), or a model of more layers"
        )));
    }
    let weights: Vec<usize> = units.iter().map(|unit| unit.elements).collect();
    let parts = even_parts(&weights, parts);
    let ranges: Vec<_> =
        parts.iter().map(|part| units[part.start].layers.start..units[part.end - 1].layers.end).collect();
    Ok(layers.cut(&ranges))
}

/// Layers that stay together.
#[derive(Debug)]
struct Unit {
    layers: Range<usize>,
    /// Elements of the parameters that are declared in it.
    elements: usize,
    /// The uses of parameters in it, by their order in a forward pass.
    uses: Range<usize>,
}

fn units(layers: &Sequential, declarations: &Declarations) -> Vec<Unit> {
    let (uses, list) = (&declarations.uses, &declarations.list);
    let first_use = |at: usize| uses.iter().position(|id| *id == uses[at]).expect("it is one of them");
    let places = layers.places();
    let mut units: Vec<Unit> = Vec::new();
    for (index, ends) in places.windows(2).enumerate() {
        let layer_uses = ends[0].range_to(ends[1]);
        let elements = |at: usize| if first_use(at) == at { list[uses[at].0].shape.iter().product() } else { 0usize };
        let mut unit = Unit {
            layers: index..index + 1,
            elements: layer_uses.clone().map(elements).sum(),
            uses: layer_uses.clone(),
        };
        let earliest = layer_uses.clone().map(first_use).min().unwrap_or(layer_uses.start);
        // Without parameters it belongs to the layer below; with a tie to the layer with the first use, and all between.
        while let Some(below) =
            units.pop_if(|below| unit.uses.is_empty() || below.uses.is_empty() || below.uses.end > earliest)
        {
            unit.layers.start = below.layers.start;
            unit.uses.start = below.uses.start;
            unit.elements += below.elements;
        }
        units.push(unit);
    }
    units.retain(|unit| !unit.uses.is_empty());
    units
}

/// Cuts `weights` into `parts` runs, none empty: the heaviest as light as it can be, and of all such ways the one whose parts
/// differ least (in squares).
fn even_parts(weights: &[usize], parts: usize) -> Vec<Range<usize>> {
    assert!((1..=weights.len()).contains(&parts), "{parts} parts of {} pieces", weights.len());
    let mut before = vec![0u128];
    weights.iter().for_each(|&weight| before.push(before[before.len() - 1] + weight as u128));
    let cap = lightest_cap(weights, parts);
    // By number of parts and pieces covered: the least sum of squares, and where the last part begins.
    let mut best: Vec<Vec<Option<(u128, usize)>>> = vec![vec![None; weights.len() + 1]; parts + 1];
    best[0][0] = Some((0, 0));
    for count in 1..=parts {
        for end in count..=weights.len() {
            for start in count - 1..end {
                let weight = before[end] - before[start];
                let Some((below, _)) = best[count - 1][start].filter(|_| weight <= cap) else { continue };
                let squares = below + weight * weight;
                if best[count][end].is_none_or(|(least, _)| squares < least) {
                    best[count][end] = Some((squares, start));
                }
            }
        }
    }
    let mut end = weights.len();
    let mut cuts: Vec<Range<usize>> = Vec::with_capacity(parts);
    for count in (1..=parts).rev() {
        let (_, start) = best[count][end].expect("the cap can be kept");
        cuts.push(start..end);
        end = start;
    }
    cuts.reverse();
    cuts
}

/// The least that the heaviest of `parts` runs can weigh. (With as many pieces as parts or more, parts can always be cut further, so no run
/// need be empty.)
fn lightest_cap(weights: &[usize], parts: usize) -> u128 {
    let runs_within = |cap: u128| {
        let (mut runs, mut filled) = (1, 0u128);
        for &weight in weights {
            filled += weight as u128;
            if filled > cap {
                (runs, filled) = (runs + 1, weight as u128);
            }
        }
        runs
    };
    let (mut low, mut high) = (0, weights.iter().map(|&weight| weight as u128).sum());
    low = low.max(weights.iter().copied().max().unwrap_or(0) as u128);
    while low < high {
        let middle = low + (high - low) / 2;
        if runs_within(middle) <= parts {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

#[cfg(test)]
mod tests;
