//! After the first step a training step over layers allocates nothing, and nothing crosses between
//! devices. Counted by an allocator and by the memory statistics. Alone in its process, because it
//! counts what the whole process does.

use counting::allocations;
use ddp::models::Model;
use ddp::nn::{
    self, Activate, CrossEntropy, Dropout, Embedding, Init, Linear, Loss, LossFormula, Module, Mse,
    Pass, PassOptions, Residual, Rope, Saved, Scope, Scratch, SelfAttention, Sequential, Tie, Var,
};
use ddp::optim::{Clip, Optimizer, Rule};
use ddp::params::ParamId;
use ddp_kernels::ops::Activation;
use ddp_kernels::transfer::{Phase, forbid_transfers, in_phase};
use ddp_kernels::{DType, Device, Random, Tensor, memory, ops};

#[path = "../../tests/counting.rs"]
mod counting;
#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;

const CPU: Device = Device::Cpu;
const ROWS: usize = 48;
const INPUTS: usize = 40;
const WIDTH: usize = 64;
const CLASSES: usize = 10;
/// Of a row of the transformer.
const TOKENS: usize = 12;

/// A model in training with everything made once, and the addresses its passes saw.
struct Training {
    model: Model,
    loss: Box<dyn Loss>,
    optimizer: Optimizer,
    clip: Clip,
    scratch: Scratch,
    saved: Saved,
    stats: Tensor,
    position: Tensor,
    bad_step: Tensor,
    step: Tensor,
    x: Tensor,
    targets: Tensor,
    steps: u64,
    /// Where the output and its gradient lay in the latest step.
    addresses: [usize; 2],
}

/// Chains, sums of rows and columns, views, joins, products and layers of a module.
#[derive(Debug)]
struct Gate;

impl Module for Gate {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let gain = m.parameter("gain", &[WIDTH], Init::Constant(1.0));
        let parts = (x * gain).softmax(-1).split(1, &[WIDTH / 2, WIDTH / 2]);
        let turned = Var::concatenate(&[&parts[1], &parts[0].tanh()], 1);
        let weight = m.parameter("mix", &[WIDTH, WIDTH], Init::Constant(0.01));
        let mixed = turned.matmul(&weight) - m.numbers(&[0.5], &[1]);
        x + m.linear("out", &(mixed * x), WIDTH)
    }
}

/// Every kind of layer: fused and unfused activations, dropout, a residual, a tied weight, a frozen
/// layer.
fn layers() -> Sequential {
    let tie = Tie::new();
    let inner = Sequential::new()
        .then(Linear::new(WIDTH).tied(&tie))
        .then(Activate::gelu())
        .then(Dropout::new(0.1));
    Sequential::new()
        .then(Linear::new(WIDTH))
        .then(Activate::relu())
        .then(Linear::new(WIDTH).tied(&tie))
        .then(Activate::gelu_tanh())
        .then(Residual::new(inner))
        .then(Gate)
        .then(Activate::relu())
        .then(Linear::new(CLASSES))
}

/// A transformer's block.
#[derive(Debug)]
struct Block;

impl Module for Block {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let rope = Rope::new(ops::rope_frequencies(WIDTH / 4, 1e4).unwrap(), 1.0);
        let attention = SelfAttention::causal(WIDTH, 4, 1, [&Linear::new; 2]).rotary(rope);
        let normed = m.layer_norm("norm_1", x);
        let x = x + m.layer("attention", &normed, attention);
        let normed = m.rms_norm("norm_2", &x);
        let up = m.linear("up", &normed, 2 * WIDTH);
        x + m.linear("down", &up.gated(nn::Gate::Swiglu), WIDTH)
    }
}

fn transformer() -> Sequential {
    Sequential::new()
        .then(Embedding::new(CLASSES, WIDTH).with_positions(TOKENS))
        .then(Block)
        .then(Block)
        .then(Activate::new(Activation::ReluSquared))
        .then(Linear::new(CLASSES))
}

impl Training {
    fn new(
        layers: Sequential,
        x: Tensor,
        loss: Box<dyn Loss>,
        targets: Tensor,
        rule: Rule,
    ) -> Training {
        let (layers, row_shape) = (Box::new(layers), &x.shape()[1..]);
        let frozen = |name: &str| name == "0.bias";
        let model = Model::new(layers, row_shape, DType::F32, CPU, 1, &frozen).unwrap();
        Training {
            optimizer: Optimizer::new(rule, &model.params).unwrap(),
            clip: Clip::new(1.0, &model.params).unwrap(),
            model,
            loss,
            scratch: Scratch::new(CPU),
            saved: Saved::default(),
            stats: Tensor::zeros(&[4], DType::F32, CPU).unwrap(),
            position: Tensor::zeros(&[2], DType::I64, CPU).unwrap(),
            bad_step: Tensor::zeros(&[1], DType::I64, CPU).unwrap(),
            step: Tensor::ones(&[1], DType::I64, CPU).unwrap(),
            x,
            targets,
            steps: 0,
            addresses: [0; 2],
        }
    }

    fn pass<R>(
        &mut self,
        training: bool,
        body: impl FnOnce(&Model, &dyn Loss, &mut Pass<'_>) -> R,
    ) -> R {
        let position = &self.position;
        let options = PassOptions {
            training,
            accumulate: false,
            last: true,
            seed: 1,
            position,
        };
        let mut ready = |_: ParamId| Ok(());
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.scratch,
            &mut self.saved,
            options,
            &mut ready,
        );
        body(&self.model, self.loss.as_ref(), &mut pass)
    }

