//! Loads, stores, atomics and copies.

use super::{Decoder, Parts, width_of};
use crate::finding::Refusal;
use crate::op::{Atomic, Element, Op, Register, Strength, Strong, Width};
use crate::text::{Operand, Space, type_bytes};

impl Decoder<'_> {
    /// Whose threads a strong access or a fence orders; None where no scope is given.
    pub(super) fn scope(parts: &mut Parts<'_>) -> Option<Strength> {
        Some(match parts.take_any(&["cta", "cluster", "gpu", "sys"])? {
            "gpu" | "sys" => Strength::Device,
            // Blocks of a cluster count as apart.
            _ => Strength::Block,
        })
    }

    /// What an access means for the order of others; ISA: `volatile` is `relaxed` with the widest
    /// scope, and an atomic that names nothing is `relaxed` with scope `gpu`.
    pub(super) fn strong(parts: &mut Parts<'_>, is_atomic: bool) -> Strong {
        let semantics = [
            "weak", "relaxed", "acquire", "release", "acq_rel", "volatile",
        ];
        let semantics = parts.take_any(&semantics);
        let scope = Self::scope(parts);
        match semantics {
            None | Some("weak") if !is_atomic => Strong::WEAK,
            semantics => Strong {
                strength: scope.unwrap_or(Strength::Device),
                acquires: matches!(semantics, Some("acquire" | "acq_rel")),
                releases: matches!(semantics, Some("release" | "acq_rel")),
            },
        }
    }

    /// State space and cache hints of a load or store; the bool: through the read-only path.
    pub(super) fn space(parts: &mut Parts<'_>) -> (Space, bool, Strong) {
        let space =
            match parts.take_any(&["global", "shared", "shared::cta", "local", "param", "const"]) {
                Some("global") => Space::Global,
                Some("shared" | "shared::cta") => Space::Shared,
                Some("local") => Space::Local,
                Some("param") => Space::Param,
                Some(_) => Space::Const,
                None => Space::Generic,
            };
        let strong = Self::strong(parts, false);
        let read_only = parts.take("nc");
        parts.take_any(&["ca", "cg", "cs", "lu", "cv", "wb", "wt"]);
        let hints = [
            "L1::evict_normal",
            "L1::evict_unchanged",
            "L1::evict_first",
            "L1::evict_last",
            "L1::no_allocate",
        ];
        parts.take_any(&hints);
        parts.take_any(&["L2::64B", "L2::128B", "L2::256B"]);
        (space, read_only, strong)
    }

    /// How many elements, each of how many bytes.
    pub(super) fn shape(parts: &mut Parts<'_>) -> Option<(usize, Element)> {
        let kind = parts.last();
        let count = match parts.take_any(&["v2", "v4", "v8"]) {
            Some("v2") => 2,
            Some("v4") => 4,
            Some(_) => 8,
            None => 1,
        };
        let bytes = type_bytes(kind)? as u32;
        let is_signed = kind.starts_with('s');
        Some((count, Element { bytes, is_signed }))
    }

    pub(super) fn load(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let Some((count, element)) = Self::shape(parts) else {
            return Ok(None);
        };
        let (space, read_only, strong) = Self::space(parts);
        let list = Self::vector(&operands[0]);
        let to: Result<Box<[Register]>, Refusal> =
            list.iter().map(|part| self.any_result(part)).collect();
        let (to, place) = (to?, self.place(&operands[1], space)?);
        let fits = to.len() == count
            && to
                .iter()
                .all(|register| register.width.bits() >= element.bytes * 8);
        Ok((fits && space != Space::Const).then_some(Op::Load {
            place,
            element,
            read_only,
            strong,
            to,
        }))
    }

    pub(super) fn store(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let Some((count, element)) = Self::shape(parts) else {
            return Ok(None);
        };
        let (space, _, strong) = Self::space(parts);
        let width = match element.bytes {
            8 => Width::D,
            4 => Width::W,
            _ => Width::H,
        };
        let list = Self::vector(&operands[1]);
        let from: Result<Box<[Register]>, Refusal> = list
            .iter()
            .map(|part| self.any_source(part, width))
            .collect();
        let (from, place) = (from?, self.place(&operands[0], space)?);
        let fits = from.len() == count
            && from
                .iter()
                .all(|register| register.width.bits() >= element.bytes * 8);
        let is_writable = !matches!(space, Space::Const | Space::Param);
        Ok((fits && is_writable).then_some(Op::Store {
            place,
            element,
            strong,
            from,
        }))
    }

    pub(super) fn atomic(
        &mut self,
        is_red: bool,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        let strong = Self::strong(parts, true);
        let (space, ..) = Self::space(parts);
        let is_signed = kind.starts_with('s');
        let names = ["add", "exch", "cas", "min", "max", "and", "or", "xor"];
        let op = match parts.take_any(&names) {
            Some("add") if kind == "f32" => Atomic::AddF32,
            Some("add") if kind == "f64" => Atomic::AddF64,
            Some("add") => Atomic::Add,
            Some("exch") => Atomic::Exchange,
            Some("cas") => Atomic::CompareAndSwap,
            Some("min") => {
                if is_signed {
                    Atomic::MinS
                } else {
                    Atomic::MinU
                }
            }
            Some("max") => {
                if is_signed {
                    Atomic::MaxS
                } else {
                    Atomic::MaxU
                }
            }
            Some("and") => Atomic::And,
            Some("or") => Atomic::Or,
            Some("xor") => Atomic::Xor,
            _ => return Ok(None),
        };
        let operands_before = usize::from(!is_red);
        let has_third = op == Atomic::CompareAndSwap;
        if operands.len() != operands_before + 2 + usize::from(has_third)
            || !matches!(width, Width::W | Width::D)
        {
            return Ok(None);
        }
        let d = if is_red {
            None
        } else {
            Some(Register {
                width,
                slot: self.result(&operands[0], width)?,
            })
        };
        let place = self.place(&operands[operands_before], space)?;
        let mut value = |at: usize| -> Result<Register, Refusal> {
            Ok(Register {
                width,
                slot: self.source(&operands[at], width)?,
            })
        };
        let b = value(operands_before + 1)?;
        let c = if has_third {
            Some(value(operands_before + 2)?)
        } else {
            None
        };
        Ok(Some(Op::Atomic {
            op,
            place,
            bytes: width.bits() / 8,
            strong,
            d,
            b,
            c,
        }))
    }

    pub(super) fn copy(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        if parts.take("commit_group") {
            return Ok(operands.is_empty().then_some(Op::CommitCopies));
        }
        if parts.take("wait_all") {
            return Ok(operands.is_empty().then_some(Op::WaitCopies { but: None }));
        }
        if parts.take("wait_group") {
            return Ok(match operands {
                [Operand::Integer(but)] => Some(Op::WaitCopies {
                    but: Some(*but as u32),
                }),
                _ => None,
            });
        }
        let is_global = parts.take("cg");
        if !is_global && !parts.take("ca")
            || !parts.take("global")
            || parts.take_any(&["shared", "shared::cta"]).is_none()
        {
            return Ok(None);
        }
        parts.take_any(&["L2::64B", "L2::128B", "L2::256B"]);
        let (3 | 4, Some(Operand::Integer(bytes))) = (operands.len(), operands.get(2)) else {
            return Ok(None);
        };
        let bytes = *bytes as u32;
        // `.cg` is for 16 bytes only.
        if !(bytes == 16 || !is_global && matches!(bytes, 4 | 8)) {
            return self.refuse(format!("a copy of {bytes} bytes"));
        }
        let given = match operands.get(3) {
            Some(given) => Some(self.source(given, Width::W)?),
            None => None,
        };
        Ok(Some(Op::CopyAsync {
            to: self.place(&operands[0], Space::Shared)?,
            from: self.place(&operands[1], Space::Global)?,
            bytes,
            given,
        }))
    }
}
