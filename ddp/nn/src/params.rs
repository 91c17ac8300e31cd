//! The parameters of a model in flat arenas: one for values, one for gradients. The optimizers'
//! moments have the layout of the gradients.
//!
//! Order: parameters lie in the order in which backward completes their gradients, so a bucket of
//! the reducer is one range. Each starts at a multiple of 256 bytes; the padding between them is
//! zero and stays zero. Frozen parameters and buffers come last: they have values and no gradients.
//!
//! ZeRO: where N ranks share the trained part, each trained parameter starts at a whole quantum
//! (with ZeRO-2 at one of every N), and the part is padded to a multiple of N quanta. It can then
//! be cut into N equal slices of whole quanta, which is the unit in which optimizers work and norms
//! are summed. Where a rank has a part alone (`division.rs`), it has masters of its slices only, if
//! layers read copies, and with ZeRO-2 gradients of its slices, and memory for those of a few
//! buckets.
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

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::ops::{self, QUANTUM};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Random, Tensor};
use twox_hash::XxHash3_64;

mod division;
mod reads;

pub use self::division::{Division, Window};
use self::division::{Held, WindowPool};
use crate::build::{Declaration, Declarations, Init, is_adapter};
pub use crate::build::{Numerics, ParamId, Precision};
use crate::error::Result;

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
    /// Whether several layers use it.
    pub is_shared: bool,
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
pub struct TiedCopy {
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
    tied_copies: Vec<TiedCopy>,
    /// The most ranks that the layout lets share the trained part.
    shares: usize,
    /// By `ParamId`: the index in `list`.
    index: Vec<usize>,
    /// By `ParamId`: how many layers use it, here and in later parts.
    uses: Vec<usize>,
    /// By `ParamId`: how many layers of later parts use it.
    pub(crate) uses_above: Vec<usize>,
    /// (A), the masters; fewer where ranks have divided them.
    values: Held,
    /// The part of `values` that is trained.
    trained_values: Tensor,
    /// (T), what the optimizer reads; less where ranks have divided them.
    gradients: Held,
    /// Where backward writes gradients, unless that is `gradients`.
    windows: Option<WindowPool>,
    /// T.
    trained: usize,
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

/// How ranks share the trained part of a model: any number of them up to the given one, of which
/// each has all of it in memory, or as many as that, with a part each.
#[derive(Clone)]
pub struct Sharing {
    /// The most ranks; 1 for the tightest layout.
    pub ranks: usize,
    /// Whether memory of gradients is used again within a backward. Then parameters begin where
    /// all ranks' slices are whole quanta.
    pub frees_gradients: bool,
    /// Tells what this rank has of these parameters on this device; None if it has all.
    pub division: Option<Divide>,
}

/// Divides these parameters of one device.
pub type Divide = Arc<dyn Fn(&[Parameter], Device) -> Division + Send + Sync>;

impl From<usize> for Sharing {
    fn from(ranks: usize) -> Sharing {
        Sharing {
            ranks,
            frees_gradients: false,
            division: None,
        }
    }
}

impl fmt::Debug for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let divided = self.division.is_some();
        write!(f, "Sharing among {}, divided: {divided}", self.ranks)
    }
}

