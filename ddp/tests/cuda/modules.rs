//! Modules by their formula on GPUs. Their chains have the CPU's bits, forward and backward; their
//! training is the CPU's up to rounding, captured as eager, and the same on any number of ranks.

use std::sync::Arc;

use ddp::config::{GraphChoice, Precision};
use ddp::data::TaskSpec;
use ddp::nn::{Convolution, Formula, Init, Linear, Scope};
use ddp::nn::{Sequential, Var};
use ddp::optim::Rule;
use ddp_kernels::{DType, Device, Random, Seed, Tensor};

use crate::gpu;
use crate::own_losses;
use crate::support::pass::in_pass;
use crate::support::random::uniform;
use crate::support::test_name;
use crate::support::training::{Case, Outcome, Rows, Way, on_ranks};

type Of = fn(&mut Scope<'_>, &Var) -> Var;

fn weight(m: &mut Scope<'_>, name: &str, shape: &[usize]) -> Var {
    m.parameter(name, shape, Init::Normal { deviation: 1.0 })
}

/// The gated block of docs/adding-a-model.md.
fn gated(m: &mut Scope<'_>, x: &Var) -> Var {
    let hidden = m.linear("up", x, 10).gelu();
    let temperature = m.parameter("temperature", &[1], Init::Constant(1.0));
    let gate = (m.linear("gate", x, 10) / temperature).softmax(-1);
    x + m.linear("down", &(hidden * gate), x.size(-1))
}

/// Softmax over the last axis and over another, and parameters that are broadcast over any axis.
fn broadcast(m: &mut Scope<'_>, x: &Var) -> Var {
    let own = x.size(1);
    let x = x.reshape(&[4, own / 4]);
    let columns = weight(m, "columns", &[own / 4]);
    let rows = weight(m, "rows", &[4, 1]);
    let scale = weight(m, "scale", &[1]);
    let scores = (&x * &rows + &columns).tanh() * scale;
    let mixed = scores.softmax(-1) * &x + scores.softmax(1) * x.sigmoid();
    let chosen = x.less(&columns).select(&mixed, &(&mixed * &rows));
    (chosen / ((&x * &x).mean(-1) + 1.0).sqrt() + x.largest(1)).reshape(&[own])
}

/// A small network of convolutions over images of 8 × 8.
fn images(m: &mut Scope<'_>, x: &Var) -> Var {
    let x = x.reshape(&[1, 8, 8]);
    let y = m.conv2d("first", &x, Convolution::new(4, 3).padding(1));
    let y = m.group_norm("norm", &y, 2).relu().max_pool2d(3, 2, 1);
    let second = Convolution::new(4, 3).stride(2).padding(1).groups(2);
    let y = m.conv2d("second", &y, second).silu().avg_pool2d(2, 1);
    y.reshape(&[4])
}

/// Pools, windows, padding and a group norm without a matmul.
fn views(m: &mut Scope<'_>, x: &Var) -> Var {
    let x = x.reshape(&[4, 4, 4]);
    let y = m.group_norm("norm", &x, 2).max_pool2d(3, 1, 1);
    let y = y
        .pad(-1, 1, 0)
        .windows(-1, 2, 1)
        .sum(-1)
        .reshape(&x.row_shape())
        * &x;
    let y = y.every(1, 2).avg_pool2d(2, 2);
    y.reshape(&[8])
}

/// The row of a table that a row's largest element names, and elements that are gathered.
fn chosen(m: &mut Scope<'_>, x: &Var) -> Var {
    let own = x.size(1);
    let places = x
        .equal(&x.largest(-1))
        .select(&m.indices(own), &x.number(1e6));
    let table = weight(m, "table", &[own, 3]) * 2.0;
    let named = table.rows(&places.smallest(-1)).reshape(&[3]);
    let x = (x * weight(m, "scale", &[own])).reshape(&[3, own / 3]);
    let indices = m.numbers(&[1.0, 0.0, 0.0, 1.0], &[1, 2, 2]);
    let elements = x.slice(-1, 0..2).gather(1, &indices);
    let rows = x.gather(1, &m.numbers(&[2.0, 2.0], &[1, 2]));
    named + elements.sum(-1).sum(-2).reshape(&[1]) * rows.mean(-1).mean(-2).reshape(&[1])
}

const FORMULAS: [(&str, Of, usize); 4] = [
    ("gated", gated, 6),
    ("broadcast", broadcast, 24),
    ("chosen", chosen, 12),
    ("images", images, 64),
];

/// A formula in f32 and one in bf16, or all.
fn one_in_each_precision() -> Vec<(&'static str, Of, usize, Precision)> {
    let one = |precision| {
        let check = format!("{} {precision:?}", test_name());
        let of = move |(name, formula, columns)| (name, formula, columns, precision);
        ddp_testing::cases_of(&check, FORMULAS.map(of), 1)
    };
    [Precision::F32, Precision::Bf16].map(one).concat()
}

/// The output and the gradients of the input and the parameters, for random numbers.
fn passed(formula: Of, columns: usize, rows: usize, device: Device) -> [Vec<u32>; 3] {
    let layers = Sequential::new().then(Formula(formula));
    let model = layers.build(&[columns], device, Seed(1)).unwrap();
    let draw = |shape: &[usize], seed: u64| {
        let drawn = Tensor::randn(shape, DType::F32, Device::Cpu, &mut Random::new(seed));
        drawn.unwrap().to(device).unwrap()
    };
    in_pass(&model, true, |mut pass| {
        let x = draw(&[rows, columns], 3);
        let y = model.forward(&mut pass, &x).unwrap();
        let dy = draw(y.shape(), 4);
        let dx = model.backward_to_input(&mut pass, &dy).unwrap().unwrap();
        [&y, &dx, model.params.gradients()].map(|tensor| {
            let values = tensor.to_vec::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        })
    })
}

#[test]
fn chains_of_own_modules_have_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let formulas: [(&str, Of, usize); 5] = [
        ("broadcast", broadcast, 24),
        ("broadcast over longer rows", broadcast, 4 * 300),
        ("views", views, 64),
        ("chosen", chosen, 900),
        (
            "softmax",
            |_, x| (x * 3.0).log_softmax(-1) + x.softmax(-1),
            1030,
        ),
    ];
    // Each with 1 or 7 rows.
    let cases = formulas.into_iter().flat_map(|it| [(it, 1), (it, 7)]);
    let cases = ddp_testing::cases_of(&test_name(), cases, formulas.len());
    for ((name, formula, columns), rows) in cases {
        let [cpu, gpu] = [Device::Cpu, gpu.device].map(|it| passed(formula, columns, rows, it));
        for (what, at) in ["output", "input's gradient", "gradients"].iter().zip(0..) {
            assert!(cpu[at] == gpu[at], "{what} of {name}, {rows} rows");
        }
    }
}

