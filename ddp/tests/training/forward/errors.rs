//! What is refused, with the operation and the line that it names.

use super::*;

#[test]
fn errors_name_operation_operands_and_line() {
    let refused = |formula: Of, row: &[usize]| -> String {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(row, Device::Cpu, ddp_kernels::Seed(1));
        built.unwrap_err().to_string()
    };
    let line = line!() + 2;
    let text = refused(
        |m, x| x.exp() + m.parameter("wrong", &[7], Init::Constant(0.0)),
        &[5],
    );
    let at = format!(
        "0 ({0}:{line}): add: expected equal lengths, or 1, got exp [rows, 5] of {0}:{line} \
         and 0.wrong [7]; help: ",
        file!()
    );
    assert!(text.starts_with(&at), "{text}");
    let cases: [(Of, &str); 22] = [
        (
            |m, x| m.conv1d("c", &x.reshape(&[1, 5]), Convolution::new(2, 3)) + x,
            "got conv1d [rows, 2, 3] of ddp/tests/",
        ),
        (
            |m, x| m.within("inner", |m| m.conv1d("c", x, Convolution::new(2, 3))),
            "0.inner.c (ddp/tests/training/forward/errors.rs:",
        ),
        (|_, x| x.sum(4), ": sum: "),
        (|_, x| x.mean(4), ": mean: "),
        (|_, x| x.smallest(4), ": smallest: "),
        (|_, x| x.softmax(4), ": softmax: "),
        (|_, x| x.log_softmax(4), ": log_softmax: "),
        (
            |m, x| m.dropout("drop", x, 0.5) + m.dropout("drop", x, 0.5),
            "dropout: expected a name that no other dropout has",
        ),
        (
            |_, x| x.reshape(&[3]),
            "expected as many elements as [3] has, got x [rows, 5]; help: give the lengths of a row",
        ),
        (|_, x| x.permute(&[0, 0]), "each of its axes once in [0, 0]"),
        (|_, x| x.slice(1, 2..9), "expected indices 2..9 below 5"),
        (
            |m, x| x.matmul(&weight(m, "w", &[4, 6])),
            "as many rows of the second as columns of the first, 5",
        ),
        (
            |_, x| x.matmul(x),
            "expected a second matrix that is the same for all rows",
        ),
        (
            |m, _| weight(m, "w", &[2, 5]),
            "output: expected one value per row, got 0.w [2, 5], which is the same for all rows",
        ),
        (
            |m, x| m.linear("up", x, 3).relu() + x.matmul(&weight(m, "w", &[5, 4])).named("mixed"),
            "got relu [rows, 3] of ddp/tests/",
        ),
        (
            |m, x| m.linear("up", x, 3) + x.matmul(&weight(m, "w", &[5, 4])).named("mixed"),
            " and mixed [rows, 4] of ddp/tests/",
        ),
        (
            |m, x| x.softmax(-1) + m.linear("up", x, 3),
            "got softmax [rows, 5] of ddp/tests/",
        ),
        (
            |m, x| x.pow(1.5) + m.linear("up", x, 3),
            "got pow [rows, 5] of ddp/tests/",
        ),
        (
            |m, x| m.linear("a", x, 5) + m.linear("a", x, 5),
            "0.a.weight: expected a name that is not taken, got it twice; help: give each layer its own name",
        ),
        (
            |_, x| Var::concatenate(&[x, &x.exp().reshape(&[5, 1])], 1),
            ": concatenate: ",
        ),
        (
            |_, x| {
                if x.tanh() > x.exp() {
                    x.exp()
                } else {
                    x.tanh()
                }
            },
            ": >: expected no branch on values, which a formula does not see, got tanh [rows, 5] of ",
        ),
        (
            |_, x| if &x.tanh() == x { x.exp() } else { x.tanh() },
            "; help: write a.equal(&b).select(&yes, &no)",
        ),
    ];
    for (formula, expected) in cases {
        let text = refused(formula, &[5]);
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

/// They were accepted. A window of 0 was none on a GPU.
#[test]
fn settings_that_mean_nothing_are_refused() {
    let cases: [(Of, &[usize], &str); 8] = [
        (
            |m, x| m.conv1d("c", x, Convolution::new(2, 3).dilation(0)),
            &[2, 9],
            "convolution: expected windows that fit into the input, and strides and dilations of at least 1",
        ),
        (
            |m, x| m.conv1d("c", x, Convolution::new(2, 11)),
            &[2, 9],
            "convolution: expected windows that fit into the input",
        ),
        (
            |m, x| m.conv1d("c", x, Convolution::new(2, 3).groups(4)),
            &[2, 9],
            "convolution: expected 2 channels and 2 outputs in 4 equal groups",
        ),
        (
            |m, x| x.convolve(&weight(m, "w", &[2, 1, 3]), Convolution::new(2, 3)),
            &[2, 9],
            "convolution: expected a weight (outputs, channels / groups, size …) [2, 2, 3]",
        ),
        (
            |_, x| x.convolve(x, Convolution::new(2, 3)),
            &[2],
            "convolution: expected (batch, channels) and one or two more axes",
        ),
        (
            |m, x| {
                m.parameter(
                    "w",
                    &[3],
                    Init::Normal {
                        deviation: f64::NAN,
                    },
                ) + x
            },
            &[3],
            "0.w: expected finite initial weights, got Normal { deviation: NaN }",
        ),
        (
            |m, x| {
                let attention = SelfAttention::causal(8, 2, 2, [&Linear::new, &Linear::new]);
                m.layer("a", x, attention.windowed(0))
            },
            &[4, 8],
            "attention: expected a window of at least 1 token",
        ),
        (
            |m, x| m.layer("a", x, SelfAttention::causal(8, 3, 3, [&Linear::new; 2])),
            &[4, 8],
            "attention: expected heads that divide 8 columns, and kv_heads that divide them, instead \
             of 3 heads of 0 columns",
        ),
    ];
    for (formula, row, expected) in cases {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(row, Device::Cpu, ddp_kernels::Seed(1));
        let text = built.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
}

/// Errors within a module of the user's own named the line that calls the module.
#[test]
fn errors_within_own_modules_name_the_line_of_the_wrong_operation() {
    fn wrong(m: &mut Scope<'_>, x: &Var) -> Var {
        x + m.parameter("wrong", &[7], Init::Constant(0.0))
    }
    let line_of_add = line!() - 2;
    fn wrong_layer(m: &mut Scope<'_>, x: &Var) -> Var {
        m.linear("flat", x, 0)
    }
    let line_of_layer = line!() - 2;
    let cases: [(Of, u32, &str); 6] = [
        (wrong, line_of_add, "0"),
        (
            |m, x| m.layer("block", x, Formula(wrong)),
            line_of_add,
            "0.block",
        ),
        (
            |m, x| m.within("block", |m| wrong(m, x)),
            line_of_add,
            "0.block",
        ),
        (
            |m, x| m.within("blocks", |m| m.layer("0", x, Formula(wrong))),
            line_of_add,
            "0.blocks.0",
        ),
        (
            |m, x| m.layer("block", x, Formula(wrong_layer)),
            line_of_layer,
            "0.block.flat",
        ),
        (
            |m, x| {
                m.layer(
                    "all",
                    x,
                    Sequential::new().named("block", Formula(wrong_layer)),
                )
            },
            line_of_layer,
            "0.all.block.flat",
        ),
    ];
    for (formula, line, place) in cases {
        let layers = Sequential::new().then(Formula(formula));
        let built = layers.build(&[5], Device::Cpu, ddp_kernels::Seed(1));
        let text = built.unwrap_err().to_string();
        let at = format!("{place} ({}:{line}): ", file!());
        assert!(text.starts_with(&at), "{at}: {text}");
    }
}

/// x, where an element of the output, or of the gradient, is left out.
#[derive(Debug)]
struct Forgets {
    is_backward: bool,
}

impl Forgets {
    fn write(&self, to: &Tensor, of: &Tensor, forgets: bool) -> Result<()> {
        let rows = to.shape()[0] - usize::from(forgets);
        Ok(to.slice(0..rows)?.copy_from(&of.slice(0..rows)?)?)
    }
}

impl CustomOp for Forgets {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        self.write(out, x[0], !self.is_backward)
    }

    fn backward(&self, _: &[&Tensor], of: [&Tensor; 2], dx: &[&Tensor]) -> Result<()> {
        self.write(dx[0], of[1], self.is_backward)
    }
}

/// It trained on whatever the memory held.
#[test]
fn an_own_operation_that_leaves_elements_out_is_refused_with_its_line() {
    for (is_backward, what) in [(false, "forward: out"), (true, "backward: gradient 0")] {
        let line = line!() + 2;
        let formula =
            move |m: &mut Scope<'_>, x: &Var| m.custom(Arc::new(Forgets { is_backward }), &[x]);
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let layers = Sequential::new().then(Formula(formula));
            let model = Model::new(Box::new(layers), &[3], dtype, Device::Cpu, 1, &|_| false);
            let x = Tensor::zeros(&[4, 3], dtype, Device::Cpu).unwrap();
            let error = try_rows(&model.unwrap(), &x).unwrap_err();
            let expected = format!(
                "0 ({}:{line}): Forgets {{ is_backward: {is_backward} }}: {what}: expected all \
                 12 elements to be written, got 3 unwritten; help: ",
                file!()
            );
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
    }
}

/// Its kernel is called wrongly.
#[derive(Debug)]
struct Wrong;

impl CustomOp for Wrong {
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> Result<()> {
        Ok(ddp_kernels::ops::sum_into(out, x[0])?)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], _: &[&Tensor]) -> Result<()> {
        Ok(())
    }
}

#[test]
fn errors_of_a_kernel_name_the_layer_and_the_line() {
    let line = line!() + 1;
    let formula = |m: &mut Scope<'_>, x: &Var| m.custom(Arc::new(Wrong), &[&x.exp()]);
    let model = built(Sequential::new().then(Formula(formula)), &[3]);
    let x = Tensor::zeros(&[4, 3], DType::F32, Device::Cpu).unwrap();
    let text = try_rows(&model, &x).unwrap_err().to_string();
    let expected = format!("0 ({}:{line}): ", file!());
    assert!(
        text.starts_with(&expected) && text.contains("sum"),
        "{text}"
    );
}
