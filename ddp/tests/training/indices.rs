//! Values that choose others: indices, tokens, masks of positions.

use ddp::models::Model;
use ddp::nn::check::DerivativeCheck;
use ddp::nn::{Decoder, Embedding, Formula, Head, Init, Module, Scope, Sequential, Var};
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
    let alone: Of = |m, x| m.indices(600) + x * 0.0;
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
    assert_eq!(sums_of(|_, x| x.reshape(&[2, 3]).largest(-1)), [9.0, 4.0]);
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let chosen: Of = |m, x| table(m).rows(&x.slice(1, 1..4));
        let expected = [
            [0.0, 1.0, 50.0, 51.0, 30.0, 31.0],
            [40.0, 41.0, 0.0, 1.0, 0.0, 1.0],
        ];
        assert_eq!(of_tokens(chosen, dtype), expected.concat());
        // The mean over tokens that are not padding.
        let masked: Of = |m, x| {
            let is_token = (1.0 - x.equal(&x.number(0.0))).reshape(&[6, 1]);
            let all = table(m).rows(x) * &is_token;
            (all.sum(1) / is_token.sum(1)).reshape(&[2])
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
        let indices = m.numbers(&[3.0, 0.0, 3.0], &[1, 3]);
        x.gather(1, &indices)
    };
    let columns: Of = |m, x| {
        let indices = m.numbers(&[1.0, 0.0, 1.0, 1.0], &[1, 4, 1]);
        x.gather(-1, &indices)
    };
    let elements: Of = |m, x| {
        let indices = m.numbers(&[3.0, 0.0, 2.0, 1.0], &[1, 2, 2]);
        x.gather(1, &indices)
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
        let chosen = (table * 2.0).rows(&indices);
        chosen.sum(-1).reshape(&[4, 2]) * x
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
    let other: Of = |m, x| x.gather(1, &m.indices(3).reshape(&[1, 3, 1]));
    let text = refusal(Formula(other), &[4]);
    assert!(
        text.contains("gather: expected indices of the same shape"),
        "{text}"
    );
    let outside: Of = |m, x| {
        let indices = m.numbers(&[0.0, 4.0], &[1, 2]);
        x.gather(1, &indices)
    };
    let between: Of = |m, x| {
        let indices = m.numbers(&[0.0, 0.5], &[1, 2]);
        x.gather(1, &indices)
    };
    for (formula, dtype) in [
        (outside, DType::F32),
        (between, DType::F32),
        (between, DType::BF16),
    ] {
        let layers = Box::new(Sequential::new().then(Formula(formula)));
        let model = Model::new(layers, &[4], dtype, Device::Cpu, 1, &|_| false).unwrap();
        let x = Tensor::zeros(&[2, 4], DType::F32, Device::Cpu).unwrap();
        let text = try_rows(&model, &x).unwrap_err().to_string();
        assert!(
            text.contains("indices.rs:") && text.contains("gather: expected whole indices below 4"),
            "{text}"
        );
    }
    // An embedding takes numbers, too.
    let between: Of = |m, x| m.embedding("e", &(x + 0.5), 7, 3);
    let layers = Box::new(Sequential::new().then(Formula(between)));
    let model = Model::new(layers, &[4], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let x = Tensor::zeros(&[2, 4], DType::F32, Device::Cpu).unwrap();
    assert!(try_rows(&model, &x).is_err());
}

/// The gradient of a weight that a matmul makes is f32, which the next matmul reads rounded.
#[test]
fn computed_weights_and_tables_are_trained_in_bf16() {
    let formula: Of = |m, x| {
        let init = Init::Normal { deviation: 1.0 };
        let [a, b] = ["a", "b"].map(|name| m.parameter(name, &[4, 4], init));
        let weight = a.matmul(&b);
        let indices = m.numbers(&[1.0, 0.0], &[1, 2]);
        x.linear(&weight, None) + weight.rows(&indices).sum(1).reshape(&[4])
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

fn passed(formula: Of, dtype: DType, x: &Tensor) -> [Vec<f64>; 2] {
    let layers = Box::new(Sequential::new().then(Formula(formula)));
    let row = &x.shape()[1..];
    let model = Model::new(layers, row, dtype, Device::Cpu, 1, &|_| false).unwrap();
    let [y, dx] = try_rows(&model, &x.to_dtype(dtype).unwrap()).unwrap();
    assert_eq!([y.dtype(), dx.dtype()], [dtype; 2]);
    [y, dx].map(|it| it.to_dtype(DType::F64).unwrap().to_vec().unwrap())
}

/// Backward computes values again. They were unrounded, and compared with rounded ones.
#[test]
fn the_gradient_of_the_largest_is_its_own_in_bf16() {
    let formulas: [Of; 7] = [
        |m, x| {
            let h = m.linear("l", &x.reshape(&[5, 1]), 24).gelu();
            let both = h.maximum(&h).largest(-1) + &h;
            both.mean(-1).reshape(&[5])
        },
        |_, x| (x * 1.1).largest(-1),
        |_, x| x.silu().largest(-1),
        |_, x| {
            let h = x * 1.1;
            &h / h.abs().largest(-1)
        },
        // The value is in memory, too, for a matmul.
        |m, x| {
            let h = x.sigmoid();
            let init = Init::Constant(0.1);
            h.largest(-1) + h.matmul(&m.parameter("w", &[5, 1], init))
        },
        |m, x| {
            let p = (x * 1.1).softmax(-1);
            let kept = p.equal(&p.largest(-1)) * &p * m.linear("e", x, 5);
            kept.sum(-1)
        },
        |m, x| m.recompute(|_| x.sigmoid().largest(-1)) * x,
    ];
    let x = [0.3f32, -1.7, 2.2, 0.9, 1.3, -0.4, 0.25, 0.8, -2.5, 0.7];
    let x = Tensor::from_slice(&x, &[2, 5], Device::Cpu).unwrap();
    for (at, formula) in formulas.into_iter().enumerate() {
        let [exact, rounded] = [DType::F32, DType::BF16].map(|dtype| passed(formula, dtype, &x));
        for (exact, rounded) in exact.iter().zip(&rounded) {
            let size = exact.iter().fold(0.1f64, |a, b| a.max(b.abs()));
            for (exact, rounded) in exact.iter().zip(rounded) {
                let apart = (exact - rounded).abs() / size;
                assert!(apart < 0.03, "formula {at}: {exact}, in bf16 {rounded}");
            }
        }
    }
}

/// What is computed again is what forward had in bf16, also where that was rounded to memory.
#[test]
fn recomputed_values_have_the_same_bits_in_bf16() {
    fn body(m: &mut Scope<'_>, x: &Var) -> Var {
        let h = (x * 1.1).sigmoid();
        let p = m.linear("up", &h, 5).softmax(-1);
        let kept = p.equal(&p.largest(-1)) * &p + h.largest(-1);
        m.linear("down", &(kept * h), 5)
    }
    let x = [0.3f32, -1.7, 2.2, 0.9, 1.3, -0.4, 0.25, 0.8, -2.5, 0.7];
    let x = Tensor::from_slice(&x, &[2, 5], Device::Cpu).unwrap();
    let kept = passed(body, DType::BF16, &x);
    assert_eq!(
        kept,
        passed(|m, x| m.recompute(|m| body(m, x)), DType::BF16, &x)
    );
    assert!(kept[1].iter().any(|it| *it != 0.0));
}

/// Small numbers beside them, and tables of them, round no index.
#[test]
fn indices_beside_numbers_that_bf16_holds_are_exact() {
    let one: [Of; 7] = [
        |m, x| {
            (m.indices(20).reshape(&[20, 1]) * 30.0 + m.indices(30)).reshape(&[1, 600]) + x * 0.0
        },
        |m, x| m.indices(600).maximum(&m.numbers(&[256.0], &[1])) + x * 0.0,
        |m, x| (m.indices(600) + m.numbers(&[256.0], &[1])) + x * 0.0,
        |m, x| {
            let zeros = m.numbers(&[0.0], &[1]).expand(&[1]);
            Var::concatenate(&[&m.indices(599), &zeros], 0) + x * 0.0
        },
        |m, x| m.indices(600).rows(&m.indices(600)) + x * 0.0,
        |_, x| x.number(301.0).expand(&[600]) + x * 0.0,
        |m, x| {
            let wide = m.indices(600).reshape(&[1, 600]);
            wide.gather(1, &wide) + x * 0.0
        },
    ];
    let x = Tensor::zeros(&[2, 600], DType::F32, Device::Cpu).unwrap();
    for (at, formula) in one.into_iter().enumerate() {
        // As a mask of where they are equal to themselves in f32.
        let exact = passed(formula, DType::F32, &x)[0].clone();
        let layers = Formula(move |m: &mut Scope<'_>, x: &Var| {
            let here = formula(m, &x.without_gradient());
            let own = m.numbers(&exact[..600], &[600]);
            here.equal(&own) + x * 0.0
        });
        let model = Sequential::new().then(layers);
        let model = Model::new(
            Box::new(model),
            &[600],
            DType::BF16,
            Device::Cpu,
            1,
            &|_| false,
        );
        let [y, _] = of_rows(&model.unwrap(), &x.to_dtype(DType::BF16).unwrap());
        let wrong = y.iter().position(|it| *it != 1.0);
        assert_eq!(wrong, None, "formula {at}");
    }
}

#[test]
fn gathered_elements_of_long_rows_are_right_in_bf16() {
    let formula: Of = |m, x| {
        let index = m.numbers(&[50.0, 7.0, 99.0, 0.0, 31.0, 2.0, 64.0, 98.0], &[1, 2, 4]);
        x.gather(1, &index)
    };
    let x: Vec<f32> = (0..1600).map(|at| (at * 37 % 256) as f32).collect();
    let x = Tensor::from_slice(&x, &[4, 100, 4], Device::Cpu).unwrap();
    assert_eq!(
        passed(formula, DType::F32, &x),
        passed(formula, DType::BF16, &x)
    );
    let own: Of = |_, x| x.gather(1, &(x * 0.0 + 1.0));
    // Row 1 of four elements in each of the first.
    assert_eq!(
        passed(own, DType::F32, &x)[0][..4],
        [148.0, 185.0, 222.0, 3.0]
    );
}

/// Kernels read what is chosen among constants in the layers' dtype.
#[test]
fn masks_of_constants_are_read_by_kernels_in_bf16() {
    let formula: Of = |m, x| {
        let mask = x
            .less(&x.number(0.0))
            .select(&x.number(1.0), &x.number(0.0));
        let mixed =
            m.linear("l", &mask, 5) + mask.matmul(&m.parameter("w", &[5, 5], Init::Constant(0.1)));
        let normed = m.layer_norm("n", &mask) + x.pow(0.0);
        m.dropout("d", &normed, 0.1) + mixed * x
    };
    let alone: Of = |_, x| {
        x.less(&x.number(0.0))
            .select(&x.number(1.0), &x.number(0.3))
            + x * 0.0
    };
    let counted: Of = |m, x| {
        let one_hot = x.without_gradient().reshape(&[5, 1]).equal(&m.indices(300));
        one_hot.sum(1).reshape(&[300]) * x.sum(-1)
    };
    for rows in [1, 3] {
        let x = Tensor::ones(&[rows, 5], DType::F32, Device::Cpu).unwrap();
        for formula in [formula, alone, counted] {
            passed(formula, DType::BF16, &x);
        }
    }
}

#[test]
fn tokens_are_chosen_and_choose() {
    let chosen: Of = |m, x| x.gather(1, &m.numbers(&[5.0, 0.0], &[1, 2]));
    let of_chosen: Of = |m, x| {
        let first = m.numbers(&[1.0], &[1, 1]);
        let all = Var::concatenate(&[&first, x], 1);
        m.indices(1000).rows(&(all + 700.0)).slice(1, 0..2)
    };
    for dtype in [DType::F32, DType::BF16] {
        assert_eq!(of_tokens(chosen, dtype), [1.0, 6.0, 0.0, 2.0]);
    }
    assert_eq!(
        of_tokens(of_chosen, DType::F32),
        [701.0, 706.0, 701.0, 702.0]
    );
    let embedded: Of = |m, x| m.embedding("e", &(x * 0.0 - 0.9), 7, 3);
    let layers = Box::new(Sequential::new().then(OfTokens(embedded)));
    let model = Model::new(layers, &[6], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
    let x = Tensor::zeros(&[2, 6], DType::I64, Device::Cpu).unwrap();
    assert!(try_rows(&model, &x).is_err(), "no token is below 0");
}

/// Tokens 0 and 1 alone did not tell them from models that attention alone lets see earlier tokens.
#[test]
fn formulas_that_see_earlier_tokens_generate_no_texts() {
    let previous: Of = |m, x| {
        let n = x.size(1);
        let before = x.slice(1, 0..n - 1).pad(1, 1, 0);
        let vectors = m.embedding("e", x, 7, 3) + m.embedding("before", &before, 7, 3);
        m.layer("head", &vectors, Head::new(7))
    };
    let counted: Of = |m, x| {
        let n = x.size(1);
        let [row, column] = [m.indices(n).reshape(&[n, 1]), m.indices(n)];
        let is_token = (1.0 - x.equal(&x.number(0.0))).reshape(&[1, n]);
        let count = (column.less_equal(&row) * is_token).sum(-1);
        let vectors = m.embedding("e", x, 7, 3) + count;
        m.layer("head", &vectors, Head::new(7))
    };
    let plain: Of = |m, x| {
        let is_token = (1.0 - x.equal(&x.number(0.0))).reshape(&[x.size(1), 1]);
        let vectors = m.embedding("e", x, 7, 3) * is_token;
        m.layer("head", &vectors, Head::new(7))
    };
    for (formula, generates) in [(previous, false), (counted, false), (plain, true)] {
        let layers = Box::new(Sequential::new().then(OfTokens(formula)));
        let model = Model::new(layers, &[6], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
        assert_eq!(Decoder::new(&model, 6).is_ok(), generates);
    }
}

#[test]
fn rows_of_several_documents_are_not_read_as_numbers() {
    let formula: Of = |m, x| {
        let vectors = m.layer("e", x, Embedding::new(7, 3).of_documents());
        let is_token = (1.0 - x.equal(&x.number(0.0))).reshape(&[6, 1]);
        vectors * is_token
    };
    let text = refusal(OfTokens(formula), &[6]);
    assert!(
        text.contains("indices.rs:") && text.contains("rows of one document"),
        "{text}"
    );
}
