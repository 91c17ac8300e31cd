//! After its first step, a training step takes nothing from the system: no buffer for a tensor and
//! no heap memory. Counted by an allocator and by the memory statistics.

use counting::allocations;
use ddp_kernels::ops::{
    self, Activation, AdamwConstants, AdamwScalars, Attention, ChunkTable, CrossEntropyOptions,
    CrossEntropyOut, DropoutKey, EmbeddingScratch, Norm, NormGradients, NormOptions,
};
use ddp_kernels::transfer::{self, Phase};
use ddp_kernels::{DType, Device, Random, Result, Tensor, memory};

#[path = "../../tests/counting.rs"]
mod counting;
#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

/// A perceptron of two layers with everything a step needs, and attention over its hidden layer,
/// made once.
struct Net {
    x: Tensor,
    labels: Tensor,
    values: Tensor,
    gradients: Tensor,
    moments: [Tensor; 2],
    hidden: Tensor,
    dropped: Tensor,
    dhidden: Tensor,
    attended: [Tensor; 2],
    lines: [Tensor; 2],
    logits: Tensor,
    losses: Tensor,
    total: Tensor,
    position: Tensor,
    chunks: ChunkTable,
    partials: Tensor,
    clip: Tensor,
    first_bad_step: Tensor,
    step: Tensor,
    scalars: Tensor,
    constants: AdamwConstants,
}

const BATCH: usize = 96;
const INPUTS: usize = 200;
const HIDDEN: usize = 320;
const CLASSES: usize = 10;

impl Net {
    fn new() -> Result<Net> {
        let mut random = Random::new(1);
        let cpu = Device::Cpu;
        let f32_zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, cpu);
        let count = HIDDEN * INPUTS + CLASSES * HIDDEN;
        let values = Tensor::randn(&[count], DType::F32, cpu, &mut random)?;
        ops::scale_into(&values, &values, 0.05)?;
        let chunks = ChunkTable::whole(count);
        let constants = AdamwConstants::default();
        let scalars = AdamwScalars {
            learning_rate: 1e-3,
            weight_decay: 0.01,
            step: 1,
        }
        .to_array(&constants)?;
        Ok(Net {
            x: Tensor::randn(&[BATCH, INPUTS], DType::F32, cpu, &mut random)?,
            labels: Tensor::randint(CLASSES as u32, &[BATCH], DType::I64, cpu, &mut random)?,
            gradients: values.zeros_like()?,
            moments: [values.zeros_like()?, values.zeros_like()?],
            values,
            hidden: f32_zeros(&[BATCH, HIDDEN])?,
            dropped: f32_zeros(&[BATCH, HIDDEN])?,
            dhidden: f32_zeros(&[BATCH, HIDDEN])?,
            attended: [f32_zeros(&[BATCH, 192])?, f32_zeros(&[BATCH, 192])?],
            lines: [f32_zeros(&[12, 24])?, f32_zeros(&[12, 24])?],
            logits: f32_zeros(&[BATCH, CLASSES])?,
            losses: f32_zeros(&[BATCH])?,
            total: f32_zeros(&[])?,
            position: Tensor::zeros(&[2], DType::I64, cpu)?,
            partials: Tensor::zeros(&[chunks.quanta()], DType::F64, cpu)?,
            chunks,
            clip: f32_zeros(&[2])?,
            first_bad_step: Tensor::zeros(&[1], DType::I64, cpu)?,
            step: Tensor::ones(&[1], DType::I64, cpu)?,
            scalars: Tensor::from_slice(&scalars, &[4], cpu)?,
            constants,
        })
    }

    /// The two weights, as views of one arena.
    fn weights(arena: &Tensor) -> Result<[Tensor; 2]> {
        let split = HIDDEN * INPUTS;
        let first = arena.slice(0..split)?.reshape(&[HIDDEN, INPUTS])?;
        let second = arena
            .slice(split..arena.count())?
            .reshape(&[CLASSES, HIDDEN])?;
        Ok([first, second])
    }

    fn matmuls(&self) -> Result<()> {
        let ([w1, w2], [dw1, dw2]) = (Net::weights(&self.values)?, Net::weights(&self.gradients)?);
        ops::linear_into(
            &self.hidden,
            &self.x,
            &w1,
            None,
            Some(Activation::Relu),
            None,
        )?;
        ops::linear_into(&self.logits, &self.dropped, &w2, None, None, None)?;
        ops::linear_backward_weight_into(&dw2, None, &self.logits, &self.dropped, false)?;
        ops::linear_backward_input_into(
            &self.dhidden,
            &self.logits,
            &w2,
            Some((Activation::Relu, &self.hidden)),
        )?;
        ops::linear_backward_weight_into(&dw1, None, &self.dhidden, &self.x, false)
    }

    /// Four sequences of 24 tokens, whose three heads of 64 share one of k and v.
    fn attention(&self) -> Result<()> {
        let attention = Attention {
            time: 24,
            heads: 3,
            kv_heads: 1,
            head_size: 64,
            causal: true,
            scale: None,
            window: None,
            cap: None,
        };
        let [out, dout] = &self.attended;
        let [log_sum_exp, delta] = &self.lines;
        let (qkv, dqkv) = (&self.hidden, &self.dhidden);
        ops::attention_into(out, log_sum_exp, qkv, None, &attention)?;
        ops::attention_backward_into(dqkv, delta, [dout, out], log_sum_exp, qkv, None, &attention)
    }

    fn everything_else(&self) -> Result<()> {
        let key = DropoutKey {
            seed: 1,
            layer: 0,
            position: &self.position,
        };
        ops::dropout_into(&self.dropped, &self.hidden, 0.1, &key)?;
        let out = CrossEntropyOut {
            losses: &self.losses,
            dlogits: Some(&self.logits),
            weights: None,
        };
        let options = CrossEntropyOptions {
            gradient_scale: 1.0 / BATCH as f64,
            ..Default::default()
        };
        ops::cross_entropy(&self.logits, &self.labels, out, &options, None)?;
        ops::mean_into(&self.total, &self.losses)?;
        ops::dropout_into(&self.dhidden, &self.dhidden, 0.1, &key)?;
        ops::grad_norm_partials(&self.partials, &self.gradients, &self.chunks)?;
        ops::clip_scale(&self.clip, Some(&self.partials), 1.0, None)?;
        ops::mark_nonfinite(&self.first_bad_step, &self.clip, &self.step)?;
        let [first, second] = &self.moments;
        let (clip, bad) = (Some(&self.clip), Some(&self.first_bad_step));
        let (values, gradients) = (&self.values, &self.gradients);
        ops::adamw(
            &ops::UpdateTensors {
                gradient_scale: clip,
                first_bad_step: bad,
                ..ops::UpdateTensors::new([values, gradients], &self.chunks, &self.scalars)
            },
            [first, second],
            &self.constants,
        )
    }
}

