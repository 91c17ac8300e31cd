//! Tests of layers made of layers.

use ddp_kernels::ops::Activation;
use ddp_kernels::{Device, Random, Tensor};

use super::*;
use crate::check::DerivativeCheck;
use crate::models::gpt::{GptSpec, RecomputeKind};
use crate::models::{DataShape, Family, Model};
use crate::pass::tests::in_pass;
use crate::{Activate, CrossEntropy, Linear, Normalize};
use crate::{Pass, PassOptions, Saved, Scratch};

/// A layer that its neighbours do not know, and so do not share passes over memory with.
#[derive(Debug)]
struct Apart(Box<dyn Module>);

impl Module for Apart {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        self.0.forward(m, &x.apart()).apart()
    }
}

impl Sequential {
    /// The same layers, each alone.
    fn without_fusing(mut self) -> Sequential {
        let apart = |layer| Box::new(Apart(layer)) as Box<dyn Module>;
        self.layers = self.layers.into_iter().map(apart).collect();
        self
    }
}

/// A linear layer of the norm of its input.
fn after_norm() -> Sequential {
    let norm = Sequential::new().named("norm", Normalize::layer());
    norm.named("linear", Linear::new(4).normal(0.5))
}

/// Residuals with and without norms, and a norm above.
fn layers() -> Sequential {
    Sequential::new()
        .named("a", Residual::new(after_norm()))
        .named("b", Residual::new(Linear::new(4)))
        .named("c", Residual::new(after_norm()))
        .named("d", Residual::new(after_norm()))
        .named("norm", Normalize::rms())
}

fn output(layers: Sequential) -> Vec<f32> {
    let model = Model::new(Box::new(layers), &[4], DType::F32, Device::Cpu, 1, &|_| {
        false
    });
    let model = model.unwrap();
    let x = Tensor::randn(&[3, 4], DType::F32, Device::Cpu, &mut Random::new(2)).unwrap();
    in_pass(&model, false, |mut pass| {
        model.forward(&mut pass, &x).unwrap().to_vec().unwrap()
    })
}

#[test]
fn a_sum_with_the_norm_above_has_the_bits_of_both_alone() {
    assert_eq!(output(layers()), output(layers().without_fusing()));
}

#[test]
fn derivatives_are_right_whatever_is_trained() {
    let frozen: [&dyn Fn(&str) -> bool; 5] = [
        &|_| false,
        // Only a norm is trained, below layers that are not.
        &|name| name != "c.norm.weight",
        &|name| name != "c.linear.weight",
        &|name| name.contains("norm"),
        &|name| name < "d",
    ];
    for (index, frozen) in frozen.into_iter().enumerate() {
        for layers in [layers(), layers().without_fusing()] {
            let check = DerivativeCheck {
                rows: 3,
                frozen,
                ..DerivativeCheck::new(&[4])
            };
            let worst = check.worst(layers).unwrap();
            assert!(worst.error() < 1e-7, "{index}: {worst:?}");
        }
    }
}

