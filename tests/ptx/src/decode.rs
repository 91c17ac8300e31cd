//! From statements to decoded instructions, or a refusal that names what is not simulated.

use std::collections::HashMap;

use crate::finding::Refusal;
use crate::names;
use crate::number::{Approximate, Conversion, Number, Rounding};
use crate::op::{
    Atomic, Coded, Compare, Compared, Element, Float, Int, Logic, Op, Place, Reduce, Reduction,
    Register, Shuffle, Slot, Vote, Width,
};
use crate::text::{
    Content, Instruction, KernelText, Operand, Space, Statement, Variable, type_bytes,
};

/// Generic addresses of shared and local memory begin here; global ones are their own.
pub(crate) const SHARED_WINDOW: u64 = 1 << 60;
pub(crate) const LOCAL_WINDOW: u64 = 1 << 61;
pub(crate) const WINDOW_BYTES: u64 = 1 << 32;
/// Bytes without an owner before and between variables of shared and local memory.
const GAP_BYTES: u64 = 64;

/// A value that a register has when a thread starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fixed {
    Bits(u64),
    /// 0 to 2 for x to z.
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
    /// Lanes before (0), up to (1), from (2) and after (3) this one, and itself (4).
    Lanes(u8),
    DynamicShared,
    TotalShared,
}

/// Bytes in a state space that have an owner.
#[derive(Clone, Debug)]
pub(crate) struct Owned {
    pub(crate) name: String,
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

/// A kernel, ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) code: Vec<Coded>,
    /// Registers by width.
    pub(crate) counts: [usize; 4],
    pub(crate) fixed: Vec<(Register, Fixed)>,
    pub(crate) parameters: Vec<(u64, u64)>,
    pub(crate) parameter_bytes: u64,
    pub(crate) shared: Vec<Owned>,
    /// Where dynamic shared memory begins.
    pub(crate) dynamic_at: u64,
    /// The smallest access that may be to shared memory.
    pub(crate) cell_bytes: u32,
    pub(crate) local: Vec<Owned>,
    pub(crate) local_bytes: u64,
    pub(crate) threads_max: Option<u32>,
}

/// Lays out variables with gaps.
fn lay_out<'a>(variables: impl Iterator<Item = &'a Variable>) -> (Vec<Owned>, u64) {
    let (mut at, mut owned) = (GAP_BYTES, Vec::new());
    for variable in variables {
        at = at.next_multiple_of(variable.alignment.max(1));
        owned.push(Owned {
            name: variable.name.clone(),
            start: at,
            bytes: variable.bytes,
        });
        at += variable.bytes + GAP_BYTES;
    }
    (owned, at)
}