#[test]
fn losses_by_formula_have_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    for loss in 0..own_losses::losses().len() {
        for (rows, dtype) in [(1, DType::F32), (7, DType::BF16), (2000, DType::F32)] {
            let of = |device| own_losses::computed(loss, rows, dtype, device);
            let bits = |tensor: &Tensor| -> Vec<u32> {
                let floats = tensor.to(Device::Cpu).unwrap().to_dtype(DType::F32);
                let floats = floats.unwrap().to_vec::<f32>().unwrap();
                floats.into_iter().map(f32::to_bits).collect()
            };
            let [cpu, gpu] = [Device::Cpu, gpu.device].map(of);
            for (what, at) in ["losses", "gradient", "statistics"].iter().zip(0..) {
                let same = bits(&cpu[at]) == bits(&gpu[at]);
                assert!(same, "{what} of loss {loss}, {rows} rows in {dtype}");
            }
        }
    }
}

/// Regression of 3 numbers from `columns`, in two micro-batches a step.
fn case(columns: usize) -> Case {
    let task = TaskSpec::Regression { outputs: 3 };
    Case {
        data: Arc::new(Rows::new(40, columns, task, uniform)),
        rule: Rule::adamw(),
        learning_rate: 1e-2,
        batch: 8,
        micro: Some(3),
        // No parameter is 0.
        values: |stream, index| 0.5 * uniform(stream, index) + 0.6,
        steps: 0..6,
        ..Case::regression(40, uniform)
    }
}

fn trained(case: &Case, formula: Of, ranks: usize) -> Vec<Outcome> {
    on_ranks(ranks, Some(1), |world| {
        let layers = Sequential::new().then(Formula(formula));
        let layers = layers.then(Linear::new(3).outer());
        case.run_step(world, case.step_of(world, layers)?)
    })
}

#[test]
fn own_modules_learn_as_on_the_cpu_captured_and_eager() {
    let Some(_gpu) = gpu() else { return };
    for (name, formula, columns, precision) in one_in_each_precision() {
        let case = case(columns);
        let cpu = trained(&case, formula, 1).remove(0);
        let apart_max = if precision == Precision::F32 {
            1e-5
        } else {
            0.05
        };
        let [captured, eager] = [GraphChoice::On, GraphChoice::Off].map(|graph| {
            let case = Way::Gpus(graph).of(&case);
            trained(&Case { precision, ..case }, formula, 1).remove(0)
        });
        assert!(captured == eager, "{name} in {precision:?}");
        for (gpu, cpu) in eager.losses.iter().zip(&cpu.losses) {
            let apart = (gpu - cpu).abs() / cpu;
            assert!(
                apart < apart_max,
                "{name} in {precision:?}: {gpu} on the GPU, {cpu} on the CPU"
            );
        }
    }
}

#[test]
fn own_modules_have_the_same_bits_on_one_rank_and_two() {
    let Some(_gpu) = gpu().filter(|_| Device::usable().len() > 2) else {
        return;
    };
    for (name, formula, columns, precision) in one_in_each_precision() {
        let case = Case {
            precision,
            shards: Some(2),
            ..Way::Gpus(GraphChoice::On).of(&case(columns))
        };
        let one = trained(&case, formula, 1).remove(0);
        for outcome in trained(&case, formula, 2) {
            assert!(outcome == one, "{name} in {precision:?}");
        }
    }
}
