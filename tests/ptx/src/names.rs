//! From names to registers: which names a body declares, where each is live, and a slot for each,
//! shared by names that are never live together.

use std::collections::HashMap;

use crate::finding::Refusal;
use crate::op::{Register, Slot, Touched, Width};
use crate::text::{Content, Instruction, Operand, Statement};

/// An instruction, and the number of each register that it names.
type NamedInstruction<'a> = (&'a Statement, &'a Instruction, Vec<(String, u32)>);

/// A body whose registers are numbered, with the place of each label.
pub(crate) struct Named<'a> {
    pub(crate) instructions: Vec<NamedInstruction<'a>>,
    pub(crate) labels: HashMap<&'a str, u32>,
    pub(crate) widths: Vec<Width>,
}

struct Scope {
    /// (prefix, count) or whole names.
    declared: Vec<(String, Option<u32>, Width)>,
    known: HashMap<String, u32>,
}

fn width_of(kind: &str, line: u32) -> Result<Width, Refusal> {
    Ok(match kind {
        "pred" => Width::P,
        "b16" | "u16" | "s16" | "f16" | "bf16" => Width::H,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => Width::W,
        "b64" | "u64" | "s64" | "f64" => Width::D,
        _ => {
            return Err(Refusal::at(
                line,
                format!("registers of type .{kind} are not simulated"),
            ));
        }
    })
}

fn names_in(operand: &Operand, into: &mut Vec<String>) {
    match operand {
        Operand::Name(name) | Operand::Not(name) | Operand::Address(Some(name), _) => {
            into.push(name.clone())
        }
        Operand::Pair(first, second) => into.extend([first.clone(), second.clone()]),
        Operand::Vector(parts) => parts.iter().for_each(|part| names_in(part, into)),
        _ => {}
    }
}

/// Numbers the registers of a body.
pub(crate) fn number(statements: &[Statement]) -> Result<Named<'_>, Refusal> {
    let mut scopes = vec![Scope {
        declared: Vec::new(),
        known: HashMap::new(),
    }];
    let mut named = Named {
        instructions: Vec::new(),
        labels: HashMap::new(),
        widths: Vec::new(),
    };
    for statement in statements {
        match &statement.content {
            Content::Open => scopes.push(Scope {
                declared: Vec::new(),
                known: HashMap::new(),
            }),
            Content::Close => drop(scopes.pop()),
            Content::Registers(registers) => {
                let width = width_of(&registers.kind, statement.line)?;
                let scope = scopes
                    .last_mut()
                    .ok_or_else(|| Refusal::at(statement.line, "a } too many"))?;
                scope
                    .declared
                    .push((registers.prefix.clone(), registers.count, width));
            }
            Content::Label(label) => {
                named.labels.insert(label, named.instructions.len() as u32);
            }
            Content::Variable(_) => {}
            Content::Instruction(instruction) => {
                let mut names = Vec::new();
                names.extend(instruction.guard.iter().map(|(name, _)| name.clone()));
                instruction
                    .operands
                    .iter()
                    .for_each(|operand| names_in(operand, &mut names));
                let mut found = Vec::new();
                for name in names {
                    if let Some(number) = resolve(&mut scopes, &mut named.widths, &name) {
                        found.push((name, number));
                    }
                }
                named.instructions.push((statement, instruction, found));
            }
        }
    }
    Ok(named)
}

/// The number of the register of this name; None for what is no register.
fn resolve(scopes: &mut [Scope], widths: &mut Vec<Width>, name: &str) -> Option<u32> {
    for scope in scopes.iter_mut().rev() {
        if let Some(known) = scope.known.get(name) {
            return Some(*known);
        }
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let index: Option<u32> = name[stem.len()..].parse().ok();
        let declares = |(prefix, count, _): &&(String, Option<u32>, Width)| match count {
            None => prefix == name,
            Some(count) => prefix == stem && index.is_some_and(|index| index < *count),
        };
        if let Some((_, _, width)) = scope.declared.iter().find(declares) {
            let number = widths.len() as u32;
            widths.push(*width);
            scope.known.insert(name.to_owned(), number);
            return Some(number);
        }
    }
    None
}

/// Whether an opcode's first operand is read, not written.
fn first_is_read(parts: &[String]) -> bool {
    let second = parts.get(1).map(String::as_str);
    match parts[0].as_str() {
        "bar" | "barrier" => !parts.iter().any(|part| part == "red"),
        "st" | "red" | "cp" | "bra" | "membar" | "fence" | "prefetch" | "prefetchu"
        | "nanosleep" | "ret" | "exit" => true,
        "discard" | "applypriority" => true,
        "stmatrix" => true,
        _ => second == Some("store"),
    }
}

