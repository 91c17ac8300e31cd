//! The list of operations: what each holds, how plans treat it (`Role`), what it reads (`Reads`),
//! and the kind of its value where that does not follow from its inputs. What an operation does is
//! in its own file (`operation.rs`).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Activation, Function, Windows};

use crate::build::ParamId;
use crate::error::Result;
use crate::scratch::NumberKind;

/// How plans treat an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Nothing computes it.
    Leaf,
    /// Its first input's value, with another derivative.
    Same,
    /// Read where its input lies.
    View,
    /// Made only when something asks for it.
    Reshape,
    /// Copies its inputs by chains.
    Copy,
    Elementwise,
    Reduction,
    /// Another value of its input's operation.
    Output,
    /// Runs by itself.
    Kernel,
    /// The end of a parameter's gradient.
    End,
}

/// What the inputs of an operation may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    /// In the dtype of layers.
    Layers,
    /// In the dtype of layers or in that of sums.
    Floats,
    /// Also tokens; floats in the dtype of layers.
    Tokens,
    /// Also tokens; floats of both dtypes.
    All,
}

/// Passes the list to a macro.
macro_rules! operations {
    ($to:ident) => {
        $to! {
            Leaf {
                /// The module's input, or in backward the gradient of its output.
                Input,
                Parameter(ParamId),
                /// Numbers that the forward has written down.
                Numbers(Arc<[f64]>),
                /// A tensor on the device, without a gradient.
                Given(Tensor),
                /// One number, of shape [].
                Constant(f64),
                /// 0, s, 2s and so on, in row-major order.
                Steps(usize) => SumDtypeReadRounded,
            }
            Same {
                /// Without a gradient.
                Stop: Tokens,
                /// Its derivative by the second input is the third, by the fourth the fifth.
                Slope,
            }
            View {
                /// Repeats axes of length 1.
                Expand,
                /// Axis i of the value is this axis of its input.
                Permute(Vec<usize>),
                /// From this index of an axis on, one of so many.
                Slice(usize, usize, usize),
                /// Windows of an axis, each so many further on, and what is in each as a new last
                /// axis.
                Window(usize, usize),
            }
            Reshape {
                Reshape: All,
            }
            Copy {
                /// Along an axis, inputs each from an index on, one of so many. The rest is 0.
                Join(usize, Vec<usize>, usize),
            }
            Elementwise {
                /// Element by element; shapes are broadcast.
                Apply(Function),
            }
            Reduction {
                /// Over these axes, which keep a length of 1.
                Sum(Vec<usize>): Floats,
                Largest(Vec<usize>),
            }
            Output {
                /// By number.
                Output(usize, NumberKind): Tokens,
            }
            Kernel {
                /// Numbers of this kind, without a gradient.
                Cast(NumberKind): All,
                /// The windows of a convolution as columns, and the gradient of that.
                Unfold(Windows),
                Fold(Windows),
                /// (S, M, K) with (S, K, N), each of which may be transposed.
                MatMul([bool; 2]),
                Custom(Arc<dyn CustomOp>): Tokens,
                /// The gradients of all its inputs, which are its value and the parts after it.
                CustomBackward(Arc<dyn CustomOp>): Tokens,
                /// x·Wᵀ + b, of x (…, I), W (O, I) and perhaps b (O), then the activation.
                Linear(Option<Activation>),
                /// d·W, of d (…, O) and W, times the derivative of the activation below.
                LinearInput(Option<Activation>),
                /// dᵀ·x, of d (…, O) and x (…, I).
                LinearWeight => SumDtypeReadRounded,
                /// Of d and x: gradients of weight and bias where the optimizer finds them.
                LinearGradients(ParamId, Option<ParamId>),
                /// Adds the matmul of its last two inputs to the first; whether W is transposed.
                AddMatMul(bool),
                Activate(Activation),
                /// Of d and what the activation keeps.
                ActivateBackward(Activation),
                /// With this ε, of x, weight and perhaps bias. Its part: the statistics of rows.
                /// A run with three values is of the sum of its first two inputs, the first value.
                Norm(ops::Norm, f64),
                /// Of d, x, statistics and weight. Its parts: sums of rows for the gradients of
                /// weight and bias. A fifth input, the first, is added.
                NormBackward(ops::Norm, f64),
                /// By number and probability.
                Dropout(u32, f64),
                Gated(Gate),
                /// Of d and x.
                GatedBackward(Gate),
                /// Tokens of codes that also say where documents begin, which is its part.
                Documents: Tokens => Tokens,
                /// Of tokens, the table, in which these rows get no gradient, and perhaps a row for
                /// each position.
                Embedding(Arc<[usize]>): Tokens,
                /// The table's gradient, 0 in these rows, of d and the tokens.
                EmbeddingBackward(Arc<[usize]>): Tokens => SumDtypeReadRounded,
                /// The gradient of the rows of positions, of d.
                PositionsBackward => SumDtypeReadRounded,
                /// What tokens choose along this axis, of the tokens and a value (`Var::gather`).
                Gather(usize): All,
                /// The gradient of that value, of d and the tokens.
                GatherBackward: All => SumDtypeReadRounded,
                /// Turns so many heads of so many columns by their positions, or back.
                Turn(Rope, [usize; 2], bool),
                /// Of queries, keys and values, and perhaps where documents begin. Its part: sums
                /// for backward.
                Attention(ops::Attention),
                /// Of d, the output, the sums, queries, keys and values, and perhaps where
                /// documents begin.
                AttentionBackward(ops::Attention),
                /// What shares a pass over memory.
                Chain(Arc<ops::Chain>): Floats,
                /// Copies inputs to parts of the value, the rest of which is 0 if the flag is set.
                Copies(bool, Arc<[ops::Chain]>): Floats,
                /// The gradient of a parameter by an operation that can add to it.
                GradientBy(ParamId, Box<Op>),
            }
            End {
                /// The gradient of a parameter is complete. Zeros, if it has no input.
                Gradient(ParamId): Floats,
                /// The gradient of a parameter is complete, which the loss has written.
                Finished(ParamId),
            }
        }
    };
}
pub(super) use operations;

