//! Chains of elementwise steps in one pass over memory, with sums and maxima of rows in between.
//!
//! A chain is made of steps over an index space: load an element, compute, sum a row, store. Each
//! operand has a view, an offset and strides over the index space, so that broadcasting, slices
//! and permutations are read where they lie. With `row` last dimensions as rows, `Step::Sum` and
//! `Step::Max` reduce a row to a number that later steps use: softmax and layer norm are one read
//! and one write.
//!
//! On the CPU (`cpu.rs`) a chain runs over blocks that stay in the first cache. On a GPU it is a
//! kernel whose text `cuda.rs` makes from the steps. Both compute in f32 with the same bits (f64 on
//! the CPU for checks). A row is summed in 32 lanes, element i in lane i % 32, and the lanes as a
//! tree. Operands may also be bf16, which is read exactly and rounded once when stored.

mod cpu;
mod cuda;

use std::sync::OnceLock;

use crate::error::{Caller, Result};
use crate::launch::{Grid, Source};
use crate::ops::call::{Call, Versions, with_float};
use crate::{DType, Tensor};

/// The most steps of a chain.
const STEPS_MAX: usize = 64;
/// The most operands of a chain, loads and stores together.
const OPERANDS_MAX: usize = 10;
/// The most dimensions of an index space.
const DIMENSIONS_MAX: usize = 16;
/// The most values of the index space that are alive at one time.
const LIVE_MAX: usize = 24;

/// A function of elements. Comparisons give 1 or 0. NaN stays NaN in `Min` and `Max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Function {
    Add,
    Sub,
    Mul,
    Div,
    Min,
    Max,
    Less,
    LessEqual,
    Equal,
    /// The second where the first is not 0, else the third.
    Where,
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    /// 1 / √x
    Rsqrt,
    Tanh,
    Sigmoid,
    Silu,
    /// The derivative of `Silu`.
    SiluSlope,
    /// x·Φ(x), exact
    Gelu,
    /// The derivative of `Gelu`.
    GeluSlope,
    /// `Gelu` approximated with tanh
    GeluTanh,
    /// The derivative of `GeluTanh`.
    GeluTanhSlope,
    Relu,
}

impl Function {
    /// Every function.
    pub const ALL: [Function; 25] = {
        use Function::*;
        [
            Add,
            Sub,
            Mul,
            Div,
            Min,
            Max,
            Less,
            LessEqual,
            Equal,
            Where,
            Neg,
            Abs,
            Exp,
            Log,
            Sqrt,
            Rsqrt,
            Tanh,
            Sigmoid,
            Silu,
            SiluSlope,
            Gelu,
            GeluSlope,
            GeluTanh,
            GeluTanhSlope,
            Relu,
        ]
    };

    /// How many arguments it has.
    pub fn arguments(self) -> usize {
        use Function::*;
        match self {
            Add | Sub | Mul | Div | Min | Max | Less | LessEqual | Equal => 2,
            Where => 3,
            _ => 1,
        }
    }
}

/// A step of a chain. Values are called by the number of the step that makes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// An element of an input, by its number.
    Load(usize),
    /// A number.
    Constant(f64),
    /// A function of earlier values.
    Apply(Function, [usize; 3]),
    /// The sum of a row of an earlier value.
    Sum(usize),
    /// The largest of a row of an earlier value; NaN if one is.
    Max(usize),
    /// Writes a value to an output, by its number.
    Store(usize, usize),
}

/// Where an operand's elements are: `offset + Σ index · stride` over the index space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The element at index 0.
    pub offset: usize,
    /// By dimension of the index space.
    pub strides: Vec<usize>,
}

impl View {
    /// All elements of a tensor of these dimensions, in order.
    pub fn whole(dims: &[usize]) -> View {
        let mut strides = vec![0; dims.len()];
        let mut count = 1;
        for (stride, &length) in strides.iter_mut().zip(dims).rev() {
            (*stride, count) = (count, count * length);
        }
        View { offset: 0, strides }
    }

