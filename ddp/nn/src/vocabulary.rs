//! Both ends of a model with a vocabulary, whose weights may be tied.
//!
//! Embedding: a learned row for each token, as `torch.nn.Embedding`, plus one for each position if
//! wanted. Letters: B sequences, T tokens, V different tokens, C columns.
//!
//! Head: the last linear layer of a model with many classes.

use ddp_kernels::DType;

use crate::build::{Init, Tie};
use crate::forward::{Module, Scope, Var};
use crate::linear::Linear;

/// Rows of "tokens.weight" (V, C) for i64 tokens (B, T), which start standard normal. With
/// positions, row t of "positions.weight" is added to token t of each sequence.
#[derive(Clone, Debug)]
pub struct Embedding {
    vocabulary: usize,
    columns: usize,
    /// The longest sequence, if positions are learned.
    context: Option<usize>,
    deviation: f64,
    /// What the rows are multiplied by.
    scale: f64,
    /// Tokens whose rows get no gradient here.
    untrained: Vec<usize>,
    tie: Option<Tie>,
    /// Whether inputs also say where documents begin.
    has_documents: bool,
}

impl Embedding {
    /// A row of this many columns for each of this many tokens.
    pub fn new(vocabulary: usize, columns: usize) -> Embedding {
        Embedding {
            vocabulary,
            columns,
            context: None,
            deviation: 1.0,
            scale: 1.0,
            untrained: Vec::new(),
            tie: None,
            has_documents: false,
        }
    }

    /// The same layer for rows of several documents: the upper half of each i64 says where in its
    /// row the token's document begins. The attention above keeps documents apart.
    pub fn of_documents(self) -> Embedding {
        Embedding {
            has_documents: true,
            ..self
        }
    }

    /// The same layer with a row for each position of sequences of `context` tokens.
    pub fn with_positions(mut self, context: usize) -> Embedding {
        self.context = Some(context);
        self
    }

    /// The same layer whose rows start normal with this standard deviation.
    pub fn normal(self, deviation: f64) -> Embedding {
        Embedding { deviation, ..self }
    }

    /// The same layer that returns its rows times `scale`.
    pub fn scaled(self, scale: f64) -> Embedding {
        Embedding { scale, ..self }
    }

    /// The same layer in which the rows of `tokens` get no gradient, as that of `padding_idx` of
    /// `torch.nn.Embedding`.
    pub fn untrained(mut self, tokens: &[usize]) -> Embedding {
        self.untrained = tokens.to_vec();
        self
    }

    /// The same layer with a table that all layers of this tie share.
    pub fn tied(mut self, tie: &Tie) -> Embedding {
        self.tie = Some(tie.clone());
        self
    }
}

impl Module for Embedding {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let &[_, time] = &x.shape()[..] else {
            let help = "give sequences of tokens";
            return x.refuse("embedding", &[x], "[rows, tokens]", help);
        };
        if let Some(context) = self.context.filter(|it| *it < time && !m.is_decoding()) {
            let expected = format!("rows of at most {context} tokens, as many as positions");
            let help = "build it for the context of the data";
            return x.refuse("embedding", &[x], &expected, help);
        }
        if self.context.is_some() && self.has_documents {
            let expected = "rotary positions, not learned ones, where rows hold several documents";
            let help = "give each document a row of its own";
            return x.refuse("embedding", &[x], expected, help);
        }
        let deviation = self.deviation;
        let init = Init::Normal { deviation };
        let size = [self.vocabulary, self.columns];
        let table = m.within("tokens", |m| match &self.tie {
            Some(tie) => m.tied_parameter(tie, "weight", &size, init),
            None => m.parameter("weight", &size, init),
        });
        let positions = self.context.map(|context| {
            let all = m.within("positions", |m| {
                m.parameter("weight", &[context, self.columns], init)
            });
            if m.is_decoding() || time == context {
                all
            } else {
                all.slice(0, 0..time)
            }
        });
        let tokens = if self.has_documents {
            m.documents(x)
        } else {
            x.clone()
        };
        let rows = tokens.rows_of(&table, positions.as_ref(), &self.untrained);
        match self.scale {
            1.0 => rows,
            scale => rows * scale,
        }
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

/// A linear layer without a bias, the last of a model. In a pass that leaves the head to the loss,
/// the model's forward returns this layer's input, and `Model::loss_gradient` does its work.
#[derive(Clone, Debug)]
pub struct Head {
    linear: Linear,
    outputs: usize,
    /// V
    classes: usize,
    /// 0 for none.
    cap: f64,
}

impl Head {
    /// A head of this many classes.
    pub fn new(classes: usize) -> Head {
        Head {
            linear: Linear::new(classes).without_bias().outer(),
            outputs: classes,
            classes,
            cap: 0.0,
        }
    }

