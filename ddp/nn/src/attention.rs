//! Self-attention: a linear layer makes queries, keys and values of all heads, and another one
//! mixes the outputs of the heads. Letters: B sequences, T tokens, C columns, H heads, K heads of
//! keys and values, D columns of a head.

use std::sync::{Arc, Mutex, PoisonError};

use ddp_kernels::ops::{self, Attention, Chain, Step, View};
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::Linear;
use crate::loss::math_dtype;
use crate::norm::Normalize;
use crate::pass::Pass;

/// Rotary positions. Clones share their tables.
#[derive(Clone, Debug)]
pub struct Rope {
    /// The angle between neighbouring positions, for each pair of columns that is turned.
    frequencies: Vec<f64>,
    /// What the turned columns are multiplied by.
    scale: f64,
    /// A table for each device and length, once it was needed.
    tables: Arc<Mutex<Vec<Tensor>>>,
}

impl Rope {
    /// Turns a pair of columns for each of `frequencies`, the angles between neighbouring
    /// positions, and multiplies them by `scale`.
    pub fn new(frequencies: Vec<f64>, scale: f64) -> Rope {
        Rope {
            frequencies,
            scale,
            tables: Arc::default(),
        }
    }

    /// The table of this many positions on `device`.
    fn table(&self, positions: usize, device: Device) -> Result<Tensor> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |it: &&Tensor| it.device() == device && it.shape()[0] == positions;
        if let Some(table) = tables.iter().find(is_it) {
            return Ok(table.clone());
        }
        let made = announced("rotary positions", || {
            ops::rope_table(positions, &self.frequencies, self.scale, device)
        })?;
        tables.push(made.clone());
        Ok(made)
    }
}

/// What a norm of queries or keys is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// The columns of each head, which share weights.
    Head,
    /// All columns of all heads.
    Heads,
}

/// Self-attention over (B, T, C). Its linear layers are called "qkv" and "out"; rows of `qkv`'s
/// weight are the queries' H·D, then the keys' K·D, then the values' K·D. Norms of queries and keys
/// are called "q_norm" and "k_norm".
#[derive(Debug)]
pub struct SelfAttention {
    /// `time` is 0 until it is built.
    attention: Attention,
    /// Rotary positions, if these are wanted.
    rotary: Option<Rope>,
    /// Norms of queries and keys, if these are wanted, each with the columns of a row of it.
    norms: Option<[(Normalize, usize); 2]>,
    qkv: Linear,
    out: Linear,
}

impl SelfAttention {
    /// Causal attention with this many heads of C / `heads` columns, of which `kv_heads` have
    /// separate keys and values. `linear` makes a linear layer with this many outputs; the first
    /// makes queries, keys and values, the second the output.
    pub fn causal(
        width: usize,
        heads: usize,
        kv_heads: usize,
        linear: [&dyn Fn(usize) -> Linear; 2],
    ) -> SelfAttention {
        SelfAttention::of_heads([heads, kv_heads, width / heads.max(1)], width, linear)
    }

    /// As [`SelfAttention::causal`], with `[H, K, D]`: D need not be C / H. It returns `width`
    /// columns.
    pub fn of_heads(
        [heads, kv_heads, head_size]: [usize; 3],
        width: usize,
        linear: [&dyn Fn(usize) -> Linear; 2],
    ) -> SelfAttention {
        let parts = [heads, kv_heads, kv_heads].map(|heads| heads * head_size);
        SelfAttention {
            attention: Attention {
                time: 0,
                heads,
                kv_heads,
                head_size,
                causal: true,
                scale: None,
                window: None,
            },
            rotary: None,
            norms: None,
            qkv: linear[0](parts.iter().sum()).in_parts(&parts),
            out: linear[1](width),
        }
    }

    /// The same attention in which each token sees all of its sequence.
    pub fn full(mut self) -> SelfAttention {
        self.attention.causal = false;
        self
    }

    /// The same attention whose queries and keys are turned by their positions.
    pub fn rotary(mut self, rope: Rope) -> SelfAttention {
        self.rotary = Some(rope);
        self
    }

    /// The same attention in which each token sees at most this many, itself and those before it.
    pub fn windowed(mut self, tokens: usize) -> SelfAttention {
        self.attention.window = Some(tokens);
        self
    }

    /// The same attention that multiplies q·k by `scale` instead of 1/√D.
    pub fn scaled(mut self, scale: f64) -> SelfAttention {
        self.attention.scale = Some(scale);
        self
    }

    /// The same attention whose queries and keys are normalized, before they are turned.
    pub fn normed(mut self, norm: &Normalize, over: NormOver) -> SelfAttention {
        let Attention {
            heads,
            kv_heads,
            head_size,
            ..
        } = self.attention;
        self.norms = Some([heads, kv_heads].map(|heads| match over {
            NormOver::Head => (norm.clone(), head_size),
            NormOver::Heads => (norm.clone(), heads * head_size),
        }));
        self
    }