/// Registers that the instruction writes and reads, by number.
fn effects(instruction: &Instruction, names: &[(String, u32)]) -> (Vec<u32>, Vec<u32>) {
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    let number = |name: &String| {
        names
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, number)| *number)
    };
    let guard = instruction
        .guard
        .as_ref()
        .and_then(|(name, _)| number(name));
    reads.extend(guard);
    for (at, operand) in instruction.operands.iter().enumerate() {
        let mut inside = Vec::new();
        names_in(operand, &mut inside);
        let is_write = at == 0
            && !first_is_read(&instruction.parts)
            && !matches!(operand, Operand::Address(..));
        let list = if is_write { &mut writes } else { &mut reads };
        list.extend(inside.iter().filter_map(number));
    }
    if guard.is_some() || instruction.parts[0] == "wgmma" {
        // Lanes that skip it keep the value.
        reads.extend(&writes);
    }
    (writes, reads)
}

#[derive(Clone, PartialEq)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Bits {
        Bits(vec![0; count.div_ceil(64)])
    }

    fn set(&mut self, at: u32) {
        self.0[at as usize / 64] |= 1 << (at % 64);
    }

    fn clear(&mut self, at: u32) {
        self.0[at as usize / 64] &= !(1 << (at % 64));
    }

    fn join(&mut self, other: &Bits) -> bool {
        let mut grew = false;
        for (word, more) in self.0.iter_mut().zip(&other.0) {
            grew |= *more & !*word != 0;
            *word |= more;
        }
        grew
    }

    fn each(&self, mut use_it: impl FnMut(u32)) {
        for (at, word) in self.0.iter().enumerate() {
            let mut word = *word;
            while word != 0 {
                use_it(at as u32 * 64 + word.trailing_zeros());
                word &= word - 1;
            }
        }
    }
}

/// Where each numbered register lies, and how many slots of each width there are.
pub(crate) struct Places {
    pub(crate) registers: Vec<Register>,
    pub(crate) counts: HashMap<Width, usize>,
    /// The slots of fragments of `wgmma`, and the names of these registers.
    pub(crate) fragments: HashMap<Slot, String>,
    /// By instruction: what it does to fragments, unless it is a `wgmma`.
    pub(crate) touched: Vec<Option<Box<Touched>>>,
}

/// The registers that `wgmma` uses after the instruction, by number.
fn fragments(named: &Named<'_>) -> HashMap<u32, String> {
    let of_wgmma = named
        .instructions
        .iter()
        .filter(|(_, instruction, _)| instruction.parts[0] == "wgmma");
    let mut found = HashMap::new();
    for (_, instruction, names) in of_wgmma {
        let mut inside = Vec::new();
        for operand in &instruction.operands {
            if let Operand::Vector(_) = operand {
                names_in(operand, &mut inside);
            }
        }
        found.extend(
            names
                .iter()
                .filter(|(name, _)| inside.contains(name))
                .map(|(name, number)| (*number, name.clone())),
        );
    }
    found
}

