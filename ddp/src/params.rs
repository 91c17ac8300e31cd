//! All parameters of a model in flat arenas: one for values, one for gradients (the optimizers' moments have the same layout).
//!
//! Order: that in which a backward pass completes gradients, so that a bucket of the reducer is one range. Every parameter starts at
//! a multiple of 256 bytes; the padding between is zero and stays zero. Frozen parameters and buffers come last: they
//! have values and no gradients.

use std::ops::Range;

use ddp_kernels::ops::{Chunk, ChunkTable};
use ddp_kernels::{DType, Device, Random, Tensor};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::error::{Error, Result};
use crate::nn::build::{Build, Declarations, Declared, Place};
use crate::nn::layer::Layer;

/// A parameter or buffer, by the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(crate) usize);

impl ParamId {
    /// Its number in the order of declaration, from 0: of a model's parameters and buffers each has another.
    pub fn number(self) -> usize {
        self.0
    }
}

/// Where one parameter is, and what it is called.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The parameter.
    pub id: ParamId,
    /// Its name, as PyTorch would call it: `0.weight`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements in the arenas.
    pub range: Range<usize>,
    /// Whether weight decay applies: to matrices.
    pub decays: bool,
    /// Whether it is left as it is.
    pub frozen: bool,
    /// Whether it is a buffer: saved and moved with the model, never trained.
    pub is_buffer: bool,
}

impl Parameter {
    /// Whether it has a gradient and the optimizer changes it.
    pub fn is_trained(&self) -> bool {
        !self.frozen && !self.is_buffer
    }
}

/// Every parameter starts at a multiple of this many bytes: what cuBLASLt's heuristics assume.
pub const ALIGNMENT_BYTES: usize = 256;

/// The parameters of a model and their memory.
#[derive(Debug)]
pub struct Params {
    /// In the order of the arenas.
    list: Vec<Parameter>,
    /// From a `ParamId` to its place in `list`.
    place: Vec<usize>,
    /// By `ParamId`: in how many places a pass uses it.
    uses: Vec<usize>,
    /// How many of the first k uses of parameters, in the order of a forward pass, are of trained ones.
    trained_uses_before: Vec<usize>,
    values: Tensor,
    /// The values of all that are trained.
    trained_values: Tensor,
    gradients: Tensor,
    /// By `ParamId`.
    value_views: Vec<Tensor>,
    gradient_views: Vec<Option<Tensor>>,
}

impl Params {
    /// Builds `model` for rows of `shape`, and gives it memory on `device`, filled from `seed` (the same values on any device, in
    /// any dtype up to rounding). `frozen` says by name which parameters are left as they are. Returns the shape of one row of the output too.
    pub fn new(
        model: &mut dyn Layer,
        shape: &[usize],
        dtype: DType,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<(Params, Vec<usize>)> {
        if !dtype.is_float() {
            return Err(Error::Usage(format!(
                "a model's values are floats: expected f32 (or f64, for checks), got {dtype}"
            )));
        }
        let mut declarations = Declarations::new();
        let output = model.build(&mut Build::new(&mut declarations), shape)?;
        let Declarations { list: declared, uses: used, .. } = declarations;
        let list = lay_out(&declared, dtype, frozen);
        let end = list.last().map_or(0, |parameter| parameter.range.end);
        let trained = list.iter().filter(|p| p.is_trained()).map(|p| p.range.end).max().unwrap_or(0);

        let mut place = vec![0; declared.len()];
        list.iter().enumerate().for_each(|(at, parameter)| place[parameter.id.0] = at);
        let mut uses = vec![0; declared.len()];
        let mut trained_uses_before = vec![0];
        for id in used {
            uses[id.0] += 1;
            let before = trained_uses_before[trained_uses_before.len() - 1];
            trained_uses_before.push(before + usize::from(list[place[id.0]].is_trained()));
        }

        let values = Tensor::zeros(&[end], dtype, device)?.named("values");
        let gradients = Tensor::zeros(&[trained], dtype, device)?.named("gradients");
        let trained_values = values.slice(0..trained)?;
        let view = |arena: &Tensor, p: &Parameter, kind: &str| -> Result<Tensor> {
            Ok(arena.slice(p.range.clone())?.reshape(&p.shape)?.named(&format!("{}{kind}", p.name)))
        };
        let by_id = || place.iter().map(|&at| &list[at]);
        let value_views = by_id().map(|p| view(&values, p, "")).collect::<Result<Vec<_>>>()?;
        let gradient_views = by_id()
            .map(|p| p.is_trained().then(|| view(&gradients, p, ".grad")).transpose())
            .collect::<Result<Vec<_>>>()?;
        let params = Params {
            list,
            place,
            uses,
            trained_uses_before,
            values,
            trained_values,
            gradients,
            value_views,
            gradient_views,
        };
        params.fill(&declared, seed)?;
        Ok((params, output))
    }

    /// Fills every parameter as declared: each from a stream of random numbers of its own, which its name and the seed choose.
    /// So it starts the same whatever else the model has.
    fn fill(&self, declared: &[Declared], seed: u64) -> Result<()> {
        for (declared, target) in declared.iter().zip(&self.value_views) {
            let mut random = Random::new(xxh3_64_with_seed(declared.name.as_bytes(), seed));
            let source = declared.init.values(target.count(), &mut random)?;
            let source = source.to_dtype(target.dtype())?.reshape(&declared.shape)?;
            ddp_kernels::transfer::announced("the model's first values", || target.copy_from(&source))?;
        }
        Ok(())
    }

    /// All of them, in the order of the arenas.
    pub fn list(&self) -> &[Parameter] {
        &self.list
    }

    /// One of them.
    pub fn parameter(&self, id: ParamId) -> &Parameter {
        &self.list[self.place[id.0]]
    }

    /// The parameter or buffer called `name`.
    pub fn find(&self, name: &str) -> Result<&Parameter> {
        self.list.iter().find(|parameter| parameter.name == name).ok_or_else(|| Error::Model {
            layer: "model".into(),
            expected: format!("one of: {}", self.names().collect::<Vec<_>>().join(", ")),
            got: name.to_string(),
            way_out: "Names are the layers' places in the model, a dot, and weight or bias.".into(),
        })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|parameter| parameter.name.as_str())
    }