    /// The table of rotary positions on the device of `like`.
    fn rotary_table(&self, like: &Tensor) -> Result<Option<Tensor>> {
        let table = |rope: &Rope| rope.table(self.built().time, like.device());
        self.rotary.as_ref().map(table).transpose()
    }

    fn built(&self) -> &Attention {
        assert_ne!(
            self.attention.time, 0,
            "a layer is built (Model::new) before it is run"
        );
        &self.attention
    }

    /// Which heads of a row of queries, keys and values are turned, and their columns.
    fn turned(&self) -> [usize; 2] {
        let Attention {
            heads,
            kv_heads,
            head_size,
            ..
        } = self.attention;
        [heads + kv_heads, head_size]
    }

    /// Puts `of` each norm of queries and keys in their place in `qkv` (B·T, (H + 2K)·D). `of` gets
    /// a copy of the queries or keys as rows of the norm.
    fn each_norm<'a>(
        &'a self,
        pass: &mut Pass<'_>,
        qkv: &Tensor,
        order: impl Iterator<Item = usize>,
        of: impl Fn(&'a Normalize, &mut Pass<'_>, &Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        let Some(norms) = &self.norms else {
            return Ok(());
        };
        let [rows, stride] = [qkv.shape()[0], qkv.shape()[1]];
        let Attention {
            heads,
            kv_heads,
            head_size,
            ..
        } = self.attention;
        for index in order {
            let columns = [heads, kv_heads][index] * head_size;
            let strides = vec![stride, 1];
            let there = View {
                offset: [0, heads * head_size][index],
                strides,
            };
            let here = View::whole(&[rows, columns]);
            let copy = |from: &View, to: &View| {
                let (steps, views) = (vec![Step::Load(0), Step::Store(0, 0)], [from, to]);
                let views = views.map(|view| vec![view.clone()]);
                Chain::new("heads", &[rows, columns], 0, steps, views)
            };
            let (norm, row) = &norms[index];
            let x = pass.take(&[rows * columns / row, *row])?;
            ops::chain_into(&copy(&there, &here)?, &[&x], &[qkv])?;
            let y = of(norm, pass, &x)?;
            ops::chain_into(&copy(&here, &there)?, &[qkv], &[&y])?;
        }
        Ok(())
    }

    /// Queries, keys and values (B·T, (H + 2K)·D) of `x`, normalized but not turned.
    fn queries_keys_values(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(pass, x)?;
        let qkv = qkv.reshape(&[qkv.count() / self.qkv.outputs, self.qkv.outputs])?;
        self.each_norm(pass, &qkv, 0..2, |norm, pass, x| norm.forward(pass, x))?;
        Ok(qkv)
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
            ops::rope_into(qkv, qkv, &table, self.turned())?;
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
        let Attention {
            heads,
            kv_heads,
            head_size,
            ..
        } = self.attention;
        let &[time, width] = shape else {
            return Err(build.refuse(
                "rows of two dimensions, [tokens, columns]",
                format!("{shape:?}"),
                "attention is between the tokens of a row",
            ));
        };
        if heads * kv_heads * head_size == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(build.refuse(
                format!("heads of some of {width} columns, and kv_heads that divide them"),
                format!("{heads} heads of {head_size} columns and {kv_heads} kv_heads"),
                "choose another number of heads, or another width",
            ));
        }
        let turned = self
            .rotary
            .as_ref()
            .map_or(0, |rope| 2 * rope.frequencies.len());
        if turned > head_size {
            return Err(build.refuse(
                format!("rotary positions of at most {head_size} columns, those of a head"),
                format!("{turned}"),
                "choose another number of heads, or another width",
            ));
        }
        self.attention.time = time;
        build.scope("qkv", |build| self.qkv.build(build, shape))?;
        for (index, (norm, row)) in self.norms.iter_mut().flatten().enumerate() {
            let name = ["q_norm", "k_norm"][index];
            build.scope(name, |build| norm.build(build, &[*row]))?;
        }
        build.scope("out", |build| {
            self.out.build(build, &[time, heads * head_size])
        })
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let qkv = self.queries_keys_values(pass, x)?;
        let &Attention {
            heads, head_size, ..
        } = self.built();
        let (rows, width) = (qkv.shape()[0], heads * head_size);
        let shape = [x.shape()[0], x.shape()[1], width];
        if pass.cache().is_some() {
            let mixed = self.mix_new(pass, &qkv)?;
            return self.out.forward(pass, &mixed.reshape(&shape)?);
        }
        if let Some(table) = self.rotary_table(x)? {
            ops::rope_into(&qkv, &qkv, &table, self.turned())?;
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
        self.out.forward(pass, &mixed.reshape(&shape)?)
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
            ops::rope_backward_into(&dqkv, &dqkv, &table, self.turned())?;
        }
        self.each_norm(pass, &dqkv, (0..2).rev(), |norm, pass, dy| {
            norm.backward_sum(pass, dy, None)
        })?;
        let shape = [dy.shape()[0], dy.shape()[1], qkv.shape()[1]];
        self.qkv.backward(pass, &dqkv.reshape(&shape)?)
    }
}