/// The gradients of two micro-batches, and the bytes of the activations.
fn gradients(recompute: RecomputeKind) -> (Vec<f32>, usize) {
    let spec = GptSpec {
        layers: 6,
        heads: 2,
        width: 8,
        context: 16,
        dropout: 0.25,
        recompute,
        ..GptSpec::default()
    };
    let layers = spec.layers(&DataShape {
        row_shape: &[16],
        image: &[],
        dtype: DType::I64,
        outputs: 5,
        documents: false,
    });
    let layers = Box::new(layers.unwrap());
    // Only some of the second block is trained, and nothing below it.
    let is_frozen = |name: &str| {
        ["embedding", "blocks.0", "blocks.1.attention.norm"]
            .iter()
            .any(|frozen| name.starts_with(frozen))
    };
    let model = Model::new(layers, &[16], DType::F32, Device::Cpu, 1, &is_frozen).unwrap();
    let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
    let stats = Tensor::zeros(&[4], DType::F32, Device::Cpu).unwrap();
    for first in [0i64, 3] {
        let tokens: Vec<i64> = (0..48).map(|at| (at * at + first) % 5).collect();
        let tokens = Tensor::from_slice(&tokens, &[3, 16], Device::Cpu).unwrap();
        let position = Tensor::from_slice(&[1, first], &[2], Device::Cpu).unwrap();
        let options = PassOptions {
            training: true,
            accumulate: first > 0,
            last: first > 0,
            seed: 4,
            position: &position,
        };
        let mut ready = |_| Ok(());
        let params = &model.params;
        let mut pass = Pass::new(params, &mut scratch, &mut saved, options, &mut ready);
        let y = model.forward(&mut pass, &tokens).unwrap();
        let loss = CrossEntropy::default();
        let dy = model.loss_gradient(&mut pass, &loss, [&y, &tokens, &stats]);
        model.backward(&mut pass, &dy.unwrap()).unwrap();
    }
    (model.params.gradients().to_vec().unwrap(), scratch.bytes())
}

#[test]
fn what_is_computed_again_has_the_same_bits_and_takes_less_memory() {
    let (kept, all) = gradients(RecomputeKind::None);
    let mut bytes = vec![all];
    for recompute in [RecomputeKind::Attention, RecomputeKind::Block] {
        let (again, less) = gradients(recompute);
        assert!(again == kept, "{recompute:?}");
        bytes.push(less);
    }
    println!("{bytes:?}");
    assert!(bytes[1] < bytes[0] && bytes[2] * 2 < bytes[0], "{bytes:?}");
}

/// The gradients of perceptrons with GELU, how many tensors forward saves, and the bytes of the
/// activations.
fn of_perceptrons(
    fuses: bool,
    activation: Activation,
    dtype: DType,
    wide: usize,
) -> (Tensor, usize, usize) {
    let mut layers = Sequential::new();
    for _ in 0..3 {
        let gelu = Activate::new(activation);
        layers = layers
            .then(Linear::new(wide))
            .then(gelu)
            .then(Linear::new(8));
    }
    let layers = Box::new(if fuses {
        layers
    } else {
        layers.without_fusing()
    });
    let model = Model::new(layers, &[8], dtype, Device::Cpu, 1, &|_| false).unwrap();
    let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
    let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
    let options = PassOptions {
        training: true,
        accumulate: false,
        last: true,
        seed: 4,
        position: &position,
    };
    let mut ready = |_| Ok(());
    let params = &model.params;
    let mut pass = Pass::new(params, &mut scratch, &mut saved, options, &mut ready);
    let x = Tensor::randn(&[32, 8], dtype, Device::Cpu, &mut Random::new(1)).unwrap();
    let y = model.forward(&mut pass, &x).unwrap();
    let kept = pass.saved_count();
    model.backward(&mut pass, &y).unwrap();
    let gradients = params.gradients().to_dtype(DType::F64).unwrap();
    (gradients, kept, scratch.bytes())
}

#[test]
fn the_output_of_a_gelu_is_computed_again_and_its_buffer_serves_all_layers() {
    for (activation, dtype, wide) in [
        (Activation::Gelu, DType::F32, 64),
        (Activation::GeluTanh, DType::F32, 37),
        (Activation::Gelu, DType::F64, 37),
    ] {
        let (gradients, kept, bytes) = of_perceptrons(true, activation, dtype, wide);
        let (plain, plain_kept, _) = of_perceptrons(false, activation, dtype, wide);
        let bits = |of: Tensor| of.to_vec::<f64>().unwrap();
        assert!(
            bits(gradients) == bits(plain),
            "{activation:?} {dtype} {wide}"
        );
        assert_eq!([kept, plain_kept], [6, 9]);
        // The inputs of three GELUs and one more buffer of their size. Of 8 columns: the
        // output, the inputs of two layers, and gradients.
        let row = dtype.bytes() * 32;
        assert!(bytes <= row * (4 * wide + 6 * 8), "{}", bytes / row);
    }
}
