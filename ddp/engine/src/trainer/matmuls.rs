//! How fast a large matmul is, which a run's speed is compared with.

use ddp_comm::World;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Random, Tensor, ops};
use ddp_nn::models::Model;

use crate::error::Result;
use crate::exchange;
use crate::step::Stage;

/// Rows and columns of the large matmul: on the CPU its operands fit into the caches.
const SIDE_CPU: usize = 512;
const SIDE_GPU: usize = 4096;
/// Repetitions, of which the fastest counts.
const TIMINGS: usize = 6;

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
        ops::with_f32_math(model.f32_math, matmul)?;
        least_s = least_s.min(stream.record_timed()?.since(&start)?.as_secs_f64());
    }
    Ok(2.0 * (side as f64).powi(3) / least_s / 1e12)
}
