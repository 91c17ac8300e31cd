//! What an operation does. Each has its own file, or shares one with others of few lines.

use std::fmt;
use std::ops::Deref;

use ddp_kernels::Tensor;
use ddp_kernels::ops::{ChainStep, ChainView};

// What the files of operations use, by `use super::operation::*`.
pub(super) use super::derivatives::Backward;
pub(super) use super::op::*;
pub(super) use super::plan::Planner;
pub(super) use super::running::{Run, rows, rows_of};
pub(super) use super::trace::{NumberKind, Var};
pub(super) use crate::error::Result;

pub(super) trait Operation: fmt::Debug {
    /// Its name in messages and profiles.
    fn name(&self) -> String {
        snake_case(&format!("{self:?}"))
    }

    /// The kind of its value, from those of its inputs, which are None of numbers that each dtype
    /// holds. None if that follows from its role (`kinds.rs`).
    fn kind(&self, _of: &[Option<NumberKind>]) -> Option<NumberKind> {
        None
    }

    /// The kind and shape of the part that it always has, for a value of this shape.
    fn part(&self, _shape: &[usize]) -> Option<(NumberKind, Vec<usize>)> {
        None
    }

    /// The numbers of a leaf of this many elements.
    fn numbers(&self, _count: usize) -> Option<Vec<f64>> {
        None
    }

    /// Of a view: turns where its input lies, of the first shape, into where its value does.
    fn look(&self, _at: &mut ChainView, _shapes: [&[usize]; 2]) {}

    /// What it is in a chain, of these values.
    fn step(&self, _of: [usize; 3]) -> Option<ChainStep> {
        None
    }

    /// The gradients of its inputs. None where no gradient flows.
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![None; at.x.len()]
    }

    /// The values that its run makes.
    fn outputs(&self, planner: &mut Planner, id: usize) -> Vec<usize> {
        let part = self.part(planner.shape(id));
        let part = part.map(|(kind, shape)| planner.part(id, 0, kind, &shape));
        let own = Some(id).filter(|_| planner.role(id) != Role::End);
        own.into_iter().chain(part).collect()
    }

    /// Runs it.
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let out = r.take(0)?;
        self.write(r, &out, false)
    }

    /// Writes its value to `out` or adds it, for those that can also write a parameter's gradient.
    fn write(&self, _r: &mut Run<'_, '_>, _out: &Tensor, _accumulate: bool) -> Result<()> {
        unreachable!("{self:?} runs within others")
    }
}

macro_rules! dispatch {
    ($($Role:ident { $($(#[$doc:meta])* $Name:ident $(($($field:ty),+))?
        $(: $Reads:ident)? $(=> $Kind:ident)?,)* })*) => {
        impl Deref for Op {
            type Target = dyn Operation;

            fn deref(&self) -> &Self::Target {
                match self {
                    $($(Op::$Name(it) => it,)*)*
                }
            }
        }
    };
}
operations!(dispatch);

/// `NormBackward(…)` as `norm_backward`.
pub(super) fn snake_case(text: &str) -> String {
    let mut name = String::new();
    let letters = text.chars().take_while(|c| c.is_alphanumeric());
    for (at, letter) in letters.enumerate() {
        if letter.is_uppercase() && at > 0 {
            name.push('_');
        }
        name.extend(letter.to_lowercase());
    }
    name
}
