//! In which order matmuls of bf16 on the CPU add, which all ranks agree on and a run keeps.

use std::collections::BTreeMap;
use std::time::Instant;

use ddp_comm::World;
use ddp_kernels::ops::{self, Bf16Order, bf16_order, set_bf16_order};
use ddp_kernels::setting::Choice;
use ddp_kernels::simd::{self, Bf16Unit};
use ddp_kernels::{DType, Device, Random, Tensor};
use ddp_nn::params::Precision;

use crate::config::Config;
use crate::error::Result;
use crate::exchange;
use crate::setting::DTYPE;

/// Its name among the versions that bits depend on.
const VERSION: &str = "bf16-order";

/// The order of a run, if it computes by bf16 on the CPU: that in which it began, or the one in
/// force on all ranks, by default that of their hardware. In force on this thread from here on.
pub(super) fn agree(
    options: &Config,
    device: Device,
    world: &World,
    before: Option<Bf16Order>,
) -> Result<Option<Bf16Order>> {
    if options.dtype == Precision::F32 || device.is_accelerator() {
        return Ok(None);
    }
    let all: Vec<(Option<Bf16Order>, Bf16Order)> =
        exchange::gather(world, &(before, bf16_order()))?;
    let first = all[0].1;
    let common = if all.iter().all(|rank| rank.1 == first) {
        first
    } else {
        Bf16Order::Dpbf16
    };
    let order = all.iter().find_map(|rank| rank.0).unwrap_or(common);
    let emulated = exchange::gather(world, &!order.is_native())?;
    let ranks: Vec<String> = (0..emulated.len())
        .filter(|&rank| emulated[rank])
        .map(|rank| rank.to_string())
        .collect();
    // In the first world of ranks, and when one comes that differs.
    if world.rank() == 0 && before.is_none_or(|_| world.generation() < 2) {
        let name = order.name();
        if let (_, Some(why)) = simd::bf16_units() {
            tracing::info!(
                "this processor has AMX, but Linux does not give it to this process: {why}"
            );
        }
        if ranks.is_empty() {
            tracing::debug!("sums of bf16 in the order {name}, by this processor's instruction");
        } else {
            let (s, compute) = if ranks.len() == 1 {
                ("", "computes")
            } else {
                ("s", "compute")
            };
            tracing::info!(
                "sums of bf16 in the order {name}; rank{s} {} {compute} it by f32 arithmetic, \
                 without an instruction for it, which takes about as long as {DTYPE} f32 or longer",
                ranks.join(", ")
            );
        }
    }
    set_bf16_order(Some(order));
    Ok(Some(order))
}

/// Says whether a run in f32 that takes so many multiplications and additions would take less time
/// in bf16, if it takes long enough for that to matter.
pub(super) fn advise(options: &Config, device: Device, world: &World, flop: f64) -> Result<()> {
    /// Ten seconds of a core.
    const FLOP_MIN: f64 = 1e12;
    let is_missed = options.dtype == Precision::F32
        && !device.is_accelerator()
        && simd::bf16_unit() > Bf16Unit::None;
    if is_missed && flop >= FLOP_MIN && world.rank() == 0 && world.generation() < 2 {
        let factor = factor()?;
        // Beside other programs a short measurement may say anything.
        if factor > 1.2 {
            tracing::info!(
                "this processor multiplies bf16 {factor:.1} times as fast as f32: see {DTYPE} bf16"
            );
        }
    }
    Ok(())
}

/// How much faster a matmul of bf16 is than one of f32, in the order in force.
pub fn factor() -> Result<f64> {
    /// Rows and columns: all fits into the caches.
    const SIDE: usize = 512;
    const TRIES: usize = 3;
    let fastest = |dtype: DType| -> Result<f64> {
        let x = Tensor::randn(&[SIDE, SIDE], dtype, Device::Cpu, &mut Random::new(0))?;
        let out = x.zeros_like()?;
        let once = || -> Result<f64> {
            let began = Instant::now();
            ops::addmm_into(&out, &out, &x, &x, 1.0, 0.0)?;
            Ok(began.elapsed().as_secs_f64())
        };
        (0..TRIES).try_fold(f64::INFINITY, |least, _| Ok(least.min(once()?)))
    };
    Ok(fastest(DType::F32)? / fastest(DType::BF16)?)
}

/// Adds the order of a run to the versions in its metrics log and checkpoints.
pub(super) fn note(order: Option<Bf16Order>, versions: &mut BTreeMap<String, String>) {
    if let Some(order) = order {
        versions.insert(VERSION.into(), order.name().into());
    }
}

/// The order that these versions have.
pub fn order_of(versions: &BTreeMap<String, String>) -> Option<Bf16Order> {
    versions.get(VERSION)?.parse().ok()
}
