//! Tests of simd.

use super::*;
use crate::ops::testing::{alone_with_the_pool, cpu, cpu_of, random_f32};
use crate::ops::{self, Activation, AdamwConstants, AdamwScalars, ChunkTable, CrossEntropyOut};
use crate::{DType, Device, Random, Tensor};

/// The bits of what loops of every kind make of the same inputs.
fn bits() -> Vec<u32> {
    const COUNT: usize = 70_001;
    let (x, y) = (
        cpu(&random_f32(COUNT, 1), &[COUNT]),
        cpu(&random_f32(COUNT, 2), &[COUNT]),
    );
    let apart = x.empty_like().unwrap();
    ops::activate_backward_into(&apart, &y, &x, Activation::Relu).unwrap();
    let mut made = vec![
        apart,
        ops::sum(&x).unwrap(),
        ops::cast(&ops::cast(&x, DType::BF16).unwrap(), DType::F32).unwrap(),
        ops::cast(&ops::cast(&x, DType::F16).unwrap(), DType::F32).unwrap(),
        Tensor::rand(&[COUNT], DType::F32, Device::Cpu, &mut Random::new(3)).unwrap(),
    ];
    for activation in Activation::all() {
        let dx = ops::activate(&y, activation).unwrap();
        ops::activate_backward_into(&dx, &dx, &x, activation).unwrap();
        made.extend([ops::activate(&x, activation).unwrap(), dx]);
    }
    ops::axpy(&y, 0.3, &x).unwrap();
    let [values, first, second] = [(); 3].map(|()| x.zeros_like().unwrap());
    ops::scale_into(&values, &x, 2.0).unwrap();
    let constants = AdamwConstants::default();
    let scalars = AdamwScalars {
        learning_rate: 1e-2,
        weight_decay: 0.1,
        step: 1,
    }
    .to_array(&constants)
    .unwrap();
    let chunks = ChunkTable::whole(COUNT);
    ops::adamw(
        &ops::UpdateTensors::new([&values, &y], &chunks, &cpu(&scalars, &[4])),
        [&first, &second],
        &constants,
    )
    .unwrap();
    made.extend([y, values, first, second]);
    for classes in [10, 700] {
        let logits = x
            .slice(0..70_000)
            .unwrap()
            .reshape(&[70_000 / classes, classes])
            .unwrap();
        let targets = cpu_of(&vec![3i64; 70_000 / classes], &[70_000 / classes]);
        let (losses, dlogits) = (
            logits.new_zeros(&[70_000 / classes]).unwrap(),
            logits.zeros_like().unwrap(),
        );
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: Some(&dlogits),
            weights: None,
        };
        ops::cross_entropy(&logits, &targets, out, &Default::default(), None).unwrap();
        made.extend([losses, dlogits]);
    }
    let narrow = ops::cast(&x.slice(0..64_000).unwrap(), DType::BF16).unwrap();
    let (wide, tall) = (
        narrow.reshape(&[40, 1600]).unwrap(),
        narrow.reshape(&[1600, 40]).unwrap(),
    );
    let acc = wide.new_zeros(&[40, 40]).unwrap();
    for order in [ops::Bf16Order::Amx, ops::Bf16Order::Dpbf16] {
        let product = || ops::addmm(&acc, &wide, &tall, 1.0, 0.0).unwrap();
        made.push(ops::cast(&ops::with_bf16_order(order, product), DType::F32).unwrap());
    }
    made.iter()
        .flat_map(|tensor| tensor.to_vec::<f32>().unwrap())
        .map(f32::to_bits)
        .collect()
}

#[test]
fn the_results_do_not_depend_on_the_level() {
    let _alone = alone_with_the_pool();
    let widest = level();
    let expected = bits();
    for narrower in [Level::Baseline, Level::Avx2]
        .into_iter()
        .filter(|&narrower| narrower < widest)
    {
        // Other tests may run at this level meanwhile, which by this very claim changes nothing for
        // them.
        FOUND.store(narrower as u8, Ordering::Relaxed);
        let same = bits() == expected;
        FOUND.store(widest as u8, Ordering::Relaxed);
        assert!(same, "{narrower:?} differs from {widest:?}");
    }
}
