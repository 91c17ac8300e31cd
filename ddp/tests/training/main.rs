//! Models, losses, the optimizer, the step and checkpoints, on the CPU in this process: ranks are
//! threads. The claims about ranks, ZeRO-1 and split models are checked on GPUs too: tests/cuda.

#[path = "../support/mod.rs"]
mod support;

#[path = "../claims/own_losses.rs"]
mod own_losses;
#[path = "../claims/ranks.rs"]
mod ranks;
#[path = "../claims/shards.rs"]
mod shards;
#[path = "../claims/zero.rs"]
mod zero;

mod attended;
mod checkpoints;
mod derivatives;
mod formula_losses;
mod formulas;
mod forward;
mod golden_layers;
mod golden_losses;
mod golden_nanogpt;
mod golden_resnet;
mod golden_vit;
mod indices;
mod layers;
mod nonfinite;
mod op_info;
mod rows;
mod same_bits;
mod split;

use support::training::{Way, quietly};

/// A test waits here for what it cannot share with others: nothing, on the CPU.
fn turn() -> Option<()> {
    quietly();
    Some(())
}

/// How the ranks train.
fn ways() -> Vec<Way> {
    vec![Way::Cpu]
}
