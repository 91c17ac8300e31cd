//! Self-attention: a linear layer makes queries, keys and values of all heads, and another one
//! mixes the outputs of the heads. Letters: B sequences, T tokens, C columns, H heads, K heads of
//! keys and values, D columns of a head.

use std::sync::OnceLock;

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Attention};
use ddp_kernels::transfer::announced;

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::Linear;
use crate::loss::math_dtype;
use crate::pass::Pass;

/// Self-attention over (B, T, C). Its linear layers are called "qkv" and "out"; rows of `qkv`'s
/// weight are the queries' H·D, then the keys' K·D, then the values' K·D.
#[derive(Debug)]
pub struct SelfAttention {
    heads: usize,
    kv_heads: usize,
    causal: bool,
    /// The base of rotary positions, if these are wanted, and their table once it was needed.
    rotary: Option<(f64, OnceLock<Tensor>)>,
    qkv: Linear,
    out: Linear,
    built: Option<Attention>,
}

impl SelfAttention {
    /// Causal attention with this many heads, each of C / `heads` columns, of which `kv_heads` have
    /// separate keys and values. `linear` makes a linear layer with this many outputs; the first
    /// makes queries, keys and values, the second the output.
    pub fn causal(
        width: usize,
        heads: usize,
        kv_heads: usize,
        linear: [&dyn Fn(usize) -> Linear; 2],
    ) -> SelfAttention {
        let head_size = width / heads.max(1);
        let parts = [heads, kv_heads, kv_heads].map(|heads| heads * head_size);
        SelfAttention {
            heads,
            kv_heads,
            causal: true,
            rotary: None,
            qkv: linear[0](parts.iter().sum()).in_parts(&parts),
            out: linear[1](width),
            built: None,
        }
    }

    /// The same attention in which each token sees all of its sequence.
    pub fn full(mut self) -> SelfAttention {
        self.causal = false;
        self
    }

    /// The same attention whose queries and keys are turned by their positions, with this base.
    pub fn rotary(mut self, base: f64) -> SelfAttention {
        self.rotary = Some((base, OnceLock::new()));
        self
    }

    /// The table of rotary positions on the device of `like`. Made when it is first needed.
    fn rotary_table(&self, like: &Tensor) -> Result<Option<&Tensor>> {
        let Some((base, table)) = &self.rotary else {
            return Ok(None);
        };
        if let Some(table) = table.get() {
            return Ok(Some(table));
        }
        let &Attention {
            time, head_size, ..
        } = self.built();
        let made = announced("rotary positions", || {
            ops::rope_table(time, head_size, *base, like.device())
        })?;
        Ok(Some(table.get_or_init(|| made)))
    }

    fn built(&self) -> &Attention {
        self.built
            .as_ref()
            .expect("a layer is built (Model::new) before it is run")
    }

    /// What the heads return for new tokens, whose queries, keys and values are in `qkv`, after
    /// those in the pass's cache.
    fn mix_new(&self, pass: &mut Pass<'_>, qkv: &Tensor) -> Result<Tensor> {
        let built = self.built();
        let (rows, columns) = (qkv.shape()[0], built.heads * built.head_size);
        let mixed = pass.take(&[rows, columns])?;
        let cache = pass.cache().expect("the caller decodes");
        let before = cache.tokens;
        if let Some(table) = self.rotary_table(qkv)? {
            let table = table.slice(before..before + rows)?;
            ops::rope_into(qkv, qkv, &table, self.heads + self.kv_heads)?;
        }
        let time = before + rows;
        let kept = cache.next(rows, 2 * built.kv_heads * built.head_size, qkv.dtype())?;
        ops::attention_cached_into(&mixed, &kept, qkv, &Attention { time, ..*built })?;
        Ok(mixed)
    }

    /// The shape of the numbers that forward keeps, one for each head and token.
    fn sums_shape(&self, rows: usize) -> [usize; 2] {
        let Attention { time, heads, .. } = *self.built();
        [rows / time * heads, time]
    }
}

impl Layer for SelfAttention {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let divides = |by: usize, of: usize| by > 0 && of.is_multiple_of(by);
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        let &[time, width] = shape else {
            return Err(build.refuse(
                "rows of two dimensions, [tokens, columns]",
                format!("{shape:?}"),
                "attention is between the tokens of a row",
            ));
        };
        if !divides(heads, width) || !divides(kv_heads, heads) {
            return Err(build.refuse(
                format!("heads that divide {width} columns, and kv_heads that divide them"),
                format!("{heads} heads and {kv_heads} kv_heads"),
                "choose another number of heads, or another width",
            ));
        }
        if self.rotary.is_some() && !(width / heads).is_multiple_of(2) {
            return Err(build.refuse(
                "heads of an even number of columns, for rotary positions",
                format!("{}", width / heads),
                "choose another number of heads, or another width",
            ));
        }
        self.built = Some(Attention {
            time,
            heads,
            kv_heads,
            head_size: width / heads,
            causal: self.causal,
            scale: None,
            window: None,
        });
        build.scope("qkv", |build| self.qkv.build(build, shape))?;
        build.scope("out", |build| self.out.build(build, shape))
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let width = x.shape()[2];
        let qkv = self.qkv.forward(pass, x)?;
        let rows = x.count() / width;
        let qkv = qkv.reshape(&[rows, self.qkv.outputs])?;
        if pass.cache().is_some() {
            let mixed = self.mix_new(pass, &qkv)?;
            return self.out.forward(pass, &mixed.reshape(x.shape())?);
        }
        if let Some(table) = self.rotary_table(x)? {
            ops::rope_into(&qkv, &qkv, table, self.heads + self.kv_heads)?;
        }
        let mixed = pass.take(&[rows, width])?;
        let sums = pass.take_as(&self.sums_shape(rows), math_dtype(x))?;
        let begins = pass.documents();
        ops::attention_into(&mixed, &sums, &qkv, begins.as_ref(), self.built())?;
        if pass.is_training() {
            for tensor in [&qkv, &mixed, &sums] {
                pass.save(tensor);
            }
        }
        self.out.forward(pass, &mixed.reshape(x.shape())?)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let dmixed = pass.input_gradient(true, |pass| self.out.backward(pass, dy))?;
        let dmixed = dmixed.expect("it is needed");
        let [sums, mixed, qkv] = [pass.restore(), pass.restore(), pass.restore()];
        let dqkv = pass.take(qkv.shape())?;
        let delta = pass.take_as(sums.shape(), sums.dtype())?;
        let dmixed = dmixed.reshape(mixed.shape())?;
        let begins = pass.documents();
        let (inputs, begins) = ([&dmixed, &mixed], begins.as_ref());
        ops::attention_backward_into(&dqkv, &delta, inputs, &sums, &qkv, begins, self.built())?;
        if let Some(table) = self.rotary_table(dy)? {
            ops::rope_backward_into(&dqkv, &dqkv, table, self.heads + self.kv_heads)?;
        }
        let shape = [dy.shape()[0], dy.shape()[1], qkv.shape()[1]];
        self.qkv.backward(pass, &dqkv.reshape(&shape)?)
    }
}
