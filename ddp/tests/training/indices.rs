//! Values that choose others: indices, tokens, masks of positions.

use ddp::models::Model;
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{Formula, Init, Module, Scope, Sequential, Var};
use ddp_kernels::{DType, Device, Seed, Tensor};

use crate::forward::{of_rows, try_rows};

type Of = fn(&mut Scope<'_>, &Var) -> Var;

/// A model of tokens.
#[derive(Debug)]
struct OfTokens(Of);

impl Module for OfTokens {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        (self.0)(m, x)
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

fn refusal(module: impl Module, row: &[usize]) -> String {
    let layers = Sequential::new().then(module);
    let built = layers.build(row, Device::Cpu, Seed(1));
    built.unwrap_err().to_string()
}

fn output(formula: Of, dtype: DType, x: &Tensor) -> Vec<f64> {
    let layers = Box::new(Sequential::new().then(Formula(formula)));
    let row = &x.shape()[1..];
    let model = Model::new(layers, row, dtype, Device::Cpu, 1, &|_| false).unwrap();
    let [y, _] = of_rows(&model, x);
    y
}

/// bf16 holds whole numbers up to 256: above, two positions were one.
#[test]
fn positions_of_long_rows_differ_in_bf16() {
    let same: Of = |m, x| {
        let at = m.indices(600);
        let same = at.reshape(&[600, 1]).equal(&at).sum(-1).reshape(&[1, 600]);
        x * 0.0 + same
    };
    let x = Tensor::zeros(&[1, 600], DType::F32, Device::Cpu).unwrap();
    assert_eq!(output(same, DType::BF16, &x), [1.0; 600]);
}

/// Indices stay whole through what chooses among them; a matmul reads them rounded.
#[test]
fn the_index_of_the_largest_is_exact_in_bf16() {
    let largest: Of = |m, x| {
        let none = x.number(1e9);
        let at = x.equal(&x.largest(-1)).select(&m.indices(600), &none);
        let chosen = at.smallest(-1).equal(&m.indices(600));
        x * 0.0 + chosen
    };
    let mut row = [0.0f32; 600];
    row[513] = 2.0;
    let x = Tensor::from_slice(&row, &[1, 600], Device::Cpu).unwrap();
    let chosen = output(largest, DType::BF16, &x);
    assert_eq!(chosen[513], 1.0);
    assert_eq!(chosen.iter().sum::<f64>(), 1.0);
    let rounded: Of = |m, x| x.matmul(&m.indices(600).reshape(&[600, 1]));
    assert_eq!(output(rounded, DType::BF16, &x), [1024.0]);
    let alone: Of = |m, x| m.indices(600).reshape(&[1, 600]).expand(&x.shape());
    let alone = output(alone, DType::BF16, &x);
    assert_eq!(alone[255..260], [255.0, 256.0, 256.0, 258.0, 260.0]);
}

/// The output for rows of six tokens, which are 6, 0, 5, 3, 3, 1 and 2, 4, 0, 0, 0, 0.
fn of_tokens(formula: Of, dtype: DType) -> Vec<f64> {
    let layers = Box::new(Sequential::new().then(OfTokens(formula)));
    let model = Model::new(layers, &[6], dtype, Device::Cpu, 1, &|_| false).unwrap();
    let tokens = [6i64, 0, 5, 3, 3, 1, 2, 4, 0, 0, 0, 0];
    of_rows(
        &model,
        &Tensor::from_slice(&tokens, &[2, 6], Device::Cpu).unwrap(),
    )[0]
    .clone()
}

/// 10 times the row's number, and the column.
fn table(m: &mut Scope<'_>) -> Var {
    let tens: Vec<f64> = (0..7).map(|row| 10.0 * f64::from(row)).collect();
    let columns = m.indices(2);
    m.numbers(&tens, &[7, 1]) + columns
}

/// All were refused: a token was for an embedding alone.
#[test]
fn tokens_are_sliced_compared_and_counted() {
    assert_eq!(sums_of(|_, x| x * 2.0 + 1.0), [42.0, 18.0]);
    assert_eq!(sums_of(|_, x| x.equal(&x.number(0.0))), [1.0, 4.0]);
    assert_eq!(
        sums_of(|_, x| x.reshape(&[x.size(0), 2, 3]).largest(-1)),
        [9.0, 4.0]
    );
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let chosen: Of = |m, x| table(m).rows(&x.slice(1, 1..4));
        let expected = [
            [0.0, 1.0, 50.0, 51.0, 30.0, 31.0],
            [40.0, 41.0, 0.0, 1.0, 0.0, 1.0],
        ];
        assert_eq!(of_tokens(chosen, dtype), expected.concat());
        // The mean of what is not padding.
        let masked: Of = |m, x| {
            let is_token = (1.0 - x.equal(&x.number(0.0))).reshape(&[x.size(0), 6, 1]);
            let all = table(m).rows(x) * &is_token;
            (all.sum(1) / is_token.sum(1)).reshape(&[x.size(0), 2])
        };
        assert_eq!(of_tokens(masked, dtype), [36.0, 37.0, 30.0, 31.0]);
    }
    let layer: Of = |m, x| m.embedding("e", &x.slice(1, 2..5), 7, 3);
    let whole: Of = |m, x| m.embedding("e", x, 7, 3).slice(1, 2..5);
    assert_eq!(of_tokens(layer, DType::F32), of_tokens(whole, DType::F32));

    fn sums_of(formula: Of) -> Vec<f64> {
        let rows = of_tokens(formula, DType::F32);
        let of_row = rows.chunks(rows.len() / 2);
        of_row.map(|row| row.iter().sum()).collect()
    }
}

/// As `torch.gather` of x (3, 4, 2), and with indices that choose whole rows.
#[test]
fn gathered_elements_and_rows_are_pytorchs() {
    let x: Vec<f32> = (0..24).map(|at| at as f32).collect();
    let x = Tensor::from_slice(&x, &[3, 4, 2], Device::Cpu).unwrap();
    let at = |batch: usize, row: usize, column: usize| (batch * 8 + row * 2 + column) as f64;
    let rows: Of = |m, x| {
        let indices = m.numbers(&[3.0, 0.0, 3.0], &[1, 3]).expand(&[x.size(0), 3]);
        x.gather(1, &indices)
    };
    let columns: Of = |m, x| {
        let indices = m.numbers(&[1.0, 0.0, 1.0, 1.0], &[1, 4, 1]);
        x.gather(-1, &indices.expand(&[x.size(0), 4, 1]))
    };
    let elements: Of = |m, x| {
        let indices = m.numbers(&[3.0, 0.0, 2.0, 1.0], &[1, 2, 2]);
        x.gather(1, &indices.expand(&[x.size(0), 2, 2]))
    };
    // Each row's own: the place of its largest.
    let own: Of = |m, x| {
        let largest = x.equal(&x.largest(1));
        let places = m.indices(4).reshape(&[4, 1]);
        let places = largest.select(&places, &x.number(4.0)).smallest(1);
        x.gather(1, &places)
    };
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = x.to_dtype(dtype).unwrap();
        let all = |of: &dyn Fn(usize) -> Vec<f64>| (0..3).flat_map(of).collect::<Vec<f64>>();
        let expected = all(&|b| [3, 0, 3].map(|row| [at(b, row, 0), at(b, row, 1)]).concat());
        assert_eq!(output(rows, dtype, &x), expected);
        let expected = all(&|b| vec![at(b, 0, 1), at(b, 1, 0), at(b, 2, 1), at(b, 3, 1)]);
        assert_eq!(output(columns, dtype, &x), expected);
        let expected = all(&|b| vec![at(b, 3, 0), at(b, 0, 1), at(b, 2, 0), at(b, 1, 1)]);
        assert_eq!(output(elements, dtype, &x), expected);
        assert_eq!(
            output(own, dtype, &x),
            all(&|b| vec![at(b, 3, 0), at(b, 3, 1)])
        );
    }
    let weighted: [Of; 4] = [rows, columns, elements, |m, x| {
        let table = m.parameter("table", &[5, 2, 3], Init::Normal { deviation: 1.0 });
        let indices = m.numbers(&[4.0, 0.0, 4.0, 1.0], &[1, 4]);
        let chosen = (table * 2.0).rows(&indices.expand(&[x.size(0), 4]));
        chosen.sum(-1).reshape(&x.shape()) * x
    }];
    for formula in weighted {
        let worst = DerivativeCheck::new(&[4, 2])
            .worst(Formula(formula))
            .unwrap();
        assert!(worst.error() < 1e-7, "{worst:?}");
    }
}