    /// One past the furthest element, for an index space that is not empty.
    fn end(&self, dims: &[usize]) -> Option<usize> {
        let far = self
            .strides
            .iter()
            .zip(dims)
            .try_fold(1usize, |sum, (&stride, &length)| {
                sum.checked_add(stride.checked_mul(length - 1)?)
            });
        far?.checked_add(self.offset)
    }

    /// Whether no two indices have the same element.
    fn is_injective(&self, dims: &[usize]) -> bool {
        let mut pairs: Vec<(usize, usize)> = self
            .strides
            .iter()
            .zip(dims)
            .filter(|(_, length)| **length > 1)
            .map(|(&stride, &length)| (stride, length))
            .collect();
        pairs.sort_unstable();
        let mut reach = 0;
        pairs.into_iter().all(|(stride, length)| {
            let is_clear = stride > reach;
            reach += stride * (length - 1);
            is_clear
        })
    }

    /// Whether it is the same element everywhere in the last `last` dimensions.
    fn is_constant_over(&self, dims: &[usize], last: usize) -> bool {
        let first = dims.len() - last;
        (first..dims.len()).all(|at| self.strides[at] == 0 || dims[at] == 1)
    }
}

/// Steps over an index space.
pub struct Chain {
    name: &'static str,
    /// The index space. Neighbouring dimensions that all views run through as one are merged.
    dims: Vec<usize>,
    /// How many of the last dimensions are a row; 0 if no step reduces.
    row: usize,
    steps: Vec<Step>,
    loads: Vec<View>,
    stores: Vec<View>,
    /// By step: whether its value is the same everywhere in a row, or a constant.
    is_row_wide: Vec<bool>,
    /// By step: where its value is on the CPU, if it differs within a row.
    slots: Vec<usize>,
    live: usize,
    /// Its kernel for the dtypes of its first operands.
    source: OnceLock<([DType; OPERANDS_MAX], &'static Source)>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {:?}: {:?}", self.name, self.dims, self.steps)
    }
}

/// f32 and bf16; f64 on the CPU.
const DTYPES: Versions = Versions {
    cpu: &[DType::F32, DType::BF16, DType::F64],
    cuda: &[DType::F32, DType::BF16],
};

impl Chain {
    /// Steps over the index space `dims`, of which the last `row` dimensions are a row, with the
    /// views of the inputs and outputs. `name` is for messages and profiles.
    #[track_caller]
    pub fn new(
        name: &'static str,
        dims: &[usize],
        row: usize,
        steps: Vec<Step>,
        [loads, stores]: [Vec<View>; 2],
    ) -> Result<Chain> {
        let by = Caller::new(name);
        let check = |what: &str, got: usize, most: usize| match got <= most {
            true => Ok(()),
            false => Err(by.value(what, format!("at most {most}"), got)),
        };
        check("steps", steps.len(), STEPS_MAX)?;
        check("operands", loads.len() + stores.len(), OPERANDS_MAX)?;
        check("dimensions", dims.len(), DIMENSIONS_MAX)?;
        check("dimensions of a row", row, dims.len())?;
        let ranks = loads
            .iter()
            .chain(&stores)
            .all(|view| view.strides.len() == dims.len());
        if !ranks {
            return Err(by.value("views", "a stride for each dimension", "others"));
        }
        let mut is_row_wide = Vec::with_capacity(steps.len());
        for (at, step) in steps.iter().enumerate() {
            let values: &[usize] = match step {
                Step::Load(_) | Step::Constant(_) => &[],
                Step::Apply(function, values) => &values[..function.arguments()],
                Step::Sum(value) | Step::Max(value) | Step::Store(_, value) => {
                    std::slice::from_ref(value)
                }
            };
            let is_value = |it: &usize| *it < at && !matches!(steps[*it], Step::Store(..));
            let (count, number) = match step {
                Step::Load(number) => (loads.len(), *number),
                Step::Store(number, _) => (stores.len(), *number),
                Step::Sum(_) | Step::Max(_) => (dims.len().min(row), 0),
                _ => (1, 0),
            };
            if !values.iter().all(is_value) || number >= count {
                return Err(by.value(
                    format!("step {at}"),
                    "earlier values, operands, rows",
                    "others",
                ));
            }
            is_row_wide.push(match step {
                Step::Load(load) => row > 0 && loads[*load].is_constant_over(dims, row),
                Step::Constant(_) | Step::Sum(_) | Step::Max(_) => true,
                Step::Apply(..) => values.iter().all(|&it| is_row_wide[it]),
                Step::Store(store, value) => {
                    row > 0 && is_row_wide[*value] && stores[*store].is_constant_over(dims, row)
                }
            });
        }
        let count: usize = dims.iter().product();
        for (at, step) in steps.iter().enumerate() {
            let Step::Store(store, _) = step else {
                continue;
            };
            // Each row stores one, or each element.
            let over = if is_row_wide[at] {
                dims.len() - row
            } else {
                dims.len()
            };
            let (view, dims) = (&stores[*store], &dims[..over]);
            let within = View {
                offset: 0,
                strides: view.strides[..over].to_vec(),
            };
            if count > 0 && !within.is_injective(dims) {
                return Err(by.value("an output", "a place for each element", "places shared"));
            }
        }
        let (slots, live) = slots_of(&steps, &is_row_wide);
        check("values alive at one time", live, LIVE_MAX)?;
        let mut chain = Chain {
            name,
            dims: dims.to_vec(),
            row,
            steps,
            loads,
            stores,
            is_row_wide,
            slots,
            live,
            source: OnceLock::new(),
        };
        chain.merge();
        Ok(chain)
    }

