//! Formulas in which every operation occurs.

use ddp::nn::{Convolution, Init, Scope, Var};

fn w(m: &mut Scope<'_>, shape: &[usize]) -> Var {
    m.parameter("w", shape, Init::Constant(0.0))
}

fn attention(m: &mut Scope<'_>, x: &Var) -> Var {
    let parts = (x * w(m, &[6])).split(-1, &[2, 2, 2]);
    let scores = parts[0].matmul(&parts[1].transpose(-1, -2));
    let future = m.indices(4).reshape(&[4, 1]).less(&m.indices(4));
    let scores = future.select(&scores.number(-1e30), &scores);
    scores.softmax(-1).matmul(&parts[2])
}

/// The name, the shape of a row, the formula.
pub(crate) type Case = (
    &'static str,
    &'static [usize],
    fn(&mut Scope<'_>, &Var) -> Var,
);

pub(crate) const CASES: [Case; 42] = [
    ("add", &[5], |m, x| x + w(m, &[5])),
    ("sub", &[2, 5], |m, x| w(m, &[2, 1]) - x),
    ("mul", &[2, 5], |m, x| x * w(m, &[5])),
    ("div", &[2, 5], |m, x| {
        let w = w(m, &[1]);
        x / &w + &w / (x * x + 1.0)
    }),
    ("neg", &[5], |m, x| -x * w(m, &[1])),
    ("abs", &[71], |m, x| x.abs() * w(m, &[1])),
    ("exp", &[71], |m, x| x.exp() * w(m, &[1])),
    ("log", &[71], |m, x| x.log() * w(m, &[1])),
    ("sqrt", &[71], |m, x| x.abs().sqrt() * w(m, &[1])),
    ("rsqrt", &[71], |m, x| (x * x + 1.0).rsqrt() * w(m, &[1])),
    ("tanh", &[71], |m, x| x.tanh() * w(m, &[1])),
    ("sigmoid", &[71], |m, x| x.sigmoid() * w(m, &[1])),
    ("silu", &[71], |m, x| x.silu() * w(m, &[1])),
    ("gelu", &[71], |m, x| x.gelu() * w(m, &[1])),
    ("gelu_tanh", &[71], |m, x| x.gelu_tanh() * w(m, &[1])),
    ("relu", &[71], |m, x| x.relu() * w(m, &[1])),
    ("cube", &[5], |m, x| x.pow(3.0) * w(m, &[5])),
    ("power", &[5], |m, x| (x * x + 1.0).pow(1.25) * w(m, &[5])),
    ("maximum", &[71], |m, x| {
        let w = w(m, &[1]);
        x.maximum(&(&w * 0.0)) + x.minimum(&w)
    }),
    ("where", &[6], |m, x| {
        let w = w(m, &[6]);
        x.less(&w).select(&(x * x), &(&w * 2.0))
    }),
    ("sum", &[2, 3, 4], |m, x| {
        x.sum(1) * w(m, &[4]) + x.sum(3) + x.sum(2)
    }),
    ("mean", &[2, 3], |m, x| {
        (x - x.mean(-1)) * w(m, &[3]) + x.mean(1)
    }),
    ("largest", &[4, 3], |m, x| {
        x.largest(1) * w(m, &[3]) + x.smallest(-1)
    }),
    ("softmax", &[4, 3], |m, x| {
        x.softmax(-1) * w(m, &[3]) + x.softmax(1)
    }),
    ("log_softmax", &[4, 3], |m, x| {
        x.log_softmax(-1) * w(m, &[3])
    }),
    ("matmul", &[2, 4, 3], |m, x| x.matmul(&w(m, &[1, 3, 5]))),
    ("matmul_both", &[2, 4, 3], |m, x| {
        x.matmul(&w(m, &[2, 5, 3]).transpose(-1, -2))
    }),
    ("matrix", &[3], |m, x| {
        x.matmul(&w(m, &[5, 3]).transpose(0, 1))
    }),
    ("permute", &[2, 3, 4], |m, x| {
        let turned = x.permute(&[0, 3, 1, 2]) * w(m, &[4, 2, 3]);
        turned.reshape(&[24])
    }),
    ("slices", &[5], |m, x| {
        let first = x.slice(1, 1..3) * w(m, &[2]);
        Var::concatenate(&[&first, &x.slice(1, 2..5)], 1)
    }),
    ("layer_norm", &[2, 7], |m, x| {
        let centred = x - x.mean(-1);
        let scale = ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
        centred * scale * w(m, &[7])
    }),
    ("attention", &[4, 6], attention),
    ("every", &[7], |m, x| x.every(1, 2) * w(m, &[4])),
    ("windows", &[8], |m, x| x.windows(1, 3, 2) * w(m, &[3])),
    ("pad", &[2, 3], |m, x| x.pad(-1, 1, 2) * w(m, &[2, 6])),
    ("conv1d", &[4, 7], |m, x| {
        let of = Convolution::new(6, 3).stride(2).padding(1).groups(2);
        m.conv1d("w", x, of.without_bias())
    }),
    ("conv2d", &[2, 5, 6], |m, x| {
        let of = Convolution::new(3, 3).padding(1);
        m.conv2d("w", x, of.without_bias())
    }),
    ("conv2d_apart", &[4, 5, 5], |m, x| {
        let of = Convolution::new(4, 3).stride(2).padding(1).groups(4);
        m.conv2d("w", x, of.without_bias())
    }),
    ("conv2d_patches", &[3, 4, 4], |m, x| {
        let of = Convolution::new(5, 2).stride(2);
        m.conv2d("w", x, of.without_bias())
    }),
    ("max_pool2d", &[2, 5, 6], |m, x| {
        // Of equal ones PyTorch's gradient goes to the first.
        let apart = m.indices(60).reshape(&[2, 5, 6]) * (1.0 / 65536.0);
        (x + apart).max_pool2d(3, 2, 1) * w(m, &[2, 3, 3])
    }),
    ("avg_pool2d", &[2, 4, 5], |m, x| {
        x.avg_pool2d(2, 2) * w(m, &[2, 2, 2])
    }),
    ("group_norm", &[4, 3, 2], |m, x| m.group_norm("w", x, 2)),
];
