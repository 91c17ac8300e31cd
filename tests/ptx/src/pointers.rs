//! Whether a kernel takes pointers from memory or puts them there. If so, the addresses among its
//! arguments must stay what they are: others see what it stores, and compare what it loads.

use crate::names::Named;
use crate::text::{Instruction, Operand};

/// A bit for each load of 8 bytes of a parameter (the last one for all beyond), and this one for
/// what comes from memory.
const LOADED: u64 = 1 << 63;
const LAST: u32 = 62;

fn registers<'a>(
    operand: &'a Operand,
    names: &'a [(String, u32)],
) -> Box<dyn Iterator<Item = usize> + 'a> {
    let number = |name: &String| {
        let found = names.iter().find(|(known, _)| known == name);
        found.map(|(_, number)| *number as usize)
    };
    match operand {
        Operand::Name(name) | Operand::Address(Some(name), _) => Box::new(number(name).into_iter()),
        Operand::Vector(parts) => {
            Box::new(parts.iter().flat_map(move |part| registers(part, names)))
        }
        _ => Box::new(std::iter::empty()),
    }
}

/// Whether an access may be to global memory, and moves values of 8 bytes.
fn is_global(parts: &[String]) -> bool {
    let has = |name: &str| parts.iter().any(|part| part == name);
    !["shared", "shared::cta", "local", "param", "const"]
        .iter()
        .any(|space| has(space))
}

fn is_wide(parts: &[String]) -> bool {
    matches!(
        parts.last().map(String::as_str),
        Some("u64" | "s64" | "b64")
    )
}

/// The operands whose address the result of an instruction may still be.
fn carried(instruction: &Instruction) -> &[Operand] {
    let rest = instruction.operands.get(1..).unwrap_or_default();
    match instruction.parts[0].as_str() {
        "mov" | "cvta" | "add" | "sub" | "min" | "max" | "and" | "or" | "cvt" => rest,
        "selp" => &rest[..rest.len().min(2)],
        // The third operand is added.
        "mad" | "fma" => rest.get(2..).unwrap_or_default(),
        _ => &[],
    }
}

/// The instructions that have an address in global memory: its operand.
fn address(instruction: &Instruction) -> Option<&Operand> {
    let is_access = matches!(instruction.parts[0].as_str(), "ld" | "st" | "atom" | "red");
    let found = instruction
        .operands
        .iter()
        .find(|operand| matches!(operand, Operand::Address(..)));
    found.filter(|_| is_access && is_global(&instruction.parts))
}

/// What the values of registers come from, by number.
fn origins(named: &Named<'_>) -> Vec<u64> {
    let mut origins = vec![0; named.widths.len()];
    let mut loads = 0;
    for (_, instruction, names) in &named.instructions {
        let parts = &instruction.parts;
        if parts[0] != "ld" || !is_wide(parts) {
            continue;
        }
        for register in registers(&instruction.operands[0], names) {
            origins[register] |= match parts.get(1).map(String::as_str) {
                Some("param") => {
                    loads += 1;
                    1 << (loads - 1).min(LAST)
                }
                _ if is_global(parts) => LOADED,
                _ => 0,
            };
        }
    }
    loop {
        let mut grew = false;
        for (_, instruction, names) in &named.instructions {
            let sources = carried(instruction);
            let of = sources
                .iter()
                .flat_map(|operand| registers(operand, names))
                .fold(0, |all, register| all | origins[register]);
            if let Some(result) = instruction.operands.first().filter(|_| of != 0) {
                for register in registers(result, names) {
                    grew |= of & !origins[register] != 0;
                    origins[register] |= of;
                }
            }
        }
        if !grew {
            return origins;
        }
    }
}

/// Whether it stores a pointer that it was given, loads one and uses it, or compares both.
pub(crate) fn are_held(named: &Named<'_>) -> bool {
    let origins = origins(named);
    let of = |operand: &Operand, names: &[(String, u32)]| {
        registers(operand, names).fold(0, |all, register| all | origins[register])
    };
    let addresses: Vec<u64> = named
        .instructions
        .iter()
        .filter_map(|(_, instruction, names)| Some(of(address(instruction)?, names)))
        .collect();
    let pointers = addresses.iter().fold(0, |all, of| all | of) & !LOADED;
    if addresses.contains(&LOADED) {
        return true;
    }
    named.instructions.iter().any(|(_, instruction, names)| {
        let (parts, operands) = (&instruction.parts, &instruction.operands);
        match (parts[0].as_str(), &operands[..]) {
            ("st" | "atom" | "red", [.., value]) if is_global(parts) && is_wide(parts) => {
                of(value, names) & pointers != 0
            }
            ("setp", [_, first, second, ..]) => {
                let (first, second) = (of(first, names), of(second, names));
                first == LOADED && second & pointers != 0
                    || second == LOADED && first & pointers != 0
            }
            _ => false,
        }
    })
}
