//! Arithmetic and comparisons.

use super::{Decoder, Parts, wider, width_of};
use crate::finding::Refusal;
use crate::number::Approximate;
use crate::op::{Compare, Compared, Float, Int, Logic, Op, Width};
use crate::text::Operand;

impl Decoder<'_> {
    pub(super) fn binary(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        if kind == "pred" {
            let op = match name {
                "and" => Logic::And,
                "or" => Logic::Or,
                "xor" => Logic::Xor,
                _ => return Ok(None),
            };
            return Ok(Some(Op::Logic {
                op,
                d: self.result(&operands[0], Width::P)?,
                a: self.source(&operands[1], Width::P)?,
                b: self.source(&operands[2], Width::P)?,
            }));
        }
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        if kind == "f32" || kind == "f64" {
            let op = match name {
                "add" => Float::Add,
                "sub" => Float::Sub,
                "mul" => Float::Mul,
                "min" => Float::Min,
                "max" => Float::Max,
                "div" if parts.take("approx") => Float::DivApprox,
                "div" if parts.take("full") => Float::DivFull,
                "div" if parts.all.contains(&"rn") => Float::Div,
                _ => return Ok(None),
            };
            // The only rounding of arithmetic that is simulated; it is also the default.
            parts.take("rn");
            let ftz = kind == "f32" && parts.take("ftz");
            let (d, a) = (
                self.result(&operands[0], width)?,
                self.source(&operands[1], width)?,
            );
            let b = self.source(&operands[2], width)?;
            return Ok(Some(if kind == "f32" {
                Op::F32 { op, ftz, d, a, b }
            } else {
                Op::F64 { op, d, a, b }
            }));
        }
        if !kind.starts_with(['u', 's', 'b']) || kind.len() > 3 {
            return Ok(None);
        }
        let is_signed = kind.starts_with('s');
        let by_sign = |signed: Int, unsigned: Int| if is_signed { signed } else { unsigned };
        let op = match name {
            "add" => Int::Add,
            "sub" => Int::Sub,
            "mul" if parts.take("wide") => {
                let Some(wider) = wider(width) else {
                    return Ok(None);
                };
                return Ok(Some(Op::Wide {
                    from: width,
                    is_signed,
                    d: self.result(&operands[0], wider)?,
                    a: self.source(&operands[1], width)?,
                    b: self.source(&operands[2], width)?,
                    c: None,
                }));
            }
            "mul" if parts.take("hi") => by_sign(Int::MulHighS, Int::MulHighU),
            "mul" if parts.take("lo") => Int::Mul,
            "div" => by_sign(Int::DivS, Int::DivU),
            "rem" => by_sign(Int::RemS, Int::RemU),
            "min" => by_sign(Int::MinS, Int::MinU),
            "max" => by_sign(Int::MaxS, Int::MaxU),
            "and" => Int::And,
            "or" => Int::Or,
            "xor" => Int::Xor,
            "shl" => Int::Shl,
            "shr" => by_sign(Int::ShrS, Int::ShrU),
            _ => return Ok(None),
        };
        let is_shift = matches!(op, Int::Shl | Int::ShrS | Int::ShrU);
        Ok(Some(Op::Int {
            width,
            op,
            d: self.result(&operands[0], width)?,
            a: self.source(&operands[1], width)?,
            b: self.source(&operands[2], if is_shift { Width::W } else { width })?,
        }))
    }

    pub(super) fn unary(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        let (d, a) = (
            self.result(&operands[0], width)?,
            self.source(&operands[1], width)?,
        );
        if kind == "pred" {
            return Ok((name == "not").then_some(Op::Logic {
                op: Logic::Not,
                d,
                a,
                b: a,
            }));
        }
        if kind == "f32" || kind == "f64" {
            let op = match name {
                "neg" => Float::Neg,
                "abs" => Float::Abs,
                _ => return Ok(None),
            };
            let ftz = kind == "f32" && parts.take("ftz");
            return Ok(Some(if kind == "f32" {
                Op::F32 {
                    op,
                    ftz,
                    d,
                    a,
                    b: a,
                }
            } else {
                Op::F64 { op, d, a, b: a }
            }));
        }
        let op = match name {
            "not" => Int::Not,
            "neg" => Int::Neg,
            "abs" => Int::Abs,
            _ => return Ok(None),
        };
        if !kind.starts_with(['u', 's', 'b']) || kind.len() > 3 {
            return Ok(None);
        }
        Ok(Some(Op::Int {
            width,
            op,
            d,
            a,
            b: a,
        }))
    }

    pub(super) fn multiply_add(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        let is_wide = parts.take("wide");
        let of = if is_wide { wider(width) } else { Some(width) };
        let Some(of) = of else { return Ok(None) };
        let (d, a) = (
            self.result(&operands[0], of)?,
            self.source(&operands[1], width)?,
        );
        let (b, c) = (
            self.source(&operands[2], width)?,
            self.source(&operands[3], of)?,
        );
        let is_integer = kind.starts_with(['u', 's']);
        Ok(match (name, kind) {
            ("mad", _) if is_integer && is_wide => Some(Op::Wide {
                from: width,
                is_signed: kind.starts_with('s'),
                d,
                a,
                b,
                c: Some(c),
            }),
            ("mad", _) if is_integer && parts.take("lo") => Some(Op::Mad { width, d, a, b, c }),
            ("fma", "f32") if parts.take("rn") => Some(Op::Fma32 {
                ftz: parts.take("ftz"),
                d,
                a,
                b,
                c,
            }),
            ("fma", "f64") if parts.take("rn") => Some(Op::Fma64 { d, a, b, c }),
            _ => None,
        })
    }

    pub(super) fn function(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        let (d, a) = (
            self.result(&operands[0], width)?,
            self.source(&operands[1], width)?,
        );
        let ftz = kind == "f32" && parts.take("ftz");
        if parts.take("rn") {
            let op = match name {
                "sqrt" => Float::Sqrt,
                "rcp" => Float::Rcp,
                _ => return Ok(None),
            };
            return Ok(Some(if kind == "f32" {
                Op::F32 {
                    op,
                    ftz,
                    d,
                    a,
                    b: a,
                }
            } else {
                Op::F64 { op, d, a, b: a }
            }));
        }
        let function = match name {
            "sqrt" => Approximate::Sqrt,
            "rcp" => Approximate::Rcp,
            "rsqrt" => Approximate::Rsqrt,
            "ex2" => Approximate::Exp2,
            "lg2" => Approximate::Log2,
            "tanh" => Approximate::Tanh,
            "sin" => Approximate::Sin,
            _ => Approximate::Cos,
        };
        Ok(
            (kind == "f32" && parts.take("approx")).then_some(Op::Approximate {
                function,
                ftz,
                d,
                a,
            }),
        )
    }

    pub(super) fn setp(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let ftz = parts.take("ftz");
        let combines = [("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)];
        let combine = combines.into_iter().find(|(name, _)| parts.take(name));
        let is_float = kind.starts_with('f');
        let names: [(&str, Compare); 18] = [
            ("eq", Compare::Eq),
            ("ne", Compare::Ne),
            ("lt", Compare::Lt),
            ("le", Compare::Le),
            ("gt", Compare::Gt),
            ("ge", Compare::Ge),
            ("lo", Compare::Lt),
            ("ls", Compare::Le),
            ("hi", Compare::Gt),
            ("hs", Compare::Ge),
            ("equ", Compare::EqU),
            ("neu", Compare::NeU),
            ("ltu", Compare::LtU),
            ("leu", Compare::LeU),
            ("gtu", Compare::GtU),
            ("geu", Compare::GeU),
            ("num", Compare::Number),
            ("nan", Compare::Nan),
        ];
        let Some((_, compare)) = names.into_iter().find(|(name, _)| parts.take(name)) else {
            return Ok(None);
        };
        let only_floats = matches!(
            compare,
            Compare::EqU
                | Compare::NeU
                | Compare::LtU
                | Compare::LeU
                | Compare::GtU
                | Compare::GeU
                | Compare::Number
                | Compare::Nan
        );
        let (of, width) = match kind {
            "u16" | "b16" => (Compared::U16, Width::H),
            "s16" => (Compared::S16, Width::H),
            "u32" | "b32" => (Compared::U32, Width::W),
            "s32" => (Compared::S32, Width::W),
            "u64" | "b64" => (Compared::U64, Width::D),
            "s64" => (Compared::S64, Width::D),
            "f32" => (Compared::F32, Width::W),
            "f64" => (Compared::F64, Width::D),
            _ => return Ok(None),
        };
        if only_floats && !is_float || operands.len() != 3 + usize::from(combine.is_some()) {
            return Ok(None);
        }
        let (d, inverse) = match &operands[0] {
            Operand::Pair(d, q) => (
                self.register(d, Width::P)?,
                Some(self.register(q, Width::P)?),
            ),
            other => (self.result(other, Width::P)?, None),
        };
        let (a, b) = (
            self.source(&operands[1], width)?,
            self.source(&operands[2], width)?,
        );
        let with = match combine {
            None => None,
            Some((_, op)) => {
                let (slot, is_negated) = self.predicate(&operands[3])?;
                Some((op, slot, is_negated))
            }
        };
        Ok(Some(Op::Setp {
            compare,
            of,
            ftz,
            d,
            inverse,
            a,
            b,
            with,
        }))
    }
}
