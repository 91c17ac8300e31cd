//! Convolutions, pooling and the norm that goes with them, as formulas: the windows of a
//! convolution are copied to columns, and multiplied.

use ddp_kernels::ops::{self, Windows};

use super::operation::*;
use super::scope::Scope;
use crate::build::Init;

/// A convolution, as `torch.nn.Conv2d` and `Conv1d`.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    outputs: usize,
    windows: Windows,
    groups: usize,
    has_bias: bool,
}

/// A number for both axes of an image, or one for its height and one for its width.
pub trait PerAxis {
    /// Of the height, of the width.
    fn per_axis(self) -> [usize; 2];
}

impl PerAxis for usize {
    fn per_axis(self) -> [usize; 2] {
        [self; 2]
    }
}

impl PerAxis for [usize; 2] {
    fn per_axis(self) -> [usize; 2] {
        self
    }
}

impl Convolution {
    /// With this many outputs, from windows of this size. Over one axis, the width counts.
    pub fn new(outputs: usize, size: impl PerAxis) -> Convolution {
        Convolution {
            outputs,
            windows: Windows {
                size: size.per_axis(),
                stride: [1; 2],
                padding: [0; 2],
                dilation: [1; 2],
            },
            groups: 1,
            has_bias: true,
        }
    }

    /// The same with windows this far apart.
    pub fn stride(mut self, stride: impl PerAxis) -> Convolution {
        self.windows.stride = stride.per_axis();
        self
    }

    /// The same with this many zeros at both ends of each axis.
    pub fn padding(mut self, padding: impl PerAxis) -> Convolution {
        self.windows.padding = padding.per_axis();
        self
    }

    /// The same with the elements of a window this far apart.
    pub fn dilation(mut self, dilation: impl PerAxis) -> Convolution {
        self.windows.dilation = dilation.per_axis();
        self
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

    /// The shape of its weight for an input of this shape, which has one axis for windows or two.
    fn weight(&self, x: &[usize]) -> Vec<usize> {
        let inputs = x
            .get(1)
            .map_or(0, |&channels| channels / self.groups.max(1));
        let axes = x.len().clamp(2, 4) - 2;
        [&[self.outputs, inputs], &self.windows.size[2 - axes..]].concat()
    }
}

impl Scope<'_> {
    /// A convolution over the last axis of `x` (B, channels, length): `name.weight` (outputs,
    /// channels / groups, size) and `name.bias`, with PyTorch's initial weights.
    #[track_caller]
    pub fn conv1d(&mut self, name: &str, x: &Var, of: Convolution) -> Var {
        self.layer_of(name, |m| m.convolution(x, of, 3).named("conv1d"))
    }

    /// A convolution over the last two axes of `x` (B, channels, height, width): `name.weight`
    /// (outputs, channels / groups, size, size) and `name.bias`, with PyTorch's initial weights.
    #[track_caller]
    pub fn conv2d(&mut self, name: &str, x: &Var, of: Convolution) -> Var {
        self.layer_of(name, |m| m.convolution(x, of, 4).named("conv2d"))
    }

    fn convolution(&mut self, x: &Var, of: Convolution, rank: usize) -> Var {
        let shape = x.shape();
        if shape.len() != rank {
            let expected = format!("(batch, channels) and {} more axes", rank - 2);
            return x.refuse("convolution", &[x], &expected, "reshape the input");
        }
        if let Some(refused) = x.wrong_groups(&of) {
            return refused;
        }
        let weight = of.weight(&shape);
        let bound = 1.0 / (weight[1..].iter().product::<usize>() as f64).sqrt();
        let init = Init::Uniform { bound };
        let weight = self.parameter("weight", &weight, init);
        let y = x.convolve(&weight, of);
        if !of.has_bias {
            return y;
        }
        let bias = self.parameter("bias", &[of.outputs], init);
        y + bias.reshape(&[&[of.outputs][..], &vec![1; rank - 2]].concat())
    }

