//! All parameters of a model in flat arenas: one for values, one for gradients (the optimizers' moments have the same layout).
//!
//! Order: that in which a backward pass completes gradients, so that a bucket of the reducer is one range. Every parameter starts at
//! a multiple of 256 bytes; the padding between is zero and stays zero. Frozen parameters and buffers come last: they
//! have values and no gradients.
//!
//! Where N ranks share the trained part (ZeRO-1), each of its parameters starts at a whole quantum, and it is padded to N quanta or a
//! multiple: so it can be cut into slices for N ranks that are whole quanta, on which the optimizers work and norms are summed.
//!
//! Layers that compute in bf16 read rounded copies of the values: a second arena of the same layout, `working`. The values themselves,
//! the masters, stay in f32, as gradients and moments do: an update is mostly smaller than the distance between two bf16. Whoever changes
//! values says so with `refresh`, which rounds them into the copies. That is a pass of its own, of 6 bytes a parameter beside the 28 of AdamW's:
//! storing both in the optimizer's kernels would save the 4 that are read again.

use std::ops::Range;

use ddp_kernels::ops::{self, Chunk, ChunkTable, QUANTUM};
use ddp_kernels::{DType, Device, Random, Tensor};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::error::{Error, Result};
use crate::nn::build::{Build, Declarations, Declared, Place};
use crate::nn::layer::Layer;

mod format;

pub use self::format::Format;

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
    /// How many ranks the layout lets share the trained part.
    shares: usize,
    /// From a `ParamId` to its place in `list`.
    place: Vec<usize>,
    /// By `ParamId`: in how many places a pass uses it.
    uses: Vec<usize>,
    /// How many of the first k uses of parameters, in the order of a forward pass, are of trained ones.
    trained_uses_before: Vec<usize>,
    /// The masters.
    values: Tensor,
    /// The values of all that are trained.
    trained_values: Tensor,
    gradients: Tensor,
    /// Where layers compute in less than the masters: rounded copies of them, which layers read.
    working: Option<Tensor>,
    /// By `ParamId`: what layers read.
    value_views: Vec<Tensor>,
    /// By `ParamId`, of the masters.
    master_views: Vec<Tensor>,
    gradient_views: Vec<Option<Tensor>>,
}

impl Params {
    /// Builds `model` for rows of `shape`, and gives it memory on `device`, filled from `seed` (the same values on any device, in
    /// any format up to rounding). `format` says what layers compute in and so what values are: a dtype, or a
    /// [`Precision`](crate::config::Precision). `frozen` says by name which parameters are left as they are. Returns the shape of one row of the
    /// output too.
    pub fn new(
        model: &mut dyn Layer,
        shape: &[usize],
        format: impl Into<Format>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Result<(Params, Vec<usize>)> {
        Params::with_shares(model, shape, format, device, seed, frozen, 1)
    }

    /// As `new`, in a layout whose trained part `shares` ranks can share: see [`ReducerOptions::shares`](crate::reducer::ReducerOptions::shares).
    pub fn with_shares(
        model: &mut dyn Layer,
        shape: &[usize],
        format: impl Into<Format>,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
        shares: usize,
    ) -> Result<(Params, Vec<usize>)> {
        assert!(shares > 0, "somebody owns the trained part");
        let format = format.into();
        format.check()?;
        let mut declarations = Declarations::new();
        let output = model.build(&mut Build::new(&mut declarations), shape)?;
        let Declarations { list: declared, uses: used, .. } = declarations;
        let (list, trained) = lay_out(&declared, format.layers, frozen, shares);
        let end = list.last().map_or(0, |parameter| parameter.range.end).max(trained);

        let mut place = vec![0; declared.len()];
        list.iter().enumerate().for_each(|(at, parameter)| place[parameter.id.0] = at);
        let mut uses = vec![0; declared.len()];
        let mut trained_uses_before = vec![0];
        for id in used {
            uses[id.0] += 1;
            let before = trained_uses_before[trained_uses_before.len() - 1];
            trained_uses_before.push(before + usize::from(list[place[id.0]].is_trained()));
        }

        let masters = format.masters();
        let values = Tensor::zeros(&[end], masters, device)?.named("values");
        let gradients = Tensor::zeros(&[trained], masters, device)?.named("gradients");
        let copies = || Ok::<_, Error>(Tensor::zeros(&[end], format.layers, device)?.named("working values"));
        let working = (format.layers != masters).then(copies).transpose()?;
        let trained_values = values.slice(0..trained)?;
        let view = |arena: &Tensor, p: &Parameter, kind: &str| -> Result<Tensor> {
            Ok(arena.slice(p.range.clone())?.reshape(&p.shape)?.named(&format!("{}{kind}", p.name)))
        };
        let by_id = || place.iter().map(|&at| &list[at]);
        let views = |arena: &Tensor| by_id().map(|p| view(arena, p, "")).collect::<Result<Vec<_>>>();
        let master_views = views(&values)?;
        let value_views = working.as_ref().map_or_else(|| Ok(master_views.clone()), views)?;
        let gradient_views = by_id()
            .map(|p| p.is_trained().then(|| view(&gradients, p, ".grad")).transpose())
            .collect::<Result<Vec<_>>>()?;
        let params = Params {
            list,
            shares,
            place,
            uses,
            trained_uses_before,
            values,
            trained_values,
            gradients,
            working,
            value_views,
            master_views,
            gradient_views,
        };
        params.fill(&declared, seed)?;
        Ok((params, output))
    }

    /// Fills every parameter as declared: each from a stream of random numbers of its own, which its name and the seed choose.
    /// So it starts the same whatever else the model has.
    fn fill(&self, declared: &[Declared], seed: u64) -> Result<()> {
        for (declared, target) in declared.iter().zip(&self.master_views) {
            let mut random = Random::new(xxh3_64_with_seed(declared.name.as_bytes(), seed));
            let source = declared.init.values(target.count(), &mut random)?;
            let source = source.to_dtype(target.dtype())?.reshape(&declared.shape)?;
            ddp_kernels::transfer::announced("the model's first values", || target.copy_from(&source))?;
        }
        self.refresh(0..self.values.count())
    }

    /// Says that these elements of the values have changed, so that layers read them as they are now: rounds them into the copies that
    /// layers read, if there are any.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        let Some(working) = &self.working else { return Ok(()) };
        Ok(ops::cast_into(&working.slice(range.clone())?, &self.values.slice(range)?)?)
    }

