//! The steps of a chain, and what is known of them before it runs.

use std::sync::OnceLock;

use super::loops::Loops;
use crate::DType;
use crate::error::{Caller, Result};
use crate::launch::CuFile;
use crate::ops::Activation;

/// The most steps of a chain.
pub(super) const STEPS_MAX: usize = 64;
/// The most operands of a chain, loads and stores together.
pub(super) const OPERANDS_MAX: usize = 10;
/// The most dimensions of an index space.
pub(super) const DIMENSIONS_MAX: usize = 16;
/// The most values of the index space that are alive at one time.
pub(super) const LIVE_MAX: usize = 24;

macro_rules! functions {
    ($($(#[$about:meta])* $Name:ident $name:literal $arguments:literal;)*) => {
        /// A function of elements. Comparisons give 1 or 0. NaN stays NaN in `Min` and `Max`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum Function {
            $($(#[$about])* $Name,)*
            Activation(Activation),
            /// An activation's derivative times the first; the second is what it keeps.
            Gradient(Activation),
        }

        impl Function {
            /// All of them.
            pub fn all() -> Vec<Function> {
                let of = |activation| [Function::Activation(activation), Function::Gradient(activation)];
                let others = [$(Function::$Name),*].into_iter();
                others.chain(Activation::all().flat_map(of)).collect()
            }

            /// Its name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Function::$Name => $name,)*
                    Function::Activation(activation) => activation.names()[0],
                    Function::Gradient(activation) => activation.names()[1],
                }
            }

            /// How many arguments it has.
            pub fn arguments(self) -> usize {
                match self {
                    $(Function::$Name => $arguments,)*
                    Function::Activation(_) => 1,
                    Function::Gradient(_) => 2,
                }
            }
        }
    };
}
functions! {
    Add "add" 2;
    Sub "sub" 2;
    Mul "mul" 2;
    Div "div" 2;
    Min "min" 2;
    Max "max" 2;
    Less "less" 2;
    LessEqual "less_equal" 2;
    Equal "equal" 2;
    /// The second where the first is not 0, else the third.
    Where "where" 3;
    Neg "neg" 1;
    Abs "abs" 1;
    Exp "exp" 1;
    Log "log" 1;
    Sqrt "sqrt" 1;
    /// 1 / √x
    Rsqrt "rsqrt" 1;
    Tanh "tanh" 1;
    Sigmoid "sigmoid" 1;
    /// As bf16 holds it.
    Round "round" 1;
}

/// A step of a chain. Values are called by the number of the step that makes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChainStep {
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

impl ChainStep {
    pub(super) fn is_load(&self) -> bool {
        matches!(self, ChainStep::Load(_))
    }

    /// The earlier values that it reads.
    pub(super) fn values(&self) -> &[usize] {
        match self {
            ChainStep::Load(_) | ChainStep::Constant(_) => &[],
            ChainStep::Apply(function, values) => &values[..function.arguments()],
            ChainStep::Sum(value) | ChainStep::Max(value) | ChainStep::Store(_, value) => {
                std::slice::from_ref(value)
            }
        }
    }
}

/// Where an operand's elements are: `offset + Σ index · stride` over the index space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChainView {
    /// The element at index 0.
    pub offset: usize,
    /// By dimension of the index space.
    pub strides: Vec<usize>,
}

impl ChainView {
    /// All elements of a tensor of these dimensions, in order.
    pub fn whole(dims: &[usize]) -> ChainView {
        let mut strides = vec![0; dims.len()];
        let mut count = 1;
        for (stride, &length) in strides.iter_mut().zip(dims).rev() {
            (*stride, count) = (count, count * length);
        }
        ChainView { offset: 0, strides }
    }