    /// The dtype of the values.
    pub fn dtype(&self) -> DType {
        self.values.dtype()
    }

    /// Where they live.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// The values of all, padding included: one dimension.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// The values of all that are trained: the part of the values that the gradients mirror.
    pub fn trained_values(&self) -> &Tensor {
        &self.trained_values
    }

    /// The gradients of all that are trained: the first part of the values' layout.
    pub fn gradients(&self) -> &Tensor {
        &self.gradients
    }

    /// One parameter's values, in its shape.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.value_views[id.0]
    }

    /// One parameter's gradient, in its shape; none if it is not trained.
    pub fn gradient(&self, id: ParamId) -> Option<&Tensor> {
        self.gradient_views[id.0].as_ref()
    }

    /// How many elements are parameters, frozen ones too, padding and buffers not counted.
    pub fn count(&self) -> usize {
        self.list.iter().filter(|p| !p.is_buffer).map(|parameter| parameter.range.len()).sum()
    }

    /// How many elements are trained, padding not counted.
    pub fn trained_count(&self) -> usize {
        self.list.iter().filter(|p| p.is_trained()).map(|parameter| parameter.range.len()).sum()
    }

    /// What the optimizer updates: a chunk for each trained parameter.
    pub fn chunks(&self) -> Result<ChunkTable> {
        let trained = self.list.iter().filter(|p| p.is_trained());
        let chunk = |p: &Parameter| Chunk { offset: p.range.start, len: p.range.len(), decay: p.decays };
        Ok(ChunkTable::new(trained.map(chunk).collect())?)
    }

    /// A hash over names, shapes and layout.
    pub fn layout_hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        for p in &self.list {
            let line = format!("{} {:?} {:?} {} {} {}\n", p.name, p.shape, p.range, p.decays, p.frozen, p.is_buffer);
            hash.update(line.as_bytes());
        }
        hash.digest()
    }

    /// A hash over the values' bits: equal on replicas that are equal. Brings them to the host.
    pub fn values_hash(&self) -> Result<u64> {
        let values = ddp_kernels::transfer::announced("hashing the model", || self.values.to(Device::Cpu))?;
        let hash = match values.dtype() {
            DType::F32 => values.with_slice(|v: &[f32]| hash_of(v, |v| v.to_bits().to_le_bytes())),
            // Every other float dtype is part of f64.
            _ => values.to_dtype(DType::F64)?.with_slice(|v: &[f64]| hash_of(v, |v| v.to_bits().to_le_bytes())),
        };
        Ok(hash?)
    }

    pub(crate) fn uses(&self, id: ParamId) -> usize {
        self.uses[id.0]
    }

    pub(crate) fn trains_between(&self, start: Place, end: Place) -> bool {
        let range = start.range_to(end);
        self.trained_uses_before[range.end] > self.trained_uses_before[range.start]
    }
}

fn hash_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> u64 {
    let mut hash = Xxh3::new();
    let mut block = [[0; N]; 512];
    for values in values.chunks(block.len()) {
        block.iter_mut().zip(values).for_each(|(block, &value)| *block = bytes(value));
        hash.update(block[..values.len()].as_flattened());
    }
    hash.digest()
}

/// Trained parameters in reverse order of declaration (a backward pass goes that way; a tied one is complete where it was
/// declared, the first place of its use), then frozen ones, then buffers.
fn lay_out(declared: &[Declared], dtype: DType, frozen: &dyn Fn(&str) -> bool) -> Vec<Parameter> {
    let grain = ALIGNMENT_BYTES / dtype.bytes();
    let parameter = |(index, declared): (usize, &Declared)| Parameter {
        id: ParamId(index),
        name: declared.name.clone(),
        shape: declared.shape.clone(),
        range: 0..declared.shape.iter().product(),
        decays: declared.shape.len() >= 2 && !declared.is_buffer,
        frozen: !declared.is_buffer && frozen(&declared.name),
        is_buffer: declared.is_buffer,
    };
    let mut list: Vec<Parameter> = declared.iter().enumerate().rev().map(parameter).collect();
    list.sort_by_key(|p| (p.is_buffer, p.frozen));
    let mut start = 0;
    for p in &mut list {
        p.range = start..start + p.range.len();
        start = p.range.end.next_multiple_of(grain);
    }
    list
}

#[cfg(test)]
mod tests;
