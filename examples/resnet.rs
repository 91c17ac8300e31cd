//! A ResNet for small images by its formula, as a family with every command and flag of
//! `ddp-train`. It has group norms: they do not depend on what else is in a batch, so a run has the
//! same bits on any number of ranks.
//!
//! ```sh
//! cargo build --release -p ddp-examples --example resnet
//! target/release/examples/resnet --model resnet --data glyphs --steps 200 --ranks 2
//! ```

use std::process::ExitCode;

use ddp::family_settings;
use ddp::kernels::DType;
use ddp::models::family::{DataShape, Family, check_size, refuse};
use ddp::nn::{Convolution, Linear, Module, Result, Scope, Sequential, Var};

family_settings! {
    /// Three stages of blocks: a model has 6 · `blocks` + 2 layers with weights.
    pub struct ResNet {
        /// Blocks of a stage
        blocks "N": usize = 3;
        /// Channels of the first stage; each later one has twice as many
        channels "N": usize = 16;
        /// Groups of channels in a norm
        groups "N": usize = 8;
    }
}

/// From the pixels to a number for each channel of the last stage.
#[derive(Debug)]
struct Trunk {
    of: ResNet,
    /// [channels, height, width] of an image.
    image: [usize; 3],
}

impl ResNet {
    fn conv(&self, m: &mut Scope<'_>, name: &str, x: &Var, outputs: usize, stride: usize) -> Var {
        let of = Convolution::new(outputs, 3).stride(stride).padding(1);
        let y = m.conv2d(&format!("{name}.conv"), x, of.without_bias());
        m.group_norm(&format!("{name}.norm"), &y, self.groups)
    }

    fn block(&self, m: &mut Scope<'_>, x: &Var, outputs: usize, stride: usize) -> Var {
        let hidden = self.conv(m, "first", x, outputs, stride).relu();
        let y = self.conv(m, "second", &hidden, outputs, 1);
        let skipped = if stride == 1 && x.size(1) == outputs {
            x.clone()
        } else {
            let of = Convolution::new(outputs, 1).stride(stride).without_bias();
            m.conv2d("skip", x, of)
        };
        (y + skipped).relu()
    }
}

impl Module for Trunk {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let (of, [channels, height, width]) = (&self.of, self.image);
        let x = x.reshape(&[channels, height, width]);
        let mut x = of.conv(m, "stem", &x, of.channels, 1).relu();
        for stage in 0..3 {
            for block in 0..of.blocks {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                x = m.within(&format!("stages.{stage}.{block}"), |m| {
                    of.block(m, &x, of.channels << stage, stride)
                });
            }
        }
        x.mean(-1).mean(-2).reshape(&[x.size(1)])
    }
}

impl Family for ResNet {
    fn name(&self) -> &'static str {
        "resnet"
    }

    fn help(&self) -> &'static str {
        "A ResNet for small images, by its formula"
    }

    fn check(&self) -> Result<()> {
        check_size("blocks", self.blocks, 1000)?;
        check_size("channels", self.channels, 1 << 12)?;
        if self.groups == 0 || !self.channels.is_multiple_of(self.groups) {
            let expected = format!("a divisor of channels, which is {}", self.channels);
            let help = "a norm is over equally many channels in each group";
            return Err(refuse("groups", self.groups, &expected, help));
        }
        Ok(())
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::F32, "resnet")?;
        let image = match if data.image.is_empty() {
            data.row_shape
        } else {
            data.image
        } {
            &[height, width] => [1, height, width],
            &[channels, height, width] => [channels, height, width],
            other => {
                let got = format!("{other:?}");
                let help = "give images as 28x28, or planes as 3x32x32";
                return Err(refuse("data", got, "rows of two or three dimensions", help));
            }
        };
        let of = self.clone();
        let trunk = Trunk { of, image };
        Ok(Sequential::new()
            .named("trunk", trunk)
            .named("head", Linear::new(data.outputs).outer()))
    }
}

fn main() -> ExitCode {
    ddp::program("resnet").family::<ResNet>().run()
}
