//! Claims about the rows of a batch: a result for a row depends on that row alone. Ranks, shards
//! and micro-batches divide the batch.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ddp::models::Model;
use ddp::nn::{Convolution, CustomOp, Formula, Init, Result, Scope, Sequential, Var};
use ddp_kernels::{DType, Device, Tensor};

use crate::support::pass::in_pass;

/// An output for `x`.
type Of = fn(&mut Scope<'_>, &Var) -> Var;

fn weight(m: &mut Scope<'_>, name: &str, shape: &[usize]) -> Var {
    m.parameter(name, shape, Init::Normal { deviation: 1.0 })
}

/// The error of a module of this formula for rows of this shape.
fn built(formula: Of, row: &[usize]) -> Result<(), String> {
    let layers = Sequential::new().then(Formula(formula));
    let built = layers.build(row, Device::Cpu, ddp_kernels::Seed(1));
    built.map(drop).map_err(|error| error.to_string())
}

/// Ranks and micro-batches divide the batch, so these results depended on how many there are.
#[test]
fn what_mixes_the_rows_of_a_batch_is_refused_with_its_line() {
    let line = line!() + 1;
    let text = built(|_, x| x - x.mean(0), &[4]).unwrap_err();
    let expected = format!(
        "0 ({}:{line}): mean: expected a result for each row that does not depend on other rows",
        file!()
    );
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.contains("got x [2, 4]; help: "), "{text}");
    let mixed: [(&str, Of); 20] = [
        ("sum", |_, x| x * x.sum(0)),
        ("softmax", |_, x| x.softmax(0)),
        ("log_softmax", |_, x| x.log_softmax(-3)),
        ("smallest", |_, x| x - x.smallest(0)),
        ("largest", |_, x| x - x.largest(0).tanh()),
        // The batch is within another axis, or was moved.
        ("sum", |_, x| {
            let rows = x.reshape(&[x.size(0) * 4, 6]);
            (&rows - rows.sum(0)).reshape(&x.shape())
        }),
        ("softmax", |_, x| {
            x.transpose(0, 2).softmax(2).transpose(0, 2)
        }),
        ("sum", |m, x| {
            let other = x.permute(&[1, 0, 2]) * weight(m, "w", &[6]);
            let all = other.reshape(&[2, 2, x.size(0) * 6]);
            x + all.sum(2).reshape(&[4, 1])
        }),
        ("mean", |_, x| {
            let both = Var::concatenate(&[x, &x.exp()], 0);
            let pairs = both.reshape(&[x.size(0) * 8, 6]);
            x - pairs.mean(0)
        }),
        ("matmul", |_, x| {
            let rows = x.reshape(&[x.size(0), 24]);
            rows.matmul(&rows.transpose(0, 1).matmul(&rows))
                .reshape(&x.shape())
        }),
        ("slice", |_, x| x + x.slice(0, 0..1)),
        // Of the row before, and of the first half of the rows.
        ("slice", |_, x| x - x.pad(0, 1, 0).slice(0, 0..x.size(0))),
        ("slice", |_, x| {
            let twice = Var::concatenate(&[x, x], 0);
            x - twice.slice(0, 1..x.size(0) + 1)
        }),
        ("slice", |_, x| {
            let rows = x.reshape(&[x.size(0) * 4, 6]);
            rows.slice(0, 0..x.size(0) * 2).reshape(&[x.size(0), 2, 6])
        }),
        // Numbers of which each has all rows, where each row has all.
        ("add", |m, x| {
            let (rows, count) = (x.size(0), 4 * x.size(0));
            let numbers: Vec<f64> = (0..count).map(|it| (it / rows) as f64).collect();
            let numbers = m.numbers(&numbers, &[count, 1]);
            (x.reshape(&[count, 6]) + numbers).reshape(&x.shape())
        }),
        // Reshaped where the axes should have been exchanged.
        ("reshape", |_, x| x.transpose(0, 1).reshape(&x.shape())),
        ("add", |_, x| {
            let rows = x.reshape(&[x.size(0) * 4, 6]);
            let others = x.transpose(0, 1).reshape(&[x.size(0) * 4, 6]);
            (rows + others).reshape(&x.shape())
        }),
        ("window", |_, x| {
            let next = x.pad(0, 0, 1).windows(0, 2, 1).largest(-1);
            x + next.reshape(&x.shape())
        }),
        ("dropout", |m, x| {
            m.dropout("d", &x.transpose(0, 1), 0.5).transpose(0, 1)
        }),
        ("unfold", |m, x| {
            let image = x.transpose(0, 1).reshape(&[4, 1, x.size(0), 6]);
            let y = m.conv2d("c", &image, Convolution::new(1, 1));
            y.reshape(&[4, x.size(0), 6]).transpose(0, 1)
        }),
    ];
    for (name, formula) in mixed {
        let text = built(formula, &[4, 6]).unwrap_err();
        let expected = format!(": {name}: expected a result for each row that does not depend");
        assert!(text.contains(&expected), "{name}: {text}");
    }
    // More than shapes depends on how many rows there are.
}

