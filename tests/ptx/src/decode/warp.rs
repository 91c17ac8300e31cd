//! What threads do together.

use super::{Decoder, Parts, width_of};
use crate::finding::Refusal;
use crate::op::{Op, Reduce, Reduction, Shuffle, Slot, Vote, Width};
use crate::text::{Operand, Space};

impl Decoder<'_> {
    pub(super) fn load_matrix(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let is_whole = ["sync", "aligned", "m8n8", "b16"]
            .iter()
            .all(|part| parts.take(part));
        let count = match parts.take_any(&["x1", "x2", "x4"]) {
            Some("x1") => 1,
            Some("x2") => 2,
            Some(_) => 4,
            None => return Ok(None),
        };
        let is_transposed = parts.take("trans");
        if !is_whole || parts.take_any(&["shared", "shared::cta"]).is_none() {
            return Ok(None);
        }
        let list = Self::vector(&operands[0]);
        let to: Result<Box<[Slot]>, Refusal> = list
            .iter()
            .map(|part| self.result(part, Width::W))
            .collect();
        let (to, place) = (to?, self.place(&operands[1], Space::Shared)?);
        Ok((to.len() == count).then_some(Op::LoadMatrix {
            place,
            is_transposed,
            to,
        }))
    }

    pub(super) fn multiply(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let is_known = ["sync", "aligned", "m16n8k16", "row", "col"]
            .iter()
            .all(|part| parts.take(part));
        let types: Vec<&str> = std::mem::take(&mut parts.all);
        let is_f16 = match types[..] {
            ["f32", "bf16", "bf16", "f32"] => false,
            ["f32", "f16", "f16", "f32"] => true,
            _ => return self.refuse("these types and this shape are not simulated"),
        };
        if !is_known {
            return self.refuse("this shape is not simulated");
        }
        Ok(Some(Op::Multiply {
            is_f16,
            d: self.words(&operands[0], true)?,
            a: self.words(&operands[1], false)?,
            b: self.words(&operands[2], false)?,
            c: self.words(&operands[3], false)?,
        }))
    }

    pub(super) fn shuffle(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let how = match parts.take_any(&["up", "down", "bfly", "idx"]) {
            Some("up") => Shuffle::Up,
            Some("down") => Shuffle::Down,
            Some("bfly") => Shuffle::Butterfly,
            Some(_) => Shuffle::Index,
            None => return Ok(None),
        };
        if operands.len() != 5 {
            return Ok(None);
        }
        let (d, is_valid) = match &operands[0] {
            Operand::Pair(d, p) => (
                self.register(d, Width::W)?,
                Some(self.register(p, Width::P)?),
            ),
            other => (self.result(other, Width::W)?, None),
        };
        Ok(Some(Op::Shuffle {
            how,
            d,
            is_valid,
            a: self.source(&operands[1], Width::W)?,
            b: self.source(&operands[2], Width::W)?,
            c: self.source(&operands[3], Width::W)?,
            members: self.source(&operands[4], Width::W)?,
        }))
    }

    pub(super) fn barrier(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        if parts.take("warp") {
            let ([members], true) = (operands, parts.take("sync")) else {
                return Ok(None);
            };
            return Ok(Some(Op::WarpBarrier {
                members: self.source(members, Width::W)?,
            }));
        }
        // `bar` is `barrier.cta….aligned`.
        parts.take("cta");
        parts.take("aligned");
        let optional = |decoder: &mut Self, operand: Option<&Operand>| match operand {
            Some(operand) => decoder.source(operand, Width::W).map(Some),
            None => Ok(None),
        };
        if parts.take("red") {
            let op = match parts.take_any(&["and", "or", "popc"]) {
                Some("and") => Reduction::And,
                Some("or") => Reduction::Or,
                Some(_) => Reduction::Count,
                None => return Ok(None),
            };
            parts.take_any(&["pred", "u32"]);
            let (3 | 4, true) = (operands.len(), operands.len() >= 3) else {
                return Ok(None);
            };
            let of = if op == Reduction::Count {
                Width::W
            } else {
                Width::P
            };
            let (a, is_inverted) = self.predicate(&operands[operands.len() - 1])?;
            return Ok(Some(Op::Barrier {
                id: self.source(&operands[1], Width::W)?,
                threads: optional(self, (operands.len() == 4).then(|| &operands[2]))?,
                arrives_only: false,
                reduce: Some(Reduce {
                    op,
                    d: self.result(&operands[0], of)?,
                    a,
                    is_inverted,
                }),
            }));
        }
        let arrives_only = parts.take("arrive");
        if !arrives_only && !parts.take("sync")
            || operands.is_empty()
            || operands.len() > 2
            || arrives_only && operands.len() != 2
        {
            return Ok(None);
        }
        Ok(Some(Op::Barrier {
            id: self.source(&operands[0], Width::W)?,
            threads: optional(self, operands.get(1))?,
            arrives_only,
            reduce: None,
        }))
    }

    pub(super) fn vote(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        self.needed(operands, 3)?;
        let how = match parts.take_any(&["all", "any", "uni", "ballot"]) {
            Some("all") => Vote::All,
            Some("any") => Vote::Any,
            Some("uni") => Vote::Uniform,
            Some(_) => Vote::Ballot,
            None => return Ok(None),
        };
        let of = if how == Vote::Ballot {
            Width::W
        } else {
            Width::P
        };
        parts.take(if how == Vote::Ballot { "b32" } else { "pred" });
        let (a, is_inverted) = self.predicate(&operands[1])?;
        Ok(Some(Op::Vote {
            how,
            d: self.result(&operands[0], of)?,
            a,
            is_inverted,
            members: self.source(&operands[2], Width::W)?,
        }))
    }

    pub(super) fn matched(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        self.needed(operands, 3)?;
        let Some(width) = width_of(parts.last()) else {
            return Ok(None);
        };
        let (is_all, _) = (parts.take("all"), parts.take("any"));
        let (d, is_same) = match &operands[0] {
            Operand::Pair(d, p) => (
                self.register(d, Width::W)?,
                Some(self.register(p, Width::P)?),
            ),
            other => (self.result(other, Width::W)?, None),
        };
        Ok(Some(Op::Match {
            is_all,
            is_same,
            d,
            a: self.any_source(&operands[1], width)?,
            members: self.source(&operands[2], Width::W)?,
        }))
    }
}
