//! Bits of words: fields, bytes, tables, shifts of two words, counts.

use super::{Decoder, Parts, width_of};
use crate::finding::Refusal;
use crate::op::{Op, Width};
use crate::text::Operand;

impl Decoder<'_> {
    pub(super) fn bits(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        match name {
            "bfi" => {
                self.needed(operands, 5)?;
                let Some(width) = width_of(parts.last()) else {
                    return Ok(None);
                };
                Ok(Some(Op::Insert {
                    width,
                    d: self.result(&operands[0], width)?,
                    a: self.source(&operands[1], width)?,
                    b: self.source(&operands[2], width)?,
                    position: self.source(&operands[3], Width::W)?,
                    length: self.source(&operands[4], Width::W)?,
                }))
            }
            "bfe" => {
                self.needed(operands, 4)?;
                let kind = parts.last();
                let Some(width) = width_of(kind) else {
                    return Ok(None);
                };
                Ok(Some(Op::Extract {
                    width,
                    is_signed: kind.starts_with('s'),
                    d: self.result(&operands[0], width)?,
                    a: self.source(&operands[1], width)?,
                    position: self.source(&operands[2], Width::W)?,
                    length: self.source(&operands[3], Width::W)?,
                }))
            }
            "prmt" if parts.take("b32") => {
                self.needed(operands, 4)?;
                Ok(Some(Op::Permute {
                    d: self.result(&operands[0], Width::W)?,
                    a: self.source(&operands[1], Width::W)?,
                    b: self.source(&operands[2], Width::W)?,
                    selector: self.source(&operands[3], Width::W)?,
                }))
            }
            "lop3" if parts.take("b32") => {
                self.needed(operands, 5)?;
                let Operand::Integer(table) = operands[4] else {
                    return self.refuse("a table that is no constant");
                };
                Ok(Some(Op::Lookup {
                    d: self.result(&operands[0], Width::W)?,
                    a: self.source(&operands[1], Width::W)?,
                    b: self.source(&operands[2], Width::W)?,
                    c: self.source(&operands[3], Width::W)?,
                    table: table as u32,
                }))
            }
            "shf" if parts.take("b32") => {
                self.needed(operands, 4)?;
                let (is_left, wraps) = (parts.take("l"), parts.take("wrap"));
                if !is_left {
                    parts.take("r");
                }
                if !wraps {
                    parts.take("clamp");
                }
                Ok(Some(Op::Funnel {
                    is_left,
                    wraps,
                    d: self.result(&operands[0], Width::W)?,
                    a: self.source(&operands[1], Width::W)?,
                    b: self.source(&operands[2], Width::W)?,
                    amount: self.source(&operands[3], Width::W)?,
                }))
            }
            "popc" | "clz" | "brev" => {
                self.needed(operands, 2)?;
                let Some(width) = width_of(parts.last()) else {
                    return Ok(None);
                };
                let a = self.source(&operands[1], width)?;
                let of = if name == "brev" { width } else { Width::W };
                let d = self.result(&operands[0], of)?;
                Ok(Some(match name {
                    "popc" => Op::Count { width, d, a },
                    "clz" => Op::LeadingZeros { width, d, a },
                    _ => Op::Reverse { width, d, a },
                }))
            }
            _ => Ok(None),
        }
    }
}
