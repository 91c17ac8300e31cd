//! Splits of made-up models.

use ddp_kernels::DType;
use ddp_kernels::ops::Activation;
use proptest::prelude::*;

use super::*;
use crate::models::gpt::GptSpec;
use crate::models::{DataShape, Family, Mlp};
use crate::{Activate, Dropout, Linear, Residual, Tie};

const INPUTS: usize = 6;

impl Model {
    /// As of the traced module.
    pub(crate) fn run_counts(&self) -> [usize; 2] {
        self.root.run_counts()
    }
}

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

/// How often a text occurs in the models' debug output.
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
        let drawn = split.iter().flat_map(|model| model.root.drawing_numbers());
        let mut drawn: Vec<u32> = drawn.collect();
        drawn.sort_unstable();
        assert_eq!(drawn, [0, 1, 2, 3], "{parts} parts: of layers that draw");
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
    for parts in 1..=5 {
        let split = over(mlp(), parts).unwrap();
        assert_eq!(said(&split, "Activate(Gelu)"), 4, "{parts} parts");
        let first = said(&split, "layers: [Activate");
        assert_eq!(first, 0, "{parts} parts");
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

/// Five layers, of which the second, the fourth and within that a third share a weight.
fn tied(tie: &Tie) -> Sequential {
    let twice = Sequential::new()
        .then(Linear::new(INPUTS).tied(tie))
        .then(Linear::new(INPUTS).without_bias().tied(tie));
    Sequential::new()
        .then(Linear::new(INPUTS))
        .then(Residual::new(Linear::new(INPUTS).tied(tie)))
        .then(Activate::relu())
        .then(Linear::new(INPUTS))
        .then(twice)
        .then(Linear::new(2))
}

#[test]
fn the_first_part_that_uses_a_tied_weight_owns_it_and_later_ones_borrow_it() {
    // A tie of an earlier model, whose weight has the same name.
    let tie = Tie::new();
    let whole = whole(tied(&tie));
    for parts in 1..=5 {
        let split = over(tied(&tie), parts).unwrap();
        let all: Vec<String> = split.iter().flat_map(|part| names(&part.params)).collect();
        assert_eq!(all, names(&whole.params), "{parts} parts");
        for (model, name) in split.iter().flat_map(|model| {
            names(&model.params)
                .into_iter()
                .map(move |name| (model, name))
        }) {
            assert_eq!(
                bits(&model.params, &name),
                bits(&whole.params, &name),
                "{name}"
            );
        }
        let borrowers = split
            .iter()
            .filter(|part| !part.params.tied_copies().is_empty());
        assert_eq!(borrowers.count(), usize::from(parts > 1), "{parts} parts");
    }
    let split = over(tied(&tie), 5).unwrap();
    let (owner, borrower) = (&split[1].params, &split[3].params);
    let weight = owner.find("1.weight").unwrap().id;
    let [tied] = borrower.tied_copies() else {
        panic!("{borrower:?}")
    };
    assert_eq!((tied.part, tied.owner), (1, weight));
    assert_eq!((owner.uses(weight), borrower.uses(tied.id)), (3, 2));
    let gradient = borrower.gradient(tied.id).unwrap();
    for tensor in [gradient, borrower.value(tied.id)] {
        assert_eq!(tensor.shape(), owner.value(weight).shape());
        assert!(!tensor.shares_memory_with(borrower.gradients()));
        assert!(!tensor.shares_memory_with(borrower.values()));
    }
    assert_eq!(names(borrower), ["4.0.bias"]);
    assert!(borrower.find("1.weight").is_err());
    assert_eq!(borrower.count(), INPUTS);
    assert_eq!(borrower.trained_count(), INPUTS);
}

#[test]
fn a_frozen_tied_weight_and_one_in_bf16_are_borrowed_as_the_owner_has_them() {
    let frozen = |name: &str| name == "1.weight";
    let split = Model::split(
        tied(&Tie::new()),
        &[INPUTS],
        &[Device::Cpu; 4],
        |layers, row, device| {
            let precision = crate::params::Precision::Bf16;
            Model::new(layers, row, precision, device, 3, &frozen)
        },
    );
    let split = split.unwrap();
    let borrower = split
        .iter()
        .find(|part| !part.params.tied_copies().is_empty());
    let borrower = &borrower.unwrap().params;
    let id = borrower.tied_copies()[0].id;
    assert!(borrower.gradient(id).is_none());
    assert_eq!(borrower.value(id).dtype(), DType::BF16);
}

#[test]
fn a_tied_weight_counts_in_each_layer_that_uses_it() {
    let spec = GptSpec {
        layers: 4,
        heads: 2,
        width: 8,
        context: 6,
        vocab: 600,
        ..GptSpec::default()
    };
    let data = DataShape {
        row_shape: &[6],
        image: &[],
        dtype: DType::I64,
        outputs: 600,
        documents: false,
    };
    let counts = |parts: usize| -> Vec<usize> {
        let layers = spec.layers(&data).unwrap();
        let made = Model::split(
            layers,
            &[6],
            &vec![Device::Cpu; parts],
            |layers, row, device| Model::new(layers, row, DType::F32, device, 3, &|_| false),
        );
        let made = made.unwrap();
        made.iter().map(|part| part.params.list().len()).collect()
    };
    // Embeddings; 4 blocks of 12 parameters, and the norm's two. The head, as large as the
    // embedding, is the last part or in it.
    assert_eq!(counts(2), [2 + 2 * 12, 2 * 12 + 2]);
    assert_eq!(counts(3), [2, 4 * 12 + 2, 0]);
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
