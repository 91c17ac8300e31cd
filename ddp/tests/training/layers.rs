//! What layers, losses and models promise besides derivatives: fusing changes no bit, micro-batches
//! add up, zero rows are valid, frozen layers cost nothing, gradients complete in the arena's
//! order, evaluation saves nothing.

mod building;

use std::sync::{Arc, Mutex};

use ddp::models::{Mlp, Model};
use ddp::nn::{
    Activate, CrossEntropy, CustomOp, Dropout, Linear, Loss, Module, Mse, Pass, PassOptions,
    Residual, Saved, Scope, Scratch, Sequential, Tie, Var,
};
use ddp::params::ParamId;
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{DType, Device, Random, Tensor};

const CPU: Device = Device::Cpu;

/// A model with all that a pass over it needs.
struct Bench {
    model: Model,
    scratch: Scratch,
    saved: Saved,
    stats: Tensor,
    step: i64,
}

/// Which rows a pass is about and what it does with gradients.
#[derive(Clone, Copy)]
struct Part {
    first_row: i64,
    accumulate: bool,
    last: bool,
}

const WHOLE: Part = Part {
    first_row: 0,
    accumulate: false,
    last: true,
};

impl Bench {
    fn new(
        layers: impl Module,
        shape: &[usize],
        dtype: DType,
        frozen: &dyn Fn(&str) -> bool,
    ) -> Bench {
        let model = Model::new(Box::new(layers), shape, dtype, CPU, 3, frozen).unwrap();
        let stats = Tensor::zeros(&[4], DType::F64, CPU).unwrap();
        Bench {
            model,
            scratch: Scratch::new(CPU),
            saved: Saved::default(),
            stats,
            step: 1,
        }
    }

    /// Runs `body` in a pass, and returns which gradients became complete.
    fn pass<R>(
        &mut self,
        training: bool,
        part: Part,
        body: impl FnOnce(&Model, &mut Pass<'_>, &Tensor) -> R,
    ) -> (R, Vec<ParamId>) {
        let position = Tensor::from_slice(&[self.step, part.first_row], &[2], CPU).unwrap();
        let Part {
            accumulate, last, ..
        } = part;
        let options = PassOptions {
            training,
            accumulate,
            last,
            seed: 11,
            position: &position,
        };
        let mut ready = Vec::new();
        let mut listener = |id| {
            ready.push(id);
            Ok(())
        };
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.scratch,
            &mut self.saved,
            options,
            &mut listener,
        );
        let result = body(&self.model, &mut pass, &self.stats);
        (result, ready)
    }

    /// Forward, loss and backward. The names of the gradients that became complete.
    fn train(&mut self, loss: &dyn Loss, x: &Tensor, targets: &Tensor, part: Part) -> Vec<String> {
        let ready = self.pass(true, part, |model, pass, stats| {
            let y = model.forward(pass, x).unwrap();
            let dy = loss.gradient(pass, [&y, targets, stats]).unwrap();
            model.backward(pass, &dy).unwrap();
            assert_eq!(
                pass.saved_count(),
                0,
                "the backward took back all that the forward saved"
            );
        });
        ready
            .1
            .into_iter()
            .map(|id| self.model.params.parameter(id).name.clone())
            .collect()
    }

    fn gradients(&self) -> Vec<f64> {
        self.model
            .params
            .gradients()
            .to_dtype(DType::F64)
            .unwrap()
            .to_vec()
            .unwrap()
    }

    fn stats(&self) -> Vec<f64> {
        self.stats.to_vec().unwrap()
    }
}

fn randn(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    Tensor::randn(shape, dtype, CPU, &mut Random::new(seed)).unwrap()
}

/// `rows` classes below `classes`.
fn labels(rows: usize, classes: u32) -> Tensor {
    Tensor::randint(classes, &[rows], DType::I64, CPU, &mut Random::new(9)).unwrap()
}

fn mlp(activation: Activation, dropout: f64) -> Sequential {
    Mlp {
        hidden: vec![20, 17],
        outputs: 5,
        activation,
        dropout,
    }
    .layers()
}

