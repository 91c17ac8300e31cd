//! The parameters of a model in flat arenas: one for values, one for gradients. The optimizers'
//! moments have the layout of the gradients.
//!
//! Order: parameters lie in the order in which backward completes their gradients, so a bucket of
//! the reducer is one range. Each starts at a multiple of 256 bytes; the padding between them is
//! zero and stays zero. Frozen parameters and buffers come last: they have values and no gradients.
//!
//! ZeRO-1: where N ranks share the trained part, each trained parameter starts at a whole quantum,
//! and the part is padded to a multiple of N quanta. It can then be cut into N equal slices of
//! whole quanta, which is the unit in which optimizers work and norms are summed.
//!
//! bf16: layers then read rounded copies of the values, a second arena of the same layout
//! (`working`). The values themselves (the master weights), gradients and moments stay f32, because
//! most updates are smaller than the distance between two bf16 numbers. Code that changes values
//! calls `refresh`, which rounds them into the copies.
//!
//! Adapters: where linear layers have some (`lora.rs`), all other parameters are the *base*. It has
//! an arena of its own, in the dtype that layers read, and no masters: it is read from where it was
//! saved, and never saved again.
//!
//! Split models: a part *borrows* a parameter that it uses and an earlier part declares. The part
//! then has separate memory for the values that layers read and for a gradient; the parameter is
//! not in its `list()` or arenas.

use std::ops::Range;

use ddp_kernels::ops::{self, Chunk, ChunkTable, QUANTUM};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Random, Tensor};
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

use crate::build::{Declarations, Declared, Init, is_adapter};
pub use crate::build::{Format, ParamId, Precision};
use crate::error::{Error, Result};

/// A parameter or buffer, and where it lies.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Identifies it.
    pub id: ParamId,
    /// Its name, as PyTorch would call it: `0.weight`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements in the arenas, or in that of the base. A borrowed one has memory apart.
    pub range: Range<usize>,
    /// Whether weight decay applies: only to matrices.
    pub decays: bool,
    /// The rows of each matrix in it that Muon orthogonalises by itself; empty for none.
    pub matrices: Vec<usize>,
    /// Whether it keeps its initial weights.
    pub frozen: bool,
    /// Whether it is a buffer: saved and moved with the model, never trained.
    pub is_buffer: bool,
    /// Whether it is of the base, to which adapters are added.
    pub is_base: bool,
}

impl Parameter {
    /// Whether it has a gradient and the optimizer changes it.
    pub fn is_trained(&self) -> bool {
        !self.frozen && !self.is_buffer
    }
}

/// A parameter that a part of a split model uses and an earlier part owns. The code that runs the
/// parts copies its values from the owner before a forward. Before this part's backward (or that of
/// the loss), the gradient that later uses have summed so far is copied from the owner; after it,
/// the gradient is copied back.
#[derive(Clone, Copy, Debug)]
pub struct Loan {
    /// Identifies it in this part.
    pub id: ParamId,
    /// The number of the part that owns it.
    pub part: usize,
    /// Identifies it there.
    pub owner: ParamId,
}

/// Each parameter starts at a multiple of this many bytes, as cuBLASLt's heuristics assume.
pub const ALIGNMENT_BYTES: usize = 256;

/// The parameters of a model and their memory. Letters: A elements of all parameters with padding,
/// T elements of the trained part.
#[derive(Debug)]
pub struct Params {
    /// In the order of the arenas, then borrowed ones.
    list: Vec<Parameter>,
    /// How many in `list` are not borrowed.
    own: usize,
    /// Those that are.
    loans: Vec<Loan>,
    /// The most ranks that the layout lets share the trained part.
    shares: usize,
    /// By `ParamId`: the index in `list`.
    index: Vec<usize>,
    /// By `ParamId`: how many layers use it, here and in later parts.
    uses: Vec<usize>,
    /// By `ParamId`: how many layers of later parts use it.
    pub(crate) uses_above: Vec<usize>,
    /// (A), the masters.
    values: Tensor,
    /// (T), the part of `values` that is trained.
    trained_values: Tensor,
    /// (T)
    gradients: Tensor,
    /// (A), the rounded copies that layers read, if they compute in less than the masters' dtype.
    working: Option<Tensor>,
    /// The base's values, in the layers' dtype; empty without adapters.
    base: Tensor,
    /// By `ParamId`: what layers read.
    value_views: Vec<Tensor>,
    /// By `ParamId`: views of the masters.
    master_views: Vec<Tensor>,
    /// By `ParamId`.
    gradient_views: Vec<Option<Tensor>>,
}