    /// All of them, in the order of the arenas.
    pub fn list(&self) -> &[Parameter] {
        &self.list
    }

    /// All of them, in the order in which people know them: that of their declaration, from the input on.
    pub fn in_order(&self) -> Vec<&Parameter> {
        let mut list: Vec<_> = self.list.iter().collect();
        list.sort_by_key(|parameter| parameter.id);
        list
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

    /// How many ranks the layout lets share the trained part; 1 for a layout as tight as it can be.
    pub fn shares(&self) -> usize {
        self.shares
    }

    /// What layers compute in: the dtype of what `value` gives, of activations and of their gradients.
    pub fn dtype(&self) -> DType {
        self.read_arena().dtype()
    }

    /// The dtype of the values themselves, of gradients and of the optimizer's moments: that of layers, or f32 where that is narrower.
    pub fn master_dtype(&self) -> DType {
        self.values.dtype()
    }

    /// Where they live.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// The values of all, padding included: one dimension. Who writes to them calls `refresh` behind it.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// What layers read: the arena that `value` gives views of, laid out like the values. It is the values themselves, unless layers
    /// compute in less: then it is their rounded copies.
    pub fn read_arena(&self) -> &Tensor {
        self.working.as_ref().unwrap_or(&self.values)
    }

    /// The values of all that are trained: the part of the values that the gradients mirror.
    pub fn trained_values(&self) -> &Tensor {
        &self.trained_values
    }

    /// The gradients of all that are trained: the first part of the values' layout.
    pub fn gradients(&self) -> &Tensor {
        &self.gradients
    }

    /// One parameter's values as layers read them, in its shape and in `dtype`.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.value_views[id.0]
    }

    /// One parameter's values themselves, in its shape and in `master_dtype`: what is trained and saved. Who writes to them calls `refresh`
    /// behind it.
    pub fn master(&self, id: ParamId) -> &Tensor {
        &self.master_views[id.0]
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
        self.chunks_of(0..self.gradients.count())
    }

    /// The chunks of a part of the gradients' arena, counted from its start: what it has of each trained parameter.
    pub fn chunks_of(&self, part: Range<usize>) -> Result<ChunkTable> {
        let chunk = |p: &Parameter| -> Option<Chunk> {
            let (start, end) = (p.range.start.max(part.start), p.range.end.min(part.end));
            (start < end).then(|| Chunk { offset: start - part.start, len: end - start, decay: p.decays })
        };
        let trained = self.list.iter().filter(|p| p.is_trained());
        Ok(ChunkTable::new(trained.filter_map(chunk).collect())?)
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

    /// A hash over the bits of the values themselves: equal on replicas that are equal. Brings them to the host.
    pub fn values_hash(&self) -> Result<u64> {
        let mut hash = Xxh3::new();
        self.value_hashes()?.iter().for_each(|(_, part)| hash.update(&part.to_le_bytes()));
        Ok(hash.digest())
    }

    /// The same of each parameter, by name, from the input on: what replicas compare. Brings them to the host one by one: there is
    /// never a second copy of the model in memory.
    pub fn value_hashes(&self) -> Result<Vec<(&str, u64)>> {
        let hash = |parameter: &Parameter| -> Result<u64> {
            let values = self.master(parameter.id);
            let values = ddp_kernels::transfer::announced("hashing the model", || values.to(Device::Cpu))?;
            Ok(match values.dtype() {
                DType::F32 => values.with_slice(|v: &[f32]| hash_of(v, |v| v.to_bits().to_le_bytes())),
                // Every other float dtype is part of f64.
                _ => values.to_dtype(DType::F64)?.with_slice(|v: &[f64]| hash_of(v, |v| v.to_bits().to_le_bytes())),
            }?)
        };
        self.in_order().into_iter().map(|parameter| Ok((parameter.name.as_str(), hash(parameter)?))).collect()
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
/// declared, the first place of its use), then frozen ones, then buffers. Says where the trained part ends, too.
fn lay_out(
    declared: &[Declared],
    dtype: DType,
    frozen: &dyn Fn(&str) -> bool,
    shares: usize,
) -> (Vec<Parameter>, usize) {
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
    let count = list.iter().filter(|p| p.is_trained()).count();
    let place = |part: &mut [Parameter], mut start: usize, multiple: usize| -> usize {
        let mut end = start;
        for p in part {
            end = start + p.range.len();
            p.range = start..end;
            start = end.next_multiple_of(multiple);
        }
        end
    };
    let (trained_part, rest) = list.split_at_mut(count);
    let trained = place(trained_part, 0, if shares > 1 { grain.max(QUANTUM) } else { grain });
    let trained = if shares > 1 { trained.next_multiple_of(shares * QUANTUM) } else { trained };
    place(rest, trained.next_multiple_of(grain), grain);
    (list, trained)
}

#[cfg(test)]
mod tests;