    /// One past the furthest element, for an index space that is not empty.
    pub(super) fn end(&self, dims: &[usize]) -> Option<usize> {
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

/// Which operands of a chain, first inputs and then outputs, lie in order in the dtype of its math.
pub(super) type OperandsInOrder = [bool; OPERANDS_MAX];

/// Steps over an index space.
pub struct Chain {
    pub(super) name: &'static str,
    /// The index space. Neighbouring dimensions that all views run through as one are merged.
    pub(super) dims: Vec<usize>,
    /// How many of the last dimensions are a row; 0 if no step reduces.
    pub(super) row: usize,
    pub(super) steps: Vec<ChainStep>,
    pub(super) loads: Vec<ChainView>,
    pub(super) stores: Vec<ChainView>,
    /// By step: whether its value is the same everywhere in a row, or a constant.
    pub(super) is_row_wide: Vec<bool>,
    /// By step: where its value is on the CPU, if it differs within a row.
    pub(super) slots: Vec<usize>,
    pub(super) live: usize,
    /// Its kernel for the dtypes of its first operands.
    pub(super) source: OnceLock<([DType; OPERANDS_MAX], &'static CuFile)>,
    /// Its loops of machine code, once it ran on the CPU.
    pub(super) loops: OnceLock<Box<(OperandsInOrder, Loops)>>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} over {:?}: {:?}", self.name, self.dims, self.steps)
    }
}

impl Chain {
    /// Steps over the index space `dims`, of which the last `row` dimensions are a row, with the
    /// views of the inputs and outputs. `name` is for messages and profiles.
    #[track_caller]
    pub fn new(
        name: &'static str,
        dims: &[usize],
        row: usize,
        steps: Vec<ChainStep>,
        [loads, stores]: [Vec<ChainView>; 2],
    ) -> Result<Chain> {
        let by = Caller::new(name);
        let check = |what: &str, got: usize, most: usize| {
            if got <= most {
                Ok(())
            } else {
                Err(by.value(what, format!("at most {most}"), got))
            }
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
            let values = step.values();
            let is_value = |it: &usize| *it < at && !matches!(steps[*it], ChainStep::Store(..));
            let (count, number) = match step {
                ChainStep::Load(number) => (loads.len(), *number),
                ChainStep::Store(number, _) => (stores.len(), *number),
                ChainStep::Sum(_) | ChainStep::Max(_) => (dims.len().min(row), 0),
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
                ChainStep::Load(load) => row > 0 && loads[*load].is_constant_over(dims, row),
                ChainStep::Constant(_) | ChainStep::Sum(_) | ChainStep::Max(_) => true,
                ChainStep::Apply(..) => values.iter().all(|&it| is_row_wide[it]),
                ChainStep::Store(store, value) => {
                    row > 0 && is_row_wide[*value] && stores[*store].is_constant_over(dims, row)
                }
            });
        }
        let count: usize = dims.iter().product();
        for (at, step) in steps.iter().enumerate() {
            let ChainStep::Store(store, _) = step else {
                continue;
            };
            // Each row stores one, or each element.
            let over = if is_row_wide[at] {
                dims.len() - row
            } else {
                dims.len()
            };
            let (view, dims) = (&stores[*store], &dims[..over]);
            let within = ChainView {
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
            loops: OnceLock::new(),
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
            let fits =
                |view: &ChainView| view.strides[at] == view.strides[at + 1] * self.dims[at + 1];
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
    pub(super) fn row_length(&self) -> usize {
        self.dims[self.dims.len() - self.row..].iter().product()
    }

    /// How many inputs and outputs there are.
    pub(super) fn operands(&self) -> [usize; 2] {
        [self.loads.len(), self.stores.len()]
    }
}

/// A slot for each value that differs within a row, reused after the value's last reader.
fn slots_of(steps: &[ChainStep], is_row_wide: &[bool]) -> (Vec<usize>, usize) {
    let mut last = vec![0; steps.len()];
    for (at, step) in steps.iter().enumerate() {
        step.values().iter().for_each(|&value| last[value] = at);
    }
    let (mut slots, mut free, mut live) = (vec![0; steps.len()], Vec::new(), 0);
    for (at, step) in steps.iter().enumerate() {
        if !is_row_wide[at] && !matches!(step, ChainStep::Store(..)) {
            slots[at] = free.pop().unwrap_or_else(|| {
                live += 1;
                live - 1
            });
        }
        let dies = |value: &usize| last[*value] == at && !is_row_wide[*value];
        let is_value = |it: &usize| !matches!(steps[*it], ChainStep::Store(..));
        free.extend(
            (0..at)
                .filter(|it| is_value(it) && dies(it) && last[*it] > *it)
                .map(|it| slots[it]),
        );
    }
    (slots, live)
}

/// Whether the view runs through all elements in order.
pub(super) fn is_whole(view: &ChainView, dims: &[usize]) -> bool {
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
