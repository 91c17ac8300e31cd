//! LoRA: adapters of low rank beside frozen linear layers, y = x·Wᵀ + b + scale · d(x)·Aᵀ·Bᵀ,
//! where d is dropout. Letters: I inputs, O outputs of the layer, R rank, N adapters of the layer,
//! P outputs that they cover.
//!
//! A layer in place of several (queries, keys and values) has an adapter for each, as PEFT has.
//! Their A's are one parameter, so that all are one matmul; so are their B's, whose matmul is with
//! a matrix of blocks: some zeros cost less than a matmul for each. They share what dropout drops.

use std::ops::Range;

use crate::build::Init;
pub use crate::build::{LORA_A, LORA_B, Lora, is_adapter};
use crate::forward::{Scope, Var};

/// `y` (…, O), the output for `x` of a linear layer whose parts have this many outputs, with what
/// its adapters add.
pub(crate) fn adapted(m: &mut Scope<'_>, x: &Var, y: Var, parts: &[usize]) -> Var {
    let Some(lora) = m.lora() else { return y };
    let adapted = (lora.adapted)(m.path(), parts);
    if adapted.is_empty() {
        return y;
    }
    let (inputs, outputs) = (x.size(-1), parts.iter().sum());
    let columns = adapted.len() * lora.rank;
    // As in PEFT: Kaiming's, with a = √5.
    let bound = 1.0 / (inputs as f64).sqrt();
    let a = m.parameter(LORA_A, &[columns, inputs], Init::Uniform { bound });
    let rows = adapted.iter().map(Range::len).sum();
    let b = m.parameter(LORA_B, &[rows, lora.rank], Init::Constant(0.0));
    let dropped = match lora.dropout {
        0.0 => x.clone(),
        probability => m.drop_elements(x, probability),
    };
    let mixed = dropped.linear(&a, None) * lora.scale;
    let covers_all = adapted.len() == 1 && adapted[0].len() == outputs;
    if covers_all {
        return y + mixed.linear(&b, None);
    }
    // B of all adapters (O, N·R), which is 0 except in the blocks of each.
    let mut start = 0;
    let blocks = adapted.iter().enumerate().map(|(index, range)| {
        let block = b.slice(0, start..start + range.len());
        start += range.len();
        let before = index * lora.rank;
        block.pad(1, before, columns - before - lora.rank)
    });
    let blocks: Vec<Var> = blocks.collect();
    let starts: Vec<usize> = adapted.iter().map(|range| range.start).collect();
    let wide = Var::placed(&blocks, 0, &starts, outputs);
    y + mixed.linear(&wide, None)
}

#[cfg(test)]
mod tests;