/// More than shapes depends on how many rows there are.
#[test]
fn what_depends_on_the_number_of_rows_is_refused_with_its_line() {
    let counted: [(&str, Of); 4] = [
        (
            "got 0.5 for 2 rows, which differs from 0.07142857142857142 for 14; help: ",
            |_, x| x * (1.0 / x.size(0) as f64),
        ),
        (
            "numbers [3] for 2 rows, which differs from numbers [3] for 14",
            |m, x| x + m.numbers(&[x.size(0) as f64; 3], &[3]).sum(0),
        ),
        ("exp [2, 4, 6] of ", |_, x| {
            if x.size(0) > 2 { x.tanh() } else { x.exp() }
        }),
        ("which differs from exp [14, 4, 6] of ", |_, x| {
            if x.size(0) > 2 {
                x.tanh().exp()
            } else {
                x.tanh()
            }
        }),
    ];
    for (expected, formula) in counted {
        let text = built(formula, &[4, 6]).unwrap_err();
        let begins = "expected the same operations and numbers for any number of rows";
        let is_here = text.starts_with(&format!("0 ({}:", file!()));
        let is_said = text.contains(begins) && text.contains(expected);
        assert!(is_here && is_said, "{expected}: {text}");
    }
}

#[test]
fn what_keeps_rows_apart_is_built() {
    let apart: [Of; 15] = [
        // Of time first; of the rows of each number; of flat tokens; NaN.
        |m, x| {
            let steps: Vec<f64> = (0..4).flat_map(|it| vec![it as f64; x.size(0)]).collect();
            let steps = m.numbers(&steps, &[4, x.size(0), 1]);
            (x.transpose(0, 1) + steps).transpose(0, 1)
        },
        |m, x| {
            let slopes: Vec<f64> = (0..2).flat_map(|it| vec![it as f64; x.size(0)]).collect();
            let slopes = m.numbers(&slopes, &[2, x.size(0), 1, 1]).sum(0);
            (x * slopes).reshape(&x.shape())
        },
        |m, x| {
            let places = m.numbers(&[0.0, 1.0, 2.0, 3.0].repeat(x.size(0)), &[x.size(0) * 4, 1]);
            (x.reshape(&[x.size(0) * 4, 6]) + places).reshape(&x.shape())
        },
        |m, x| x + m.numbers(&[0.0, f64::NAN, 0.0, 0.0, 0.0, 0.0], &[6]),
        // The same numbers for each row.
        |m, x| {
            x + m
                .numbers(&[1.0, 2.0].repeat(x.size(0)), &[x.size(0), 2, 1])
                .sum(1)
                .reshape(&[x.size(0), 1, 1])
        },
        |_, x| x.reshape(&[x.size(0) * 4, 6]).every(0, 4).softmax(-1),
        |m, x| x * weight(m, "w", &[3, 4, 6]).softmax(0).sum(0),
        |_, x| {
            let patches = x.reshape(&[x.size(0) * 4, 6]).softmax(-1);
            let rows = patches.reshape(&x.shape());
            rows.mean(1) * x
        },
        |_, x| x.transpose(0, 1).softmax(0).transpose(0, 1),
        |_, x| {
            let both = Var::concatenate(&[x, &x.exp()], 0);
            let pairs = both.softmax(-1).reshape(&[2, x.size(0), 24]).mean(0);
            x * pairs.reshape(&x.shape())
        },
        |_, x| {
            let rows = x.size(0);
            let both = Var::concatenate(&[x, &x.exp()], 0).softmax(1);
            both.slice(0, 0..rows) * both.slice(0, rows..2 * rows).sum(1)
        },
        |m, x| {
            m.linear("l", &x.reshape(&[x.size(0) * 4, 6]), 6)
                .reshape(&x.shape())
        },
        |m, x| {
            let image = x.reshape(&[x.size(0), 1, 4, 6]);
            let y = m.conv2d("c", &image, Convolution::new(2, 3).padding(1));
            m.group_norm("n", &y.max_pool2d(2, 2, 0), 1)
                .mean(-1)
                .mean(1)
        },
        |_, x| x.matmul(&x.transpose(1, 2)).matmul(x),
        |m, x| {
            let b = x.size(0);
            let heads = x
                .reshape(&[b, 4, 2, 3])
                .permute(&[0, 2, 1, 3])
                .reshape(&[b * 2, 4, 3]);
            let mixed = heads
                .matmul(&heads.transpose(1, 2))
                .softmax(-1)
                .matmul(&heads);
            let back = mixed
                .reshape(&[b, 2, 4, 3])
                .permute(&[0, 2, 1, 3])
                .reshape(&[b, 4, 6]);
            m.dropout("d", &back, 0.5)
        },
    ];
    for (at, formula) in apart.into_iter().enumerate() {
        built(formula, &[4, 6]).unwrap_or_else(|text| panic!("{at}: {text}"));
    }
}