pub(crate) fn decode(kernel: &KernelText, globals: &[Variable]) -> Result<Program, Refusal> {
    let named = names::number(&kernel.statements)?;
    let places = names::place(&named)?;
    let inside = kernel
        .statements
        .iter()
        .filter_map(|statement| match &statement.content {
            Content::Variable(variable) => Some(variable),
            _ => None,
        });
    let variables: Vec<&Variable> = globals.iter().chain(inside).collect();
    let is_used = |variable: &&&Variable| {
        let uses = |operand: &Operand| match operand {
            Operand::Name(name) | Operand::Address(Some(name), _) => *name == variable.name,
            _ => false,
        };
        named
            .instructions
            .iter()
            .any(|(_, instruction, _)| instruction.operands.iter().any(uses))
    };
    let of = |space: Space, is_open: bool| {
        let all = variables.iter().filter(is_used);
        all.copied()
            .filter(move |variable| variable.space == space && variable.is_open == is_open)
    };
    let (shared, end) = lay_out(of(Space::Shared, false));
    let dynamic_at = end.next_multiple_of(1024);
    let (local, local_bytes) = lay_out(of(Space::Local, false));
    let mut symbols = HashMap::new();
    for (space, owned) in [(Space::Shared, &shared), (Space::Local, &local)] {
        symbols.extend(
            owned
                .iter()
                .map(|owned| (owned.name.clone(), (space, owned.start))),
        );
    }
    symbols.extend(
        of(Space::Shared, true).map(|open| (open.name.clone(), (Space::Shared, dynamic_at))),
    );
    let (mut parameters, mut parameter_bytes) = (Vec::new(), 0_u64);
    for parameter in &kernel.parameters {
        parameter_bytes = parameter_bytes.next_multiple_of(parameter.alignment.max(1));
        symbols.insert(parameter.name.clone(), (Space::Param, parameter_bytes));
        parameters.push((parameter_bytes, parameter.bytes));
        parameter_bytes += parameter.bytes;
    }
    let mut decoder = Decoder {
        counts: Width::ALL.map(|width| places.counts.get(&width).copied().unwrap_or(0)),
        symbols,
        labels: &named.labels,
        fixed: HashMap::new(),
        names: HashMap::new(),
        line: 0,
    };
    let mut code = Vec::new();
    for (statement, instruction, found) in &named.instructions {
        decoder.line = statement.line;
        decoder.names = found
            .iter()
            .map(|(name, number)| (name.clone(), places.registers[*number as usize]))
            .collect();
        code.push(decoder.coded(statement, instruction)?);
    }
    let end = kernel
        .statements
        .last()
        .map_or(0, |statement| statement.line);
    code.push(Coded {
        op: Op::Exit,
        guard: None,
        line: end,
        source: (0, 0),
    });
    let mut fixed: Vec<(Register, Fixed)> = decoder
        .fixed
        .iter()
        .map(|((_, fixed), register)| (*register, *fixed))
        .collect();
    fixed.sort_by_key(|(register, _)| (register.width, register.slot));
    Ok(Program {
        name: kernel.name.clone(),
        cell_bytes: code
            .iter()
            .filter_map(|coded| shared_access(&coded.op))
            .min()
            .unwrap_or(16),
        code,
        counts: decoder.counts,
        fixed,
        parameters,
        parameter_bytes,
        shared,
        dynamic_at,
        local,
        local_bytes,
        threads_max: kernel.threads_max,
    })
}

/// The bytes of an access that may be to shared memory.
fn shared_access(op: &Op) -> Option<u32> {
    let (place, bytes) = match op {
        Op::Load {
            place, element, to, ..
        } => (place, element.bytes * to.len() as u32),
        Op::Store {
            place,
            element,
            from,
        } => (place, element.bytes * from.len() as u32),
        Op::Atomic { place, bytes, .. } => (place, *bytes),
        Op::CopyAsync { to, bytes, .. } => (to, *bytes),
        Op::LoadMatrix { place, .. } => (place, 16),
        _ => return None,
    };
    matches!(place.space, Space::Shared | Space::Generic).then_some(bytes)
}

struct Decoder<'a> {
    counts: [usize; 4],
    /// Space and address of variables.
    symbols: HashMap<String, (Space, u64)>,
    labels: &'a HashMap<&'a str, u32>,
    fixed: HashMap<(Width, Fixed), Register>,
    /// Registers of the current instruction.
    names: HashMap<String, Register>,
    line: u32,
}

/// Types of integer and untyped operands, by their width.
fn width_of(kind: &str) -> Option<Width> {
    Some(match kind {
        "pred" => Width::P,
        "b16" | "u16" | "s16" | "f16" | "bf16" => Width::H,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => Width::W,
        "b64" | "u64" | "s64" | "f64" => Width::D,
        _ => return None,
    })
}

/// What an opcode's parts say, as each is consumed: what is left over is not understood.
struct Parts<'a> {
    all: Vec<&'a str>,
}

impl<'a> Parts<'a> {
    fn take(&mut self, part: &str) -> bool {
        let at = self.all.iter().position(|known| *known == part);
        at.map(|at| self.all.remove(at)).is_some()
    }

    fn take_any(&mut self, parts: &[&'static str]) -> Option<&'static str> {
        parts.iter().copied().find(|part| self.take(part))
    }

    fn last(&mut self) -> &'a str {
        self.all.pop().unwrap_or_default()
    }
}

impl Decoder<'_> {
    fn refuse<T>(&self, message: impl Into<String>) -> Result<T, Refusal> {
        Err(Refusal::at(self.line, message))
    }

