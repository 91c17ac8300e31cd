//! Models after they are built: names, shapes and initial weights as in PyTorch, and what is
//! refused.

use super::*;

#[test]
fn an_mlp_has_the_names_and_shapes_of_pytorchs_sequential() {
    let names = |dropout| {
        let bench = Bench::new(mlp(Activation::Relu, dropout), &[13], DType::F32, &|_| {
            false
        });
        let mut list = bench.model.params.list().to_vec();
        list.sort_by_key(|p| p.id);
        assert_eq!(
            (&bench.model.input_shape[..], &bench.model.output_shape[..]),
            (&[13][..], &[5][..])
        );
        list.into_iter()
            .map(|p| format!("{} {:?}", p.name, p.shape))
            .collect::<Vec<_>>()
    };
    let plain = [
        "0.weight [20, 13]",
        "0.bias [20]",
        "2.weight [17, 20]",
        "2.bias [17]",
        "4.weight [5, 17]",
        "4.bias [5]",
    ];
    assert_eq!(names(0.0), plain);
}

#[test]
fn dropout_changes_neither_names_nor_first_values() {
    let first = |dropout| {
        let layers = mlp(Activation::Relu, dropout);
        let bench = Bench::new(layers, &[13], DType::F32, &|_| false);
        let hashes = bench.model.params.value_hashes().unwrap().into_iter();
        hashes
            .map(|(name, hash)| (name.to_string(), hash))
            .collect::<Vec<_>>()
    };
    assert_eq!(first(0.1), first(0.0));
}

#[test]
fn linear_starts_uniform_between_the_bounds_of_pytorch() {
    let bench = Bench::new(Linear::new(400), &[100], DType::F32, &|_| false);
    for name in ["weight", "bias"] {
        let p = bench.model.params.find(name).unwrap();
        let values = bench.model.params.value(p.id).to_vec::<f32>().unwrap();
        let count = values.len() as f64;
        let bound = 0.1;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
        let square = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / count;
        assert!(
            values.iter().all(|&v| f64::from(v.abs()) <= bound + 1e-8),
            "{name}"
        );
        assert!(
            values.iter().any(|&v| f64::from(v) > 0.95 * bound)
                && values.iter().any(|&v| f64::from(v) < -0.95 * bound)
        );
        // Within five standard deviations. Of a uniform value that is bound/√3, of its square
        // bound² √(1/5 − 1/9).
        assert!(
            mean.abs() < 5.0 * bound / (3.0 * count).sqrt(),
            "{name}: {mean}"
        );
        assert!(
            (square - bound * bound / 3.0).abs()
                < 5.0 * bound * bound * (4.0 / 45.0 / count).sqrt(),
            "{name}: {square}"
        );
    }
}

#[test]
fn models_that_cannot_be_are_refused_by_place_and_reason() {
    let error = |layers: Sequential, shape: &[usize]| {
        Model::new(Box::new(layers), shape, DType::F32, CPU, 1, &|_| false)
            .unwrap_err()
            .to_string()
    };
    let got = error(
        Sequential::new()
            .then(Linear::new(3))
            .then(Residual::new(Linear::new(4))),
        &[2],
    );
    assert!(
        got.starts_with("1 (") && got.contains("residual: expected rows of the input's shape [3]"),
        "{got}"
    );
    let got = error(
        Sequential::new().then(Sequential::new().then(Linear::new(0))),
        &[2],
    );
    assert!(
        got.starts_with("0.0 (") && got.contains("at least one input, and at least one output"),
        "{got}"
    );
    let got = error(Sequential::new().then(Linear::new(3)), &[]);
    assert!(got.contains("got x [rows]"), "{got}");
    let got = error(Sequential::new().then(Dropout::new(1.0)), &[2]);
    assert!(
        got.contains(
            "expected a probability of at least 0 and less than 1, not 1, got x [rows, 2]"
        ),
        "{got}"
    );
    let tie = Tie::new();
    let got = error(
        Sequential::new()
            .then(Linear::new(3).tied(&tie))
            .then(Linear::new(3).tied(&tie)),
        &[2],
    );
    assert!(
        got.contains("1.weight: expected shape [3, 2], to be tied to 0.weight, got [3, 3]"),
        "{got}"
    );
    let got = error(Sequential::new().then(Linear::new(usize::MAX / 2)), &[4]);
    assert!(got.contains("fewer than memory could hold"), "{got}");
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    let mut bench = Bench::new(
        Sequential::new().then(Linear::new(3)),
        &[2],
        DType::F32,
        &|_| false,
    );
    let mut error = |x: Tensor| {
        let forward = |model: &Model, pass: &mut Pass<'_>, _: &Tensor| model.forward(pass, &x);
        bench.pass(false, WHOLE, forward).0.unwrap_err().to_string()
    };
    let text = error(randn(&[5, 3], DType::F32, 1));
    assert!(
        text.contains(
            "model: expected rows of [2] in f32, as it was built for, got f32[5, 3] on cpu"
        ),
        "{text}"
    );
    assert!(error(randn(&[5, 2], DType::F64, 1)).contains("got f64[5, 2] on cpu"));
    assert!(error(randn(&[2], DType::F32, 1)).contains("got f32[2] on cpu"));
}
