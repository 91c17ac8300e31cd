//! From statements to decoded instructions, or a refusal that names what is not simulated.

mod arithmetic;
mod bits;
mod group;
mod memory;
mod moves;
mod operands;
mod warp;

use std::collections::{HashMap, HashSet};

use crate::finding::Refusal;
use crate::names;
use crate::op::{Coded, Op, Register, Slot, Strength, Strong, Width};
use crate::pointers;
use crate::text::{Content, Instruction, KernelText, Operand, Space, Statement, Variable};

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
    /// The same of global memory, at most 16.
    pub(crate) global_cell_bytes: u32,
    pub(crate) holds_pointers: bool,
    pub(crate) local: Vec<Owned>,
    pub(crate) local_bytes: u64,
    pub(crate) threads_max: Option<u32>,
    /// The registers of 32 bits that are fragments of `wgmma`, and their names.
    pub(crate) fragments: HashMap<Slot, String>,
}

impl Program {
    /// Of variables, without gaps.
    pub(crate) fn shared_bytes(&self) -> u64 {
        self.shared.iter().map(|owned| owned.bytes).sum()
    }
}

/// The name in the source of a variable that C++ has mangled: `tile` of `_ZZ7reversePfE4tile`.
fn plain(name: &str) -> &str {
    let inner = name.rmatch_indices('E').find_map(|(at, _)| {
        let rest = &name[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_digit())?;
        let count: usize = rest[..end].parse().ok()?;
        (rest.len() - end == count).then_some(&rest[end..])
    });
    inner.filter(|_| name.starts_with("_Z")).unwrap_or(name)
}

/// Lays out variables with gaps.
fn lay_out<'a>(variables: impl Iterator<Item = &'a Variable>) -> (Vec<Owned>, u64) {
    let (mut at, mut owned) = (GAP_BYTES, Vec::new());
    for variable in variables {
        at = at.next_multiple_of(variable.alignment.max(1));
        owned.push(Owned {
            name: plain(&variable.name).to_owned(),
            start: at,
            bytes: variable.bytes,
        });
        at += variable.bytes + GAP_BYTES;
    }
    (owned, at)
}