/// Gives each register a slot: by the range of instructions in which it is live.
pub(crate) fn place(named: &Named<'_>) -> Result<Places, Refusal> {
    let count = named.instructions.len();
    let effects: Vec<_> = named
        .instructions
        .iter()
        .map(|(_, instruction, names)| effects(instruction, names))
        .collect();
    let (blocks, next) = blocks_of(named)?;
    let mut live_in = vec![Bits::new(named.widths.len()); blocks.len()];
    let mut live_out = live_in.clone();
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for block in (0..blocks.len()).rev() {
            for follower in next[block].iter().flatten() {
                let more = live_in[*follower].clone();
                live_out[block].join(&more);
            }
            let mut live = live_out[block].clone();
            for at in blocks[block].clone().rev() {
                effects[at].0.iter().for_each(|write| live.clear(*write));
                effects[at].1.iter().for_each(|read| live.set(*read));
            }
            has_changed |= live_in[block].join(&live);
        }
    }
    let mut ranges = vec![(usize::MAX, 0); named.widths.len()];
    let mut touch = |register: u32, at: usize| {
        let range: &mut (usize, usize) = &mut ranges[register as usize];
        *range = (range.0.min(at), range.1.max(at));
    };
    for (block, span) in blocks.iter().enumerate() {
        live_in[block].each(|register| touch(register, span.start));
        live_out[block].each(|register| touch(register, span.end - 1));
        for at in span.clone() {
            effects[at]
                .0
                .iter()
                .chain(&effects[at].1)
                .for_each(|register| touch(*register, at));
        }
    }
    let fragments = fragments(named);
    for number in fragments.keys() {
        // What a `wgmma` uses later than its own place shares its slot with no other register.
        ranges[*number as usize] = (0, count);
    }
    let mut order: Vec<u32> = (0..named.widths.len() as u32).collect();
    order.sort_by_key(|register| ranges[*register as usize]);
    let mut registers = vec![
        Register {
            width: Width::W,
            slot: 0
        };
        named.widths.len()
    ];
    let mut counts = HashMap::new();
    for width in Width::ALL {
        // By slot: the last instruction of its register.
        let mut ends: Vec<usize> = Vec::new();
        let mut free: std::collections::BinaryHeap<std::cmp::Reverse<usize>> = Default::default();
        let mut busy: std::collections::BinaryHeap<std::cmp::Reverse<(usize, usize)>> =
            Default::default();
        for register in order
            .iter()
            .filter(|register| named.widths[**register as usize] == width)
        {
            let (first, last) = ranges[*register as usize];
            // A register may begin where another ends only if that one was read there before:
            // results are written lane by lane after all operands are read, but vectors are
            // written in order.
            while busy.peek().is_some_and(|it| it.0.0 < first) {
                free.extend(busy.pop().map(|it| std::cmp::Reverse(it.0.1)));
            }
            let slot = match free.pop() {
                Some(slot) => slot.0,
                None => {
                    ends.push(0);
                    ends.len() - 1
                }
            };
            busy.push(std::cmp::Reverse((last.min(count), slot)));
            let slot = Slot::try_from(slot)
                .map_err(|_| Refusal::at(0, "a kernel with too many registers"))?;
            registers[*register as usize] = Register { width, slot };
        }
        counts.insert(width, ends.len());
    }
    let slot = |number: &u32| registers[*number as usize].slot;
    let touched = named.instructions.iter().zip(&effects);
    let touched = touched.map(|((_, instruction, _), (writes, reads))| {
        let of = |numbers: &[u32]| -> Vec<Slot> {
            let known = numbers.iter().filter(|it| fragments.contains_key(it));
            known.map(slot).collect()
        };
        let (reads, writes) = (of(reads), of(writes));
        let is_ordinary = instruction.parts[0] != "wgmma";
        (is_ordinary && !(reads.is_empty() && writes.is_empty()))
            .then(|| Box::new(Touched { reads, writes }))
    });
    Ok(Places {
        touched: touched.collect(),
        fragments: fragments
            .iter()
            .map(|(number, name)| (slot(number), name.clone()))
            .collect(),
        registers,
        counts,
    })
}

type Blocks = (Vec<std::ops::Range<usize>>, Vec<[Option<usize>; 2]>);

/// Ranges of instructions without a branch into or out of their middle, and which may follow each.
fn blocks_of(named: &Named<'_>) -> Result<Blocks, Refusal> {
    let count = named.instructions.len();
    let mut starts: Vec<usize> = named
        .labels
        .values()
        .map(|at| *at as usize)
        .filter(|at| *at < count)
        .collect();
    starts.push(0);
    let ends = |instruction: &Instruction| {
        matches!(
            instruction.parts[0].as_str(),
            "bra" | "ret" | "exit" | "trap"
        )
    };
    for (at, (_, instruction, _)) in named.instructions.iter().enumerate() {
        if ends(instruction) && at + 1 < count {
            starts.push(at + 1);
        }
    }
    starts.sort_unstable();
    starts.dedup();
    let mut blocks = Vec::new();
    for (at, start) in starts.iter().enumerate() {
        blocks.push(*start..starts.get(at + 1).copied().unwrap_or(count));
    }
    blocks.retain(|block| !block.is_empty());
    let index: HashMap<usize, usize> = blocks
        .iter()
        .enumerate()
        .map(|(at, block)| (block.start, at))
        .collect();
    let mut next = Vec::new();
    for block in &blocks {
        let (statement, last, _) = &named.instructions[block.end - 1];
        let falls = index.get(&block.end).copied();
        let is_guarded = last.guard.is_some();
        next.push(match last.parts[0].as_str() {
            "bra" => {
                let Some(Operand::Name(label)) = last.operands.first() else {
                    return Err(Refusal::at(statement.line, "bra without a label"));
                };
                let target = named.labels.get(label.as_str()).copied();
                let target = target
                    .ok_or_else(|| Refusal::at(statement.line, format!("no label {label}")))?;
                [
                    index.get(&(target as usize)).copied(),
                    falls.filter(|_| is_guarded),
                ]
            }
            "ret" | "exit" | "trap" => [None, falls.filter(|_| is_guarded)],
            _ => [falls, None],
        });
    }
    Ok((blocks, next))
}
