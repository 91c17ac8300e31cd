//! Convolutions, pooling and the norm that goes with them, as formulas: windows are read where they
//! lie, copied to rows once, and multiplied.

use super::scope::Scope;
use super::trace::Var;
use crate::build::Init;

/// A convolution, as `torch.nn.Conv2d` and `Conv1d`.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    outputs: usize,
    size: usize,
    stride: usize,
    padding: usize,
    groups: usize,
    has_bias: bool,
}

impl Convolution {
    /// With this many outputs, from windows of this size along each axis.
    pub fn new(outputs: usize, size: usize) -> Convolution {
        Convolution {
            outputs,
            size,
            stride: 1,
            padding: 0,
            groups: 1,
            has_bias: true,
        }
    }

    /// The same with windows this far apart.
    pub fn stride(self, stride: usize) -> Convolution {
        Convolution { stride, ..self }
    }

    /// The same with this many zeros at both ends of each axis.
    pub fn padding(self, padding: usize) -> Convolution {
        Convolution { padding, ..self }
    }

    /// The same in groups: an output sees the inputs of its own group.
    pub fn groups(self, groups: usize) -> Convolution {
        Convolution { groups, ..self }
    }

    /// The same without a bias.
    pub fn without_bias(self) -> Convolution {
        Convolution {
            has_bias: false,
            ..self
        }
    }
}

impl Scope<'_> {
    /// A convolution over the last axis of `x` (B, channels, length): `name.weight` (outputs,
    /// channels / groups, size) and `name.bias`, with PyTorch's initial weights.
    #[track_caller]
    pub fn conv1d(&mut self, name: &str, x: &Var, of: Convolution) -> Var {
        self.convolution(name, x, of, 1)
    }

    /// A convolution over the last two axes of `x` (B, channels, height, width): `name.weight`
    /// (outputs, channels / groups, size, size) and `name.bias`, with PyTorch's initial weights.
    #[track_caller]
    pub fn conv2d(&mut self, name: &str, x: &Var, of: Convolution) -> Var {
        self.convolution(name, x, of, 2)
    }

    #[track_caller]
    fn convolution(&mut self, name: &str, x: &Var, of: Convolution, axes: usize) -> Var {
        let shape = x.shape();
        let (groups, outputs) = (of.groups, of.outputs);
        let divides = |of: usize| groups > 0 && of.is_multiple_of(groups);
        if shape.len() != axes + 2 || !divides(shape[1]) || !divides(outputs) || of.stride == 0 {
            let expected = format!(
                "(batch, channels) and {axes} more axes, {groups} groups that divide the channels \
                 and the {outputs} outputs, and a stride of at least 1"
            );
            let help = "reshape the input, or choose other groups";
            return x.refuse("convolution", &[x], &expected, help);
        }
        let (batch, inputs) = (shape[0], shape[1] / groups);
        // (B, groups, inputs, …), then windows of each axis with their contents behind.
        let mut windows = x.reshape(&[&[batch, groups, inputs], &shape[2..]].concat());
        for axis in 3..3 + axes as isize {
            windows = windows.pad(axis, of.padding, of.padding);
            windows = windows.windows(axis, of.size, of.stride);
        }
        let kernel = vec![of.size; axes];
        let columns = inputs * kernel.iter().product::<usize>();
        let bound = 1.0 / (columns as f64).sqrt();
        let init = Init::Uniform { bound };
        let weight = [&[outputs, inputs], &kernel[..]].concat();
        let weight = self.parameter(&format!("{name}.weight"), &weight, init);
        if windows.rank() != 3 + 2 * axes {
            // A window that does not fit was refused.
            return x.clone();
        }
        let places = windows.shape()[3..3 + axes].to_vec();
        let rows = batch * places.iter().product::<usize>();
        let order = [&[1, 0], &(3..3 + axes).collect::<Vec<_>>()[..], &[2]].concat();
        let order = [order, (3 + axes..3 + 2 * axes).collect()].concat();
        let patches = windows.permute(&order).reshape(&[groups, rows, columns]);
        let weight = weight.reshape(&[groups, outputs / groups, columns]);
        let y = patches.matmul(&weight.transpose(-1, -2));
        let y = y.reshape(&[&[groups, batch], &places[..], &[outputs / groups]].concat());
        let order = [&[1, 0, 2 + axes], &(2..2 + axes).collect::<Vec<_>>()[..]].concat();
        let y = y.permute(&order);
        let y = y.reshape(&[&[batch, outputs], &places[..]].concat());
        if !of.has_bias {
            return y;
        }
        let bias = self.parameter(&format!("{name}.bias"), &[outputs], init);
        y + bias.reshape(&[&[outputs][..], &vec![1; axes]].concat())
    }

    /// A norm over groups of channels of `x` (B, channels, …), as `torch.nn.GroupNorm`:
    /// `name.weight` and `name.bias`, a number for each channel.
    #[track_caller]
    pub fn group_norm(&mut self, name: &str, x: &Var, groups: usize) -> Var {
        let shape = x.shape();
        if shape.len() < 2 || groups == 0 || !shape[1].is_multiple_of(groups) {
            let expected = format!("(batch, channels, …) with channels in {groups} groups");
            return x.refuse(
                "group_norm",
                &[x],
                &expected,
                "choose another number of groups",
            );
        }
        let rest: usize = shape[1..].iter().product();
        let rows = x.reshape(&[shape[0], groups, rest / groups]);
        let centred = &rows - rows.mean(-1);
        let normed = &centred * ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
        let each = [&[shape[1]][..], &vec![1; shape.len() - 2]].concat();
        let mut of_channel = |what: &str, value: f64| {
            let init = Init::Constant(value);
            let parameter = self.parameter(&format!("{name}.{what}"), &shape[1..2], init);
            parameter.reshape(&each)
        };
        let (weight, bias) = (of_channel("weight", 1.0), of_channel("bias", 0.0));
        normed.reshape(&shape) * weight + bias
    }
}

impl Var {
    /// The largest of each window of the last two axes; `padding` at their ends counts as −∞.
    #[track_caller]
    pub fn max_pool2d(&self, size: usize, stride: usize, padding: usize) -> Var {
        let mut x = self.clone();
        for axis in [-2isize, -1] {
            if padding > 0 && x.rank() >= 2 {
                let mut ends = x.shape();
                let at = x.rank() - axis.unsigned_abs();
                ends[at] = padding;
                let ends = x.number(f64::NEG_INFINITY).expand(&ends);
                x = Var::concatenate(&[&ends, &x, &ends], axis);
            }
        }
        let windows = x.windows_of_two(size, stride);
        let largest = windows.largest(-1).largest(-2);
        largest.without_last(windows.rank())
    }

    /// The mean of each window of the last two axes.
    #[track_caller]
    pub fn avg_pool2d(&self, size: usize, stride: usize) -> Var {
        let windows = self.windows_of_two(size, stride);
        windows.mean(-1).mean(-2).without_last(windows.rank())
    }

    #[track_caller]
    fn windows_of_two(&self, size: usize, stride: usize) -> Var {
        let rank = self.rank() as isize;
        let windows = self.windows(rank - 2, size, stride);
        windows.windows(rank - 1, size, stride)
    }

    /// Without the last two axes, of length 1, of a value of this many.
    fn without_last(&self, rank: usize) -> Var {
        let shape = self.shape();
        self.reshape(&shape[..rank.min(shape.len()).saturating_sub(2)])
    }
}
