//! A program that adds a model family, `mine`, and has every command and flag of `ddp-train`.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example my_train
//! target/release/examples/my_train --model mine,depth=4 --ranks 2 --out mine
//! target/release/examples/my_train eval --checkpoint mine --data glyphs
//! ```

use std::process::ExitCode;

use ddp::family_settings;
use ddp::kernels::DType;
use ddp::models::family::{DataShape, Family, check_size};
use ddp::nn::{Activate, Linear, Normalize, Result, Sequential};

family_settings! {
    /// A perceptron whose hidden layers are alike. The settings of the family are flags, too.
    pub struct Mine {
        /// Hidden layers
        depth "N": usize = 2;
        /// Outputs of each hidden layer
        width "N": usize = 64;
    }
}

impl Family for Mine {
    fn name(&self) -> &'static str {
        "mine"
    }

    fn help(&self) -> &'static str {
        "A perceptron whose hidden layers are alike"
    }

    fn check(&self) -> Result<()> {
        check_size("depth", self.depth, 4096)?;
        check_size("width", self.width, 4096)
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::F32, "mine")?;
        let mut layers = Sequential::new();
        for _ in 0..self.depth {
            let hidden = Linear::new(self.width);
            let hidden = layers.then(hidden).then(Normalize::layer());
            layers = hidden.then(Activate::gelu());
        }
        Ok(layers.then(Linear::new(data.outputs)))
    }
}

fn main() -> ExitCode {
    ddp::program("my-train").family::<Mine>().run()
}