#[test]
fn what_cannot_be_gathered_is_refused_with_its_line() {
    let of_batch: Of = |m, x| {
        let indices = m.numbers(&[0.0, 0.0], &[2]);
        x.gather(0, &indices.slice(0, 0..1)).expand(&x.shape())
    };
    let text = refusal(Formula(of_batch), &[4]);
    assert!(
        text.contains("gather: expected a result for each row"),
        "{text}"
    );
    let other: Of = |m, x| x.gather(1, &m.indices(3).reshape(&[1, 3]));
    let text = refusal(Formula(other), &[4]);
    assert!(
        text.contains("gather: expected indices of the same shape"),
        "{text}"
    );
    let outside: Of = |m, x| {
        let indices = m.numbers(&[0.0, 4.0], &[1, 2]);
        x.gather(1, &indices.expand(&[x.size(0), 2]))
    };
    let layers = Box::new(Sequential::new().then(Formula(outside)));
    let model = Model::new(layers, &[4], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let x = Tensor::zeros(&[2, 4], DType::F32, Device::Cpu).unwrap();
    let text = try_rows(&model, &x).unwrap_err().to_string();
    assert!(
        text.contains("indices.rs:") && text.contains("got -1"),
        "{text}"
    );
}

/// The gradient of a weight that a matmul makes is f32, which the next matmul reads rounded.
#[test]
fn computed_weights_and_tables_are_trained_in_bf16() {
    let formula: Of = |m, x| {
        let init = Init::Normal { deviation: 1.0 };
        let [a, b] = ["a", "b"].map(|name| m.parameter(name, &[4, 4], init));
        let weight = a.matmul(&b);
        let indices = m.numbers(&[1.0, 0.0], &[1, 2]).expand(&[x.size(0), 2]);
        x.linear(&weight, None) + weight.rows(&indices).sum(1).reshape(&[x.size(0), 4])
    };
    let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[1, 4], Device::Cpu).unwrap();
    let [exact, rounded] = [DType::F32, DType::BF16].map(|dtype| {
        let layers = Box::new(Sequential::new().then(Formula(formula)));
        let model = Model::new(layers, &[4], dtype, Device::Cpu, 1, &|_| false).unwrap();
        of_rows(&model, &x);
        let gradients = model.params.gradients().to_vec::<f32>().unwrap();
        // Without what only pads the memory.
        gradients
            .into_iter()
            .filter(|it| *it != 0.0)
            .collect::<Vec<_>>()
    });
    let far = exact
        .iter()
        .zip(&rounded)
        .map(|(a, b)| (a - b).abs() / a.abs().max(1.0));
    assert!(far.fold(0.0, f32::max) < 0.05, "{exact:?} {rounded:?}");
    assert_eq!([exact.len(), rounded.len()], [32; 2]);
}
