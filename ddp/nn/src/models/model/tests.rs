//! Models split over devices, and computed again by parts.

mod made;
mod tied;

use std::collections::BTreeMap;

use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Random};
use proptest::prelude::*;

use super::*;
use crate::models::gpt::{GptSpec, RecomputeKind};
use crate::models::{DataShape, Family, Mlp};
use crate::params::{Parameter, Precision};
use crate::pass::tests::in_pass;
use crate::{
    Activate, Dropout, Formula, Init, Linear, PassOptions, Residual, Saved, Scope, Scratch,
};
use crate::{Tie, Var};

const INPUTS: usize = 6;

impl Model {
    /// As of the traced module.
    pub(crate) fn run_counts(&self) -> [usize; 2] {
        self.root.run_counts()
    }
}

fn whole(layers: Sequential) -> Model {
    over(layers, 1).unwrap().remove(0)
}

fn over(layers: Sequential, parts: usize) -> Result<Vec<Model>> {
    over_in(Precision::F32, layers, parts)
}

fn over_in(precision: Precision, layers: Sequential, parts: usize) -> Result<Vec<Model>> {
    let devices = vec![Device::Cpu; parts];
    Model::split(layers, &[INPUTS], &devices, |layers, shape, device| {
        Model::new(layers, shape, precision, device, 3, &|_| false)
    })
}

fn mlp() -> Sequential {
    let activation = Activation::Gelu;
    Mlp {
        hidden: vec![16, 8, 8, 4],
        outputs: 3,
        activation,
        dropout: 0.25,
    }
    .layers()
}

/// Names in the order of declaration.
fn names(params: &Params) -> Vec<String> {
    let mut list: Vec<_> = params.list().iter().collect();
    list.sort_by_key(|parameter| parameter.id);
    list.iter()
        .map(|parameter| parameter.name.clone())
        .collect()
}

fn bits(params: &Params, name: &str) -> Vec<u32> {
    let value = params
        .value(params.find(name).unwrap().id)
        .to_vec::<f32>()
        .unwrap();
    value.into_iter().map(f32::to_bits).collect()
}

#[test]
fn parts_have_the_names_and_first_values_of_the_whole() {
    let whole = [whole(mlp())];
    for parts in 1..=5 {
        let split = over(mlp(), parts).unwrap();
        assert_eq!(split.len(), parts);
        let all: Vec<String> = split
            .iter()
            .flat_map(|model| names(&model.params))
            .collect();
        assert_eq!(all, names(&whole[0].params), "{parts} parts");
        for model in &split {
            for name in names(&model.params) {
                assert_eq!(
                    bits(&model.params, &name),
                    bits(&whole[0].params, &name),
                    "{parts} parts: {name}"
                );
            }
        }
        assert_eq!(split[parts - 1].output_shape, whole[0].output_shape);
        assert_eq!(
            split
                .iter()
                .map(|model| model.params.count())
                .sum::<usize>(),
            whole[0].params.count()
        );
    }
}

/// The output of a training pass, and by name all gradients.
type Passed = (Vec<f32>, BTreeMap<String, Vec<f32>>);

fn pass_over(models: &[Model], x: &Tensor) -> Passed {
    pass_with_bytes(models, x).0
}

/// With the bytes of activations.
fn pass_with_bytes(models: &[Model], x: &Tensor) -> (Passed, usize) {
    let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 5,
        position: &position,
    };
    let mut x = x.clone();
    let mut scratch: Vec<Scratch> = models.iter().map(|_| Scratch::new(Device::Cpu)).collect();
    let mut saved: Vec<Saved> = models.iter().map(|_| Saved::default()).collect();
    let mut ready = |_| Ok(());
    for ((model, scratch), saved) in models.iter().zip(&mut scratch).zip(&mut saved) {
        let mut pass = Pass::new(&model.params, scratch, saved, options, &mut ready);
        x = model.forward(&mut pass, &x).unwrap();
    }
    let output = x.to_dtype(DType::F32).unwrap().to_vec().unwrap();
    let mut dy = Some(x);
    for ((model, scratch), saved) in models.iter().zip(&mut scratch).zip(&mut saved).rev() {
        let mut pass = Pass::resume(&model.params, scratch, saved, options, &mut ready);
        dy = model.backward_to_input(&mut pass, &dy.unwrap()).unwrap();
    }
    let list = models.iter().flat_map(|model| {
        let gradient = |p: &Parameter| model.params.gradient(p.id).unwrap().to_vec().unwrap();
        model
            .params
            .list()
            .iter()
            .map(move |p| (p.name.clone(), gradient(p)))
    });
    let bytes = scratch.iter().map(Scratch::bytes).sum();
    ((output, list.collect()), bytes)
}

/// So many rows for these models.
fn numbers(models: &[Model], rows: usize) -> Tensor {
    let shape = [&[rows], &models[0].input_shape[..]].concat();
    Tensor::randn(&shape, DType::F32, Device::Cpu, &mut Random::new(2)).unwrap()
}