pub(crate) fn decode(kernel: &KernelText, globals: &[Variable]) -> Result<Program, Refusal> {
    let statements = kernel.statements()?;
    let named = names::number(&statements)?;
    let places = names::place(&named)?;
    let inside = statements
        .iter()
        .filter_map(|statement| match &statement.content {
            Content::Variable(variable) => Some(variable),
            _ => None,
        });
    let variables: Vec<&Variable> = globals.iter().chain(inside).collect();
    let operands = named.instructions.iter();
    let used: HashSet<&str> = operands
        .flat_map(|(_, instruction, _)| &instruction.operands)
        .filter_map(|operand| match operand {
            Operand::Name(name) | Operand::Address(Some(name), _) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let of = |space: Space, is_open: bool| {
        let all = variables
            .iter()
            .filter(|variable| used.contains(variable.name.as_str()));
        all.copied()
            .filter(move |variable| variable.space == space && variable.is_open == is_open)
    };
    let (shared, end) = lay_out(of(Space::Shared, false));
    let dynamic_at = end.next_multiple_of(1024);
    let (local, local_bytes) = lay_out(of(Space::Local, false));
    let mut symbols = HashMap::new();
    for (space, owned) in [(Space::Shared, &shared), (Space::Local, &local)] {
        let names = of(space, false).map(|variable| variable.name.clone());
        let places = owned.iter().map(|owned| (space, owned.start));
        symbols.extend(names.zip(places));
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
    for ((statement, instruction, found), touched) in named.instructions.iter().zip(places.touched)
    {
        decoder.line = statement.line;
        decoder.names = found
            .iter()
            .map(|(name, number)| (name.clone(), places.registers[*number as usize]))
            .collect();
        code.push(Coded {
            touched,
            ..decoder.coded(statement, instruction)?
        });
    }
    let end = statements.last().map_or(0, |statement| statement.line);
    code.push(Coded {
        op: Op::Exit,
        guard: None,
        touched: None,
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
            .filter_map(|coded| access_to(Space::Shared, &coded.op))
            .min()
            .unwrap_or(16),
        global_cell_bytes: code
            .iter()
            .filter_map(|coded| access_to(Space::Global, &coded.op))
            .min()
            .unwrap_or(4)
            .min(16),
        holds_pointers: pointers::are_held(&named),
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
        fragments: places.fragments,
    })
}

/// The bytes of an access that may be to memory of this space, global or shared.
fn access_to(space: Space, op: &Op) -> Option<u32> {
    let (place, bytes) = match op {
        Op::Load {
            place, element, to, ..
        } => (place, element.bytes * to.len() as u32),
        Op::Store {
            place,
            element,
            from,
            ..
        } => (place, element.bytes * from.len() as u32),
        Op::Atomic { place, bytes, .. } => (place, *bytes),
        Op::CopyAsync {
            to, from, bytes, ..
        } => {
            let place = if space == Space::Global { from } else { to };
            (place, *bytes)
        }
        Op::LoadMatrix { place, .. } => (place, 16),
        Op::Wgmma(_) => return (space == Space::Shared).then_some(16),
        _ => return None,
    };
    (place.space == space || place.space == Space::Generic).then_some(bytes)
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
            touched: None,
            line: statement.line,
            source: statement.source,
        })
    }

    fn needed(&self, operands: &[Operand], count: usize) -> Result<(), Refusal> {
        if operands.len() == count {
            return Ok(());
        }
        self.refuse(format!("{} operands, expected {count}", operands.len()))
    }

    fn op(
        &mut self,
        name: &str,
        parts: &mut Parts<'_>,
        operands: &[Operand],
    ) -> Result<Option<Op>, Refusal> {
        match name {
            "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "and" | "or" | "xor"
            | "shl" | "shr" => {
                self.needed(operands, 3)?;
                self.binary(name, parts, operands)
            }
            "not" | "neg" | "abs" | "cnot" => {
                self.needed(operands, 2)?;
                self.unary(name, parts, operands)
            }
            "mad" | "fma" => {
                self.needed(operands, 4)?;
                self.multiply_add(name, parts, operands)
            }
            "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "tanh" | "sin" | "cos" => {
                self.needed(operands, 2)?;
                self.function(name, parts, operands)
            }
            "setp" => self.setp(parts, operands),
            "selp" => {
                self.needed(operands, 4)?;
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
                self.needed(operands, 2)?;
                self.mov(parts, operands)
            }
            "cvt" => self.cvt(parts, operands),
            "cvta" => {
                self.needed(operands, 2)?;
                self.cvta(parts, operands)
            }
            "bfi" | "bfe" | "prmt" | "lop3" | "shf" | "popc" | "clz" | "brev" => {
                self.bits(name, parts, operands)
            }
            "ld" => {
                self.needed(operands, 2)?;
                self.load(parts, operands)
            }
            "st" => {
                self.needed(operands, 2)?;
                self.store(parts, operands)
            }
            "atom" | "red" => self.atomic(name == "red", parts, operands),
            "cp" if parts.take("async") => self.copy(parts, operands),
            "ldmatrix" => {
                self.needed(operands, 2)?;
                self.load_matrix(parts, operands)
            }
            "mma" => {
                self.needed(operands, 4)?;
                self.multiply(parts, operands)
            }
            "shfl" if parts.take("sync") && parts.take("b32") => self.shuffle(parts, operands),
            "vote" if parts.take("sync") => self.vote(parts, operands),
            "match" if parts.take("sync") => self.matched(parts, operands),
            "activemask" if parts.take("b32") => {
                self.needed(operands, 1)?;
                Ok(Some(Op::ActiveMask {
                    d: self.result(&operands[0], Width::W)?,
                }))
            }
            "bar" | "barrier" => self.barrier(parts, operands),
            "membar" => Ok(parts.take_any(&["cta", "gl", "sys"]).map(|scope| {
                Op::Fence(Strong {
                    strength: if scope == "cta" {
                        Strength::Block
                    } else {
                        Strength::Device
                    },
                    acquires: true,
                    releases: true,
                })
            })),
            "wgmma" => self.group(parts, operands),
            "fence" if parts.take("proxy") => {
                parts.take("shared::cta");
                Ok(parts.take("async").then_some(Op::ProxyFence))
            }
            "fence" => {
                let semantics = parts.take_any(&["sc", "acq_rel", "acquire", "release"]);
                Ok(Self::scope(parts).map(|strength| {
                    Op::Fence(Strong {
                        strength,
                        acquires: semantics != Some("release"),
                        releases: semantics != Some("acquire"),
                    })
                }))
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
}

fn wider(width: Width) -> Option<Width> {
    match width {
        Width::H => Some(Width::W),
        Width::W => Some(Width::D),
        _ => None,
    }
}