/// What a GPT's blocks use beside matmuls, made once.
struct Block {
    tokens: Tensor,
    /// (V, C)
    table: Tensor,
    /// (T, C)
    positions: Tensor,
    order: Tensor,
    sums: Tensor,
    /// (C)
    weight: Tensor,
    stats: Tensor,
    weight_sums: Tensor,
    angles: Tensor,
    /// (R, C)
    rows: [Tensor; 3],
    /// (R, C / 2)
    half: Tensor,
}

impl Block {
    fn new() -> Result<Block> {
        const WIDTH: usize = 512;
        let f32_zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu);
        let rows = || f32_zeros(&[BATCH, WIDTH]);
        Ok(Block {
            tokens: Tensor::randint(7, &[BATCH], DType::I64, Device::Cpu, &mut Random::new(2))?,
            table: f32_zeros(&[7, WIDTH])?,
            positions: f32_zeros(&[BATCH / 2, WIDTH])?,
            order: Tensor::zeros(&[2, BATCH], DType::I64, Device::Cpu)?,
            sums: f32_zeros(&[ops::embedding_sums_of(BATCH), WIDTH])?,
            weight: f32_zeros(&[WIDTH])?,
            stats: f32_zeros(&[BATCH, Norm::Layer.statistics()])?,
            weight_sums: f32_zeros(&[ops::norm_blocks_of(BATCH), WIDTH])?,
            angles: ops::rope_table(
                BATCH / 2,
                &ops::rope_frequencies(64, 1e4)?,
                1.0,
                Device::Cpu,
            )?,
            rows: [rows()?, rows()?, rows()?],
            half: f32_zeros(&[BATCH, WIDTH / 2])?,
        })
    }

    fn run(&self) -> Result<()> {
        let [a, b, c] = &self.rows;
        let options = NormOptions {
            norm: Norm::Layer,
            epsilon: 1e-5,
            weight: Some(&self.weight),
            bias: Some(&self.weight),
        };
        ops::embedding_into(a, &self.table, &self.tokens, Some(&self.positions))?;
        ops::add_norm_into(b, c, &self.stats, [a, b], &options)?;
        ops::rope_into(c, c, &self.angles, [4, 64])?;
        ops::swiglu_into(&self.half, c)?;
        ops::swiglu_backward_into(c, &self.half, c)?;
        ops::activate_into(a, c, Activation::ReluSquared)?;
        ops::activate_backward_into(c, c, a, Activation::ReluSquared)?;
        ops::rope_backward_into(c, c, &self.angles, [4, 64])?;
        let gradients = NormGradients {
            dx: a,
            dresidual: Some(a),
            weight_sums: Some(&self.weight_sums),
            bias_sums: None,
            row_sums: None,
        };
        ops::norm_backward_into(&gradients, c, b, &self.stats, &options)?;
        ops::column_sum_into(&self.weight, &self.weight_sums, true)?;
        ops::embedding_positions_backward_into(&self.positions, a, true)?;
        let scratch = EmbeddingScratch {
            order: &self.order,
            sums: &self.sums,
        };
        ops::embedding_backward_into(&self.table, a, &self.tokens, scratch, true)
    }
}

#[test]
fn a_training_step_takes_nothing_from_the_system_after_the_first() {
    let (net, block) = (Net::new().unwrap(), Block::new().unwrap());
    let all = || {
        net.matmuls()?;
        net.attention()?;
        net.everything_else()?;
        block.run()
    };
    let step = || transfer::in_phase(Phase::Step, || transfer::forbid_transfers(all));
    for _ in 0..3 {
        step().unwrap();
    }
    let before = memory::stats(Device::Cpu);
    for _ in 0..20 {
        step().unwrap();
    }
    let after = memory::stats(Device::Cpu);
    assert_eq!(
        after.allocation_count, before.allocation_count,
        "no tensor was made"
    );
    assert_eq!(
        after.system_allocation_count,
        before.system_allocation_count
    );

    // The least of some counts: the test's own harness, or a worker that makes its buffer for
    // panels when it helps for the first time, may add to one of them. What every step takes shows
    // in all.
    let count = |body: &dyn Fn() -> Result<()>| {
        let counts = (0..8).map(|_| {
            let before = allocations();
            (0..20).for_each(|_| body().unwrap());
            allocations() - before
        });
        counts.min().unwrap()
    };
    assert_eq!(count(&|| step()), 0, "no operation touches the heap");
    assert!(net.total.item().unwrap().is_finite());
}