impl Params {
    /// Allocates what `declarations` declare on `device` and fills it from `seed`, with the same
    /// values on any device and in any format, up to rounding. `frozen` tells by name which
    /// parameters are not trained, `sharing` how ranks share the others.
    pub(crate) fn new(
        declarations: &Declarations,
        format: Numerics,
        device: Device,
        seed: u64,
        frozen: &dyn Fn(&str) -> bool,
        sharing: &Sharing,
    ) -> Result<Params> {
        let shares = sharing.ranks;
        assert!(shares > 0, "0 ranks to share the trained part");
        format.check()?;
        let declared = &declarations.list;
        let has_base = declarations.lora.is_some();
        let base_of = |name: &str| has_base && !is_adapter(name);
        let (mut list, borrowed, trained) =
            lay_out(declared, format.layers, [frozen, &base_of], sharing);
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

        for p in &mut list {
            p.is_shared = uses[p.id.0] > 1 || declared[p.id.0].is_tied;
        }

        let masters = format.masters();
        let division = sharing.division.as_ref();
        let division = division.map(|divide| divide(&list[..own], device));
        let windows = division.as_ref().and_then(|it| it.windows.clone());
        // Own ranges and what is not trained, or all.
        let held = |divides: bool, end: usize| -> Vec<Range<usize>> {
            let own = division.as_ref().filter(|_| divides).map(|it| &it.own);
            let rest = own.map_or(0, |_| trained)..end;
            own.into_iter().flatten().cloned().chain([rest]).collect()
        };
        let values = held(format.layers != masters, end);
        let values = Held::zeros(values, masters, device, "values")?;
        let gradients = held(windows.is_some(), trained);
        let gradients = Held::zeros(gradients, masters, device, "gradients")?;
        let windows = windows.map(|all| WindowPool::zeros(all, masters, device));
        let windows = windows.transpose()?;
        let working = match format.layers {
            same if same == masters => None,
            narrower => Some(Tensor::zeros(&[end], narrower, device)?.named("working values")),
        };
        let base = Tensor::zeros(&[base_end], format.layers, device)?.named("base");
        let own_count = values.memory.count() - (end - trained);
        let trained_values = values.memory.slice(0..own_count)?;
        let view = |arena: &Tensor, p: &Parameter, ending: &str| -> Result<Tensor> {
            let view = arena.slice(p.range.clone())?.reshape(&p.shape)?;
            Ok(view.named(&format!("{}{ending}", p.name)))
        };
        let by_id = || index.iter().map(|&at| &list[at]);
        let views = |arena: Option<&Tensor>| -> Result<Vec<Tensor>> {
            let view = |p: &Parameter| match (p, arena) {
                (p, _) if is_borrowed(p) => Ok(values.memory.slice(0..0)?),
                (p, _) if p.is_base => view(&base, p, ""),
                (p, Some(arena)) if !p.is_buffer => view(arena, p, ""),
                (p, _) if p.is_trained() && own_count < trained => Ok(values.memory.slice(0..0)?),
                (p, _) => {
                    let part = values.part(p.range.clone())?.reshape(&p.shape)?;
                    Ok(part.named(&p.name))
                }
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
            (true, false) => {
                let range = p.range.clone();
                let part = match &windows {
                    Some(windows) => windows.part(range)?,
                    None => gradients.part(range)?,
                };
                let name = format!("{}.grad", p.name);
                Ok(Some(part.reshape(&p.shape)?.named(&name)))
            }
        };
        let master_views = views(None)?;
        let mut value_views = match &working {
            Some(working) => views(Some(working))?,
            None => master_views.clone(),
        };
        for p in &list[own..] {
            value_views[p.id.0] = apart(p, format.layers, ", borrowed")?;
        }
        let gradient_views = by_id().map(gradient_view).collect::<Result<_>>()?;
        let params = Params {
            list,
            own,
            tied_copies: Vec::new(),
            uses_above: vec![0; declared.len()],
            shares,
            index,
            uses,
            values,
            trained_values,
            gradients,
            windows,
            trained,
            working,
            base,
            value_views,
            master_views,
            gradient_views,
        };
        if !device.is_planned() {
            params.fill(declared, seed)?;
        }
        Ok(params)
    }

    /// Fills each parameter as declared, from a random stream that follows from its name and the
    /// seed: its initial weights do not depend on the rest of the model. The base is left at 0: it
    /// is always read.
    fn fill(&self, declared: &[Declaration], seed: u64) -> Result<()> {
        for (id, declared) in declared.iter().enumerate() {
            if declared.is_borrowed || self.parameter(ParamId(id)).is_base {
                continue;
            }
            let parameter = self.parameter(ParamId(id));
            if let (Init::Constant(value), true) = (&declared.init, self.has_master(parameter)) {
                ops::fill_into(&self.master_views[id], *value)?;
                self.refresh(parameter.range.clone())?;
                continue;
            }
            let mut random = Random::new(XxHash3_64::oneshot_with_seed(
                seed,
                declared.name.as_bytes(),
            ));
            let source = declared.init.values(parameter.range.len(), &mut random)?;
            self.set(parameter, &source, "the model's initial weights")?;
        }
        Ok(())
    }

    /// Gives a parameter these values, in host memory, and rounds them into what layers read. `why`
    /// they move to the device.
    pub fn set(&self, parameter: &Parameter, values: &Tensor, why: &'static str) -> Result<()> {
        if self.has_master(parameter) {
            copy(&self.master_views[parameter.id.0], values, why)?;
            if parameter.is_base {
                return Ok(());
            }
            return self.refresh(parameter.range.clone());
        }
        self.set_part(parameter, 0, &values.flatten()?, why)
    }

    /// As `set`, for the elements (N) from number `first` on of a parameter whose master ranks have
    /// divided.
    pub fn set_part(
        &self,
        parameter: &Parameter,
        first: usize,
        values: &Tensor,
        why: &'static str,
    ) -> Result<()> {
        let (start, count) = (parameter.range.start + first, values.count());
        for part in self.values.within(start..start + count) {
            let from = values.slice(part.start - start..part.end - start)?;
            copy(&self.values.part(part)?, &from, why)?;
        }
        let of_layers = self.value(parameter.id).flatten()?;
        copy(&of_layers.slice(first..first + count)?, values, why)
    }

    /// Whether this rank has all of a parameter's master.
    pub fn has_master(&self, parameter: &Parameter) -> bool {
        !self.is_divided() || !parameter.is_trained()
    }

    /// Whether ranks have divided the masters of trained parameters: this one has those that it
    /// owns.
    pub fn is_divided(&self) -> bool {
        self.trained_values.count() < self.trained
    }

    /// Tells that these elements of the values have changed: rounds them into the copies that
    /// layers read, if there are any.
    pub fn refresh(&self, range: Range<usize>) -> Result<()> {
        let Some(working) = &self.working else {
            return Ok(());
        };
        let target = working.slice(range.clone())?;
        Ok(ops::cast_into(&target, &self.values.part(range)?)?)
    }

    /// The copies of these elements, if an optimizer can round the values into them.
    pub(crate) fn copies(&self, range: Range<usize>) -> Result<Option<Tensor>> {
        let copies = self.working.as_ref();
        let copies = copies.filter(|it| it.dtype() == DType::BF16);
        Ok(copies.map(|copies| copies.slice(range)).transpose()?)
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
                let mut list = params.list.iter();
                let Some(same) = list.find(|other| other.name == borrowed.name) else {
                    continue;
                };
                let id = same.id;
                params.uses[id.0] += uses;
                params.uses_above[id.0] += uses;
                found.get_or_insert((part, id));
            }
            let (part, owner) = found.expect("an earlier part declares what a later one borrows");
            let id = borrowed.id;
            self.tied_copies.push(TiedCopy { id, part, owner });
        }
    }
}

