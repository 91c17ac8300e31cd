//! nanoGPT's model by its formula, as a family with every command and flag of `ddp-train`.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example nanogpt
//! target/release/examples/nanogpt --model nanogpt --data book.txt --steps 200 --ranks 2 --out run
//! target/release/examples/nanogpt generate --checkpoint run --prompt "It was"
//! ```

use std::process::ExitCode;

use ddp::family_settings;
use ddp::kernels::DType;
use ddp::models::family::{DataShape, Family, check_size};
use ddp::nn::{Embedding, Head, Linear, Module, Normalize, Result};
use ddp::nn::{Scope, SelfAttention, Sequential, Tie, Var};

family_settings! {
    /// A transformer of blocks that this program defines.
    pub struct NanoGpt {
        /// Blocks
        blocks "N": usize = 4;
        /// Heads of attention
        heads "N": usize = 4;
        /// Columns of each token
        width "N": usize = 128;
        /// Tokens in a row
        context "N": usize = 128;
        /// The probability of dropping an element
        dropout "P": f64 = 0.0;
    }
}

#[derive(Debug)]
struct Block(NanoGpt);

impl Module for Block {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let (width, heads) = (self.0.width, self.0.heads);
        let linear = |outputs| Linear::new(outputs).normal(0.02);
        let last =
            |outputs| Linear::new(outputs).normal(0.02 / (2.0 * self.0.blocks as f64).sqrt());
        let normed = m.layer_norm("ln_1", x);
        let attention = SelfAttention::causal(width, heads, heads, [&linear, &last]);
        let attended = m.layer("attention", &normed, attention);
        let x = x + m.dropout("drop_1", &attended, self.0.dropout);
        let normed = m.layer_norm("ln_2", &x);
        let hidden = m.layer("up", &normed, linear(4 * width)).gelu();
        let output = m.layer("down", &hidden, last(width));
        x + m.dropout("drop_2", &output, self.0.dropout)
    }
}

impl Family for NanoGpt {
    fn name(&self) -> &'static str {
        "nanogpt"
    }

    fn help(&self) -> &'static str {
        "nanoGPT, by its formula"
    }

    fn check(&self) -> Result<()> {
        check_size("blocks", self.blocks, 1024)?;
        check_size("width", self.width, 1 << 16)?;
        check_size("context", self.context, 1 << 20)
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn generates(&self) -> bool {
        true
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::I64, "nanogpt")?;
        let tie = Tie::new();
        let embedding = Embedding::new(data.outputs, self.width).with_positions(self.context);
        let mut layers = Sequential::new().then(embedding.normal(0.02).tied(&tie));
        for _ in 0..self.blocks {
            layers = layers.then(Block(self.clone()));
        }
        let head = Head::new(data.outputs).normal(0.02).tied(&tie);
        Ok(layers.then(Normalize::layer()).then(head))
    }
}

fn main() -> ExitCode {
    ddp::program("nanogpt").family::<NanoGpt>().run()
}
