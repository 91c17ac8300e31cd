//! Both ends of a model with a vocabulary, whose weights may be tied.
//!
//! Embedding: a learned row for each token, as `torch.nn.Embedding`, plus one for each position if
//! wanted. Letters: B sequences, T tokens, V different tokens, C columns.
//!
//! Head: the last linear layer of a model with many classes, whose outputs (logits) would take more
//! memory than the rest. With a loss it processes the rows in pieces: logits, loss and gradients of
//! one piece, then the next. Letters: R rows, C columns, V classes, P ≥ V classes with padding.

use std::ops::Range;
use std::sync::OnceLock;

use ddp_kernels::ops::{self, EmbeddingScratch};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use crate::build::{Build, Init, ParamId, Tie};
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::Linear;
use crate::loss::{Loss, math_dtype};
use crate::pass::{Gradient, Pass};

/// Rows of "tokens.weight" (V, C) for i64 tokens (B, T), which start standard normal. With
/// positions, row t of "positions.weight" is added to token t of each sequence.
#[derive(Debug)]
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
    built: Option<Built>,
}

#[derive(Clone, Copy, Debug)]
struct Built {
    tokens: ParamId,
    positions: Option<ParamId>,
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
            built: None,
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

    fn built(&self) -> Built {
        self.built
            .expect("a layer is built (Model::new) before it is run")
    }
}

impl Layer for Embedding {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let &[time] = shape else {
            return Err(build.refuse(
                "rows of one dimension, [tokens]",
                format!("{shape:?}"),
                "give sequences of tokens",
            ));
        };
        if self.context.is_some_and(|context| context != time) {
            return Err(build.refuse(
                format!("rows of {:?} tokens, as many as positions", self.context),
                format!("{time}"),
                "build it for the context of the data",
            ));
        }
        if self.context.is_some() && self.has_documents {
            return Err(build.refuse(
                "rotary positions, where rows hold several documents",
                "learned ones",
                "give each document a row of its own",
            ));
        }
        let deviation = self.deviation;
        let init = Init::Normal { deviation };
        let size = [self.vocabulary, self.columns];
        let tokens = build.scope("tokens", |build| match &self.tie {
            Some(tie) => build.tied_parameter(tie, "weight", &size, init),
            None => build.parameter("weight", &size, init),
        })?;
        let size = [time, self.columns];
        let positions = self
            .context
            .map(|_| build.scope("positions", |build| build.parameter("weight", &size, init)))
            .transpose()?;
        self.built = Some(Built { tokens, positions });
        Ok(vec![time, self.columns])
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let Built { tokens, positions } = self.built();
        let mut ids = x.reshape(&[x.count()])?;
        if self.has_documents {
            let codes = ids;
            ids = pass.take_as(codes.shape(), DType::I64)?;
            let begins = pass.take_as(codes.shape(), DType::I32)?;
            ops::split_documents_into(&ids, &begins, &codes)?;
            pass.set_documents(begins);
        }
        let y = pass.take(&[x.count(), self.columns])?;
        let table = pass.value(tokens)?;
        let mut positions = positions.map(|id| pass.value(id).cloned()).transpose()?;
        if let (Some(all), Some(cache)) = (&mut positions, pass.cache()) {
            *all = all.slice(cache.tokens..cache.tokens + ids.count())?;
        }
        ops::embedding_into(&y, table, &ids, positions.as_ref())?;
        if self.scale != 1.0 {
            ops::scale_into(&y, &y, self.scale)?;
        }
        if pass.is_training() {
            pass.save(&ids);
        }
        Ok(y.reshape(&[x.shape()[0], x.shape()[1], self.columns])?)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let Built { tokens, positions } = self.built();
        let ids = pass.restore();
        let mut dy = dy.reshape(&[ids.count(), self.columns])?;
        if self.scale != 1.0 {
            let scaled = pass.take(dy.shape())?;
            ops::scale_into(&scaled, &dy, self.scale)?;
            dy = scaled;
        }
        if let Some(positions) = positions {
            if let Some(gradient) = pass.gradient(positions) {
                let Gradient { tensor, accumulate } = gradient;
                ops::embedding_positions_backward_into(tensor, &dy, accumulate)?;
            }
            pass.finished(positions)?;
        }
        if let Some(Gradient { tensor, accumulate }) = pass.gradient(tokens) {
            let scratch = EmbeddingScratch {
                order: &pass.take_as(&[ids.count()], DType::I32)?,
                sums: &pass.take_as(
                    &[ops::embedding_sums_of(ids.count()), self.columns],
                    tensor.dtype(),
                )?,
            };
            let rows = self
                .untrained
                .iter()
                .map(|&token| tensor.slice(token..token + 1));
            let rows = rows.collect::<Result<Vec<_>, _>>()?;
            // A tied head may have added to them.
            let mut before = Vec::new();
            for row in rows.iter().filter(|_| accumulate) {
                let copy = pass.take_as(row.shape(), row.dtype())?;
                copy.copy_from(row)?;
                before.push(copy);
            }
            ops::embedding_backward_into(tensor, &dy, &ids, scratch, accumulate)?;
            for (index, row) in rows.iter().enumerate() {
                match before.get(index) {
                    Some(before) => row.copy_from(before)?,
                    None => ops::zero(row)?,
                }
            }
        }
        pass.finished(tokens)?;
        // Tokens have no gradient.
        Ok(None)
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}