    fn coded(
        &mut self,
        statement: &Statement,
        instruction: &Instruction,
    ) -> Result<Coded, Refusal> {
        let guard = match &instruction.guard {
            None => None,
            Some((name, is_negated)) => Some((self.register(name, Width::P)?, *is_negated)),
        };
        let mut parts = Parts {
            all: instruction
                .parts
                .iter()
                .skip(1)
                .map(String::as_str)
                .collect(),
        };
        let op = self.op(&instruction.parts[0], &mut parts, &instruction.operands);
        let op = match op {
            Ok(Some(op)) if parts.all.is_empty() => op,
            Ok(_) => return self.refuse(format!("{} is not simulated", instruction.opcode())),
            Err(refusal) => {
                return Err(Refusal::at(
                    refusal.line,
                    format!("{}: {}", instruction.opcode(), refusal.message),
                ));
            }
        };
        Ok(Coded {
            op,
            guard,
            line: statement.line,
            source: statement.source,
        })
    }

    fn register(&self, name: &str, width: Width) -> Result<Slot, Refusal> {
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

    fn fixed(&mut self, width: Width, fixed: Fixed) -> Result<Slot, Refusal> {
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
    fn source(&mut self, operand: &Operand, width: Width) -> Result<Slot, Refusal> {
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
    fn any_source(&mut self, operand: &Operand, width: Width) -> Result<Register, Refusal> {
        if let Operand::Name(name) = operand
            && let Some(register) = self.names.get(name)
        {
            return Ok(*register);
        }
        let slot = self.source(operand, width)?;
        Ok(Register { width, slot })
    }

    fn result(&self, operand: &Operand, width: Width) -> Result<Slot, Refusal> {
        match operand {
            Operand::Name(name) => self.register(name, width),
            other => self.refuse(format!("result {other:?}")),
        }
    }

    fn any_result(&self, operand: &Operand) -> Result<Register, Refusal> {
        match operand {
            Operand::Name(name) => match self.names.get(name) {
                Some(register) => Ok(*register),
                None => self.refuse(format!("{name} is no register")),
            },
            other => self.refuse(format!("result {other:?}")),
        }
    }

    /// A predicate that may be negated.
    fn predicate(&mut self, operand: &Operand) -> Result<(Slot, bool), Refusal> {
        match operand {
            Operand::Not(name) => Ok((self.register(name, Width::P)?, true)),
            Operand::Integer(value) => Ok((
                self.fixed(Width::P, Fixed::Bits(u64::from(*value != 0)))?,
                false,
            )),
            other => Ok((self.source(other, Width::P)?, false)),
        }
    }

    fn place(&mut self, operand: &Operand, space: Space) -> Result<Place, Refusal> {
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

    fn vector(operand: &Operand) -> Vec<Operand> {
        match operand {
            Operand::Vector(parts) => parts.clone(),
            other => vec![other.clone()],
        }
    }

    fn words<const N: usize>(
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

    fn op(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let needed = |count: usize| {
            if operands.len() == count {
                Ok(())
            } else {
                Err(Refusal::at(
                    self.line,
                    format!("{} operands, expected {count}", operands.len()),
                ))
            }
        };
        match name {
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "and" | "or" | "xor"
            | "shl" | "shr" => {
                needed(3)?;
                self.binary(name, parts, operands)
            }
            "not" | "neg" | "abs" | "cnot" => {
                needed(2)?;
                self.unary(name, parts, operands)
            }
            "mad" | "fma" => {
                needed(4)?;
                self.multiply_add(name, parts, operands)
            }
            "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "tanh" | "sin" | "cos" => {
                needed(2)?;
                self.function(name, parts, operands)
            }
            "setp" => self.setp(parts, operands),
            "selp" => {
                needed(4)?;
                let Some(width) = width_of(parts.last()) else {
                    return Ok(None);
                };
                let (d, a) = (
                    self.result(&operands[0], width)?,
                    self.source(&operands[1], width)?,
                );
                let b = self.source(&operands[2], width)?;
                let (p, is_negated) = self.predicate(&operands[3])?;
                let (a, b) = if is_negated { (b, a) } else { (a, b) };
                Ok(Some(Op::Select { width, d, a, b, p }))
            }
            "mov" => {
                needed(2)?;
                self.mov(parts, operands)
            }
            "cvt" => self.cvt(parts, operands),
            "cvta" => {
                needed(2)?;
                self.cvta(parts, operands)
            }
            "bfi" => {
                needed(5)?;
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
                needed(4)?;
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
                needed(4)?;
                Ok(Some(Op::Permute {
                    d: self.result(&operands[0], Width::W)?,
                    a: self.source(&operands[1], Width::W)?,
                    b: self.source(&operands[2], Width::W)?,
                    selector: self.source(&operands[3], Width::W)?,
                }))
            }
            "lop3" if parts.take("b32") => {
                needed(5)?;
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
                needed(4)?;
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
                needed(2)?;
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
            "ld" => {
                needed(2)?;
                self.load(parts, operands)
            }
            "st" => {
                needed(2)?;
                self.store(parts, operands)
            }
            "atom" | "red" => self.atomic(name == "red", parts, operands),
            "cp" if parts.take("async") => self.copy(parts, operands),
            "ldmatrix" => {
                needed(2)?;
                self.load_matrix(parts, operands)
            }
            "mma" => {
                needed(4)?;
                self.multiply(parts, operands)
            }
            "shfl" if parts.take("sync") && parts.take("b32") => self.shuffle(parts, operands),
            "vote" if parts.take("sync") => {
                needed(3)?;
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
            "match" if parts.take("sync") => {
                needed(3)?;
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
            "activemask" if parts.take("b32") => {
                needed(1)?;
                Ok(Some(Op::ActiveMask {
                    d: self.result(&operands[0], Width::W)?,
                }))
            }
            "bar" | "barrier" => self.barrier(parts, operands),
            "membar" => Ok(parts.take_any(&["cta", "gl", "sys"]).map(|_| Op::Fence)),
            "fence" => {
                parts.take_any(&["sc", "acq_rel", "acquire", "release"]);
                Ok(parts
                    .take_any(&["cta", "cluster", "gpu", "sys"])
                    .map(|_| Op::Fence))
            }
            "bra" => {
                parts.take("uni");
                let target = match operands {
                    [Operand::Name(label)] => self.labels.get(label.as_str()).copied(),
                    _ => None,
                };
                match target {
                    Some(target) => Ok(Some(Op::Branch { target })),
                    None => self.refuse("no such label"),
                }
            }
            "ret" | "exit" => {
                parts.take("uni");
                Ok(Some(Op::Exit))
            }
            "trap" => Ok(Some(Op::Trap)),
            _ => Ok(None),
        }
    }

    fn binary(
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

    fn unary(
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

    fn multiply_add(
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

    fn function(
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

    fn setp(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
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

    fn mov(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
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

    fn cvt(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
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

    fn cvta(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
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

    /// State space and cache hints of a load or store; the bool: through the read-only path.
    fn space(parts: &mut Parts<'_>) -> (Space, bool) {
        let space =
            match parts.take_any(&["global", "shared", "shared::cta", "local", "param", "const"]) {
                Some("global") => Space::Global,
                Some("shared" | "shared::cta") => Space::Shared,
                Some("local") => Space::Local,
                Some("param") => Space::Param,
                Some(_) => Space::Const,
                None => Space::Generic,
            };
        parts.take_any(&["weak", "relaxed", "acquire", "release", "volatile"]);
        parts.take_any(&["cta", "cluster", "gpu", "sys"]);
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
        (space, read_only)
    }

    /// How many elements, each of how many bytes.
    fn shape(parts: &mut Parts<'_>) -> Option<(usize, Element)> {
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

    fn load(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
        let Some((count, element)) = Self::shape(parts) else {
            return Ok(None);
        };
        let (space, read_only) = Self::space(parts);
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
            to,
        }))
    }

    fn store(
        &mut self,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let Some((count, element)) = Self::shape(parts) else {
            return Ok(None);
        };
        let (space, _) = Self::space(parts);
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
            from,
        }))
    }

    fn atomic(
        &mut self,
        is_red: bool,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        let kind = parts.last();
        let Some(width) = width_of(kind) else {
            return Ok(None);
        };
        parts.take_any(&["relaxed", "acquire", "release", "acq_rel"]);
        parts.take_any(&["cta", "cluster", "gpu", "sys"]);
        let (space, _) = Self::space(parts);
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
            d,
            b,
            c,
        }))
    }

    fn copy(&mut self, parts: &mut Parts<'_>, operands: &[Operand]) -> Result<Option<Op>, Refusal> {
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

    fn load_matrix(
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

    fn multiply(
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

    fn shuffle(
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

    fn barrier(
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
}

fn wider(width: Width) -> Option<Width> {
    match width {
        Width::H => Some(Width::W),
        Width::W => Some(Width::D),
        _ => None,
    }
}
