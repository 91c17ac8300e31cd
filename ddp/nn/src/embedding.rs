//! Embedding: a learned row for each token, as `torch.nn.Embedding`, plus one for each position if
//! wanted. Letters: B sequences, T tokens, V different tokens, C columns.

use ddp_kernels::ops::{self, EmbeddingScratch};
use ddp_kernels::{DType, Tensor};

use crate::build::{Build, Init, ParamId, Tie};
use crate::error::Result;
use crate::layer::Layer;
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
    tie: Option<Tie>,
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
            tie: None,
            built: None,
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
        let ids = x.reshape(&[x.count()])?;
        let y = pass.take(&[x.count(), self.columns])?;
        let table = pass.value(tokens)?;
        let mut positions = positions.map(|id| pass.value(id).cloned()).transpose()?;
        if let (Some(all), Some(cache)) = (&mut positions, pass.cache()) {
            *all = all.slice(cache.tokens..cache.tokens + ids.count())?;
        }
        ops::embedding_into(&y, table, &ids, positions.as_ref())?;
        if pass.is_training() {
            pass.save(&ids);
        }
        Ok(y.reshape(&[x.shape()[0], x.shape()[1], self.columns])?)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let Built { tokens, positions } = self.built();
        let ids = pass.restore();
        let dy = dy.reshape(&[ids.count(), self.columns])?;
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
            ops::embedding_backward_into(tensor, &dy, &ids, scratch, accumulate)?;
        }
        pass.finished(tokens)?;
        // Tokens have no gradient.
        Ok(None)
    }

    fn input_dtype(&self) -> Option<DType> {
        Some(DType::I64)
    }
}
