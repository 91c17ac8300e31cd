//! The layers that only a transformer over patches has. Letters: B images, T tokens of an image, K
//! numbers of a patch, C columns.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Patches};

use crate::Linear;
use crate::build::{Build, Init, ParamId};
use crate::error::Result;
use crate::layer::Layer;
use crate::pass::{Gradient, Pass};

/// Cuts images into patches, of which a linear layer, "patches", makes tokens, and adds
/// "positions.weight" (T, C). A leading token has a patch of zeros: its content is learned by its
/// position.
#[derive(Debug)]
pub(super) struct PatchEmbedding {
    patches: Patches,
    linear: Linear,
    positions: Option<ParamId>,
    /// Of a row.
    input_shape: Vec<usize>,
}

impl PatchEmbedding {
    /// Tokens of this many columns.
    pub(super) fn new(patches: Patches, columns: usize) -> PatchEmbedding {
        PatchEmbedding {
            patches,
            linear: Linear::new(columns).outer(),
            positions: None,
            input_shape: Vec::new(),
        }
    }

    fn positions(&self) -> ParamId {
        self.positions
            .expect("a layer is built (Model::new) before it is run")
    }
}

impl Layer for PatchEmbedding {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        if shape.iter().product::<usize>() != self.patches.pixels() {
            return Err(build.refuse(
                format!("images of {} numbers", self.patches.pixels()),
                format!("rows of shape {shape:?}"),
                "build it for the images of the data",
            ));
        }
        self.input_shape = shape.to_vec();
        let patches = [self.patches.tokens(), self.patches.columns()];
        let tokens = build.scope("patches", |build| self.linear.build(build, &patches))?;
        // As large as tokens, so that the first steps see where a patch is.
        let init = Init::Normal { deviation: 0.5 };
        let positions = build.scope("positions", |build| {
            build.parameter("weight", &tokens, init)
        });
        self.positions = Some(positions?);
        Ok(tokens)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let images = x.shape()[0];
        let x = x.reshape(&[images, self.patches.pixels()])?;
        let shape = [images, self.patches.tokens(), self.patches.columns()];
        let patches = pass.take(&shape)?;
        ops::patches_into(&patches, &x, &self.patches)?;
        let tokens = self.linear.forward(pass, &patches)?;
        let positions = pass.value(self.positions())?.flatten()?;
        let rows = tokens.reshape(&[images, positions.count()])?;
        ops::add_into(&rows, &rows, &positions)?;
        Ok(tokens)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let columns = self.linear.outputs();
        if let Some(Gradient { tensor, accumulate }) = pass.gradient(self.positions()) {
            let dy = dy.reshape(&[dy.count() / columns, columns])?;
            ops::embedding_positions_backward_into(tensor, &dy, accumulate)?;
        }
        pass.finished(self.positions())?;
        let Some(dpatches) = self.linear.backward(pass, dy)? else {
            return Ok(None);
        };
        let images = dy.shape()[0];
        let dx = pass.take(&[images, self.patches.pixels()])?;
        ops::patches_backward_into(&dx, &dpatches, &self.patches)?;
        let shape = [&[images], &self.input_shape[..]].concat();
        Ok(Some(dx.reshape(&shape)?))
    }
}

/// The mean of the first tokens of each image: (B, T, C) to (B, C).
#[derive(Debug)]
pub(super) struct MeanOfTokens {
    /// How many are in the mean.
    tokens: usize,
    /// T, once built.
    time: usize,
}

impl MeanOfTokens {
    /// The mean of this many tokens.
    pub(super) fn new(tokens: usize) -> MeanOfTokens {
        MeanOfTokens { tokens, time: 0 }
    }
}

impl Layer for MeanOfTokens {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let &[time, columns] = shape else {
            return Err(build.refuse(
                "rows of two dimensions, [tokens, columns]",
                format!("{shape:?}"),
                "the mean is over the tokens of a row",
            ));
        };
        self.time = time;
        Ok(vec![columns])
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let mean = pass.take(&[x.shape()[0], x.shape()[2]])?;
        ops::token_mean_into(&mean, x, self.tokens)?;
        Ok(mean)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let dx = pass.take(&[dy.shape()[0], self.time, dy.shape()[1]])?;
        ops::token_mean_backward_into(&dx, dy, self.tokens)?;
        Ok(Some(dx))
    }
}
