//! Digests of a training, which show in which step and layer two runs first differ.
//!
//! At log steps the gradients of each layer are digested before the update, and the weights after
//! it. Digests do not depend on the number of ranks, on ZeRO-1 or on how a model is split: they are
//! computed by quantum of each parameter (`ops::digest_quanta`) and put together here. Ranks with
//! slices under ZeRO-1 add theirs: a quantum is 0 on all ranks but one.

use std::collections::BTreeMap;
use std::ops::Range;

use ddp_comm::{Group, Reduce};
use ddp_data::Loader;
use ddp_kernels::ops::{self, Chunk, ChunkTable, DIGEST, QUANTUM, digest_mix};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::optim::Clip;
use ddp_nn::params::{Parameter, Params};
use serde::Serialize;

use crate::error::Result;

/// A layer: its name, a hash of all bits, the norm and the sum of its elements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerDigest(pub String, pub String, pub f64, pub f64);

/// What a logged step read and computed. Layers are in order from the input to the output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepDigests {
    /// A hash of the numbers of the global batch's rows.
    pub batch: String,
    /// The mean gradients before clipping.
    pub gradients: Vec<LayerDigest>,
    /// The trained weights after the update.
    pub weights: Vec<LayerDigest>,
}

/// The numbers of the rows in the batch of step `step0`, from 0, as a hash.
pub(crate) fn of_batch(loader: &mut Loader, step0: u64) -> String {
    let rows = loader.rows_of(step0);
    text(rows.fold(0, |hash, row| digest_mix(hash ^ digest_mix(row))))
}

fn is_saved(parameter: &Parameter) -> bool {
    !parameter.is_base
}

/// The weights of a whole model, in parts: also those that are not trained, and buffers, but not a
/// base. All ranks call it together: they may have divided the weights.
pub(crate) fn of_weights<'a>(
    parts: impl Iterator<Item = (&'a Params, &'a Group)>,
) -> Result<Vec<LayerDigest>> {
    let digests = |(params, group): (&Params, &Group)| -> Result<Vec<LayerDigest>> {
        let chunks = |part: &Range<usize>| -> Result<ChunkTable> {
            let saved = params.list().iter().filter(|p| is_saved(p));
            let chunk = |p: &Parameter| {
                let (start, end) = (p.range.start.max(part.start), p.range.end.min(part.end));
                (start < end).then(|| Chunk {
                    offset: start - part.start,
                    len: end - start,
                    decay: false,
                })
            };
            Ok(ChunkTable::new(saved.filter_map(chunk).collect())?)
        };
        let count = chunks(&(0..params.arena_count()))?.quanta();
        let quanta = Tensor::zeros(&[DIGEST * count], DType::I64, params.device())?;
        for part in params.value_ranges() {
            // What all have, one digests.
            let is_of_all = part.start >= params.trained_part().end;
            if params.is_divided() && is_of_all && group.rank() > 0 {
                continue;
            }
            let before = DIGEST * chunks(&(0..part.start))?.quanta();
            let chunks = chunks(&part)?;
            let out = quanta.slice(before..before + DIGEST * chunks.quanta())?;
            ops::digest_quanta(&out, &params.values_of(part)?, &chunks)?;
        }
        if params.is_divided() {
            let stream = Stream::current(params.device())?;
            group.all_reduce(
                &quanta.clone().named("digests of weights"),
                Reduce::Sum,
                &stream,
            )?;
        }
        Ok(by_layer(params, is_saved, &read(&quanta)?, 1.0))
    };
    Ok(parts.map(digests).collect::<Result<Vec<_>>>()?.concat())
}

/// Digests of the trained part of a model on one device. Letters: Q its quanta.
#[derive(Debug)]
pub(crate) struct DeviceDigests {
    /// i64 (2 · 3 · Q): of the gradients, then of the weights.
    pub(crate) quanta: Tensor,
}

impl DeviceDigests {
    /// Room for digests of `params`.
    pub(crate) fn new(params: &Params) -> Result<DeviceDigests> {
        let count = 2 * DIGEST * params.chunks()?.quanta();
        let quanta = Tensor::zeros(&[count], DType::I64, params.device())?.named("digests");
        Ok(DeviceDigests { quanta })
    }

    /// Digests the gradients, or the `weights`, in the slices that `clip` measures. Under ZeRO-1
    /// calls `sum_over_ranks` to complete the digests.
    pub(crate) fn take(
        &self,
        weights: bool,
        params: &Params,
        clip: &Clip,
        sum_over_ranks: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let half = self.quanta.count() / 2;
        let all = if weights {
            self.quanta.slice(half..2 * half)?
        } else {
            self.quanta.slice(0..half)?
        };
        if clip.is_shared() {
            ops::zero(&all)?;
        }
        for (range, chunks, quanta) in clip.slices() {
            let quanta = all.slice(DIGEST * quanta.start..DIGEST * quanta.end)?;
            let elements = if weights {
                params.values_of(range)?
            } else {
                params.gradients_of(range)?
            };
            ops::digest_quanta(&quanta, &elements, chunks)?;
        }
        if clip.is_shared() && half > 0 {
            return sum_over_ranks(&all.named("digests"));
        }
        Ok(())
    }

    /// The gradients and the weights by layer. `divisor` turns sums of gradients into means.
    pub(crate) fn read(&self, params: &Params, divisor: f64) -> Result<[Vec<LayerDigest>; 2]> {
        let all = read(&self.quanta)?;
        let (gradients, weights) = all.split_at(all.len() / 2);
        let of = |quanta, divisor| by_layer(params, Parameter::is_trained, quanta, divisor);
        Ok([of(gradients, divisor), of(weights, 1.0)])
    }
}

fn read(quanta: &Tensor) -> Result<Vec<i64>> {
    Ok(quanta.to(Device::Cpu)?.to_vec()?)
}

/// Puts together the quanta of the parameters that are `wanted`, which are in the arena's order.
fn by_layer(
    params: &Params,
    wanted: fn(&Parameter) -> bool,
    quanta: &[i64],
    divisor: f64,
) -> Vec<LayerDigest> {
    let (mut rest, _) = quanta.as_chunks::<DIGEST>();
    let mut by_id = BTreeMap::new();
    for p in params.list().iter().filter(|p| wanted(p)) {
        let (own, others) = rest.split_at(p.range.len().div_ceil(QUANTUM));
        by_id.insert(p.id, own);
        rest = others;
    }
    let mut layers: Vec<(&str, u64, f64, f64)> = Vec::new();
    for p in params.in_order().into_iter().filter(|p| wanted(p)) {
        let (name, _) = p.name.rsplit_once('.').unwrap_or((&p.name, ""));
        if layers.last().is_none_or(|last| last.0 != name) {
            layers.push((name, 0, 0.0, 0.0));
        }
        let (_, hash, sum, squares) = layers.last_mut().expect("pushed above");
        for quantum in by_id[&p.id] {
            let [bits, own_sum, own_squares] = quantum.map(i64::cast_unsigned);
            *hash = digest_mix(*hash ^ bits);
            *sum += f64::from_bits(own_sum);
            *squares += f64::from_bits(own_squares);
        }
    }
    let layer = |(name, hash, sum, squares): (&str, u64, f64, f64)| {
        let (norm, sum) = (squares.sqrt() / divisor, sum / divisor);
        LayerDigest(name.into(), text(hash), norm, sum)
    };
    layers.into_iter().map(layer).collect()
}

fn text(hash: u64) -> String {
    format!("{hash:016x}")
}