#[test]
fn a_parameter_that_depends_on_the_batch_is_refused() {
    let layers = Sequential::new().then(Formula(|m: &mut Scope<'_>, x: &Var| {
        x * m.parameter("w", &[x.size(0), 1], Init::Constant(1.0))
    }));
    let built = layers.build(&[3], Device::Cpu, ddp_kernels::Seed(1));
    let text = built.unwrap_err().to_string();
    let expected = "parameter 0.w: expected shape [2, 1], as in the first trace, got [14, 1]";
    assert!(text.contains(expected), "{text}");
}

/// Something is there once for each row, and does not follow from the row.
#[test]
fn entries_for_each_row_are_of_the_row() {
    let entries: [(&str, Of); 8] = [
        ("numbers", |m, x| {
            let rows = x.size(0);
            let odd: Vec<f64> = (0..2 * rows).map(|it| (it % rows % 2) as f64).collect();
            let odd = m.numbers(&odd, &[2, rows]).transpose(0, 1).sum(1);
            x * odd.reshape(&[rows, 1, 1])
        }),
        ("numbers", |m, x| {
            x + m.indices(x.size(0)).reshape(&[x.size(0), 1, 1])
        }),
        ("slice", |m, x| {
            x + weight(m, "places", &[64, 1, 6]).slice(0, 0..x.size(0))
        }),
        ("slice", |m, x| {
            let count = m.indices(64).slice(0, 0..x.size(0)).sum(0);
            x * count
        }),
        ("slice", |m, x| {
            let queue = m.buffer("queue", &[64, 4, 6], Init::Constant(1.0));
            x + queue.slice(0, x.size(0)..64).mean(0)
        }),
        ("slice", |m, x| {
            let w = weight(m, "w", &[64, 6]).slice(0, 0..x.size(0));
            x + x.linear(&w, None).sum(-1).reshape(&[x.size(0), 4, 1])
        }),
        ("reshape", |_, x| {
            let rows = x.reshape(&[24, x.size(0)]).sum(1);
            rows.reshape(&[x.size(0), 24 / x.size(0)])
        }),
        ("slice", |_, x| {
            let half = x.number(1.0).expand(&[x.size(0), 1, 1]);
            x * half
                .pad(0, 0, x.size(0))
                .slice(0, x.size(0) / 2..x.size(0) * 3 / 2)
        }),
    ];
    for (name, formula) in entries {
        let text = built(formula, &[4, 6]).unwrap_err();
        assert!(text.starts_with(&format!("0 ({}:", file!())), "{text}");
        let is_named = text.contains(&format!(": {name}: expected "));
        assert!(is_named, "{name}: {text}");
    }
    // Counted by a sum over what is alike for all rows.
    let counted: [(&str, Of); 5] = [
        ("sum", |_, x| {
            x / x.number(1.0).expand(&[x.size(0), 1, 1]).sum(0)
        }),
        ("sum", |m, x| {
            x / m.numbers(&vec![1.0; x.size(0)], &[x.size(0), 1]).sum(0)
        }),
        ("softmax", |m, x| {
            x * weight(m, "w", &[1, 6])
                .expand(&[x.size(0), 6])
                .softmax(0)
                .slice(0, 0..1)
        }),
        ("matmul", |_, x| {
            let ones = x.number(1.0).expand(&[1, x.size(0)]);
            x * ones.matmul(&ones.transpose(0, 1))
        }),
        ("window", |_, x| {
            let (rows, ones) = (x.size(0), x.number(1.0).expand(&[x.size(0)]));
            let numbers = ones.pad(0, rows - 1, 0).windows(0, rows, 1).sum(-1);
            x * numbers.reshape(&[rows, 1, 1])
        }),
    ];
    for (name, formula) in counted {
        let text = built(formula, &[4, 6]).unwrap_err();
        let expected = format!(": {name}: expected a result for each row that does not depend");
        assert!(text.contains(&expected), "{name}: {text}");
    }
}

