//! What a warpgroup does together: `wgmma`.

use super::{Decoder, Parts};
use crate::finding::Refusal;
use crate::op::{GroupProduct, Left, Op, Slot, Wgmma, Width};
use crate::text::Operand;

/// N of `m64nNk16`.
fn columns(shape: &str) -> Option<usize> {
    let columns = shape.strip_prefix("m64n")?.strip_suffix("k16")?;
    let columns = columns.parse().ok()?;
    (columns % 8 == 0 && (8..=256).contains(&columns)).then_some(columns)
}

impl Decoder<'_> {
    pub(super) fn group(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        if !parts.take("sync") || !parts.take("aligned") {
            return Ok(None);
        }
        let parts = std::mem::take(&mut parts.all);
        let op = match (&parts[..], operands) {
            (["fence"], []) => Wgmma::Fence,
            (["commit_group"], []) => Wgmma::Commit,
            (["wait_group"], [Operand::Integer(but)]) => Wgmma::Wait {
                but: u32::try_from(*but).unwrap_or(u32::MAX),
            },
            (["mma_async", shape, "f32", "bf16", "bf16"], _) => {
                let Some(columns) = columns(shape) else {
                    return self.refuse(format!("shape {shape} is not simulated"));
                };
                Wgmma::Multiply(Box::new(self.group_product(columns, operands)?))
            }
            _ => return self.refuse("this operation or these types are not simulated"),
        };
        Ok(Some(Op::Wgmma(op)))
    }

    fn group_product(
        &mut self,
        columns: usize,
        operands: &[Operand],
    ) -> Result<GroupProduct, Refusal> {
        let (d, a, b, adds, immediates) = match operands {
            [d, a @ Operand::Vector(_), b, adds, immediates @ ..] if immediates.len() == 3 => {
                (d, a, b, adds, immediates)
            }
            [d, a @ Operand::Name(_), b, adds, immediates @ ..] if immediates.len() == 4 => {
                (d, a, b, adds, immediates)
            }
            _ => return self.refuse(format!("{} operands of these kinds", operands.len())),
        };
        let sum = Self::vector(d);
        if sum.len() != columns / 2 {
            return self.refuse(format!(
                "an accumulator of {} registers, expected {}",
                sum.len(),
                columns / 2
            ));
        }
        let d: Result<Box<[Slot]>, Refusal> =
            sum.iter().map(|part| self.result(part, Width::W)).collect();
        let (scales, turns) = immediates.split_at(2);
        let is_negative = |operand: &Operand| match operand {
            Operand::Integer(1) => Ok(false),
            Operand::Integer(-1) => Ok(true),
            other => self.refuse(format!("scale {other:?}, expected 1 or -1")),
        };
        let is_set = |operand: &Operand| match operand {
            Operand::Integer(0) => Ok(false),
            Operand::Integer(1) => Ok(true),
            other => self.refuse(format!("transposition {other:?}, expected 0 or 1")),
        };
        let is_negated = is_negative(&scales[0])? != is_negative(&scales[1])?;
        let is_turned = is_set(&turns[turns.len() - 1])?;
        let a = match a {
            Operand::Vector(_) => Left::Registers(self.fragment(a)?),
            _ => Left::Matrix {
                is_turned: is_set(&turns[0])?,
                descriptor: self.source(a, Width::D)?,
            },
        };
        let adds = match adds {
            Operand::Name(_) | Operand::Integer(0 | 1) => self.source(adds, Width::P)?,
            other => {
                return self.refuse(format!("scale-d {other:?}, expected a predicate, 0 or 1"));
            }
        };
        Ok(GroupProduct {
            d: d?,
            a,
            b: self.source(b, Width::D)?,
            is_turned,
            adds,
            is_negated,
        })
    }

    /// Registers of A, which are used after the instruction: none can be a constant.
    fn fragment(&mut self, operand: &Operand) -> Result<[Slot; 4], Refusal> {
        self.words(operand, true)
    }
}