    /// A norm over groups of channels of `x` (B, channels, …), as `torch.nn.GroupNorm`:
    /// `name.weight` and `name.bias`, a number for each channel.
    #[track_caller]
    pub fn group_norm(&mut self, name: &str, x: &Var, groups: usize) -> Var {
        self.layer_of(name, |m| m.norm_of_groups(x, groups).named("group_norm"))
    }

    fn norm_of_groups(&mut self, x: &Var, groups: usize) -> Var {
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
        let rows = x.reshaped(&[shape[0], groups, rest / groups]);
        let centred = &rows - rows.mean(-1);
        let normed = &centred * ((&centred * &centred).mean(-1) + 1e-5).rsqrt();
        let each = [&[shape[1]][..], &vec![1; shape.len() - 2]].concat();
        let mut of_channel = |what: &str, value: f64| {
            let init = Init::Constant(value);
            let parameter = self.parameter(what, &shape[1..2], init);
            parameter.reshape(&each)
        };
        let (weight, bias) = (of_channel("weight", 1.0), of_channel("bias", 0.0));
        normed.reshaped(&shape) * weight + bias
    }
}

impl Var {
    #[track_caller]
    fn wrong_groups(&self, of: &Convolution) -> Option<Var> {
        let (groups, outputs, channels) = (of.groups, of.outputs, self.size(1));
        let divides = |count: usize| groups > 0 && count.is_multiple_of(groups);
        let expected =
            format!("{channels} channels and {outputs} outputs in {groups} equal groups");
        let help = "choose a number of groups that divides both";
        if divides(channels) && divides(outputs) {
            return None;
        }
        Some(self.refuse("convolution", &[self], &expected, help))
    }

    /// The convolution of this value (B, channels, …), with one or two more axes, and a weight
    /// (outputs, channels / groups, size …). It has no bias.
    #[track_caller]
    pub fn convolve(&self, weight: &Var, of: Convolution) -> Var {
        let (mut shape, mut windows) = (self.shape(), of.windows);
        let (groups, outputs) = (of.groups, of.outputs);
        if !(3..=4).contains(&shape.len()) {
            let expected = "(batch, channels) and one or two more axes";
            return self.refuse("convolution", &[self], expected, "reshape the input");
        }
        if let Some(refused) = self.wrong_groups(&of) {
            return refused;
        }
        if shape.len() == 3 {
            shape.insert(2, 1);
            let Windows {
                size,
                stride,
                padding,
                dilation,
            } = &mut windows;
            [size[0], stride[0], padding[0], dilation[0]] = [1, 1, 0, 1];
        }
        let wanted = of.weight(&self.shape());
        if weight.shape() != wanted {
            let expected = format!("a weight (outputs, channels / groups, size …) {wanted:?}");
            let help = "declare the weight so";
            return self.refuse("convolution", &[self, weight], &expected, help);
        }
        let places = windows.places([shape[2], shape[3]]);
        let Some([down, across]) = places.filter(|_| !windows.dilation.contains(&0)) else {
            let expected = format!(
                "windows that fit into the input, and strides and dilations of at least 1, of {windows:?}"
            );
            let help = "pad the input, or choose smaller windows";
            return self.refuse("convolution", &[self], &expected, help);
        };
        if weight.has_rows() {
            let expected = "a weight that is the same for all rows";
            let help = "compute the weight from parameters alone";
            return self.refuse("convolution", &[self, weight], expected, help);
        }
        self.with_all_axes(self.has_rows(), || {
            self.convolved(weight, &shape, [outputs, groups], windows, [down, across])
        })
    }