    /// The same head of which only the first `classes` outputs are classes. The others are padding:
    /// their logits are −∞, so their probability and their gradients are 0.
    pub(crate) fn of_classes(self, classes: usize) -> Head {
        Head { classes, ..self }
    }

    /// The same head that makes cap·tanh(z / cap) of each logit z; 0 for no cap.
    pub fn capped(self, cap: f64) -> Head {
        Head { cap, ..self }
    }

    /// The same head whose weight starts normal with this standard deviation.
    pub fn normal(mut self, deviation: f64) -> Head {
        self.linear = self.linear.normal(deviation);
        self
    }

    /// The same head with a weight that all layers of this tie share.
    pub fn tied(mut self, tie: &Tie) -> Head {
        self.linear = self.linear.tied(tie);
        self
    }
}

impl Module for Head {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let mut x = x.clone();
        if m.is_decoding() && x.rank() == 3 {
            x = x.slice(1, x.size(1) - 1..x.size(1));
        }
        let y = self.linear.forward(m, &x);
        // What is added to the logits of a row.
        let mask = (self.classes < self.outputs).then(|| {
            let classes = 0..self.outputs;
            let of = |class| {
                if class < self.classes {
                    0.0
                } else {
                    f64::NEG_INFINITY
                }
            };
            m.numbers(&classes.map(of).collect::<Vec<_>>(), &[self.outputs])
        });
        y.as_head(mask.as_ref(), self.cap)
    }
}