/// Rows of a piece on the CPU, as many as a matmul sums at a time. The weight's gradient is the
/// sum of the pieces in order. If all pieces are full, it is bit-identical to one matmul.
const ROWS_CPU: usize = 256;
/// In bf16 pieces are larger, because each reads the weight twice and adds to its gradient. The
/// gradient is not bit-identical to one matmul.
const ROWS_CPU_BF16: usize = 1024;
/// Rows of a piece on a GPU.
const ROWS_GPU: usize = 8192;

/// A linear layer without a bias. In a pass that leaves the head to the loss, its forward returns
/// its input, and `Model::loss_gradient` does its work.
#[derive(Debug)]
pub struct Head {
    linear: Linear,
    /// V
    classes: usize,
    /// (P), once it was needed: 0 for classes, −∞ for padding.
    mask: OnceLock<Tensor>,
}

impl Head {
    /// A head of this many classes.
    pub fn new(classes: usize) -> Head {
        Head {
            linear: Linear::new(classes).without_bias().outer(),
            classes,
            mask: OnceLock::new(),
        }
    }

    /// The same head of which only the first `classes` outputs are classes. The others are padding:
    /// their logits are −∞, so their probability and their gradients are 0.
    pub(crate) fn of_classes(self, classes: usize) -> Head {
        Head { classes, ..self }
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

    /// What is added to the logits of a row, for logits of `x`; None without padding. Made when it
    /// is first needed.
    fn mask(&self, x: &Tensor) -> Result<Option<&Tensor>> {
        if self.classes >= self.linear.outputs {
            return Ok(None);
        }
        if let Some(mask) = self.mask.get() {
            return Ok(Some(mask));
        }
        let mut values = vec![0.0f32; self.linear.outputs];
        values[self.classes..].fill(f32::NEG_INFINITY);
        let mask = Tensor::from_slice(&values, &[values.len()], Device::Cpu)?;
        let mask = announced("the mask of padded classes", || {
            mask.to_dtype(x.dtype())?.to(x.device())
        })?;
        Ok(Some(self.mask.get_or_init(|| mask)))
    }

    /// Calls `body` with each piece: its rows, and of these `x`, `targets` and the logits.
    fn each_piece(
        &self,
        pass: &mut Pass<'_>,
        x: &Tensor,
        targets: &Tensor,
        mut body: impl FnMut(&mut Pass<'_>, Range<usize>, [&Tensor; 3]) -> Result<()>,
    ) -> Result<()> {
        let (weight, columns) = (self.linear.weight(), self.linear.inputs());
        let (x, mask) = (x.reshape(&[x.count() / columns, columns])?, self.mask(x)?);
        let (rows, targets) = (x.shape()[0], targets.flatten()?);
        let piece = match x.device() {
            Device::Cpu if x.dtype() == DType::BF16 => ROWS_CPU_BF16,
            Device::Cpu => ROWS_CPU,
            Device::Cuda(_) => ROWS_GPU,
        };
        // Without rows there is one piece without rows, which sets the gradient to 0.
        for start in (0..rows.max(1)).step_by(piece) {
            let rows = start..rows.min(start + piece);
            let (x, targets) = (x.slice(rows.clone())?, targets.slice(rows.clone())?);
            let logits = pass.take(&[rows.len(), self.linear.outputs])?;
            let weight = pass.value(weight)?;
            ops::linear_into(&logits, &x, weight, mask, None, None)?;
            body(pass, rows, [&x, &targets, &logits])?;
        }
        Ok(())
    }

    /// The gradient by x (…, C) of the sum of losses, of x, targets and stats. Writes the weight's
    /// gradient.
    pub(crate) fn gradient(
        &self,
        loss: &dyn Loss,
        pass: &mut Pass<'_>,
        [x, targets, stats]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let (weight, columns) = (self.linear.weight(), self.linear.inputs());
        let dx = pass.take(&[x.count() / columns, columns])?;
        self.each_piece(pass, x, targets, |pass, rows, [x, targets, logits]| {
            loss.compute(pass, [logits, targets, stats], Some(logits))?;
            if let Some(Gradient { tensor, accumulate }) = pass.gradient(weight) {
                let accumulate = accumulate || rows.start > 0;
                ops::linear_backward_weight_into(tensor, None, logits, x, accumulate)?;
            }
            let dx = dx.slice(rows)?;
            let weight = pass.value(weight)?;
            Ok(ops::linear_backward_input_into(&dx, logits, weight, None)?)
        })?;
        Ok(dx.reshape(x.shape())?)
    }

    /// The loss of each row of x, (R), which are added to stats.
    pub(crate) fn losses(
        &self,
        loss: &dyn Loss,
        pass: &mut Pass<'_>,
        [x, targets, stats]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let losses = pass.take_as(&[targets.count()], math_dtype(x))?;
        self.each_piece(pass, x, targets, |pass, rows, [_, targets, logits]| {
            let part = loss.compute(pass, [logits, targets, stats], None)?;
            Ok(losses.slice(rows)?.copy_from(&part)?)
        })?;
        Ok(losses)
    }
}

impl Layer for Head {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        self.linear.build(build, shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if pass.leaves_head() {
            return Ok(x.clone());
        }
        if pass.cache().is_none() {
            return self.linear.forward_with(pass, x, self.mask(x)?);
        }
        let columns = self.linear.inputs();
        let rows = x.count() / columns;
        let last = x.reshape(&[rows, columns])?.slice(rows - 1..rows)?;
        self.linear.forward_with(pass, &last, self.mask(x)?)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        if !pass.leaves_head() {
            return self.linear.backward(pass, dy);
        }
        pass.finished(self.linear.weight())?;
        Ok(Some(dy.clone()))
    }
}

#[cfg(test)]
mod tests {
    use ddp_kernels::{DType, Random};

    use super::*;
    use crate::loss::{CrossEntropy, STATS};
    use crate::models::Model;
    use crate::{PassOptions, Saved, Scratch};

    /// The gradients by `x` and by the weight, with or without pieces.
    fn gradients(x: &Tensor, targets: &Tensor, in_pieces: bool) -> [Vec<f32>; 2] {
        let [dx, weight, _] = run(Head::new(11), x, targets, in_pieces);
        [dx, weight]
    }

    /// The gradients by `x` and by the weight of `head`, and the statistics.
    fn run(head: Head, x: &Tensor, targets: &Tensor, in_pieces: bool) -> [Vec<f32>; 3] {
        let head = Box::new(head);
        let model = Model::new(head, &[5], DType::F32, Device::Cpu, 1, &|_| false).unwrap();
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
        if in_pieces {
            pass = pass.leaving_head();
        }
        let y = model.forward(&mut pass, x).unwrap();
        let stats = Tensor::zeros(&[STATS], DType::F32, Device::Cpu).unwrap();
        let of = [&y, targets, &stats];
        let loss = CrossEntropy::default();
        let dy = model.loss_gradient(&mut pass, &loss, of).unwrap();
        let dx = model.backward_to_input(&mut pass, &dy).unwrap();
        let weight = params.gradient(params.list()[0].id).unwrap();
        [dx.unwrap(), weight.clone(), stats].map(|tensor| tensor.to_vec().unwrap())
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