impl Params {
    /// Allocates what `declarations` declare on `device` and fills it from `seed`, with the same
    /// values on any device and in any format, up to rounding. `frozen` tells by name which
    /// parameters are not trained; any number of ranks up to `shares` can share the trained part.
    pub(crate) fn new(
        declarations: &Declarations,
        format: Format,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
        shares: usize,
    ) -> Result<Params> {
        assert!(shares > 0, "0 ranks to share the trained part");
        format.check()?;
        let declared = &declarations.list;
        let has_base = declarations.lora.is_some();
        let base_of = |name: &str| has_base && !is_adapter(name);
        let (mut list, borrowed, trained) =
            lay_out(declared, format.layers, [frozen, &base_of], shares);
        let end_of = |is_base| {
            let last = list.iter().rfind(|p| p.is_base == is_base);
            last.map_or(0, |last| last.range.end)
        };
        let (end, base_end) = (end_of(false).max(trained), end_of(true));
        let own = list.len();
        list.extend(borrowed);
        let is_borrowed = |p: &Parameter| declared[p.id.0].is_borrowed;

        let mut index = vec![0; declared.len()];
        for (at, parameter) in list.iter().enumerate() {
            index[parameter.id.0] = at;
        }
        let mut uses = vec![0; declared.len()];
        for id in &declarations.uses {
            uses[id.0] += 1;
        }

        let masters = format.masters();
        let values = Tensor::zeros(&[end], masters, device)?.named("values");
        let gradients = Tensor::zeros(&[trained], masters, device)?.named("gradients");
        let working = match format.layers {
            same if same == masters => None,
            narrower => Some(Tensor::zeros(&[end], narrower, device)?.named("working values")),
        };
        let base = Tensor::zeros(&[base_end], format.layers, device)?.named("base");
        let trained_values = values.slice(0..trained)?;
        let view = |arena: &Tensor, p: &Parameter, ending: &str| -> Result<Tensor> {
            let view = arena.slice(p.range.clone())?.reshape(&p.shape)?;
            Ok(view.named(&format!("{}{ending}", p.name)))
        };
        let by_id = || index.iter().map(|&at| &list[at]);
        let views = |arena: &Tensor| -> Result<Vec<Tensor>> {
            let view = |p: &Parameter| match p {
                p if is_borrowed(p) => Ok(arena.slice(0..0)?),
                p if p.is_base => view(&base, p, ""),
                p if p.is_buffer => view(&values, p, ""),
                p => view(arena, p, ""),
            };
            by_id().map(view).collect()
        };
        let apart = |p: &Parameter, dtype: DType, ending: &str| -> Result<Tensor> {
            let name = format!("{}{ending}", p.name);
            Ok(Tensor::zeros(&p.shape, dtype, device)?.named(&name))
        };
        let gradient_view = |p: &Parameter| match (p.is_trained(), is_borrowed(p)) {
            (false, _) => Ok(None),
            (true, true) => apart(p, masters, ".grad, borrowed").map(Some),
            (true, false) => view(&gradients, p, ".grad").map(Some),
        };
        let master_views = views(&values)?;
        let mut value_views = match &working {
            Some(working) => views(working)?,
            None => master_views.clone(),
        };
        for p in &list[own..] {
            value_views[p.id.0] = apart(p, format.layers, ", borrowed")?;
        }
        let gradient_views = by_id().map(gradient_view).collect::<Result<_>>()?;
        let params = Params {
            list,
            own,
            loans: Vec::new(),
            uses_above: vec![0; declared.len()],
            shares,
            index,
            uses,
            values,
            trained_values,
            gradients,
            working,
            base,
            value_views,
            master_views,
            gradient_views,
        };
        params.fill(declared, seed)?;
        Ok(params)
    }

