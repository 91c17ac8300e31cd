//! Attention by its formula is the fused operation, where it is one.

use ddp::models::Model;
use ddp::nn::{Formula, Pass, PassOptions, Saved, Scope, Scratch, Sequential, Var};
use ddp_kernels::{DType, Device, Random, Tensor};

const TIME: usize = 96;
const HEADS: usize = 2;
const WIDTH: usize = 8;

type Mask = fn(&mut Scope<'_>, Var) -> Var;

/// How scores are made of q and k (B, H, T, D), and masked.
#[derive(Clone, Copy)]
struct Way {
    scores: fn(&Var, &Var) -> Var,
    mask: Mask,
    is_split: bool,
}

const PLAIN: Way = Way {
    scores: |q, k| q.matmul(&k.transpose(-1, -2)) / 2.0,
    mask: |_, scores| scores,
    is_split: true,
};

fn rows_and_columns(m: &mut Scope<'_>) -> [Var; 2] {
    let at = m.indices(TIME);
    [at.reshape(&[TIME, 1]), at]
}

fn attention(m: &mut Scope<'_>, x: &Var, way: Way, is_plain: bool) -> Var {
    let parts = if way.is_split {
        m.linear("qkv", x, 3 * WIDTH).split(-1, &[WIDTH; 3])
    } else {
        ["q", "k", "v"]
            .map(|name| m.linear(name, x, WIDTH))
            .to_vec()
    };
    let of_heads = |part: &Var| {
        let heads = part.reshape(&[TIME, HEADS, WIDTH / HEADS]);
        heads.permute(&[0, 2, 1, 3])
    };
    let [q, k, v] = [0, 1, 2].map(|at| of_heads(&parts[at]));
    let scores = (way.mask)(m, (way.scores)(&q, &k));
    let weights = scores.softmax(-1);
    // Something in between, so that it is what is written.
    let weights = if is_plain { weights * 1.0 } else { weights };
    let mixed = weights.matmul(&v).permute(&[0, 2, 1, 3]);
    m.linear("out", &mixed.reshape(&[TIME, WIDTH]), WIDTH)
}

/// The output, the gradients of the input and of parameters, and the bytes of activations.
fn passed(way: Way, is_plain: bool, dtype: DType, rows: usize) -> ([Vec<f64>; 3], usize) {
    let formula = move |m: &mut Scope<'_>, x: &Var| attention(m, x, way, is_plain);
    let layers = Box::new(Sequential::new().then(Formula(formula)));
    let model = Model::new(layers, &[TIME, WIDTH], dtype, Device::Cpu, 1, &|_| false).unwrap();
    let draw = |seed: u64| {
        let shape = [rows, TIME, WIDTH];
        let drawn = Tensor::randn(&shape, DType::F64, Device::Cpu, &mut Random::new(seed));
        drawn.unwrap().to_dtype(dtype).unwrap()
    };
    let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 1,
        position: &position,
    };
    let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
    let mut ready = |_| Ok(());
    let mut pass = Pass::new(&model.params, &mut scratch, &mut saved, options, &mut ready);
    let y = model.forward(&mut pass, &draw(3)).unwrap();
    let dx = model
        .backward_to_input(&mut pass, &draw(4))
        .unwrap()
        .unwrap();
    let all = [&y, &dx, model.params.gradients()];
    let all = all.map(|it| it.to_dtype(DType::F64).unwrap().to_vec().unwrap());
    drop((y, dx));
    (all, scratch.bytes())
}