/// What each part declares.
fn names_of(models: &[Model]) -> Vec<Vec<String>> {
    models.iter().map(|model| names(&model.params)).collect()
}

#[test]
fn parts_together_have_the_bits_of_the_whole() {
    let whole = [whole(mlp())];
    let x = numbers(&whole, 7);
    let expected = pass_over(&whole, &x);
    for parts in 2..=5 {
        let split = over(mlp(), parts).unwrap();
        assert!(pass_over(&split, &x) == expected, "{parts} parts");
    }
}

#[test]
fn activations_stay_with_the_layer_that_applies_them() {
    let split = over(mlp(), 5).unwrap();
    for model in &split[..4] {
        // Dropout has multiplied some by 0, the others by 4/3. GELU is at least -0.17.
        let models = std::slice::from_ref(model);
        let (output, _) = pass_over(models, &numbers(models, 9));
        assert!(output.iter().all(|it| *it > -0.23), "{output:?}");
        assert!(output.contains(&0.0), "{output:?}");
    }
    // Layers before the first with parameters stay with that one.
    let layers = || {
        Sequential::new()
            .then(Activate::relu())
            .then(Dropout::new(0.5))
            .then(Linear::new(4))
            .then(Linear::new(2))
    };
    assert_eq!(
        names_of(&over(layers(), 2).unwrap()),
        [["2.weight", "2.bias"], ["3.weight", "3.bias"]]
    );
}

/// Three blocks in one module. Within a block, two values or a parameter go past each layer.
#[derive(Debug)]
struct Blocks;

impl Module for Blocks {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let mut x = m.layer("first", x, Linear::new(8));
        let mask = m.numbers(&[0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0], &[8]);
        for block in ["a", "b", "c"] {
            x = m.within(block, |m| {
                let temperature = m.parameter("temperature", &[1], Init::Constant(0.7)).exp();
                let hidden = m.layer("up", &x, Linear::new(8)).gelu();
                let hidden = m.layer("drop", &hidden, Dropout::new(0.25));
                let gate = (m.layer("gate", &x, Linear::new(8)) / temperature).softmax(-1);
                &x * &mask + m.layer("down", &(hidden * gate), Linear::new(8))
            });
        }
        x
    }
}

#[test]
fn a_module_is_cut_where_one_value_alone_goes_from_below_to_above() {
    let blocks = || Sequential::new().then(Blocks).then(Linear::new(2));
    let mut found = Vec::new();
    for precision in [Precision::F32, Precision::Bf16] {
        let over = |parts| over_in(precision, blocks(), parts).unwrap();
        let x = numbers(&over(1), 7);
        let expected = pass_over(&over(1), &x);
        for parts in 2..=5 {
            let split = over(parts);
            assert!(
                pass_over(&split, &x) == expected,
                "{precision:?} {parts} parts"
            );
            found = names_of(&split);
        }
    }
    let firsts: Vec<&str> = found.iter().map(|of| &*of[0]).collect();
    assert_eq!(
        firsts,
        [
            "0.first.weight",
            "0.a.temperature",
            "0.b.temperature",
            "0.c.temperature",
            "1.weight"
        ]
    );
    let text = over(blocks(), 6).unwrap_err().to_string();
    assert!(text.contains("it can be cut in 4 places"), "{text}");
}

#[test]
fn parts_that_are_computed_again_have_the_same_bits_and_take_less_memory() {
    let wide = |m: &mut Scope<'_>, x: &Var| {
        let mut x = x.clone();
        for name in ["a", "b", "c", "d"] {
            let inner = m.layer(&format!("{name}.up"), &x, Linear::new(64)).gelu();
            let inner = m.layer(&format!("{name}.drop"), &inner, Dropout::new(0.25));
            x = &x
                + m.layer(
                    &format!("{name}.down"),
                    &(inner.exp() * 0.1),
                    Linear::new(INPUTS),
                );
        }
        x
    };
    let layers = || Sequential::new().then(Formula(wide));
    let of = |parts: usize, recomputed: usize| {
        let mut models = over(layers(), parts).unwrap();
        models
            .iter_mut()
            .for_each(|it| it.recompute_parts(recomputed));
        let x = numbers(&models, 50);
        pass_with_bytes(&models, &x)
    };
    let (expected, _) = of(1, 0);
    let bytes: Vec<usize> = (0..=5)
        .map(|count| {
            let (found, bytes) = of(1, count);
            assert!(
                [found, of(3, count).0].iter().all(|it| *it == expected),
                "{count}"
            );
            bytes
        })
        .collect();
    // Of each part three tensors of 64 columns, for all but the last two that backward runs.
    let of_part = 3 * 50 * 64 * 4;
    assert!(
        bytes[1..5].is_sorted_by(|more, less| more > less),
        "{bytes:?}"
    );
    assert!(
        bytes[4] + 2 * of_part <= bytes[0] && bytes[5] == bytes[4],
        "{bytes:?}"
    );
}

