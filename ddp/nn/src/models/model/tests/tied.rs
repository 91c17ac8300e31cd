//! Weights that several layers use, and where they are if the model is split.

use super::*;

#[test]
fn a_scale_that_two_layers_read_keeps_them_together() {
    // No layer reads `spare`: its gradient is 0.
    let scaled = |m: &mut Scope<'_>, x: &Var| {
        let scale = m.parameter("scale", &[INPUTS], Init::Constant(0.5));
        m.parameter("spare", &[3], Init::Constant(1.0));
        let first = m.layer("first", x, Linear::new(INPUTS)) * &scale;
        let second = m.layer("second", &first, Linear::new(INPUTS)) * scale;
        m.layer("third", &second, Linear::new(INPUTS))
    };
    let layers = || Sequential::new().then(Formula(scaled));
    let split = over(layers(), 3).unwrap();
    let names = names_of(&split);
    assert_eq!(names[0], ["0.spare", "0.first.weight", "0.first.bias"]);
    assert_eq!(names[1], ["0.scale", "0.second.weight", "0.second.bias"]);
    let whole = [whole(layers())];
    let x = numbers(&whole, 3);
    assert!(pass_over(&split, &x) == pass_over(&whole, &x));
    assert!(over(layers(), 4).is_err());
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
        assert_eq!(borrowers.count() > 0, parts > 1, "{parts} parts");
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
            let precision = Precision::Bf16;
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
