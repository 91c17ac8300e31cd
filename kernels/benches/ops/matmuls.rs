//! Matmuls, and layers made of them.

use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{DType, Device, Random, Result, Tensor};

use crate::machine::Machine;
use crate::{Line, against_multiply_adds};

/// A matmul of `m` × `k` by `k` × `n`; `mat2_t` when mat2 lies in memory as its transpose, as
/// weights do.
struct Matmul {
    name: &'static str,
    mnk: [usize; 3],
    mat1_t: bool,
    mat2_t: bool,
}

const fn matmul(name: &'static str, mnk: [usize; 3], mat1_t: bool, mat2_t: bool) -> Matmul {
    Matmul {
        name,
        mnk,
        mat1_t,
        mat2_t,
    }
}

/// The two sizes that the goals are set for, and every matmul of a training step of
/// 784-1024-1024-10 at batch 128 and 1024.
const MATMULS: [Matmul; 16] = [
    matmul("addmm 2048x2048x2048", [2048, 2048, 2048], false, false),
    matmul(
        "addmm 2048x2048x2048, weight as kept",
        [2048, 2048, 2048],
        false,
        true,
    ),
    matmul("addmm 128x1024x784", [128, 1024, 784], false, false),
    matmul(
        "addmm 128x1024x784, weight as kept",
        [128, 1024, 784],
        false,
        true,
    ),
    matmul(
        "addmm 128x1024x1024, weight as kept",
        [128, 1024, 1024],
        false,
        true,
    ),
    matmul(
        "addmm 128x10x1024, weight as kept",
        [128, 10, 1024],
        false,
        true,
    ),
    matmul("addmm 128x1024x1024 (dx)", [128, 1024, 1024], false, false),
    matmul("addmm 128x1024x10 (dx)", [128, 1024, 10], false, false),
    matmul("addmm 1024x784x128 (dw)", [1024, 784, 128], true, false),
    matmul("addmm 1024x1024x128 (dw)", [1024, 1024, 128], true, false),
    matmul("addmm 10x1024x128 (dw)", [10, 1024, 128], true, false),
    matmul(
        "addmm 1024x1024x784, weight as kept",
        [1024, 1024, 784],
        false,
        true,
    ),
    matmul(
        "addmm 1024x1024x1024 (dx)",
        [1024, 1024, 1024],
        false,
        false,
    ),
    matmul("addmm 1024x784x1024 (dw)", [1024, 784, 1024], true, false),
    matmul(
        "addmm 1x3072x768, weight as kept",
        [1, 3072, 768],
        false,
        true,
    ),
    matmul(
        "addmm 1x50257x768, weight as kept",
        [1, 50257, 768],
        false,
        true,
    ),
];

pub(crate) fn run(
    machine: &Machine,
    wanted: &dyn Fn(&str) -> bool,
    emit: &dyn Fn(Line),
) -> Result<()> {
    let mut random = Random::new(7);
    for matmul in MATMULS.iter().filter(|matmul| wanted(matmul.name)) {
        time(matmul, machine, &mut random, emit)?;
    }
    layers(machine, wanted, emit, &mut random)
}

fn time(
    matmul: &Matmul,
    machine: &Machine,
    random: &mut Random,
    emit: &dyn Fn(Line),
) -> Result<()> {
    let [m, n, k] = matmul.mnk;
    let mut matrix = |rows: usize, columns: usize, t: bool| {
        let shape = if t { [columns, rows] } else { [rows, columns] };
        Tensor::randn(&shape, DType::F32, Device::Cpu, random)
    };
    let (stored1, stored2) = (matrix(m, k, matmul.mat1_t)?, matrix(k, n, matmul.mat2_t)?);
    let mat1 = if matmul.mat1_t {
        stored1.t()?
    } else {
        stored1.clone()
    };
    let mat2 = if matmul.mat2_t {
        stored2.t()?
    } else {
        stored2.clone()
    };
    let out = mat1.new_zeros(&[m, n])?;
    let mut ours = || ops::addmm_into(&out, &out, &mat1, &mat2, 1.0, 0.0).expect("checked shapes");
    let name = matmul.name.to_string();
    emit(against_multiply_adds(
        name,
        2 * m * n * k,
        machine,
        &mut ours,
    ));
    Ok(())
}

/// The fused layer, to compare with its matmul alone.
fn layers(
    machine: &Machine,
    wanted: &dyn Fn(&str) -> bool,
    emit: &dyn Fn(Line),
    random: &mut Random,
) -> Result<()> {
    let (rows, inputs, outputs) = (128, 784, 1024);
    let mut randn = |shape: &[usize]| Tensor::randn(shape, DType::F32, Device::Cpu, random);
    let (x, weight, bias) = (
        randn(&[rows, inputs])?,
        randn(&[outputs, inputs])?,
        randn(&[outputs])?,
    );
    let (dy, y) = (randn(&[rows, outputs])?, randn(&[rows, outputs])?);
    let (dx, dw, db) = (x.zeros_like()?, weight.zeros_like()?, bias.zeros_like()?);
    let bodies: [(&str, &mut dyn FnMut() -> Result<()>); 3] = [
        ("linear 128x784->1024, bias and relu", &mut || {
            ops::linear_into(&y, &x, &weight, Some(&bias), Some(Activation::Relu), None)
        }),
        ("linear backward dx, relu below folded", &mut || {
            ops::linear_backward_input_into(&dx, &dy, &weight, Some((Activation::Relu, &x)))
        }),
        ("linear backward dw and db", &mut || {
            ops::linear_backward_weight_into(&dw, Some(&db), &dy, &x, false)
        }),
    ];
    for (name, body) in bodies {
        if wanted(name) {
            let operations = 2 * rows * inputs * outputs;
            let mut body = || body().expect("checked shapes");
            emit(against_multiply_adds(
                name.to_string(),
                operations,
                machine,
                &mut body,
            ));
        }
    }
    Ok(())
}
