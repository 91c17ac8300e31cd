//! Operations that read and write more than they compute: GB/s against a copy. Each at 64 MiB an
//! operand (memory) and at the activations of a training step, 128 × 1024 (caches), or at the
//! shape that the operation requires. Then the cost of a call, of a ledger entry and of a scope.

use ddp_kernels::ops::{
    self, AdamwConstants, AdamwScalars, ChunkTable, CrossEntropyOptions, CrossEntropyOut,
    SgdConstants, SgdScalars,
};
use ddp_kernels::{DType, Device, Random, Result, Tensor};

use crate::machine::Machine;
use crate::{Line, in_turn, median, median_ratio};

const LARGE: usize = 16 << 20;
const STEP: usize = 128 * 1024;

/// One operation to time: the bytes it must read and write, how, and two of its own tensors to copy
/// between in turn with it. Memory is not equally fast everywhere (two runs of one copy may differ
/// by half), so the copy uses the same.
struct Body<'a> {
    name: String,
    bytes: usize,
    run: Box<dyn FnMut() -> Result<()> + 'a>,
    copy: [Tensor; 2],
}

pub(crate) fn run(
    machine: &Machine,
    wanted: &dyn Fn(&str) -> bool,
    emit: &dyn Fn(Line),
) -> Result<()> {
    let mut measure = |bodies: Vec<Body<'_>>| {
        for mut body in bodies.into_iter().filter(|body| wanted(&body.name)) {
            let [target, source] = &body.copy;
            let mut copy = || target.copy_from(source).expect("same shape");
            let seconds = in_turn(&mut [&mut || (body.run)().expect("checked shapes"), &mut copy]);
            let gb_s = body.bytes as f64 / median(seconds[0].clone()) / 1e9;
            let copied_bytes = (2 * source.bytes()) as f64;
            let share = median_ratio(&seconds[1], &seconds[0]) * body.bytes as f64 / copied_bytes;
            let shares = vec![
                ("a copy in turn", share),
                ("the machine's copy", gb_s / machine.copy_gb_s),
            ];
            emit(Line {
                name: body.name,
                figure: gb_s,
                unit: "GB/s",
                shares,
            });
        }
    };
    for count in [LARGE, STEP] {
        elementwise(count, &mut measure)?;
    }
    optimizers(&mut measure)?;
    losses(&mut measure)?;
    calls(wanted, emit)
}