/// Multiplies by a number.
#[derive(Debug)]
struct Times(f64);

impl CustomOp for Times {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        Ok(ddp_kernels::ops::scale_into(out, x[0], self.0)?)
    }

    fn backward(&self, _: &[&Tensor], of: [&Tensor; 2], dx: &[&Tensor]) -> Result<()> {
        Ok(ddp_kernels::ops::scale_into(dx[0], of[1], self.0)?)
    }
}

/// Counts how often it is shown.
#[derive(Default)]
struct Counted(AtomicUsize);

impl fmt::Debug for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Counted {}", self.0.fetch_add(1, Ordering::Relaxed))
    }
}

impl CustomOp for Counted {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Times(1.0).shape(inputs)
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        Times(1.0).forward(x, out)
    }

    fn backward(&self, x: &[&Tensor], of: [&Tensor; 2], dx: &[&Tensor]) -> Result<()> {
        Times(1.0).backward(x, of, dx)
    }
}

/// Another rank may run an operation that both share while this one builds its model. A mutex that
/// another thread holds shows itself as locked.
#[test]
fn what_a_custom_operation_holds_may_change_at_any_time() {
    let shared = Arc::new(Counted::default());
    let forward = move |m: &mut Scope<'_>, x: &Var| m.custom(shared.clone(), &[x]);
    let layers = Sequential::new().then(Formula(forward));
    layers
        .build(&[4], Device::Cpu, ddp_kernels::Seed(1))
        .unwrap();
}

/// Operations with other settings, inputs or results for another number of rows.
#[test]
fn operations_are_the_same_for_any_number_of_rows() {
    let others: [(&str, Of); 10] = [
        (
            "got Dropout(0, 0.5) [2, 4, 6] of x for 2 rows, which",
            |m, x| m.dropout("drop", x, 1.0 / x.size(0) as f64),
        ),
        ("Times(2.0)", |m, x| {
            let other: Arc<dyn CustomOp> = match x.size(0) {
                2 => Arc::new(Counted::default()),
                _ => Arc::new(Times(2.0)),
            };
            m.custom(other, &[x])
        }),
        ("got relu [2, 4, 3]", |m, x| {
            let y = m.linear("l", x, 3);
            if x.size(0) > 2 { y.gelu() } else { y.relu() }
        }),
        ("Slice", |_, x| {
            let start = usize::from(x.size(0) > 2);
            x.slice(1, start..start + 3)
        }),
        ("Join", |_, x| {
            let before = usize::from(x.size(0) > 2);
            x.pad(1, before, 1 - before)
        }),
        ("Permute", |_, x| {
            let y = x.slice(1, 0..3).slice(2, 0..3);
            let axes = if x.size(0) > 2 { [0, 1, 2] } else { [0, 2, 1] };
            &y + y.permute(&axes)
        }),
        ("Apply(Sub)", |_, x| {
            let y = x.exp();
            if x.size(0) > 2 { x - &y } else { y - x }
        }),
        ("of exp, x for 2 rows, which differs from Join", |_, x| {
            let y = x.exp();
            let both = if x.size(0) > 2 { [x, &y] } else { [&y, x] };
            Var::concatenate(&both, 1)
        }),
        ("0.v", |m, x| {
            let (v, w) = (weight(m, "v", &[6]), weight(m, "w", &[6]));
            x * if x.size(0) > 2 { v } else { w }
        }),
        ("exp", |_, x| {
            let (y, z) = (x.exp(), x.tanh());
            if x.size(0) > 2 { y } else { z }
        }),
    ];
    for (expected, formula) in others {
        let text = built(formula, &[4, 6]).unwrap_err();
        let begins = "expected the same operations and numbers for any number of rows";
        assert!(
            text.contains(begins) && text.contains(expected),
            "{expected}: {text}"
        );
    }
}