    /// Forward, loss, backward, clipping, update; and an evaluation.
    fn step(&mut self) {
        in_phase(Phase::Step, || forbid_transfers(|| self.step_within()));
    }

    fn step_within(&mut self) {
        self.steps += 1;
        let (x, targets, stats) = (self.x.clone(), self.targets.clone(), self.stats.clone());
        ops::zero(&stats).unwrap();
        self.addresses = self.pass(true, |model, loss, pass| {
            let y = model.forward(pass, &x).unwrap();
            let dy = loss.gradient(pass, [&y, &targets, &stats]).unwrap();
            model.backward(pass, &dy).unwrap();
            [&y, &dy].map(|tensor| {
                tensor
                    .with_slice(|elements: &[f32]| elements.as_ptr().addr())
                    .unwrap()
            })
        });
        self.clip
            .compute(&self.model.params, Some(&stats.slice(1..2).unwrap()), false)
            .unwrap();
        ops::mark_nonfinite(&self.bad_step, self.clip.out(), &self.step).unwrap();
        let (scale, bad) = (Some(self.clip.out()), Some(&self.bad_step));
        self.optimizer
            .update(&self.model.params, self.steps, 1e-3, scale, bad)
            .unwrap();
        self.pass(false, |model, loss, pass| {
            let y = model.forward(pass, &x).unwrap();
            loss.compute(pass, [&y, &targets, &stats], None).unwrap();
        });
    }
}

/// A loss of class indices by its formula, without rows of class 0.
#[derive(Clone, Debug, PartialEq)]
struct Chosen;

impl LossFormula for Chosen {
    fn losses(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Var {
        let chosen = target.equal(&m.indices(CLASSES));
        -(chosen * output.log_softmax(-1)).sum(-1)
    }

    fn weights(&self, _m: &mut Scope<'_>, _output: &Var, target: &Var) -> Option<Var> {
        Some(1.0 - target.equal(&target.number(0.0)))
    }
}

/// The smallest count of twenty runs: the harness, or a worker that allocates its panel buffer when
/// it first helps, may add to some of them. What every step allocates shows in all.
fn heap_count(mut body: impl FnMut()) -> u64 {
    let counts = (0..8).map(|_| {
        let before = allocations();
        (0..20).for_each(|_| body());
        allocations() - before
    });
    counts.min().unwrap_or(0)
}

#[test]
fn a_step_over_layers_takes_nothing_from_the_system_after_the_first() {
    let classes = |shape: &[usize], seed: u64| {
        let mut random = Random::new(seed);
        Tensor::randint(CLASSES as u32, shape, DType::I64, CPU, &mut random).unwrap()
    };
    let labels = classes(&[ROWS], 3);
    let x = Tensor::randn(&[ROWS, INPUTS], DType::F32, CPU, &mut Random::new(2)).unwrap();
    let class_weights = Some(Tensor::ones(&[CLASSES], DType::F32, CPU).unwrap());
    let weighted = CrossEntropy {
        label_smoothing: 0.1,
        class_weights,
        ..CrossEntropy::default()
    };
    let numbers = Tensor::randn(&[ROWS, CLASSES], DType::F32, CPU, &mut Random::new(4)).unwrap();
    let weights = weighted.clone();
    let logits = Tensor::randn(&[ROWS, CLASSES], DType::F32, CPU, &mut Random::new(5)).unwrap();
    let shares = logits;
    ops::scale_into(&shares, &shares, 0.1).unwrap();
    let cases: [(Box<dyn Loss>, Tensor, Rule); 6] = [
        (
            Box::new(CrossEntropy::default()),
            labels.clone(),
            Rule::adamw(),
        ),
        (Box::new(weighted), labels.clone(), Rule::sgd(0.9)),
        (Box::new(weights), shares, Rule::sgd(0.0)),
        (Box::new(Chosen), labels, Rule::sgd(0.0)),
        (Box::new(Mse), numbers.clone(), Rule::sgd(0.0)),
        (Box::new(Mse), numbers, Rule::muon()),
    ];
    let of_layers = cases.map(|(loss, targets, rule)| {
        let training = Training::new(layers(), x.clone(), loss, targets, rule);
        (training, rule)
    });
    let tokens = [6, 7].map(|seed| classes(&[ROWS / TOKENS, TOKENS], seed));
    let [x, next] = tokens;
    let (loss, rule) = (Box::new(CrossEntropy::default()), Rule::adamw());
    let of_tokens = Training::new(transformer(), x, loss, next, rule);
    for (mut training, rule) in of_layers.into_iter().chain([(of_tokens, rule)]) {
        training.step();
        let before = memory::stats(CPU);
        let scratch_bytes = training.scratch.bytes();
        // It finds free what the evaluation of the first step has made.
        training.step();
        let addresses = training.addresses;
        for _ in 0..20 {
            training.step();
            assert_eq!(
                training.addresses, addresses,
                "every step finds its tensors where the last one did"
            );
        }
        let after = memory::stats(CPU);
        assert_eq!(
            after.allocation_count, before.allocation_count,
            "no tensor was made ({rule:?})"
        );
        assert_eq!(
            after.system_allocation_count,
            before.system_allocation_count
        );
        assert_eq!(training.scratch.bytes(), scratch_bytes);

        assert_eq!(
            heap_count(|| training.step()),
            0,
            "no step touches the heap ({rule:?})"
        );
        assert_eq!(training.bad_step.to_vec::<i64>().unwrap(), [0]);
    }
}