/// A layer that its neighbours do not know, so that they do not share passes over memory with it.
#[derive(Debug)]
pub(crate) struct Apart<L>(pub(crate) L);

impl<L: Module> Module for Apart<L> {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let apart = |x: &Var| {
            x.reshape(&[&x.row_shape()[..], &[1]].concat())
                .reshape(&x.row_shape())
        };
        let y = self.0.forward(m, &apart(x));
        apart(&y)
    }
}

/// The layers of `mlp`, each alone.
fn mlp_apart(activation: Activation, dropout: f64) -> Sequential {
    let mut layers = Sequential::new();
    for width in [20, 17] {
        layers = layers
            .then(Linear::new(width))
            .then(Apart(Activate::new(activation)));
        if dropout != 0.0 {
            layers.push_unnumbered(Box::new(Dropout::new(dropout)));
        }
    }
    layers.then(Linear::new(5).outer())
}

fn bits(x: &[f64]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn fusing_changes_no_bit() {
    for activation in Activation::all() {
        for dropout in [0.0, 0.3] {
            let run = |layers: Sequential| {
                let mut bench = Bench::new(layers, &[13], DType::F32, &|_| false);
                bench.train(
                    &CrossEntropy::default(),
                    &randn(&[33, 13], DType::F32, 1),
                    &labels(33, 5),
                    WHOLE,
                );
                (bits(&bench.stats()), bits(&bench.gradients()))
            };
            assert!(
                run(mlp(activation, dropout)) == run(mlp_apart(activation, dropout)),
                "{activation:?}"
            );
        }
    }
}

/// Whether the gradient of a layer's input was computed.
type Asked = Arc<Mutex<bool>>;

/// A linear layer, and below it an operation that writes down whether its backward has run.
#[derive(Clone, Debug)]
struct Probe {
    inner: Linear,
    asked: Asked,
}

impl Module for Probe {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let x = m.custom(Arc::new(self.clone()), &[x]);
        self.inner.forward(m, &x)
    }
}

impl CustomOp for Probe {
    fn shape(&self, inputs: &[Vec<usize>]) -> ddp::nn::Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }
    fn forward(&self, x: &[&Tensor], out: &Tensor) -> ddp::nn::Result<()> {
        Ok(out.copy_from(x[0])?)
    }
    fn backward(
        &self,
        _: &[&Tensor],
        [_, dy]: [&Tensor; 2],
        dx: &[&Tensor],
    ) -> ddp::nn::Result<()> {
        *self.asked.lock().unwrap() = true;
        Ok(dx[0].copy_from(dy)?)
    }
}

/// Linear layers with ReLU between, each above a probe.
fn probed(layers: usize) -> (Sequential, Vec<Asked>) {
    let (mut net, mut all) = (Sequential::new(), Vec::new());
    for index in 0..layers {
        if index > 0 {
            net.push(Box::new(Activate::relu()));
        }
        let asked = Asked::default();
        net.push(Box::new(Probe {
            inner: Linear::new(5),
            asked: asked.clone(),
        }));
        all.push(asked);
    }
    (net, all)
}

#[test]
fn the_lowest_layer_computes_no_gradient_of_the_input() {
    let (net, asked) = probed(3);
    let mut bench = Bench::new(net, &[5], DType::F32, &|_| false);
    bench.train(
        &Mse,
        &randn(&[4, 5], DType::F32, 1),
        &randn(&[4, 5], DType::F32, 2),
        WHOLE,
    );
    let asked: Vec<_> = asked.iter().map(|asked| *asked.lock().unwrap()).collect();
    assert_eq!(asked, [false, true, true]);
}

#[test]
fn nothing_is_computed_below_the_lowest_trained_layer() {
    let (net, asked) = probed(4);
    let mut bench = Bench::new(net, &[5], DType::F32, &|name| {
        name.starts_with("0.") || name.starts_with("2.")
    });
    let ready = bench.train(
        &Mse,
        &randn(&[4, 5], DType::F32, 1),
        &randn(&[4, 5], DType::F32, 2),
        WHOLE,
    );
    assert_eq!(ready, ["6.bias", "6.weight", "4.bias", "4.weight"]);
    let asked: Vec<_> = asked.iter().map(|asked| *asked.lock().unwrap()).collect();
    assert_eq!(asked, [false, false, false, true]);
}

