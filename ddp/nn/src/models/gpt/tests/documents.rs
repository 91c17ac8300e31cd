//! Several documents in one row, and rows that are padded.

use super::*;

/// The sum of the losses of these rows of tokens, and the gradients of all parameters.
fn loss_and_gradients(spec: &GptSpec, inputs: &[i64], targets: &[i64]) -> (f64, Vec<f64>) {
    let context = [spec.context];
    let shape = DataShape {
        documents: true,
        ..shape(&context)
    };
    let layers = Box::new(spec.layers(&shape).unwrap());
    let model = Model::new(layers, &context, DType::F64, Device::Cpu, 1, &|_| false).unwrap();
    of_rows(&model, spec.context, inputs, targets)
}

/// The same of a model, for rows of so many tokens.
fn of_rows(model: &Model, length: usize, inputs: &[i64], targets: &[i64]) -> (f64, Vec<f64>) {
    let of =
        |values: &[i64]| Tensor::from_slice(values, &[values.len() / length, length], Device::Cpu);
    let stats = Tensor::zeros(&[crate::loss::STATS], DType::F64, Device::Cpu).unwrap();
    in_pass(model, true, |mut pass| {
        let y = model.forward(&mut pass, &of(inputs).unwrap()).unwrap();
        let of_loss = [&y, &of(targets).unwrap(), &stats];
        let loss = CrossEntropy::default();
        let dy = model.loss_gradient(&mut pass, &loss, of_loss).unwrap();
        model.backward(&mut pass, &dy).unwrap();
    });
    let gradients = model.params.gradients().to_vec().unwrap();
    (stats.index(0).unwrap().item().unwrap(), gradients)
}

/// Also where backward computes blocks again.
#[test]
fn documents_in_one_row_have_the_loss_and_the_gradients_that_they_have_in_rows_of_their_own() {
    const LENGTHS: [usize; 3] = [7, 1, 12];
    let token = |index: usize| (index * 5 % 7) as i64;
    for recompute in [RecomputeKind::None, RecomputeKind::Block] {
        let spec = GptSpec {
            layers: 2,
            context: 20,
            position: PositionKind::Rope,
            recompute,
            ..tiny()
        };
        let (mut packed, mut alone) = (Vec::new(), Vec::new());
        let (mut packed_targets, mut alone_targets) = (Vec::new(), Vec::new());
        for length in LENGTHS {
            let begin = packed.len();
            let tokens: Vec<i64> = (begin..begin + length).map(token).collect();
            let targets = (begin..begin + length).map(|index| token(3 * index + 1));
            packed.extend(tokens.iter().map(|token| token | ((begin as i64) << 32)));
            packed_targets.extend(targets.clone());
            alone.extend(tokens.iter().copied().chain(vec![0; 20 - length]));
            alone_targets.extend(targets.chain(vec![-100; 20 - length]));
        }
        let (loss, gradients) = loss_and_gradients(&spec, &packed, &packed_targets);
        let (expected, expected_gradients) = loss_and_gradients(&spec, &alone, &alone_targets);
        assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
        let pairs = gradients.iter().zip(&expected_gradients);
        let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // Turned by other angles, queries and keys round otherwise.
        assert!(apart < 1e-7, "{apart}");
        let joined: Vec<i64> = packed.iter().map(|code| code & 0xffff_ffff).collect();
        let (other, _) = loss_and_gradients(&spec, &joined, &packed_targets);
        assert!(
            (other - expected).abs() > 1e-3,
            "one document: {other} {expected}"
        );
    }
    let learned = GptSpec {
        context: 20,
        ..tiny()
    };
    let shape = DataShape {
        documents: true,
        ..shape(&[20])
    };
    let layers = Box::new(learned.layers(&shape).unwrap());
    let error = Model::new(layers, &[20], DType::F64, Device::Cpu, 1, &|_| false).unwrap_err();
    assert!(
        error.to_string().contains("expected rotary positions"),
        "{error}"
    );
}

#[test]
fn rows_without_the_end_of_their_padding_have_the_loss_and_the_gradients_of_padded_ones() {
    let size = GptSpec {
        layers: 2,
        context: 20,
        ..tiny()
    };
    let recomputed = GptSpec {
        recompute: RecomputeKind::Block,
        ..size.clone()
    };
    for spec in [size.clone(), recomputed]
        .into_iter()
        .chain(families(&size))
    {
        let layers = Box::new(spec.layers(&shape(&[20])).unwrap());
        let model = Model::new(layers, &[20], DType::F64, Device::Cpu, 1, &|_| false).unwrap();
        let row = |length: usize, of: &dyn Fn(usize) -> i64, padding: i64| -> Vec<i64> {
            // The second of two rows is shorter.
            let rows = [9, 4].map(|used| (0..length).map(move |at| (at, at < used)));
            let all = rows.into_iter().flatten();
            all.map(|(at, is_used)| if is_used { of(at) } else { padding })
                .collect()
        };
        let both = |length: usize| {
            let inputs = row(length, &|at| (at * 5 % 7) as i64, 3);
            let targets = row(length, &|at| (at * 3 % 7) as i64, -100);
            of_rows(&model, length, &inputs, &targets)
        };
        let (expected, expected_gradients) = both(20);
        for length in [9, 12, 20] {
            // Lengths take turns, and what one leaves in memory changes no other.
            let (loss, gradients) = both(length);
            assert!(
                (loss - expected).abs() < 1e-12,
                "{length} {loss} {expected}"
            );
            let pairs = gradients.iter().zip(&expected_gradients);
            let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(apart < 1e-12, "{spec:?}: {length} {apart}");
        }
        assert!(expected_gradients.iter().any(|one| one.abs() > 1e-3));
    }
}