fn ways() -> Vec<(&'static str, bool, Way)> {
    let masked = |mask: Mask| Way { mask, ..PLAIN };
    vec![
        ("all tokens", true, PLAIN),
        (
            "q, k and v of their own",
            true,
            Way {
                is_split: false,
                ..PLAIN
            },
        ),
        (
            "k permuted at once, q scaled before",
            true,
            Way {
                scores: |q, k| (q * 0.5).matmul(&k.transpose(1, 2).permute(&[0, 2, 3, 1])),
                ..PLAIN
            },
        ),
        (
            "what may be seen, selected",
            true,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                column
                    .less_equal(&row)
                    .select(&scores, &scores.number(f64::NEG_INFINITY))
            }),
        ),
        (
            "what is later, filled",
            true,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                let later = row.less(&column).reshape(&[1, 1, TIME, TIME]);
                later.select(&scores.number(-1e9), &scores)
            }),
        ),
        (
            "what is later, added",
            true,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                scores + row.less(&column) * -1e9
            }),
        ),
        (
            "a triangle of numbers",
            true,
            masked(|m, scores| {
                let hidden = |at: usize| {
                    if at % TIME > at / TIME {
                        f64::NEG_INFINITY
                    } else {
                        0.0
                    }
                };
                let all: Vec<f64> = (0..TIME * TIME).map(hidden).collect();
                scores + m.numbers(&all, &[TIME, TIME])
            }),
        ),
        (
            "a larger triangle, of which a part is filled where it is 0",
            true,
            masked(|m, scores| {
                let time = TIME + 5;
                let all: Vec<f64> = (0..time * time)
                    .map(|at| f64::from(u8::from(at % time <= at / time)))
                    .collect();
                let all = m.numbers(&all, &[1, 1, time, time]);
                let own = all.slice(2, 0..TIME).slice(3, 0..TIME);
                let hidden = own.equal(&own.number(0.0));
                hidden.select(&scores.number(f64::NEG_INFINITY), &scores)
            }),
        ),
        (
            "the last seven tokens",
            true,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                let before = row - column;
                let near = before.less(&before.number(7.0)) * (-&before).less(&before.number(1.0));
                near.select(&scores, &scores.number(-1e9))
            }),
        ),
        (
            "itself excluded",
            false,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                column.less(&row).select(&scores, &scores.number(-1e9))
            }),
        ),
        (
            "what is later alone",
            false,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                row.less_equal(&column)
                    .select(&scores, &scores.number(-1e9))
            }),
        ),
        (
            "a small penalty",
            false,
            masked(|m, scores| {
                let [row, column] = rows_and_columns(m);
                scores + row.less(&column) * -2.0
            }),
        ),
        (
            "a triangle with a hole",
            false,
            masked(|m, scores| {
                let hidden = |at: usize| {
                    if at % TIME > at / TIME || at == 5 * TIME {
                        -1e9
                    } else {
                        0.0
                    }
                };
                let all: Vec<f64> = (0..TIME * TIME).map(hidden).collect();
                scores + m.numbers(&all, &[TIME, TIME])
            }),
        ),
        (
            "a bias that is learned",
            false,
            masked(|m, scores| {
                let bias = m.parameter(
                    "bias",
                    &[TIME, TIME],
                    ddp::nn::Init::Normal { deviation: 1.0 },
                );
                scores + bias
            }),
        ),
    ]
}

#[test]
fn attention_by_its_formula_is_the_fused_one() {
    for (name, is_fused, way) in ways() {
        for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 0.06)] {
            for rows in [1, 3] {
                let (fused, bytes) = passed(way, false, dtype, rows);
                let (plain, plain_bytes) = passed(way, true, dtype, rows);
                for (fused, plain) in fused.iter().zip(&plain) {
                    let size = plain.iter().fold(1.0f64, |a, b| a.max(b.abs()));
                    let pairs = fused.iter().zip(plain);
                    let apart = pairs.map(|(a, b)| (a - b).abs() / size).fold(0.0, f64::max);
                    assert!(apart <= bound, "{name}, {dtype}, {rows} rows: {apart}");
                    assert_eq!(fused.len(), plain.len());
                }
                // Weights of all pairs of tokens are not kept.
                let saved = plain_bytes.saturating_sub(bytes);
                let weights = rows * HEADS * TIME * TIME * dtype.bytes();
                assert_eq!(
                    saved >= weights,
                    is_fused,
                    "{name}, {dtype}, {rows} rows: {saved}"
                );
            }
        }
    }
}
