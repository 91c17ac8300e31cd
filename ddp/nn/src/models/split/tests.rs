//! Cuts of made-up models.

use ddp_kernels::DType;
use ddp_kernels::ops::{Activation, Gelu};
use proptest::prelude::*;

use super::*;
use crate::models::Mlp;
use crate::params::Params;
use crate::{Activate, Dropout, Linear, Residual, Tie};

const INPUTS: usize = 6;

fn whole(layers: Sequential) -> Model {
    Model::new(
        Box::new(layers),
        &[INPUTS],
        DType::F32,
        Device::Cpu,
        3,
        &|_| false,
    )
    .unwrap()
}

fn over(layers: Sequential, parts: usize) -> Result<Vec<Model>> {
    Model::split(
        layers,
        &[INPUTS],
        &vec![Device::Cpu; parts],
        |layers, shape, device| Model::new(layers, shape, DType::F32, device, 3, &|_| false),
    )
}

fn mlp() -> Sequential {
    let activation = Activation::Gelu(Gelu::Erf);
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

/// How often a text occurs in the models' debug output, where layers show what they fuse and the
/// number with which they draw.
fn said(models: &[Model], text: &str) -> usize {
    models
        .iter()
        .map(|model| format!("{:?}", model.root).matches(text).count())
        .sum()
}

#[test]
fn parts_have_the_names_first_values_and_drawing_numbers_of_the_whole() {
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
        for number in 0..4 {
            assert_eq!(
                said(&split, &format!("number: {number} ")),
                1,
                "{parts} parts: layer {number} that draws"
            );
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

#[test]
fn activations_stay_with_the_layer_that_applies_them() {
    let whole = [whole(mlp())];
    for fused in ["fused: Gelu(Erf)", "is_fused: true"] {
        assert_eq!(said(&whole, fused), 4, "{:?}", whole[0].root);
        for parts in 2..=5 {
            assert_eq!(
                said(&over(mlp(), parts).unwrap(), fused),
                4,
                "{parts} parts"
            );
        }
    }
    // A part's first layer has no activation below it, whose input it could use.
    let plain = || {
        Mlp {
            hidden: vec![16, 8, 8, 4],
            outputs: 3,
            activation: Activation::Gelu(Gelu::Erf),
            dropout: 0.0,
        }
        .layers()
    };
    for parts in 1..=5 {
        let split = over(plain(), parts).unwrap();
        assert_eq!(said(&split, "below: Some(Erf)"), 5 - parts, "{parts} parts");
    }
    // Layers before the first with parameters stay with that one.
    let layers = || {
        Sequential::new()
            .then(Activate::relu())
            .then(Dropout::new(0.5))
            .then(Linear::new(4))
            .then(Linear::new(2))
    };
    let split = over(layers(), 2).unwrap();
    assert_eq!(
        split
            .iter()
            .map(|model| names(&model.params))
            .collect::<Vec<_>>(),
        [["2.weight", "2.bias"], ["3.weight", "3.bias"]]
    );
}

#[test]
fn layers_of_one_tie_stay_together_with_those_between() {
    let tie = Tie::new();
    let layers = || {
        Sequential::new()
            .then(Linear::new(INPUTS))
            .then(Residual::new(Linear::new(INPUTS).tied(&tie)))
            .then(Activate::relu())
            .then(Linear::new(INPUTS))
            .then(Linear::new(INPUTS).tied(&tie))
            .then(Linear::new(2))
    };
    let split = over(layers(), 3).unwrap();
    let lengths: Vec<usize> = split
        .iter()
        .map(|model| model.params.list().len())
        .collect();
    assert_eq!(
        lengths,
        [2, 5, 2],
        "weight and bias; two weights and three biases; weight and bias"
    );
    let error = over(layers(), 4).unwrap_err();
    assert!(
        error.to_string().contains("expected from 1 to 3") && error.to_string().contains("tied"),
        "{error}"
    );
}

#[test]
fn more_devices_than_layers_with_parameters_are_refused_with_both_numbers() {
    let error = over(mlp(), 6).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(
        text.contains("a model over 6 devices") && text.contains("it has 5 layers with parameters"),
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
        weights in prop::collection::vec(0usize..1000, 1..9), parts in 1usize..9,
    ) {
        prop_assume!(parts <= weights.len());
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