    /// The convolution of this value, which has the shape (B, channels, height, width) then.
    #[track_caller]
    fn convolved(
        &self,
        weight: &Var,
        shape: &[usize],
        [outputs, groups]: [usize; 2],
        windows: Windows,
        [down, across]: [usize; 2],
    ) -> Var {
        let (batch, area) = (shape[0], windows.size[0] * windows.size[1]);
        let columns = [shape[1] * area, batch * down * across];
        let x = self.reshape(shape);
        let columns = x.checked(Unfold(windows), &[&x], columns.to_vec());
        let inner = shape[1] / groups * area;
        let columns = columns.reshape(&[groups, inner, batch * down * across]);
        let weight = weight.reshape(&[groups, outputs / groups, inner]);
        let y = weight.matmul(&columns);
        let y = y
            .reshape(&[outputs, batch, down, across])
            .permute(&[1, 0, 2, 3]);
        if self.rank() == 3 {
            y.reshape(&[batch, outputs, across])
        } else {
            y
        }
    }

    /// The largest of each window of the last two axes; `padding` at their ends counts as −∞.
    /// Of equal ones the first gets the gradient, of NaN the last, as in PyTorch.
    #[track_caller]
    pub fn max_pool2d(&self, size: usize, stride: usize, padding: usize) -> Var {
        if padding > size / 2 {
            let expected = format!("a padding up to {}, half of the size", size / 2);
            return self.refuse("max_pool2d", &[self], &expected, "use less padding");
        }
        let mut x = self.clone();
        for axis in [-2isize, -1] {
            if padding > 0 && x.rank() >= 2 {
                let mut ends = x.shape();
                let at = x.rank() - axis.unsigned_abs();
                ends[at] = padding;
                let ends = x.filled(f64::NEG_INFINITY, &ends);
                x = Var::concatenate(&[&ends, &x, &ends], axis);
            }
        }
        let largest = |largest: &Var, next: &Var| {
            // NaN is not equal to itself.
            let moves = largest.less(next) + (1.0 - next.equal(next));
            let of = [
                &largest.maximum(next),
                largest,
                &(1.0 - &moves),
                next,
                &moves,
            ];
            largest.push(Slope, &of, largest.shape())
        };
        let of_lines = x.over_windows("max_pool2d", -1, [size, stride], largest);
        of_lines.over_windows("max_pool2d", -2, [size, stride], largest)
    }

    /// The mean of each window of the last two axes.
    #[track_caller]
    pub fn avg_pool2d(&self, size: usize, stride: usize) -> Var {
        let add = |sum: &Var, next: &Var| sum + next;
        let of_lines = self.over_windows("avg_pool2d", -1, [size, stride], add);
        let sums = of_lines.over_windows("avg_pool2d", -2, [size, stride], add);
        (sums * (1.0 / size.saturating_mul(size).max(1) as f64)).named("avg_pool2d")
    }

    /// Joins the values of each window of an axis, from slices: windows as rows are too short for a
    /// pass over rows.
    #[track_caller]
    fn over_windows(
        &self,
        name: &str,
        axis: isize,
        [size, stride]: [usize; 2],
        join: impl Fn(&Var, &Var) -> Var,
    ) -> Var {
        let (Some(axis), mut shape) = (self.axis(name, axis), self.shape()) else {
            return self.clone();
        };
        if size == 0 || stride == 0 || size > shape[axis] {
            let expected = format!("a size from 1 to {}, and a stride from 1", shape[axis]);
            return self.refuse(name, &[self], &expected, "use smaller windows");
        }
        shape[axis] = (shape[axis] - size) / stride + 1;
        // Not by a closure, which would not pass on the caller's line.
        let mut joined = self.push(Slice(axis, 0, stride), &[self], shape.clone());
        for start in 1..size {
            let next = self.push(Slice(axis, start, stride), &[self], shape.clone());
            joined = join(&joined, &next);
        }
        joined.named(name)
    }
}

impl Operation for Unfold {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![at.like(0, Fold(self.0), &[at.d])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        Ok(ops::unfold_into(&r.take(0)?, r.x[0], &self.0)?)
    }
}

impl Operation for Fold {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        Ok(ops::unfold_backward_into(&r.take(0)?, r.x[0], &self.0)?)
    }
}