    /// Fills each parameter as declared, from a random stream that follows from its name and the
    /// seed: its initial weights do not depend on the rest of the model. The base is left at 0: it
    /// is always read.
    fn fill(&self, declared: &[Declared], seed: u64) -> Result<()> {
        for (id, declared) in declared.iter().enumerate() {
            if declared.is_borrowed || self.parameter(ParamId(id)).is_base {
                continue;
            }
            let target = &self.master_views[id];
            if let Init::Constant(value) = declared.init {
                ops::fill_into(target, value)?;
                continue;
            }
            let mut random = Random::new(XxHash3_64::oneshot_with_seed(
                seed,
                declared.name.as_bytes(),
            ));
            let source = declared.init.values(target.count(), &mut random)?;
            let source = source.to_dtype(target.dtype())?.reshape(&declared.shape)?;
            announced("the model's initial weights", || target.copy_from(&source))?;
        }
        self.refresh(0..self.values.count())
    }

    /// Tells that these elements of the values have changed: rounds them into the copies that
    /// layers read, if there are any.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        let Some(working) = &self.working else {
            return Ok(());
        };
        let target = working.slice(range.clone())?;
        Ok(ops::cast_into(&target, &self.values.slice(range)?)?)
    }

    /// The copies of these elements, if an optimizer can round the values into them.
    pub(crate) fn copies(&self, range: Range<usize>) -> Result<Option<Tensor>> {
        let copies = self.working.as_ref();
        let copies = copies.filter(|it| it.dtype() == DType::BF16);
        Ok(copies.map(|copies| copies.slice(range)).transpose()?)
    }

    /// All parameters and buffers, in the order of the arenas.
    pub fn list(&self) -> &[Parameter] {
        &self.list[..self.own]
    }

    /// The parameters that this part of a split model uses and an earlier part owns. `value` and
    /// `gradient` have memory for them here; they have no master, and are in no list.
    pub fn loans(&self) -> &[Loan] {
        &self.loans
    }

    /// Whether an earlier part owns this parameter.
    pub(crate) fn is_borrowed(&self, id: ParamId) -> bool {
        self.index[id.0] >= self.own
    }

    /// Connects what this part borrows with the parts `below`, in order, of the same model.
    pub(crate) fn borrow_from(&mut self, mut below: Vec<&mut Params>) {
        for borrowed in &self.list[self.own..] {
            let (mut found, uses) = (None, self.uses[borrowed.id.0]);
            for (part, params) in below.iter_mut().enumerate() {
                let mut list = params.list.iter_mut();
                let Some(same) = list.find(|other| other.name == borrowed.name) else {
                    continue;
                };
                // As in an unsplit model, where the last layer that declares matrices counts.
                if !borrowed.matrices.is_empty() {
                    same.matrices.clone_from(&borrowed.matrices);
                }
                let id = same.id;
                params.uses[id.0] += uses;
                params.uses_above[id.0] += uses;
                found.get_or_insert((part, id));
            }
            let (part, owner) = found.expect("an earlier part declares what a later one borrows");
            let id = borrowed.id;
            self.loans.push(Loan { id, part, owner });
        }
    }

    /// All parameters and buffers in the order of declaration, from the input to the output.
    pub fn in_order(&self) -> Vec<&Parameter> {
        let mut list: Vec<_> = self.list().iter().collect();
        list.sort_by_key(|parameter| parameter.id);
        list
    }

    /// One parameter or buffer, which may be borrowed.
    pub fn parameter(&self, id: ParamId) -> &Parameter {
        &self.list[self.index[id.0]]
    }

    /// The parameter or buffer called `name`.
    pub fn find(&self, name: &str) -> Result<&Parameter> {
        let found = self.list().iter().find(|p| p.name == name);
        found.ok_or_else(|| {
            let names: Vec<_> = self.list().iter().map(|p| p.name.as_str()).collect();
            Error::model(
                "model",
                format!("one of: {}", names.join(", ")),
                name.to_string(),
                "a name is the layer's number in the model, a dot, and weight or bias",
            )
        })
    }

    /// How many ranks the layout lets share the trained part; 1 for the tightest layout.
    pub fn shares(&self) -> usize {
        self.shares
    }

    /// The layers' dtype: that of `value`, of activations and of their gradients.
    pub fn dtype(&self) -> DType {
        self.read_arena().dtype()
    }

    /// The dtype of the masters, of gradients and of moments: the layers' dtype, or f32 if that is
    /// narrower.
    pub fn master_dtype(&self) -> DType {
        self.values.dtype()
    }

    /// The device of all memory.
    pub fn device(&self) -> Device {
        self.values.device()
    }

    /// (A), the masters of all parameters. Call `refresh` after writing to them.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// The values of the base, which has no masters; empty without adapters.
    pub fn base(&self) -> &Tensor {
        &self.base
    }

    /// (A), what layers read: the masters, or their rounded copies if layers compute in less.
    pub fn read_arena(&self) -> &Tensor {
        self.working.as_ref().unwrap_or(&self.values)
    }

    /// (T), the masters of all trained parameters, laid out like the gradients.
    pub fn trained_values(&self) -> &Tensor {
        &self.trained_values
    }

    /// (T), the gradients of all trained parameters.
    pub fn gradients(&self) -> &Tensor {
        &self.gradients
    }

    /// The masters of all buffers, which come last; None if there are none.
    pub fn buffers(&self) -> Result<Option<Tensor>> {
        let first = self.list().iter().find(|parameter| parameter.is_buffer);
        let all = first.map(|first| self.values.slice(first.range.start..self.values.count()));
        Ok(all.transpose()?.map(|all| all.named("buffers")))
    }

    /// One parameter's values as layers read them, in its shape and in `dtype`. A buffer is its
    /// master, so that a layer may write to it.
    pub fn value(&self, id: ParamId) -> &Tensor {
        &self.value_views[id.0]
    }

    /// One parameter's master, in its shape and in `master_dtype`: what is trained and saved. Call
    /// `refresh` after writing to it. For one of the base, that which layers read.
    pub fn master(&self, id: ParamId) -> &Tensor {
        assert!(!self.is_borrowed(id), "a borrowed parameter has no master");
        &self.master_views[id.0]
    }

    /// One parameter's gradient, in its shape; None if it is not trained.
    pub fn gradient(&self, id: ParamId) -> Option<&Tensor> {
        self.gradient_views[id.0].as_ref()
    }

    /// How many elements all parameters have, frozen ones included, without padding and buffers.
    pub fn count(&self) -> usize {
        let parameters = self.list().iter().filter(|p| !p.is_buffer);
        parameters.map(|parameter| parameter.range.len()).sum()
    }

    /// How many elements are trained, without padding.
    pub fn trained_count(&self) -> usize {
        let trained = self.list().iter().filter(|p| p.is_trained());
        trained.map(|parameter| parameter.range.len()).sum()
    }

    /// What the optimizer updates: a chunk for each trained parameter.
    pub fn chunks(&self) -> Result<ChunkTable> {
        self.chunks_of(0..self.gradients.count())
    }

    /// The chunks of a part of the gradients' arena, with offsets from the part's start.
    pub(crate) fn chunks_of(&self, part: Range<usize>) -> Result<ChunkTable> {
        let chunk = |p: &Parameter| -> Option<Chunk> {
            let (start, end) = (p.range.start.max(part.start), p.range.end.min(part.end));
            (start < end).then(|| Chunk {
                offset: start - part.start,
                len: end - start,
                decay: p.decays,
            })
        };
        let trained = self.list().iter().filter(|p| p.is_trained());
        Ok(ChunkTable::new(trained.filter_map(chunk).collect())?)
    }

    /// A hash of the bits of all masters, without the base: equal on replicas that are equal.
    /// Copies them to the host.
    pub fn values_hash(&self) -> Result<u64> {
        let mut hash = XxHash3_64::new();
        for (_, part) in self.value_hashes()? {
            hash.write(&part.to_le_bytes());
        }
        Ok(hash.finish())
    }

    /// The same for each parameter, with its name, in the order of declaration. Copies one after
    /// the other to the host, so there is never a second copy of the model in memory.
    pub fn value_hashes(&self) -> Result<Vec<(&str, u64)>> {
        let hash = |parameter: &Parameter| -> Result<u64> {
            let values = self.master(parameter.id);
            let values = announced("hashing the model", || values.to(Device::Cpu))?;
            let bytes = values.bits_as(DType::U8)?;
            Ok(bytes.with_slice(|bytes: &[u8]| XxHash3_64::oneshot(bytes))?)
        };
        let list = self.in_order().into_iter().filter(|p| !p.is_base);
        list.map(|p| Ok((p.name.as_str(), hash(p)?))).collect()
    }

    /// How many layers use a parameter, here and in later parts of a split model.
    pub fn uses(&self, id: ParamId) -> usize {
        self.uses[id.0]
    }

    /// Whether layers of later parts of a split model use it.
    pub fn is_used_above(&self, id: ParamId) -> bool {
        self.uses_above[id.0] > 0
    }
}