macro_rules! types {
    ($($Role:ident { $($(#[$doc:meta])* $Name:ident $(($($field:ty),+))?
        $(: $Reads:ident)? $(=> $Kind:ident)?,)* })*) => {
        $($(
            $(#[$doc])*
            #[derive(Clone, Debug)]
            pub(super) struct $Name $(($(pub(super) $field),+))?;

            impl From<$Name> for Op {
                fn from(it: $Name) -> Op {
                    Op::$Name(it)
                }
            }
        )*)*

        /// What makes a value from others.
        #[derive(Clone, Debug)]
        pub(super) enum Op {
            $($($Name($Name),)*)*
        }

        impl Op {
            pub(super) fn role(&self) -> Role {
                match self {
                    $($(Op::$Name(_) => Role::$Role,)*)*
                }
            }

            pub(super) fn reads(&self) -> Reads {
                if let Op::GradientBy(GradientBy(_, by)) = self {
                    return by.reads();
                }
                match self {
                    $($(Op::$Name(_) => [$(Reads::$Reads,)? Reads::Layers][0],)*)*
                }
            }

            /// The kind of its value, if the list has it.
            pub(super) fn listed_kind(&self) -> Option<NumberKind> {
                match self {
                    $($(Op::$Name(_) => [$(Some(NumberKind::$Kind),)? None][0],)*)*
                }
            }
        }
    };
}
operations!(types);

/// An operation of one's own, with a forward and a backward by hand.
pub trait CustomOp: Any + fmt::Debug + Send + Sync {
    /// The shape of the value for inputs of these shapes. Of those that have rows, the first axis
    /// is the rows.
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>>;

    /// Whether the first axis of the value is the rows of its inputs, each computed from its own
    /// row. What is made of all rows, as a mean for a buffer, depends on how ranks divide a batch.
    fn has_rows(&self) -> bool {
        true
    }

    /// Writes the value to `out`.
    fn forward(&self, inputs: &[&Tensor], out: &Tensor) -> Result<()>;

    /// Writes the gradients of all inputs, from these, the value and the value's gradient.
    fn backward(&self, inputs: &[&Tensor], out: [&Tensor; 2], gradients: &[&Tensor]) -> Result<()>;
}

/// f(gate)·up, of (…, 2·H): the first half of the columns is the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// silu
    Swiglu,
    /// gelu, approximated with tanh
    Geglu,
}

/// Rotary positions. Clones share their tables.
#[derive(Clone, Debug)]
pub struct Rope {
    /// The angle between neighbouring positions, for each pair of columns that is turned.
    pub(super) frequencies: Vec<f64>,
    /// What the turned columns are multiplied by.
    pub(super) scale: f64,
    /// A table for each device and length, once it was needed.
    pub(super) tables: Arc<Mutex<Vec<Tensor>>>,
}
