//! How fast formulas are, forward and backward:
//! `cargo bench -p ddp-nn --bench formulas [-- FILTER]`, on the CPU, or with
//! `DDP_BENCH_DEVICE=cuda` on the first GPU, with sixteen times the rows.
//!
//! One JSON line for each, with the median of a pass in microseconds; tests/peers/formulas_speed.py
//! has the same in PyTorch. The last line is what tracing and planning a model of GPT-2's layers
//! costs once.

use std::fmt;
use std::time::Instant;

use ddp_kernels::{DType, Device, Tensor, stream, threads};
use ddp_nn::models::Model;
use ddp_nn::params::ParamId;
use ddp_nn::{
    Convolution, Init, Module, Normalize, Pass, PassOptions, Saved, Scope, Scratch, Sequential, Var,
};

fn device() -> Device {
    let name = std::env::var("DDP_BENCH_DEVICE");
    if name.as_deref() == Ok("cuda") {
        return Device::Cuda(0);
    }
    Device::Cpu
}

struct Formula(fn(&mut Scope<'_>, &Var) -> Var);

impl fmt::Debug for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Formula")
    }
}

impl Module for Formula {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        self.0(m, x)
    }
}

fn layer_norm(m: &mut Scope<'_>, x: &Var) -> Var {
    let centred = x - x.mean(-1);
    let normed = &centred * ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
    let weight = m.parameter("weight", &[x.size(-1)], Init::Constant(1.0));
    normed * weight + m.parameter("bias", &[x.size(-1)], Init::Constant(0.0))
}

/// Eight operations, half of them exponentials.
fn eight(_: &mut Scope<'_>, x: &Var) -> Var {
    let gate = (x * 1.5 + 0.25).sigmoid();
    (gate * x.silu()).tanh() - x.abs()
}

/// Eight operations whose speed is that of memory.
fn eight_light(_: &mut Scope<'_>, x: &Var) -> Var {
    let y = ((x * 1.5 + 0.25).relu() - x) * x;
    (y.abs() + 1.0) * x
}

/// A convolution as in the first stage of examples/resnet.rs.
fn convolution(m: &mut Scope<'_>, x: &Var) -> Var {
    m.conv2d("conv", x, Convolution::new(16, 3).padding(1).without_bias())
}

fn deep(m: &mut Scope<'_>, x: &Var) -> Var {
    let of = Convolution::new(64, 3).padding(1).without_bias();
    m.conv2d("conv", x, of)
}

fn group_norm(m: &mut Scope<'_>, x: &Var) -> Var {
    m.group_norm("norm", x, 8).relu()
}

/// A transformer by formulas alone, with narrow layers: a trace costs the same for wide ones.
fn transformer(m: &mut Scope<'_>, x: &Var) -> Var {
    let (time, width, heads) = (x.size(1), x.size(2), 2);
    let mut x = x.clone();
    for block in 0..12 {
        x = m.within(&format!("{block}"), |m| {
            let normed = m.within("first", |m| layer_norm(m, &x));
            let all = m.linear("qkv", &normed, 3 * width);
            let parts = all.split(-1, &[width; 3]);
            let heads_of = |part: &Var| {
                let part = part.reshape(&[time, heads, width / heads]);
                part.permute(&[0, 2, 1, 3])
            };
            let [q, k, v] = [0, 1, 2].map(|at| heads_of(&parts[at]));
            let scores = q.matmul(&k.transpose(-1, -2)) * 0.5;
            let future = m.indices(time).reshape(&[time, 1]).less(&m.indices(time));
            let weights = future.select(&x.number(-1e30), &scores).softmax(-1);
            let mixed = weights.matmul(&v).permute(&[0, 2, 1, 3]);
            let x = &x + m.linear("project", &mixed.reshape(&[time, width]), width);
            let normed = m.within("second", |m| layer_norm(m, &x));
            let hidden = m.linear("up", &normed, 4 * width).gelu();
            x + m.linear("down", &hidden, width)
        });
    }
    m.within("last", |m| layer_norm(m, &x))
}

/// What runs passes of one model.
struct Bench {
    model: Model,
    scratch: Scratch,
    saved: Saved,
}

impl Bench {
    fn new(layer: Box<dyn Module>, row: &[usize]) -> Bench {
        Bench {
            model: Model::new(layer, row, DType::F32, device(), 1, &|_| false).unwrap(),
            scratch: Scratch::new(device()),
            saved: Saved::default(),
        }
    }

