//! Every derivative that a layer or loss computes against finite differences of its forward, in
//! f64.

use std::sync::{Arc, Mutex};

use crate::layers::Apart;
use ddp::models::Mlp;
use ddp::nn::check::{DerivativeCheck, Objective};
use ddp::nn::{
    Activate, CrossEntropy, CustomOp, Dropout, Linear, Loss, Module, Mse, Residual, Scope,
    Sequential, Tie, Var,
};
use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Device, Random, Tensor};

/// From `check::Derivative::error`: the error of the differences is about 1e-10 times a third
/// derivative, which is below 100 here.
const BOUND: f64 = 1e-8;

const ROWS: usize = 5;

/// A module that is checked several times.
#[derive(Debug)]
struct Again<M>(Arc<Mutex<M>>);

impl<M: Module> Module for Again<M> {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        self.0.lock().unwrap().forward(m, x)
    }

    fn input_dtype(&self) -> Option<DType> {
        self.0.lock().unwrap().input_dtype()
    }
}

#[track_caller]
fn assert_derivatives(layer: impl Module, shape: &[usize]) {
    assert_derivatives_of(layer, shape, Objective::Projection, &|_| false);
}

#[track_caller]
fn assert_derivatives_of(
    layer: impl Module,
    shape: &[usize],
    objective: Objective<'_>,
    frozen: &dyn Fn(&str) -> bool,
) {
    let name = format!("{layer:?}");
    let layer = Arc::new(Mutex::new(layer));
    // Several seeds, because one draw may hide a mistake. No draw lies on a kink.
    for seed in 1..4 {
        let check = DerivativeCheck {
            shape,
            rows: ROWS,
            seed,
            objective,
            frozen,
        };
        let worst = check.worst(Again(layer.clone())).unwrap();
        assert!(worst.error() < BOUND, "seed {seed}: {worst:?} in {name}");
    }
}

#[test]
fn linear_with_and_without_bias_on_rows_of_one_and_more_dimensions() {
    assert_derivatives(Linear::new(3), &[4]);
    assert_derivatives(Linear::new(1), &[1]);
    assert_derivatives(Linear::new(3).without_bias(), &[4]);
    assert_derivatives(Linear::new(3), &[2, 4]);
    assert_derivatives(
        Sequential::new()
            .then(Linear::new(3))
            .then(Activate::relu())
            .then(Linear::new(2)),
        &[2, 2, 4],
    );
}

#[test]
fn activations_alone_fused_unfused_and_twice_in_a_row() {
    for activation in Activation::all() {
        let act = || Activate::new(activation);
        assert_derivatives(act(), &[7]);
        assert_derivatives(Sequential::new().then(act()).then(act()), &[7]);
        let linear = || Sequential::new().then(Linear::new(6));
        let net = || linear().then(act()).then(Linear::new(3));
        assert_derivatives(net(), &[4]);
        let apart = linear().then(Apart(act())).then(Linear::new(3));
        assert_derivatives(apart, &[4]);
        assert_derivatives(net().then(act()), &[4]);
        assert_derivatives(Sequential::new().then(act()).then(Linear::new(3)), &[4]);
        assert_derivatives(
            Sequential::new()
                .then(Linear::new(5))
                .then(act())
                .then(act())
                .then(Linear::new(3)),
            &[4],
        );
    }
}

#[test]
fn dropout_drops_the_same_elements_forward_and_backward() {
    for activation in Activation::all() {
        for probability in [0.0, 0.5] {
            let net = Sequential::new()
                .then(Linear::new(6))
                .then(Activate::new(activation));
            let net = net
                .then(Dropout::new(probability))
                .then(Linear::new(3))
                .then(Dropout::new(probability));
            assert_derivatives(net, &[4]);
        }
    }
}

#[test]
fn sequentials_in_sequentials() {
    for activation in Activation::all() {
        let act = || Activate::new(activation);
        let inner = || {
            Sequential::new()
                .then(Linear::new(5))
                .then(act())
                .then(Linear::new(6))
        };
        assert_derivatives(inner().then(Sequential::new()).then(inner()), &[4]);
        assert_derivatives(
            Sequential::new().then(inner()).then(act()).then(inner()),
            &[4],
        );
        assert_derivatives(
            Sequential::new()
                .then(act())
                .then(Sequential::new().then(act()))
                .then(inner()),
            &[4],
        );
        let begins_with_one = Sequential::new().then(act()).then(Linear::new(2));
        assert_derivatives(
            Sequential::new()
                .then(Linear::new(3))
                .then(act())
                .then(begins_with_one),
            &[4],
        );
    }
    assert_derivatives(Sequential::new(), &[4]);
}

#[test]
fn residuals_with_anything_inside() {
    for activation in Activation::all() {
        let act = || Activate::new(activation);
        let inner = || {
            Sequential::new()
                .then(Linear::new(5))
                .then(act())
                .then(Linear::new(4))
        };
        assert_derivatives(Residual::new(inner()), &[4]);
        assert_derivatives(Residual::new(Sequential::new()), &[4]);
        assert_derivatives(Residual::new(Residual::new(Dropout::new(0.3))), &[4]);
        let net = Sequential::new()
            .then(Linear::new(4))
            .then(act())
            .then(Residual::new(inner()));
        assert_derivatives(
            net.then(act())
                .then(Residual::new(act()))
                .then(Linear::new(2)),
            &[4],
        );
    }
}