impl Scope<'_> {
    /// A learned row for each token of `x` (B, T): `name.tokens.weight`.
    #[track_caller]
    pub fn embedding(&mut self, name: &str, x: &Var, vocabulary: usize, columns: usize) -> Var {
        self.layer(name, x, Embedding::new(vocabulary, columns))
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::{Device, Random, Tensor, ops};

    use super::*;
    use crate::CrossEntropy;
    use crate::head::ROWS_CPU;
    use crate::loss::STATS;
    use crate::models::Model;
    use crate::pass::tests::in_pass;
    use crate::{Pass, PassOptions, Saved, Scratch};

    /// The gradients by `x` and by the weight, with or without pieces.
    fn gradients(x: &Tensor, targets: &Tensor, in_pieces: bool) -> [Vec<f32>; 2] {
        let [dx, weight, _] = run(Head::new(11), x, targets, in_pieces);
        [dx, weight]
    }

    /// The gradients by `x` and by the weight of `head`, and the statistics.
    fn run(head: impl Module, x: &Tensor, targets: &Tensor, in_pieces: bool) -> [Vec<f32>; 3] {
        run_by(head, x, targets, in_pieces.then_some(false)).0
    }

    /// The same and the bytes that it takes; in pieces as `Pass::leaving_head` says.
    fn run_by(
        head: impl Module,
        x: &Tensor,
        targets: &Tensor,
        pieces: Option<bool>,
    ) -> ([Vec<f32>; 3], usize) {
        let (head, row) = (Box::new(head), &x.shape()[1..]);
        let model = Model::new(head, row, DType::F32, Device::Cpu, 1, &|_| false).unwrap();
        ops::fill_into(model.params.gradients(), f64::NAN).unwrap();
        let position = Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu).unwrap();
        let options = PassOptions {
            training: true,
            accumulate: false,
            last: true,
            seed: 0,
            position: &position,
        };
        let (mut scratch, mut saved) = (Scratch::new(Device::Cpu), Saved::default());
        let mut ready = |_| Ok(());
        let params = &model.params;
        let mut pass = Pass::new(params, &mut scratch, &mut saved, options, &mut ready);
        if let Some(by_position) = pieces {
            pass = pass.leaving_head(by_position);
        }
        let y = model.forward(&mut pass, x).unwrap();
        let stats = Tensor::zeros(&[STATS], DType::F32, Device::Cpu).unwrap();
        let of = [&y, targets, &stats];
        let loss = CrossEntropy::default();
        let dy = model.loss_gradient(&mut pass, &loss, of).unwrap();
        let dx = model.backward_to_input(&mut pass, &dy).unwrap();
        let weight = params.gradient(params.list()[0].id).unwrap();
        let found = [dx.unwrap(), weight.clone(), stats].map(|tensor| tensor.to_vec().unwrap());
        (found, scratch.bytes())
    }

    #[test]
    fn a_last_linear_layer_of_positions_is_left_to_a_loss_of_positions() {
        let random = &mut Random::new(2);
        let x = Tensor::randn(&[400, 3, 5], DType::F32, Device::Cpu, random).unwrap();
        let targets = Tensor::randint(11, &[400, 3], DType::I64, Device::Cpu, random).unwrap();
        let linear = || Linear::new(11).without_bias();
        let run = |layer: &dyn Fn() -> Box<dyn Module>, pieces| {
            let layers = crate::Sequential::new().then(crate::Residual::new(Linear::new(5)));
            let mut layers = layers.named("last", Linear::new(5));
            layers.push(layer());
            run_by(layers, &x, &targets, pieces)
        };
        let (of_head, small) = run(&|| Box::new(Head::new(11)), Some(false));
        let (of_linear, bytes) = run(&|| Box::new(linear()), Some(true));
        assert_eq!(of_linear, of_head);
        assert!(bytes == small && small < run(&|| Box::new(linear()), None).1);
        // Other losses, a bias, and a weight that is also read elsewhere.
        let twice = |m: &mut Scope<'_>, x: &Var| {
            let weight = m.parameter("weight", &[11, 5], Init::Constant(0.1));
            (x * weight.mean(0)).linear(&weight, None)
        };
        let is_whole = |layer: &dyn Fn() -> Box<dyn Module>, by_position| {
            assert_eq!(run(layer, Some(by_position)), run(layer, None));
        };
        is_whole(&|| Box::new(linear()), false);
        is_whole(&|| Box::new(Linear::new(11)), true);
        is_whole(&move || Box::new(crate::Formula(twice)), true);
    }

    #[test]
    fn a_layer_of_sums_in_bf16_is_left_to_the_loss_too() {
        let summed = |m: &mut Scope<'_>, x: &Var| {
            let sums = x.reshape(&[3, 5, 2]).sum(-1);
            m.layer("head", &sums.reshape(&[3, 5]), Head::new(7))
        };
        let layers = Box::new(crate::Formula(summed));
        let model = Model::new(layers, &[3, 10], DType::BF16, Device::Cpu, 1, &|_| false).unwrap();
        let random = &mut Random::new(2);
        let x = Tensor::randn(&[4, 3, 10], DType::F32, Device::Cpu, random).unwrap();
        let targets = Tensor::zeros(&[4, 3], DType::I64, Device::Cpu).unwrap();
        let losses = [false, true].map(|leaves| {
            let stats = Tensor::zeros(&[STATS], DType::F32, Device::Cpu).unwrap();
            in_pass(&model, true, |pass| {
                let mut pass = if leaves {
                    pass.leaving_head(true)
                } else {
                    pass
                };
                let y = model.forward(&mut pass, &x).unwrap();
                let of = [&y, &targets, &stats];
                let dy = model.loss_gradient(&mut pass, &CrossEntropy::default(), of);
                model.backward(&mut pass, &dy.unwrap()).unwrap();
            });
            stats.to_vec::<f32>().unwrap()
        });
        assert_eq!(losses[0], losses[1]);
    }

    #[test]
    fn neither_loss_nor_gradients_depend_on_padding() {
        let random = &mut Random::new(3);
        let rows = ROWS_CPU + 3;
        let x = Tensor::randn(&[rows, 5], DType::F32, Device::Cpu, random).unwrap();
        let targets = Tensor::randint(11, &[rows], DType::I64, Device::Cpu, random).unwrap();
        for in_pieces in [false, true] {
            let [dx, weight, stats] = run(Head::new(11), &x, &targets, in_pieces);
            // Initial weights are drawn row by row: those of the classes do not depend on padding.
            let padded = run(Head::new(16).of_classes(11), &x, &targets, in_pieces);
            assert_eq!(padded[1][55..], [0.0; 25]);
            assert_eq!(padded[1][..55], weight);
            assert_eq!([&padded[0], &padded[2]], [&dx, &stats]);
        }
    }

    #[test]
    fn full_pieces_give_the_bits_of_the_whole_and_rows_do_not_depend_on_pieces() {
        let random = &mut Random::new(2);
        for rows in [0, 1, ROWS_CPU, 2 * ROWS_CPU, 2 * ROWS_CPU + 7] {
            let x = Tensor::randn(&[rows, 5], DType::F32, Device::Cpu, random).unwrap();
            let targets = Tensor::randint(11, &[rows], DType::I64, Device::Cpu, random).unwrap();
            let whole = gradients(&x, &targets, false);
            let pieces = gradients(&x, &targets, true);
            assert!(pieces.iter().flatten().all(|number| number.is_finite()));
            assert_eq!(pieces[0], whole[0], "{rows} rows");
            if rows <= ROWS_CPU || rows % ROWS_CPU == 0 {
                assert_eq!(pieces[1], whole[1], "{rows} rows");
            }
        }
    }
}