#[test]
fn frozen_layers_leave_the_others_gradients_as_they_were() {
    let run = |frozen: &dyn Fn(&str) -> bool| {
        let mut bench = Bench::new(mlp(Activation::Relu, 0.0), &[13], DType::F32, frozen);
        bench.train(
            &CrossEntropy::default(),
            &randn(&[9, 13], DType::F32, 1),
            &labels(9, 5),
            WHOLE,
        );
        bench
    };
    let all = run(&|_| false);
    for frozen in ["0.", "2.", "4.", "2.weight", "2.bias", "0.bias", ""] {
        let some = run(&|name| name.starts_with(frozen));
        for p in some.model.params.list() {
            let gradient = some
                .model
                .params
                .gradient(p.id)
                .map(|g| g.to_vec::<f32>().unwrap());
            let whole = all
                .model
                .params
                .gradient(p.id)
                .map(|g| g.to_vec::<f32>().unwrap());
            assert_eq!(
                gradient,
                whole.filter(|_| !p.name.starts_with(frozen)),
                "{} with {frozen}* frozen",
                p.name
            );
        }
    }
}

#[test]
fn gradients_complete_in_the_order_of_the_arena_in_the_last_micro_batch_alone() {
    let tie = Tie::new();
    let tied = || Linear::new(6).tied(&tie);
    let net = Sequential::new()
        .then(Linear::new(6))
        .then(tied())
        .then(Activate::gelu())
        .then(Linear::new(6));
    let net = net
        .then(Residual::new(
            Sequential::new().then(tied()).then(Dropout::new(0.1)),
        ))
        .then(Linear::new(5));
    let mut bench = Bench::new(net, &[4], DType::F32, &|name| name == "3.bias");
    let (x, targets) = (randn(&[7, 4], DType::F32, 1), randn(&[7, 5], DType::F32, 2));
    assert!(
        bench
            .train(
                &Mse,
                &x,
                &targets,
                Part {
                    last: false,
                    ..WHOLE
                }
            )
            .is_empty()
    );
    let ready = bench.train(
        &Mse,
        &x,
        &targets,
        Part {
            accumulate: true,
            ..WHOLE
        },
    );
    let trained: Vec<_> = bench
        .model
        .params
        .list()
        .iter()
        .filter(|p| p.is_trained())
        .map(|p| p.name.clone())
        .collect();
    assert_eq!(ready, trained);
    assert_eq!(
        trained.iter().filter(|name| *name == "1.weight").count(),
        1,
        "a tied weight has one place"
    );
    assert!(!trained.contains(&"4.0.weight".to_string()));
}

#[test]
fn micro_batches_with_uneven_and_empty_pieces_add_up_to_the_whole_batch() {
    let tie = Tie::new();
    let layers = |dropout| {
        let inner = Sequential::new()
            .then(Linear::new(13).tied(&tie))
            .then(Activate::gelu())
            .then(Dropout::new(dropout));
        let net = Sequential::new()
            .then(Linear::new(13).tied(&tie))
            .then(Residual::new(inner));
        net.then(mlp(Activation::Relu, dropout))
    };
    let loss = CrossEntropy {
        label_smoothing: 0.1,
        ..CrossEntropy::default()
    };
    let (x, targets) = (randn(&[29, 13], DType::F64, 1), labels(29, 5));
    for dropout in [0.0, 0.4] {
        let mut whole = Bench::new(layers(dropout), &[13], DType::F64, &|_| false);
        whole.train(&loss, &x, &targets, WHOLE);
        let mut parts = Bench::new(layers(dropout), &[13], DType::F64, &|_| false);
        ops::fill_into(parts.model.params.gradients(), f64::NAN).unwrap();
        let cuts = [0, 10, 10, 11, 29, 29];
        for cut in 1..cuts.len() {
            let rows = cuts[cut - 1]..cuts[cut];
            let part = Part {
                first_row: rows.start as i64,
                accumulate: cut > 1,
                last: cut + 1 == cuts.len(),
            };
            parts.train(
                &loss,
                &x.slice(rows.clone()).unwrap(),
                &targets.slice(rows).unwrap(),
                part,
            );
        }
        // 29 rows' terms of at most 10 are added in another order: 29 × 29 × 10 ε, with ε = 2⁻⁵³.
        let bound = 29.0 * 29.0 * 10.0 * f64::EPSILON / 2.0;
        for p in whole.model.params.list() {
            let [whole, parts] = [&whole, &parts]
                .map(|bench| bench.model.params.gradient(p.id).unwrap().to_vec::<f64>());
            for (whole, part) in whole.unwrap().into_iter().zip(parts.unwrap()) {
                assert!((whole - part).abs() <= bound, "{}: {whole} {part}", p.name);
            }
        }
        for (whole, parts) in whole.stats().into_iter().zip(parts.stats()) {
            assert!((whole - parts).abs() <= bound * 10.0, "{whole} {parts}");
        }
    }
}