/// A module past all of whose layers its input goes.
fn dense(m: &mut Scope<'_>, x: &Var) -> Var {
    let first = m.layer("first", x, Linear::new(INPUTS)).relu();
    let second = m.layer("second", &first, Linear::new(INPUTS)).relu();
    m.layer("third", &(first + second), Linear::new(INPUTS)) + x
}

#[test]
fn what_cannot_be_cut_is_refused_for_two_devices() {
    let layers = || Sequential::new().then(Formula(dense));
    assert_eq!(over(layers(), 1).unwrap().len(), 1);
    let text = over(layers(), 2).unwrap_err().to_string();
    assert!(
        text.contains("expected from 1 to 1") && text.contains("one value alone"),
        "{text}"
    );
}

#[test]
fn parts_of_a_transformer_have_the_bits_of_the_whole_for_rows_of_any_length() {
    let spec = GptSpec {
        layers: 3,
        heads: 2,
        width: 8,
        context: 6,
        dropout: 0.25,
        recompute: RecomputeKind::Block,
        tied: false,
        ..GptSpec::default()
    };
    let data = DataShape {
        row_shape: &[6],
        image: &[],
        dtype: DType::I64,
        outputs: 16,
        documents: false,
    };
    let over = |parts: usize| {
        let layers = spec.layers(&data).unwrap();
        let devices = vec![Device::Cpu; parts];
        layers.build_over(&[6], &devices, Seed(3)).unwrap()
    };
    let tokens = |time: usize| {
        let tokens: Vec<i64> = (0..4 * time as i64).map(|at| at * at % 16).collect();
        Tensor::from_slice(&tokens, &[4, time], Device::Cpu).unwrap()
    };
    let whole = over(1);
    for parts in 2..=9 {
        let split = over(parts);
        // Four rows: once as many as tokens.
        for time in [6, 4, 2] {
            let x = tokens(time);
            assert!(
                pass_over(&split, &x) == pass_over(&whole, &x),
                "{parts} {time}"
            );
        }
    }
    // Embeddings, the two halves of each block, the norm, and the head.
    let layers = spec.layers(&data).unwrap();
    let error = layers
        .build_over(&[6], &[Device::Cpu; 10], Seed(3))
        .unwrap_err();
    assert!(
        error.to_string().contains("it can be cut in 8 places"),
        "{error}"
    );
}

/// Reads a scale in training only.
fn scaled_in_training(m: &mut Scope<'_>, x: &Var) -> Var {
    let first = m.layer("first", x, Linear::new(INPUTS));
    let scale = m.parameter("scale", &[INPUTS], Init::Constant(0.5));
    let first = if m.is_training() {
        first * scale
    } else {
        first
    };
    m.layer("second", &first, Linear::new(INPUTS))
}

#[test]
fn what_reads_other_parameters_in_evaluation_is_refused_for_two_devices() {
    let layers = Sequential::new().then(Formula(scaled_in_training));
    let split = over(layers, 3).unwrap();
    let last = &split[2];
    let x = Tensor::zeros(&[2, INPUTS], DType::F32, Device::Cpu).unwrap();
    let error = in_pass(last, false, |mut pass| last.forward(&mut pass, &x)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("in training and evaluation"), "{text}");
}

#[test]
fn more_devices_than_layers_with_parameters_are_refused_with_both_numbers() {
    let error = over(mlp(), 6).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(
        text.contains("a model over 6 devices") && text.contains("it can be cut in 4 places"),
        "{text}"
    );
    assert_eq!(over(mlp(), 0).unwrap_err().exit_code(), 2);
}

/// All ways to cut `pieces` into `parts` runs.
fn all_cuts(pieces: usize, parts: usize) -> Vec<Vec<Range<usize>>> {
    if parts == 1 {
        return vec![vec![0..pieces]];
    }
    let with_last = |start: usize| {
        all_cuts(start, parts - 1).into_iter().map(move |mut cuts| {
            cuts.push(start..pieces);
            cuts
        })
    };
    (parts - 1..pieces).flat_map(with_last).collect()
}

proptest! {
    #[test]
    fn parts_are_as_even_as_consecutive_layers_can_be(
        weights in prop::collection::vec(0usize..1000, 1..9), drawn in 0usize..840,
    ) {
        // As likely any number up to that of the layers.
        let parts = 1 + drawn % weights.len();
        let unevenness = |cuts: &Vec<Range<usize>>| {
            let sums = cuts.iter().map(|part| weights[part.clone()].iter().sum::<usize>());
            (sums.clone().max(), sums.map(|sum| sum * sum).sum::<usize>())
        };
        let cuts = even_parts(&weights, parts);
        prop_assert!(cuts.iter().all(|part| !part.is_empty()));
        prop_assert_eq!(cuts.iter().cloned().flatten().collect::<Vec<_>>(), (0..weights.len()).collect::<Vec<_>>());
        let least = all_cuts(weights.len(), parts).iter().map(unevenness).min();
        prop_assert_eq!(Some(unevenness(&cuts)), least);
    }
}
