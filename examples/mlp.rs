//! A two-layer perceptron trained by hand: every operation of a training step, forward, backward
//! and update, in order. `cargo run --release --example mlp`. `ddp-train` does this for you.
//!
//! Letters: B rows of the batch, I inputs, H hidden, C classes.

use ddp::kernels::ops::{
    self, Activation, AdamwConstants, AdamwScalars, ChunkTable, CrossEntropyOptions,
    CrossEntropyOut,
};
use ddp::kernels::transfer::{self, Ledger, Phase};
use ddp::kernels::{DType, Device, Random, Result, Tensor};

const BATCH: usize = 256;
const INPUTS: usize = 20;
const HIDDEN: usize = 64;
const CLASSES: usize = 3;
const STEPS: u64 = 200;

/// The two weights as views of one flat buffer, which the optimizer updates in one call.
fn weights(flat: &Tensor) -> Result<[Tensor; 2]> {
    let first = flat.slice(0..HIDDEN * INPUTS)?.reshape(&[HIDDEN, INPUTS])?;
    let second = flat
        .slice(HIDDEN * INPUTS..flat.count())?
        .reshape(&[CLASSES, HIDDEN])?;
    Ok([first, second])
}

fn main() -> Result<()> {
    let device = Device::best();
    let mut random = Random::new(1);
    let mut randn = |shape: &[usize]| Tensor::randn(shape, DType::F32, device, &mut random);

    // The class of a point is the largest of three random projections.
    let x = randn(&[BATCH, INPUTS])?; // (B, I)
    let directions = randn(&[CLASSES, INPUTS])?; // (C, I)
    let scores = x.new_zeros(&[BATCH, CLASSES])?; // (B, C)
    ops::linear_into(&scores, &x, &directions, None, None, None)?;
    let scores = scores.to_vec::<f32>()?;
    let largest = |row: &[f32]| {
        (0..CLASSES)
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap_or(0) as i64
    };
    let labels: Vec<i64> = scores.chunks(CLASSES).map(largest).collect();
    let labels = Tensor::from_slice(&labels, &[BATCH], device)?.named("labels"); // (B)

    let values = randn(&[HIDDEN * INPUTS + CLASSES * HIDDEN])?.named("weights");
    ops::scale_into(&values, &values, 0.1)?;
    let [gradients, first_moments, second_moments] = [
        values.zeros_like()?,
        values.zeros_like()?,
        values.zeros_like()?,
    ];
    let ([w1, w2], [dw1, dw2]) = (weights(&values)?, weights(&gradients)?);
    let [hidden, dhidden] = [
        x.new_zeros(&[BATCH, HIDDEN])?,
        x.new_zeros(&[BATCH, HIDDEN])?,
    ]; // (B, H)
    let [logits, dlogits] = [
        x.new_zeros(&[BATCH, CLASSES])?,
        x.new_zeros(&[BATCH, CLASSES])?,
    ]; // (B, C)
    let losses = x.new_zeros(&[BATCH])?; // (B)
    let constants = AdamwConstants::default();
    let chunks = ChunkTable::whole(values.count());
    let scalars = x.new_zeros(&[4])?;
    let options = CrossEntropyOptions {
        gradient_scale: 1.0 / BATCH as f64,
        ..Default::default()
    };

    let accumulate = false; // Each step replaces the gradients of the one before.
    let (mut first_loss, mut last_loss) = (None, 0.0);
    for step in 1..=STEPS {
        let now = AdamwScalars {
            learning_rate: 1e-2,
            weight_decay: 0.01,
            step,
        }
        .to_array(&constants)?;
        scalars.copy_from(&Tensor::from_slice(&now, &[4], device)?)?;
        transfer::in_phase(Phase::Step, || {
            // No transfer is allowed in here.
            transfer::forbid_transfers(|| {
                ops::linear_into(&hidden, &x, &w1, None, Some(Activation::Relu), None)?;
                ops::linear_into(&logits, &hidden, &w2, None, None, None)?;
                let out = CrossEntropyOut {
                    losses: &losses,
                    dlogits: Some(&dlogits),
                    weights: None,
                };
                ops::cross_entropy(&logits, &labels, out, &options, None)?;
                ops::linear_backward_weight_into(&dw2, None, &dlogits, &hidden, accumulate)?;
                let below = Some((Activation::Relu, &hidden));
                ops::linear_backward_input_into(&dhidden, &dlogits, &w2, below)?;
                ops::linear_backward_weight_into(&dw1, None, &dhidden, &x, accumulate)?;
                let moments = (&first_moments, &second_moments);
                ops::adamw(
                    &ops::UpdateTensors::new([&values, &gradients], &chunks, &scalars),
                    [moments.0, moments.1],
                    &constants,
                )
            })
        })?;
        if step == 1 || step % 50 == 0 {
            last_loss = transfer::in_phase(Phase::Log, || ops::mean(&losses)?.item())?;
            first_loss.get_or_insert(last_loss);
            println!("step {step:3}: loss {last_loss:.4}");
        }
    }
    // The sum of losses, its divisor, correct rows, rows.
    let stats = x.new_zeros(&[4])?;
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: None,
        weights: None,
    };
    ops::cross_entropy(&logits, &labels, out, &options, Some(&stats))?;
    let [correct, rows] = [2, 3].map(|at| stats.slice(at..at + 1).and_then(|one| one.item()));
    let (correct, rows) = (correct?, rows?);
    println!("{correct} of {rows} points right");
    print!(
        "what crossed devices, and what was read:\n{}",
        Ledger::current()
    );
    assert!(
        last_loss < 0.1 * first_loss.unwrap_or(0.0) && correct > 0.97 * rows,
        "it learns"
    );
    Ok(())
}