/// Lays out trained parameters in reverse order of declaration, because backward completes a
/// gradient at the parameter's first use; then frozen ones, then buffers; apart from these, those
/// of the base. Returns them, borrowed ones, and the end of the trained part.
fn lay_out(
    declared: &[Declared],
    dtype: DType,
    [frozen, base]: [&dyn Fn(&str) -> bool; 2],
    shares: usize,
) -> (Vec<Parameter>, Vec<Parameter>, usize) {
    let alignment = ALIGNMENT_BYTES / dtype.bytes();
    let parameter = |(index, declared): (usize, &Declared)| Parameter {
        id: ParamId(index),
        name: declared.name.clone(),
        shape: declared.shape.clone(),
        range: 0..declared.shape.iter().product(),
        decays: declared.shape.len() >= 2 && !declared.is_buffer,
        matrices: declared.matrices.clone(),
        frozen: !declared.is_buffer && (frozen(&declared.name) || base(&declared.name)),
        is_buffer: declared.is_buffer,
        is_base: !declared.is_buffer && base(&declared.name),
    };
    let all = declared.iter().enumerate().rev().map(parameter);
    let (borrowed, mut list): (Vec<_>, Vec<_>) = all.partition(|p| declared[p.id.0].is_borrowed);
    list.sort_by_key(|p| (p.is_base, p.is_buffer, p.frozen));
    let trained_count = list.iter().filter(|p| p.is_trained()).count();
    let (trained, others) = list.split_at_mut(trained_count);
    let end = if shares > 1 {
        let end = place(trained, 0, alignment.max(QUANTUM));
        let room = |ranks: usize| end.next_multiple_of(ranks * QUANTUM);
        (1..=shares).map(room).max().unwrap_or(end)
    } else {
        place(trained, 0, alignment)
    };
    let of_base = others.iter().filter(|p| p.is_base).count();
    let (others, base) = others.split_at_mut(others.len() - of_base);
    place(others, end.next_multiple_of(alignment), alignment);
    place(base, 0, alignment);
    (list, borrowed, end)
}

/// Places parameters from `start` on, each at a multiple of `alignment`. Returns their end.
fn place(list: &mut [Parameter], mut start: usize, alignment: usize) -> usize {
    let mut end = start;
    for p in list {
        end = start + p.range.len();
        p.range = start..end;
        start = end.next_multiple_of(alignment);
    }
    end
}

#[cfg(test)]
mod tests;