#[test]
fn zero_rows_give_zero_gradients_or_leave_those_there() {
    for (loss, targets) in [
        (
            &CrossEntropy::default() as &dyn Loss,
            Tensor::zeros(&[0], DType::I64, CPU).unwrap(),
        ),
        (&Mse, Tensor::zeros(&[0, 5], DType::F32, CPU).unwrap()),
    ] {
        let none = Tensor::zeros(&[0, 13], DType::F32, CPU).unwrap();
        let net = Sequential::new()
            .then(Residual::new(Dropout::new(0.2)))
            .then(mlp(Activation::Gelu, 0.5));
        let mut bench = Bench::new(net, &[13], DType::F32, &|_| false);
        let params = &bench.model.params;
        let trained: Vec<_> = params
            .list()
            .iter()
            .map(|p| params.gradient(p.id).unwrap().clone())
            .collect();
        trained
            .iter()
            .for_each(|gradient| ops::fill_into(gradient, f64::NAN).unwrap());
        let ready = bench.train(loss, &none, &targets, WHOLE);
        assert_eq!(ready.len(), trained.len());
        assert!(bench.gradients().iter().all(|&g| g == 0.0));
        trained
            .iter()
            .for_each(|gradient| ops::fill_into(gradient, 2.5).unwrap());
        bench.train(
            loss,
            &none,
            &targets,
            Part {
                accumulate: true,
                ..WHOLE
            },
        );
        assert!(
            trained.iter().all(|gradient| gradient
                .to_vec::<f32>()
                .unwrap()
                .iter()
                .all(|&g| g == 2.5))
        );
        assert_eq!(bench.stats(), [0.0; 4]);
    }
}

#[test]
fn evaluation_saves_and_drops_nothing_and_alternates_two_buffers() {
    let hidden = vec![64; 8];
    let activation = Activation::GeluTanh;
    let layers = |dropout| {
        Mlp {
            hidden: hidden.clone(),
            outputs: 64,
            activation,
            dropout,
        }
        .layers()
    };
    let x = randn(&[16, 64], DType::F32, 1);
    let run = |dropout, training| {
        let mut bench = Bench::new(layers(dropout), &[64], DType::F32, &|_| false);
        let forward = |model: &Model, pass: &mut Pass<'_>, _: &Tensor| {
            let y = model.forward(pass, &x).unwrap();
            (y.to_vec::<f32>().unwrap(), pass.saved_count())
        };
        let (y, saved) = bench.pass(training, WHOLE, forward).0;
        (y, saved, bench.scratch.bytes())
    };
    let (y, saved, bytes) = run(0.5, false);
    assert_eq!((saved, bytes), (0, 2 * 16 * 64 * 4));
    assert!(y == run(0.0, true).0, "no dropout in evaluation");
    assert!(y != run(0.5, true).0);
}

