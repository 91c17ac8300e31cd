//! Algorithms of matmuls, where they are timed: those that rank 0 measures hold for all
//! ranks, and for the run that resumes a checkpoint. Also how fast a large matmul is, which a
//! run's speed is compared with.

use ddp_comm::World;
use ddp_kernels::matmuls::{self, Algorithms, Kind, MatmulChoice};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Random, Tensor, ops};
use ddp_nn::models::Model;

use crate::devices::is_simulated;
use crate::error::Result;
use crate::exchange;
use crate::setting::PRODUCTS;
use crate::step::Stage;

/// Rows and columns of the large matmul: on the CPU its operands fit into the caches.
const SIDE_CPU: usize = 768;
const SIDE_GPU: usize = 4096;
/// Repetitions, of which the fastest counts.
const TIMINGS: usize = 6;

/// Whether a run times algorithms: only tests do on simulated GPUs, whose times mean nothing.
pub(super) fn are_timed(choice: MatmulChoice, device: Device, world: &World) -> bool {
    if choice == MatmulChoice::First || !device.is_accelerator() {
        return false;
    }
    let forced = std::env::var_os("DDP_TEST_PRODUCTS").is_some_and(|value| value == "simulated");
    let is_timed = forced || !is_simulated(device);
    if !is_timed && world.rank() == 0 {
        tracing::warn!(
            "{PRODUCTS} is timed, but the speed of simulated GPUs means nothing: matmuls use \
             cuBLASLt's first algorithms"
        );
    }
    is_timed
}

/// Uses the algorithms of a checkpoint. None, with a warning, if rank 0 now has another device or
/// library, whose algorithms are other ones.
pub(super) fn reuse(
    saved: &Algorithms,
    devices: &[Device],
    world: &World,
) -> Result<Option<Algorithms>> {
    let here = exchange::broadcast(world, 0, || Ok(matmuls::measured_on(devices[0])?))?;
    let then = saved.measured_on();
    if here == then {
        use_on(saved, devices)?;
        return Ok(Some(saved.clone()));
    }
    if world.rank() == 0 {
        tracing::warn!(
            "the checkpoint's algorithms of matmuls were timed on {then}; this is {here}: \
             they are timed anew, and from here on bits differ from those of the run before"
        );
    }
    Ok(None)
}

/// Times all kinds of matmuls that any rank has made, on rank 0, and uses the fastest algorithms
/// from here on. All ranks call it together, between steps.
pub(super) fn choose(devices: &[Device], world: &World) -> Result<Algorithms> {
    let mut mine = Vec::new();
    for &device in devices {
        mine.extend(matmuls::kinds(device)?);
    }
    let all: Vec<Vec<Kind>> = exchange::gather(world, &mine)?;
    let fastest = || {
        let mut kinds: Vec<Kind> = Vec::new();
        for kind in all.into_iter().flatten() {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let fastest = matmuls::fastest(devices[0], kinds)?;
        let count = fastest.count();
        tracing::info!("matmuls of {count} kinds use their fastest algorithm");
        Ok(fastest)
    };
    let chosen = exchange::broadcast(world, 0, fastest)?;
    use_on(&chosen, devices)?;
    Ok(chosen)
}

fn use_on(algorithms: &Algorithms, devices: &[Device]) -> Result<()> {
    for &device in devices {
        let refused = algorithms.use_on(device)?;
        if refused > 0 {
            tracing::warn!(
                "{device} cannot use {refused} of the {} algorithms of matmuls that rank 0 \
                 has timed: it keeps cuBLASLt's first ones for these matmuls",
                algorithms.count()
            );
        }
    }
    Ok(())
}

/// 10¹² multiplications and additions a second of a large matmul, on all devices of all ranks at
/// once; NaN if one lacks the memory. All ranks call it together.
pub(super) fn tflops(stages: &[Stage], world: &World) -> Result<f64> {
    world.barrier()?;
    let mut mine = 0.0;
    for stage in stages {
        mine += match tflops_of(stage.model()) {
            // Too little memory for this measurement does not end the run.
            Err(ddp_kernels::Error::OutOfMemory(_)) => f64::NAN,
            measured => measured?,
        };
    }
    Ok(exchange::gather_numbers(world, &[mine])?
        .iter()
        .flatten()
        .sum())
}

fn tflops_of(model: &Model) -> ddp_kernels::Result<f64> {
    let (side, device) = match model.params.device() {
        Device::Cpu => (SIDE_CPU, Device::Cpu),
        device => (SIDE_GPU, device),
    };
    let dtype = model.params.dtype();
    let factor = Tensor::randn(&[side, side], dtype, device, &mut Random::new(0))?;
    let out = factor.new_zeros(&[side, side])?;
    let (stream, mut least_s) = (Stream::current(device)?, f64::INFINITY);
    for _ in 0..TIMINGS {
        let start = stream.record_timed()?;
        let matmul = || ops::addmm_into(&out, &out, &factor, &factor, 1.0, 0.0);
        ops::with_f32_math(model.f32_math(), matmul)?;
        least_s = least_s.min(stream.record_timed()?.since(&start)?.as_secs_f64());
    }
    Ok(2.0 * (side as f64).powi(3) / least_s / 1e12)
}
