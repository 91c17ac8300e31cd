//! Moves and conversions.

use super::{Decoder, Fixed, LOCAL_WINDOW, Parts, SHARED_WINDOW, width_of};
use crate::finding::Refusal;
use crate::number::{Conversion, Number, Rounding};
use crate::op::{Logic, Op, Register, Width};
use crate::text::Operand;

impl Decoder<'_> {
    pub(super) fn mov(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let Some(width) = width_of(parts.last()) else {
            return Ok(None);
        };
        let total = |registers: &[Register]| {
            registers
                .iter()
                .map(|register| register.width.bits())
                .sum::<u32>()
        };
        match (&operands[0], &operands[1]) {
            (Operand::Vector(list), a) => {
                let parts: Result<Box<[Register]>, Refusal> =
                    list.iter().map(|part| self.any_result(part)).collect();
                let (parts, a) = (parts?, self.source(a, width)?);
                let a = Register { width, slot: a };
                Ok((total(&parts) == width.bits()).then_some(Op::Unpack { parts, a }))
            }
            (d, Operand::Vector(list)) => {
                let d = self.result(d, width)?;
                let of = match width.bits() / list.len().max(1) as u32 {
                    32 => Width::W,
                    16 => Width::H,
                    _ => return Ok(None),
                };
                let parts: Result<Box<[Register]>, Refusal> =
                    list.iter().map(|part| self.any_source(part, of)).collect();
                let parts = parts?;
                let d = Register { width, slot: d };
                Ok((total(&parts) == width.bits()).then_some(Op::Pack { d, parts }))
            }
            (d, Operand::Integer(value)) if width == Width::P => {
                let (d, a) = (
                    self.result(d, width)?,
                    self.fixed(Width::P, Fixed::Bits(u64::from(*value != 0)))?,
                );
                Ok(Some(Op::Logic {
                    op: Logic::Move,
                    d,
                    a,
                    b: a,
                }))
            }
            (d, a) => {
                let (d, a) = (self.result(d, width)?, self.source(a, width)?);
                Ok(Some(if width == Width::P {
                    Op::Logic {
                        op: Logic::Move,
                        d,
                        a,
                        b: a,
                    }
                } else {
                    Op::Move { width, d, a }
                }))
            }
        }
    }

    pub(super) fn cvt(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let (from, to) = (parts.last(), parts.last());
        if to == "bf16x2" && from == "f32" && operands.len() == 3 && parts.take("rn") {
            return Ok(Some(Op::Bf16x2 {
                d: self.result(&operands[0], Width::W)?,
                a: self.source(&operands[1], Width::W)?,
                b: self.source(&operands[2], Width::W)?,
            }));
        }
        let (Some(from_number), Some(to_number)) = (Number::named(from), Number::named(to)) else {
            return Ok(None);
        };
        if operands.len() != 2 {
            return Ok(None);
        }
        let is_half = |number| matches!(number, Number::F16 | Number::Bf16);
        if is_half(to_number) && from_number != Number::F32 {
            return Ok(None);
        }
        let (saturates, ftz) = (parts.take("sat"), parts.take("ftz"));
        let roundings = [
            ("rn", Rounding::Nearest, false),
            ("rz", Rounding::Zero, false),
            ("rm", Rounding::Down, false),
            ("rp", Rounding::Up, false),
            ("rni", Rounding::Nearest, true),
            ("rzi", Rounding::Zero, true),
            ("rmi", Rounding::Down, true),
            ("rpi", Rounding::Up, true),
        ];
        let found = roundings.into_iter().find(|(name, ..)| parts.take(name));
        if found.is_none() && to_number.is_float() && !from_number.is_float() {
            return Ok(None);
        }
        let (_, rounding, is_integer) = found.unwrap_or(("", Rounding::Nearest, false));
        if to_number == Number::F16 && rounding != Rounding::Nearest {
            return Ok(None);
        }
        let width = match from_number {
            Number::Unsigned(64) | Number::Signed(64) | Number::F64 => Width::D,
            Number::Unsigned(32) | Number::Signed(32) | Number::F32 => Width::W,
            _ => Width::H,
        };
        let (d, a) = (
            self.any_result(&operands[0])?,
            self.any_source(&operands[1], width)?,
        );
        Ok(Some(match (from_number, to_number) {
            // The upper bits of a wider result are those of its type, extended.
            (Number::Unsigned(bits), Number::Unsigned(to_bits)) if !saturates => Op::Extend {
                is_signed: false,
                bits: bits.min(to_bits),
                d,
                a,
            },
            (Number::Signed(bits), Number::Signed(to_bits)) if !saturates => Op::Extend {
                is_signed: true,
                bits: bits.min(to_bits),
                d,
                a,
            },
            _ => Op::Convert {
                how: Conversion {
                    from: from_number,
                    to: to_number,
                    rounding,
                    is_integer,
                    ftz,
                    saturates,
                },
                d,
                a,
            },
        }))
    }

    pub(super) fn cvta(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        if !parts.take("u64") {
            return Ok(None);
        }
        let is_back = parts.take("to");
        let base = match parts.take_any(&["global", "shared", "local", "const", "param"]) {
            Some("global") => 0,
            Some("shared") => SHARED_WINDOW,
            Some("local") => LOCAL_WINDOW,
            _ => return Ok(None),
        };
        parts.take("::cta");
        Ok(Some(Op::Rebase {
            d: self.result(&operands[0], Width::D)?,
            a: self.any_source(&operands[1], Width::D)?,
            add: if is_back { base.wrapping_neg() } else { base },
        }))
    }
}
