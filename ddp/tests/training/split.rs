//! A split model computes what the whole model does, on the CPU: all parts on one device, ranks as
//! threads. The same claims on several GPUs are in tests/cuda.

#[path = "../claims/split.rs"]
mod claims;

use ddp::data::Batch;
use ddp_kernels::{DType, Device, Tensor};

use self::claims::{FEATURES, OUTPUTS, Place, Recipe};
use crate::support::random::uniform;
use crate::support::training::on_ranks;
use crate::turn;

/// Where parts may lie, and how many ranks are tried there.
fn places() -> Vec<Place> {
    let place = |ranks: usize, parts: usize| Place {
        ranks,
        devices: vec![vec![Device::Cpu; parts]; ranks],
    };
    vec![
        place(1, 2),
        place(1, 3),
        place(1, 4),
        place(2, 3),
        place(3, 2),
    ]
}

/// In f32 they were rounded, unless the type of what travels was set, too.
#[test]
fn gradients_of_a_model_in_f64_travel_in_f64() {
    let Some(_turn) = turn() else { return };
    let losses = |reduce_dtype: DType| {
        let recipe = Recipe {
            dtype: DType::F64,
            reduce_dtype,
            ..Recipe::regression()
        };
        on_ranks(2, None, |world| {
            let mut step = recipe.step(&[Device::Cpu], world)?;
            let drawn = |stream: u64, width: usize| {
                let values = (0..8 * width as u64).map(|at| f64::from(uniform(stream, at)));
                Tensor::from_slice(&values.collect::<Vec<_>>(), &[8, width], Device::Cpu)
            };
            let take = |step0: u64| {
                let stream = 2 * step0 + world.rank() as u64;
                let (x, y) = (drawn(stream, FEATURES)?, drawn(100 + stream, OUTPUTS)?);
                step.run(&Batch::new(step0, 0, 8, 0, x, y, 16), 0.01)?;
                step.report()
            };
            (0..5).map(take).collect::<ddp::Result<Vec<_>>>()
        })
    };
    assert_eq!(losses(DType::F32), losses(DType::F64));
}

/// In f64, where the order of a sum shows: that of single gradients' norms is rounded away in f32.
#[test]
fn the_norm_is_summed_in_the_order_of_the_whole() {
    let Some(_turn) = turn() else { return };
    let recipe = Recipe {
        dtype: DType::F64,
        reduce_dtype: DType::F64,
        clip_norm: 0.25,
        ..Recipe::regression()
    };
    let reports = |parts: usize| {
        on_ranks(1, None, |world| {
            let mut step = recipe.step(&vec![Device::Cpu; parts], world)?;
            let drawn = |stream: u64, width: usize| {
                let values: Vec<f64> = (0..8 * width as u64)
                    .map(|at| f64::from(uniform(stream, at)))
                    .collect();
                Tensor::from_slice(&values, &[8, width], Device::Cpu)
            };
            let take = |step0: u64| {
                let batch = Batch::new(
                    step0,
                    0,
                    8,
                    0,
                    drawn(step0, FEATURES)?,
                    drawn(100 + step0, OUTPUTS)?,
                    8,
                );
                step.measure_norm(true);
                step.run(&batch, 0.01)?;
                step.report()
            };
            (0..20).map(take).collect::<ddp::Result<Vec<_>>>()
        })
    };
    let whole = reports(1);
    for parts in 2..=4 {
        assert_eq!(reports(parts), whole, "{parts} parts");
    }
}