#[test]
fn every_dropout_layer_and_step_drops_others_and_every_rank_the_same() {
    let net = || {
        Sequential::new()
            .then(Dropout::new(0.5))
            .then(Dropout::new(0.5))
    };
    let ones = Tensor::ones(&[64, 32], DType::F32, CPU).unwrap();
    let run = |step, rows: std::ops::Range<usize>| {
        let mut bench = Bench::new(net(), &[32], DType::F32, &|_| false);
        bench.step = step;
        let part = Part {
            first_row: rows.start as i64,
            ..WHOLE
        };
        let x = ones.slice(rows).unwrap();
        bench
            .pass(true, part, |model, pass, _| {
                model.forward(pass, &x).unwrap().to_vec::<f32>().unwrap()
            })
            .0
    };
    let whole = run(1, 0..64);
    assert_eq!(
        whole,
        [run(1, 0..20), run(1, 20..21), run(1, 21..64)].concat()
    );
    assert_ne!(whole, run(2, 0..64));
    // If two layers dropped the same elements, half would remain instead of a quarter: 512 ± 5σ of
    // 2048, with σ = 19.6.
    let kept = whole.iter().filter(|&&y| y != 0.0).count();
    assert!((414..=610).contains(&kept), "{kept}");
}

#[test]
fn stats_are_the_numerators_and_denominators_of_pytorchs_means() {
    // By hand: two rows that count, one ignored. Logits 0 give a loss of ln 3 each.
    let logits = Tensor::zeros(&[3, 3], DType::F64, CPU).unwrap();
    let targets = Tensor::from_slice(&[0i64, -100, 2], &[3], CPU).unwrap();
    let weights = Tensor::from_slice(&[0.5f64, 9.0, 2.0], &[3], CPU).unwrap();
    let mut bench = Bench::new(Sequential::new(), &[3], DType::F64, &|_| false);
    let mut stats_of = |loss: &dyn Loss, output: &Tensor, targets: &Tensor, training| {
        ops::zero(&bench.stats).unwrap();
        let losses = bench
            .pass(training, WHOLE, |_, pass, stats| {
                let gradient = training.then(|| output.empty_like().unwrap());
                let of = [output, targets, stats];
                loss.compute(pass, of, gradient.as_ref()).unwrap()
            })
            .0;
        assert_eq!(losses.count(), output.shape()[0]);
        bench.stats()
    };
    let ln3 = 3f64.ln();
    for training in [false, true] {
        let plain = stats_of(&CrossEntropy::default(), &logits, &targets, training);
        // A unit or two in the last place of the sum.
        assert!(
            (plain[0] - 2.0 * ln3).abs() < 1e-15 && plain[1..] == [2.0, 1.0, 2.0],
            "{plain:?}"
        );
        let weighted = CrossEntropy {
            class_weights: Some(weights.clone()),
            ..CrossEntropy::default()
        };
        let weighted = stats_of(&weighted, &logits, &targets, training);
        assert!(
            (weighted[0] - 2.5 * ln3).abs() < 1e-15 && weighted[1..] == [2.5, 1.0, 2.0],
            "{weighted:?}"
        );
        let ones = Tensor::ones(&[3, 3], DType::F64, CPU).unwrap();
        assert_eq!(
            stats_of(&Mse, &logits, &ones, training),
            [9.0, 9.0, 0.0, 3.0]
        );
    }
}

#[test]
fn stats_of_other_dtypes_add_up_on_top_of_what_is_there() {
    for (dtype, model_dtype) in [
        (DType::F32, DType::F32),
        (DType::F32, DType::F64),
        (DType::F64, DType::F32),
    ] {
        let mut bench = Bench::new(Sequential::new(), &[2], model_dtype, &|_| false);
        bench.stats = Tensor::full(&[4], 100.0, dtype, CPU).unwrap();
        let (output, targets) = (
            randn(&[3, 2], model_dtype, 1),
            Tensor::zeros(&[3], DType::I64, CPU).unwrap(),
        );
        for _ in 0..2 {
            let loss = CrossEntropy::default();
            bench.pass(false, WHOLE, |_, pass, stats| {
                loss.compute(pass, [&output, &targets, stats], None)
                    .unwrap()
            });
        }
        let stats = bench
            .stats
            .to_dtype(DType::F64)
            .unwrap()
            .to_vec::<f64>()
            .unwrap();
        assert_eq!((stats[1], stats[3]), (106.0, 106.0));
        assert!(stats[0] > 100.0 && stats[2] >= 100.0);
    }
}