    /// Merges neighbouring dimensions, and drops those of one index.
    fn merge(&mut self) {
        let mut at = 0;
        while at < self.dims.len() {
            let first_of_row = self.dims.len() - self.row;
            let is_last = at + 1 == self.dims.len();
            let (length, row_begins) = (self.dims[at], at + 1 == first_of_row && self.row > 0);
            let mut views = self.loads.iter().chain(&self.stores);
            let fits = |view: &View| view.strides[at] == view.strides[at + 1] * self.dims[at + 1];
            let in_row = at >= first_of_row;
            let drops = length == 1 && !(in_row && self.row == 1);
            if !drops && (is_last || row_begins || !views.all(fits)) {
                at += 1;
                continue;
            }
            if !drops {
                self.dims[at + 1] *= length;
            }
            self.dims.remove(at);
            for view in self.loads.iter_mut().chain(&mut self.stores) {
                view.strides.remove(at);
            }
            self.row -= usize::from(in_row);
        }
    }

    /// The elements of a row, or of everything if there are no rows.
    fn row_length(&self) -> usize {
        self.dims[self.dims.len() - self.row..].iter().product()
    }

    /// How many inputs and outputs there are.
    fn operands(&self) -> [usize; 2] {
        [self.loads.len(), self.stores.len()]
    }
}

/// A slot for each value that differs within a row, reused after the value's last reader.
fn slots_of(steps: &[Step], is_row_wide: &[bool]) -> (Vec<usize>, usize) {
    let mut last = vec![0; steps.len()];
    for (at, step) in steps.iter().enumerate() {
        let values: &[usize] = match step {
            Step::Apply(function, values) => &values[..function.arguments()],
            Step::Sum(value) | Step::Max(value) | Step::Store(_, value) => {
                std::slice::from_ref(value)
            }
            _ => &[],
        };
        values.iter().for_each(|&value| last[value] = at);
    }
    let (mut slots, mut free, mut live) = (vec![0; steps.len()], Vec::new(), 0);
    for (at, step) in steps.iter().enumerate() {
        if !is_row_wide[at] && !matches!(step, Step::Store(..)) {
            slots[at] = free.pop().unwrap_or_else(|| {
                live += 1;
                live - 1
            });
        }
        let dies = |value: &usize| last[*value] == at && !is_row_wide[*value];
        let is_value = |it: &usize| !matches!(steps[*it], Step::Store(..));
        free.extend(
            (0..at)
                .filter(|it| is_value(it) && dies(it) && last[*it] > *it)
                .map(|it| slots[it]),
        );
    }
    (slots, live)
}