fn elementwise(count: usize, measure: &mut dyn FnMut(Vec<Body<'_>>)) -> Result<()> {
    let mut random = Random::new(3);
    let mut randn = || Tensor::randn(&[count], DType::F32, Device::Cpu, &mut random);
    let (a, b, out) = (randn()?, randn()?, randn()?);
    let half = a.to_dtype(DType::BF16)?;
    let size = if count == LARGE { "64 MiB" } else { "512 KiB" };
    let body = |name: &str, bytes: usize, run: Box<dyn FnMut() -> Result<()>>| Body {
        name: format!("{name}, {size}"),
        bytes: bytes * count,
        run,
        copy: [out.clone(), a.clone()],
    };
    macro_rules! run {
        (|$($tensor:ident),*| $call:expr) => {{
            $(let $tensor = $tensor.clone();)*
            Box::new(move || $call)
        }};
    }
    measure(vec![
        body("copy", 8, run!(|a, out| out.copy_from(&a))),
        body("fill", 4, run!(|out| ops::fill_into(&out, 0.5))),
        body(
            "relu",
            8,
            run!(|a, out| ops::activate_into(&out, &a, ops::Activation::Relu)),
        ),
        body(
            "relu in place",
            8,
            run!(|out| ops::activate_into(&out, &out, ops::Activation::Relu)),
        ),
        body(
            "scale in place",
            8,
            run!(|out| ops::scale_into(&out, &out, 0.999)),
        ),
        body("axpy", 12, run!(|a, out| ops::axpy(&out, 1e-3, &a))),
        body(
            "gelu tanh",
            8,
            run!(|a, out| ops::activate_into(&out, &a, ops::Activation::GeluTanh)),
        ),
        body(
            "gelu erf",
            8,
            run!(|a, out| ops::activate_into(&out, &a, ops::Activation::Gelu)),
        ),
        body(
            "gelu erf backward",
            12,
            run!(|a, b, out| ops::activate_backward_into(&out, &a, &b, ops::Activation::Gelu)),
        ),
        body(
            "cast f32 to bf16",
            6,
            run!(|a, half| ops::cast_into(&half, &a)),
        ),
        body(
            "cast bf16 to f32",
            6,
            run!(|half, out| ops::cast_into(&out, &half)),
        ),
        body("sum", 4, {
            let total = Tensor::zeros(&[], DType::F32, Device::Cpu)?;
            run!(|a, total| ops::sum_into(&total, &a))
        }),
        body(
            "randn",
            4,
            Box::new(move || {
                Tensor::randn(&[count], DType::F32, Device::Cpu, &mut random).map(drop)
            }),
        ),
    ]);
    Ok(())
}

fn optimizers(measure: &mut dyn FnMut(Vec<Body<'_>>)) -> Result<()> {
    let mut random = Random::new(5);
    let mut randn = || Tensor::randn(&[LARGE], DType::F32, Device::Cpu, &mut random);
    let (values, grads, first, second) = (randn()?, randn()?, randn()?, randn()?);
    let second_positive = ops::activate(&second, ops::Activation::ReluSquared)?;
    let constants = AdamwConstants::default();
    let scalars = AdamwScalars {
        learning_rate: 1e-6,
        weight_decay: 0.01,
        step: 10,
    }
    .to_array(&constants)?;
    let scalars = Tensor::from_slice(&scalars, &[4], Device::Cpu)?;
    let sgd_scalars = Tensor::from_slice(
        &SgdScalars {
            learning_rate: 1e-6,
            weight_decay: 0.01,
        }
        .to_array()?,
        &[2],
        Device::Cpu,
    )?;
    let sgd_constants = SgdConstants {
        momentum: 0.9,
        nesterov: false,
    };
    let chunks = ChunkTable::whole(LARGE);
    let partials = Tensor::zeros(&[chunks.quanta()], DType::F64, Device::Cpu)?;
    measure(vec![
        Body {
            name: "adamw, 64 MiB".into(),
            bytes: 28 * LARGE,
            run: Box::new(|| {
                ops::adamw(
                    &ops::UpdateTensors::new([&values, &grads], &chunks, &scalars),
                    [&first, &second_positive],
                    &constants,
                )
            }),
            copy: [first.clone(), grads.clone()],
        },
        Body {
            name: "sgd with momentum, 64 MiB".into(),
            bytes: 20 * LARGE,
            run: Box::new(|| {
                ops::sgd(
                    &ops::UpdateTensors::new([&values, &grads], &chunks, &sgd_scalars),
                    Some(&first),
                    &sgd_constants,
                )
            }),
            copy: [first.clone(), grads.clone()],
        },
        Body {
            name: "gradient norm, 64 MiB".into(),
            bytes: 4 * LARGE,
            run: Box::new(|| ops::grad_norm_partials(&partials, &grads, &chunks)),
            copy: [first.clone(), grads.clone()],
        },
    ]);
    Ok(())
}

fn losses(measure: &mut dyn FnMut(Vec<Body<'_>>)) -> Result<()> {
    let mut random = Random::new(6);
    for (rows, classes) in [(128, 10), (1024, 10), (128, 1000), (64, 50257)] {
        let logits = Tensor::randn(&[rows, classes], DType::F32, Device::Cpu, &mut random)?;
        let targets = Tensor::randint(
            classes as u32,
            &[rows],
            DType::I64,
            Device::Cpu,
            &mut random,
        )?;
        let (losses, dlogits) = (logits.new_zeros(&[rows])?, logits.zeros_like()?);
        measure(vec![Body {
            name: format!("cross-entropy with gradient {rows}x{classes}"),
            bytes: 8 * rows * classes,
            run: Box::new(|| {
                let out = CrossEntropyOut {
                    losses: &losses,
                    dlogits: Some(&dlogits),
                    weights: None,
                };
                ops::cross_entropy(
                    &logits,
                    &targets,
                    out,
                    &CrossEntropyOptions::default(),
                    None,
                )
            }),
            copy: [dlogits.clone(), logits.clone()],
        }]);
    }
    Ok(())
}

/// What a call costs before its math.
fn calls(wanted: &dyn Fn(&str) -> bool, emit: &dyn Fn(Line)) -> Result<()> {
    let one = Tensor::ones(&[1], DType::F32, Device::Cpu)?;
    let other = one.ones_like()?;
    let bodies: [(&str, &mut dyn FnMut() -> Result<()>); 4] = [
        ("call: axpy of one element", &mut || {
            ops::axpy(&one, 1.0, &other)
        }),
        ("call: item, booked in the ledger", &mut || {
            one.item().map(drop)
        }),
        (
            "call: with_slice of one element (as item, unbooked)",
            &mut || one.with_slice::<f32, _>(|x| _ = x[0]),
        ),
        ("call: zeros of one element, made and dropped", &mut || {
            one.zeros_like().map(drop)
        }),
    ];
    for (name, body) in bodies {
        if wanted(name) {
            let seconds = in_turn(&mut [&mut || body().expect("checked shapes")]);
            let nanoseconds = median(seconds[0].clone()) * 1e9;
            emit(Line {
                name: name.to_string(),
                figure: nanoseconds,
                unit: "ns",
                shares: vec![],
            });
        }
    }
    Ok(())
}