    /// Microseconds of a pass, forward and backward.
    fn pass(&mut self, x: &Tensor, dy: &mut Option<Tensor>) -> f64 {
        let position = Tensor::from_slice(&[1i64, 0], &[2], device()).unwrap();
        let options = PassOptions {
            training: true,
            accumulate: false,
            last: true,
            seed: 1,
            position: &position,
        };
        let (params, mut ready) = (&self.model.params, |_: ParamId| Ok(()));
        let start = Instant::now();
        let saved = &mut self.saved;
        let mut pass = Pass::new(params, &mut self.scratch, saved, options, &mut ready);
        let y = self.model.forward(&mut pass, x).unwrap();
        finish();
        let forward = start.elapsed();
        let dy = dy.get_or_insert_with(|| waves(y.shape()));
        let start = Instant::now();
        self.model.backward_to_input(&mut pass, dy).unwrap();
        finish();
        (forward + start.elapsed()).as_secs_f64() * 1e6
    }
}

/// Waits for a GPU.
fn finish() {
    if device() != Device::Cpu {
        stream::synchronize(device()).unwrap();
    }
}

/// Numbers between −2 and 2.
fn waves(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|at| (at as f32 * 0.37).sin() * 2.0)
        .collect();
    Tensor::from_slice(&values, shape, device()).unwrap()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

const PASSES: usize = 40;

/// The median of passes.
fn passes(layer: Box<dyn Module>, shape: &[usize]) -> f64 {
    let (mut bench, x, mut dy) = (Bench::new(layer, &shape[1..]), waves(shape), None);
    bench.pass(&x, &mut dy);
    median((0..PASSES).map(|_| bench.pass(&x, &mut dy)).collect())
}

/// By how much the first pass of a batch's length takes longer than the second one.
fn trace(layer: Box<dyn Module>, row: &[usize]) -> f64 {
    let mut bench = Bench::new(layer, row);
    let of_length = |rows: usize| {
        let (x, mut dy) = (waves(&[&[rows], row].concat()), None);
        let first = bench.pass(&x, &mut dy);
        first - bench.pass(&x, &mut dy)
    };
    // Memory of the longest is there already.
    median((1..16).rev().map(of_length).skip(1).collect())
}

fn main() {
    let argument = std::env::args().skip(1).find(|it| !it.starts_with('-'));
    let filter = argument.unwrap_or_default();
    if let Some(count) = std::env::var("DDP_THREADS")
        .ok()
        .and_then(|it| it.parse().ok())
    {
        threads::set_count(count).unwrap();
    }
    let of = |formula: fn(&mut Scope<'_>, &Var) -> Var| -> Box<dyn Module> {
        Box::new(Formula(formula))
    };
    let norm = || -> Box<dyn Module> { Box::new(Sequential::new().then(Normalize::layer())) };
    type Make<'a> = &'a dyn Fn() -> Box<dyn Module>;
    let cases: [(&str, Make<'_>, &[usize]); 10] = [
        ("layer norm built in 8192x768", &norm, &[8192, 768]),
        ("layer norm 8192x768", &|| of(layer_norm), &[8192, 768]),
        ("layer norm built in 512x256", &norm, &[512, 256]),
        ("layer norm 512x256", &|| of(layer_norm), &[512, 256]),
        ("eight 4096x1024", &|| of(eight), &[4096, 1024]),
        ("eight light 4096x1024", &|| of(eight_light), &[4096, 1024]),
        ("conv 64x16x28x28", &|| of(convolution), &[64, 16, 28, 28]),
        ("conv 64x64x7x7", &|| of(deep), &[64, 64, 7, 7]),
        (
            "group norm 64x16x28x28",
            &|| of(group_norm),
            &[64, 16, 28, 28],
        ),
        ("trace of twelve blocks", &|| of(transformer), &[0, 4, 8]),
    ];
    for (name, make, shape) in cases.into_iter().filter(|it| it.0.contains(&filter)) {
        let microseconds = match shape[0] {
            0 => trace(make(), &shape[1..]),
            rows if device() != Device::Cpu => {
                passes(make(), &[&[16 * rows], &shape[1..]].concat())
            }
            _ => passes(make(), shape),
        };
        let (microseconds, threads) = (microseconds.round(), threads::count());
        println!(
            r#"{{"system":"ddp","threads":{threads},"name":"{name}","microseconds":{microseconds}}}"#
        );
    }
}
