//! Operands: registers, constants, addresses and vectors, as slots of registers.

use super::{Decoder, Fixed};
use crate::finding::Refusal;
use crate::op::{Place, Register, Slot, Width};
use crate::text::{Operand, Space};

impl Decoder<'_> {
    pub(super) fn register(&self, name: &str, width: Width) -> Result<Slot, Refusal> {
        match self.names.get(name) {
            Some(register) if register.width == width => Ok(register.slot),
            Some(register) => self.refuse(format!(
                "{name} has {} bits, expected {}",
                register.width.bits(),
                width.bits()
            )),
            None => self.refuse(format!("{name} is no register")),
        }
    }

    pub(super) fn fixed(&mut self, width: Width, fixed: Fixed) -> Result<Slot, Refusal> {
        if let Some(known) = self.fixed.get(&(width, fixed)) {
            return Ok(known.slot);
        }
        let count = &mut self.counts[width as usize];
        let Ok(slot) = Slot::try_from(*count) else {
            return self.refuse("a kernel with too many registers");
        };
        *count += 1;
        self.fixed.insert((width, fixed), Register { width, slot });
        Ok(slot)
    }

    fn special(&self, name: &str) -> Option<Fixed> {
        let axis = |name: &str| match name {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        if let Some((stem, letter)) = name.split_once('.') {
            let axis = axis(letter)?;
            return match stem {
                "%tid" => Some(Fixed::Thread(axis)),
                "%ntid" => Some(Fixed::Threads(axis)),
                "%ctaid" => Some(Fixed::Block(axis)),
                "%nctaid" => Some(Fixed::Blocks(axis)),
                _ => None,
            };
        }
        Some(match name {
            "%laneid" => Fixed::Lane,
            "%warpid" => Fixed::Warp,
            "%lanemask_lt" => Fixed::Lanes(0),
            "%lanemask_le" => Fixed::Lanes(1),
            "%lanemask_ge" => Fixed::Lanes(2),
            "%lanemask_gt" => Fixed::Lanes(3),
            "%lanemask_eq" => Fixed::Lanes(4),
            "%dynamic_smem_size" => Fixed::DynamicShared,
            "%total_smem_size" => Fixed::TotalShared,
            "WARP_SZ" => Fixed::Bits(32),
            _ => return None,
        })
    }

    /// A source operand of this width: a register, a constant or an address.
    pub(super) fn source(&mut self, operand: &Operand, width: Width) -> Result<Slot, Refusal> {
        match operand {
            Operand::Name(name) if self.names.contains_key(name) => self.register(name, width),
            Operand::Name(name) => {
                if let Some(fixed) = self.special(name) {
                    return self.fixed(width, fixed);
                }
                match self.symbols.get(name) {
                    Some((Space::Shared | Space::Local | Space::Param, address)) => {
                        self.fixed(width, Fixed::Bits(*address))
                    }
                    _ => self.refuse(format!("{name} is not simulated")),
                }
            }
            Operand::Integer(value) => {
                let bits = *value as u64 & (u64::MAX >> (64 - width.bits()));
                self.fixed(width, Fixed::Bits(bits))
            }
            Operand::F32(bits) if width == Width::W => {
                self.fixed(width, Fixed::Bits(u64::from(*bits)))
            }
            Operand::F64(bits) if width == Width::D => self.fixed(width, Fixed::Bits(*bits)),
            // ISA: constants in 0d form may stand for f32 values and are rounded.
            Operand::F64(bits) if width == Width::W => self.fixed(
                width,
                Fixed::Bits(u64::from((f64::from_bits(*bits) as f32).to_bits())),
            ),
            other => self.refuse(format!("operand {other:?}")),
        }
    }

    /// A source of whatever width its register has; constants have `width`.
    pub(super) fn any_source(
        &mut self,
        operand: &Operand,
        width: Width,
    ) -> Result<Register, Refusal> {
        if let Operand::Name(name) = operand
            && let Some(register) = self.names.get(name)
        {
            return Ok(*register);
        }
        let slot = self.source(operand, width)?;
        Ok(Register { width, slot })
    }

    pub(super) fn result(&self, operand: &Operand, width: Width) -> Result<Slot, Refusal> {
        match operand {
            Operand::Name(name) => self.register(name, width),
            other => self.refuse(format!("result {other:?}")),
        }
    }

    pub(super) fn any_result(&self, operand: &Operand) -> Result<Register, Refusal> {
        match operand {
            Operand::Name(name) => match self.names.get(name) {
                Some(register) => Ok(*register),
                None => self.refuse(format!("{name} is no register")),
            },
            other => self.refuse(format!("result {other:?}")),
        }
    }

    /// A predicate that may be negated.
    pub(super) fn predicate(&mut self, operand: &Operand) -> Result<(Slot, bool), Refusal> {
        match operand {
            Operand::Not(name) => Ok((self.register(name, Width::P)?, true)),
            Operand::Integer(value) => Ok((
                self.fixed(Width::P, Fixed::Bits(u64::from(*value != 0)))?,
                false,
            )),
            other => Ok((self.source(other, Width::P)?, false)),
        }
    }

    pub(super) fn place(&mut self, operand: &Operand, space: Space) -> Result<Place, Refusal> {
        let Operand::Address(name, offset) = operand else {
            return self.refuse(format!("operand {operand:?}, expected an address"));
        };
        let (base, symbol) = match name {
            None => (None, 0),
            Some(name) => match self.names.get(name) {
                Some(register) if matches!(register.width, Width::W | Width::D) => {
                    (Some(*register), 0)
                }
                Some(_) => return self.refuse(format!("address {name}")),
                None => match self.symbols.get(name) {
                    Some((known, address)) if *known == space => (None, *address as i64),
                    _ => {
                        return self
                            .refuse(format!("variable {name} in this space is not simulated"));
                    }
                },
            },
        };
        Ok(Place {
            space,
            base,
            offset: offset + symbol,
        })
    }

    pub(super) fn vector(operand: &Operand) -> Vec<Operand> {
        match operand {
            Operand::Vector(parts) => parts.clone(),
            other => vec![other.clone()],
        }
    }

    pub(super) fn words<const N: usize>(
        &mut self,
        operand: &Operand,
        is_result: bool,
    ) -> Result<[Slot; N], Refusal> {
        let mut slots = [0; N];
        let parts = Self::vector(operand);
        if parts.len() != N {
            return self.refuse(format!("a vector of {}, expected {N}", parts.len()));
        }
        for (slot, part) in slots.iter_mut().zip(&parts) {
            *slot = if is_result {
                self.result(part, Width::W)?
            } else {
                self.source(part, Width::W)?
            };
        }
        Ok(slots)
    }
}