#[test]
fn tied_weights_gather_the_gradients_of_all_their_uses() {
    let tie = Tie::new();
    let tied = |tie: &Tie| Linear::new(4).tied(tie);
    let net = Sequential::new()
        .then(tied(&tie))
        .then(Activate::gelu())
        .then(tied(&tie).without_bias());
    assert_derivatives(net.then(Residual::new(tied(&tie))), &[4]);
}

#[test]
fn frozen_parameters_leave_the_other_derivatives_right() {
    let net = || {
        let net = Sequential::new()
            .then(Linear::new(5))
            .then(Activate::gelu())
            .then(Linear::new(4));
        net.then(Activate::relu()).then(Linear::new(3))
    };
    for frozen in [
        "0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.", "0.", "2.", "",
    ] {
        let is_frozen = |name: &str| name.starts_with(frozen);
        assert_derivatives_of(net(), &[4], Objective::Projection, &is_frozen);
        let apart = Sequential::new()
            .then(Linear::new(5))
            .then(Apart(Activate::gelu()))
            .then(Linear::new(4));
        let apart = apart.then(Apart(Activate::relu())).then(Linear::new(3));
        assert_derivatives_of(apart, &[4], Objective::Projection, &is_frozen);
    }
    let tie = Tie::new();
    let net = || {
        Sequential::new()
            .then(Linear::new(4).tied(&tie))
            .then(Linear::new(4).tied(&tie))
    };
    assert_derivatives_of(net(), &[4], Objective::Projection, &|name| {
        name == "0.weight"
    });
    assert_derivatives_of(net(), &[4], Objective::Projection, &|name| name == "1.bias");
}

#[test]
fn cross_entropy_smoothed_weighted_and_with_rows_to_ignore() {
    let targets = Tensor::from_slice(&[2i64, 0, -1, 1, 2], &[ROWS], Device::Cpu).unwrap();
    let class_weights = Tensor::from_slice(&[0.5f64, 2.0, 1.25], &[3], Device::Cpu).unwrap();
    for label_smoothing in [0.0, 0.1, 1.0] {
        for class_weights in [None, Some(class_weights.clone())] {
            let loss = CrossEntropy {
                label_smoothing,
                class_weights,
                ignore_index: Some(-1),
            };
            let net = Sequential::new()
                .then(Linear::new(6))
                .then(Activate::gelu_tanh())
                .then(Linear::new(3));
            assert_derivatives_of(net, &[4], Objective::Loss(&loss, &targets), &|_| false);
        }
    }
}

#[test]
fn cross_entropy_of_sequences() {
    let targets =
        Tensor::from_slice(&[2i64, 0, 1, 1, 2, 0, 0, 0, 1, 2], &[ROWS, 2], Device::Cpu).unwrap();
    assert_derivatives_of(
        Linear::new(3),
        &[2, 4],
        Objective::Loss(&CrossEntropy::default(), &targets),
        &|_| false,
    );
}

#[test]
fn squared_error() {
    let targets = Tensor::randn(&[ROWS, 3], DType::F64, Device::Cpu, &mut Random::new(7)).unwrap();
    let net = Sequential::new()
        .then(Linear::new(6))
        .then(Activate::relu())
        .then(Linear::new(3));
    assert_derivatives_of(
        net,
        &[4],
        Objective::Loss(&Mse as &dyn Loss, &targets),
        &|_| false,
    );
}

#[test]
fn derivatives_of_a_perceptron_with_every_option_are_right() {
    let targets = Tensor::from_slice(&[2u8, 0, 1, 1, 2], &[ROWS], Device::Cpu).unwrap();
    for activation in Activation::all() {
        let mlp = Mlp {
            hidden: vec![6, 5],
            outputs: 3,
            activation,
            dropout: 0.25,
        };
        let loss = CrossEntropy {
            label_smoothing: 0.1,
            ..CrossEntropy::default()
        };
        assert_derivatives_of(
            mlp.layers(),
            &[4],
            Objective::Loss(&loss, &targets),
            &|_| false,
        );
    }
}

#[test]
fn a_wrong_derivative_is_found_and_named() {
    /// y = 2x, whose derivative is 2 and not what stands here.
    #[derive(Debug)]
    struct Wrong;
    impl Module for Wrong {
        fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
            m.custom(Arc::new(Wrong), &[x])
        }
    }
    impl CustomOp for Wrong {
        fn shape(&self, inputs: &[Vec<usize>]) -> ddp::nn::Result<Vec<usize>> {
            Ok(inputs[0].clone())
        }
        fn forward(&self, x: &[&Tensor], y: &Tensor) -> ddp::nn::Result<()> {
            Ok(ddp_kernels::ops::scale_into(y, x[0], 2.0)?)
        }
        fn backward(
            &self,
            _: &[&Tensor],
            [_, dy]: [&Tensor; 2],
            dx: &[&Tensor],
        ) -> ddp::nn::Result<()> {
            Ok(dx[0].copy_from(dy)?)
        }
    }
    let worst = DerivativeCheck::new(&[3]).worst(Wrong).unwrap();
    assert!(
        worst.error() > 0.1 && worst.by.starts_with("input["),
        "{worst:?}"
    );
    assert!(
        (2.0 * worst.backward - worst.finite).abs() < 1e-8,
        "{worst:?}"
    );
}