/// Whether the view runs through all elements in order.
fn is_whole(view: &View, dims: &[usize]) -> bool {
    let mut count = 1;
    view.strides
        .iter()
        .zip(dims)
        .rev()
        .all(|(&stride, &length)| {
            let fits = stride == count;
            count *= length;
            fits
        })
}

/// Runs the chain: reads `inputs`, writes `outputs`, none of which may share memory with another
/// operand. Elements that no store reaches stay as they are.
///
/// Backward: none; nn's modules make the chain of the derivative.
#[track_caller]
pub fn chain_into(chain: &Chain, outputs: &[&Tensor], inputs: &[&Tensor]) -> Result<()> {
    let mut call = Call::new(chain.name);
    if [inputs.len(), outputs.len()] != chain.operands() {
        let got = format!("{} and {}", inputs.len(), outputs.len());
        let [loads, stores] = chain.operands();
        return Err(call.value("inputs and outputs", format!("{loads} and {stores}"), got));
    }
    let mut slots = [None; OPERANDS_MAX];
    let is_empty = chain.dims.contains(&0);
    let views = chain.stores.iter().chain(&chain.loads);
    for (at, (view, tensor)) in views.zip(outputs.iter().chain(inputs)).enumerate() {
        let slot = if at < outputs.len() {
            call.writes("out", tensor)
        } else {
            call.reads("x", tensor)
        };
        slots[at] = Some(slot);
        call.row_major(slot)?;
        if !is_empty && view.end(&chain.dims).is_none_or(|end| end > tensor.count()) {
            let expected = format!("room for the elements of {:?}", chain.dims);
            return Err(call.operand_error(slot, expected, "give a tensor of the traced shape"));
        }
    }
    let slots_in_use = &slots[..outputs.len() + inputs.len()];
    let Some(first) = slots_in_use.iter().flatten().next().copied() else {
        return Ok(());
    };
    let is_wide = call.tensor(first).dtype() == DType::F64;
    for &slot in slots_in_use.iter().flatten() {
        let dtypes: &[DType] = if is_wide {
            &[DType::F64]
        } else {
            &[DType::F32, DType::BF16]
        };
        call.has_dtype(slot, dtypes)?;
    }
    call.run(first, &DTYPES, |placed| {
        let mut buffers = [const { None }; OPERANDS_MAX];
        for (buffer, slot) in buffers.iter_mut().zip(slots) {
            *buffer = placed.enter_some(slot)?;
        }
        if is_empty {
            return Ok(());
        }
        let (out, x) = buffers.split_at_mut(outputs.len());
        if let Some(gpu) = placed.launcher() {
            let count: usize = chain.dims.iter().product();
            let (grid, units) = match chain.row {
                0 => (Grid::elements(count), count),
                _ => {
                    let rows = count / chain.row_length();
                    (
                        Grid::blocks(rows.div_ceil(8), 256, chain.row_length().div_ceil(32)),
                        rows,
                    )
                }
            };
            let mut args = [0; OPERANDS_MAX + 1];
            let operands = out.iter().chain(x.iter()).flatten();
            let mut used = 0;
            for (arg, buffer) in args.iter_mut().zip(operands) {
                *arg = buffer.address();
                used += 1;
            }
            args[used] = units as u64;
            let mut dtypes = [DType::F32; OPERANDS_MAX];
            for (dtype, &slot) in dtypes.iter_mut().zip(slots_in_use.iter().flatten()) {
                *dtype = placed.tensor(slot).dtype();
            }
            let source = chain.source(dtypes);
            return gpu.launch(source, "chain", grid, &args[..=used]);
        }
        with_float!(placed.dtype, T => cpu::run::<T>(chain, out, x));
        Ok(())
    })
}

#[cfg(test)]
mod tests;