/// The output for so many rows, in training or not.
fn tried(formula: Of, rows: usize, training: bool) -> Result<Tensor> {
    let layers = Sequential::new().then(Formula(formula));
    let model = Model::new(
        Box::new(layers),
        &[4, 6],
        DType::F32,
        Device::Cpu,
        1,
        &|_| false,
    );
    let model = model.unwrap();
    let x = Tensor::zeros(&[rows, 4, 6], DType::F32, Device::Cpu).unwrap();
    in_pass(&model, training, |mut pass| model.forward(&mut pass, &x))
}

/// A model is built for a few rows. It runs for others, and in evaluation.
#[test]
fn forwards_of_other_batches_and_of_evaluation_are_compared_too() {
    let only_many: Of = |_, x| x / if x.size(0) == 8 { 8.0 } else { 4.0 };
    tried(only_many, 4, true).unwrap();
    let text = tried(only_many, 8, true).unwrap_err().to_string();
    assert!(
        text.contains("got 4 for 2 rows, which differs from 8 for 8; "),
        "{text}"
    );
    let numbers: Of = |m, x| {
        let number = if x.size(0) == 8 { 8.0 } else { 4.0 };
        x + m.numbers(&vec![number; x.size(0)], &[x.size(0), 1, 1])
    };
    tried(numbers, 4, true).unwrap();
    assert!(tried(numbers, 8, true).is_err());
    let lengths: Of = |_, x| {
        let few = if x.size(0) == 8 { 7 } else { x.size(0) };
        Var::concatenate(&[&x.slice(0, 0..few), x], 0).slice(0, 0..x.size(0))
    };
    tried(lengths, 4, true).unwrap();
    assert!(tried(lengths, 8, true).is_err());
    let only_one: Of = |_, x| if x.size(0) == 1 { x.exp() } else { x.tanh() };
    tried(only_one, 2, true).unwrap();
    assert!(tried(only_one, 1, true).is_err());
    let in_evaluation: Of = |m, x| {
        if m.is_training() {
            x.exp()
        } else {
            x / x.size(0) as f64
        }
    };
    tried(in_evaluation, 4, true).unwrap();
    let text = tried(in_evaluation, 4, false).unwrap_err().to_string();
    assert!(
        text.contains("got 2 for 2 rows, which differs from 14 for 14; "),
        "{text}"
    );
    // One row is repeated by doing nothing.
    let repeats: Of = |m, x| {
        let zeros = x.number(0.0).expand(&[x.size(0), 4, 6]);
        let token = weight(m, "token", &[1, 1, 6]).expand(&[x.size(0), 1, 6]);
        Var::concatenate(&[&(x + zeros), &token], 1)
    };
    for (rows, training) in [(1, true), (1, false), (3, true), (0, true)] {
        tried(repeats, rows, training).unwrap();
    }
}

/// More values were refused at the first step.
#[test]
fn many_values_are_concatenated() {
    let stacked: Of = |_, x| {
        let steps: Vec<Var> = (0..300).map(|it| x.slice(1, it % 4..it % 4 + 1)).collect();
        Var::concatenate(&steps.iter().collect::<Vec<_>>(), 1)
    };
    assert_eq!(tried(stacked, 2, true).unwrap().shape()[..], [2, 300, 6]);
    // The output is what nothing computes.
    let constant: Of = |m, x| m.numbers(&vec![3.0; 2 * x.size(0)], &[x.size(0), 2]);
    let output: Vec<f32> = tried(constant, 2, true).unwrap().to_vec().unwrap();
    assert_eq!(output, [3.0; 4]);
}