/// Lays out trained parameters in reverse order of declaration, because backward completes a
/// gradient at the parameter's first use; then frozen ones, then buffers; apart from these, those
/// of the base. Returns them, borrowed ones, and the end of the trained part.
fn lay_out(
    declared: &[Declaration],
    dtype: DType,
    [frozen, base]: [&dyn Fn(&str) -> bool; 2],
    sharing: &Sharing,
) -> (Vec<Parameter>, Vec<Parameter>, usize) {
    let (alignment, shares) = (ALIGNMENT_BYTES / dtype.bytes(), sharing.ranks);
    let parameter = |(index, declared): (usize, &Declaration)| Parameter {
        id: ParamId(index),
        name: declared.name.clone(),
        shape: declared.shape.clone(),
        range: 0..declared.shape.iter().product(),
        decays: declared.shape.len() >= 2 && !declared.is_buffer,
        matrices: declared.matrices.clone(),
        frozen: !declared.is_buffer && (frozen(&declared.name) || base(&declared.name)),
        is_buffer: declared.is_buffer,
        is_base: !declared.is_buffer && base(&declared.name),
        is_shared: false,
    };
    let all = declared.iter().enumerate().rev().map(parameter);
    let (borrowed, mut list): (Vec<_>, Vec<_>) = all.partition(|p| declared[p.id.0].is_borrowed);
    list.sort_by_key(|p| (p.is_base, p.is_buffer, p.frozen));
    let trained_count = list.iter().filter(|p| p.is_trained()).count();
    let (trained, others) = list.split_at_mut(trained_count);
    let end = if shares > 1 {
        let quanta = if sharing.frees_gradients { shares } else { 1 };
        let end = place(trained, 0, alignment.max(quanta * QUANTUM));
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

/// Gives `to` the values of `from`, in its dtype and shape.
fn copy(to: &Tensor, from: &Tensor, why: &'static str) -> Result<()> {
    let from = from.to_dtype(to.dtype())?.reshape(to.shape())?;
    Ok(announced(why, || to.copy_from(&from))?)
}

#[cfg(test)]
mod tests;
