//! What follows the matmul: bias, activation, auxiliary output, and their gradients. Pure f32
//! arithmetic.

/// The activation that an epilogue applies, or whose derivative it applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activation {
    /// Its auxiliary matrix has one bit per element: z >= 0, including zero, where other libraries
    /// have z > 0.
    Relu,
    /// By tanh; its auxiliary matrix is z.
    Gelu,
}

/// The use of the bias pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bias {
    None,
    /// Read: one element per row of D, added to every column.
    Add,
    /// Written: the sums of D's rows.
    GradientOfOutput,
    /// Written: the sums of op(A)'s rows.
    GradientOfA,
    /// Written: the sums of op(B)'s columns.
    GradientOfB,
}

/// What a `cublasLtEpilogue_t` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epilogue {
    pub(super) name: &'static str,
    pub(super) activation: Option<Activation>,
    /// Whether the activation's derivative is applied (aux is read) rather than the activation
    /// (aux, if any, is written).
    pub(super) backward: bool,
    pub(super) aux: bool,
    pub(super) bias: Bias,
}

impl Epilogue {
    /// From the value of CUBLASLT_MATMUL_DESC_EPILOGUE; None if there is no such epilogue.
    pub(super) fn from_raw(raw: u32) -> Option<Self> {
        use Activation::{Gelu, Relu};
        let forward = |name, activation, aux, bias| Self {
            name,
            activation,
            backward: false,
            aux,
            bias,
        };
        let backward = |name, activation, bias| Self {
            name,
            activation: Some(activation),
            backward: true,
            aux: true,
            bias,
        };
        Some(match raw {
            1 => forward("DEFAULT", None, false, Bias::None),
            2 => forward("RELU", Some(Relu), false, Bias::None),
            4 => forward("BIAS", None, false, Bias::Add),
            6 => forward("RELU_BIAS", Some(Relu), false, Bias::Add),
            32 => forward("GELU", Some(Gelu), false, Bias::None),
            36 => forward("GELU_BIAS", Some(Gelu), false, Bias::Add),
            130 => forward("RELU_AUX", Some(Relu), true, Bias::None),
            134 => forward("RELU_AUX_BIAS", Some(Relu), true, Bias::Add),
            136 => backward("DRELU", Relu, Bias::None),
            152 => backward("DRELU_BGRAD", Relu, Bias::GradientOfOutput),
            160 => forward("GELU_AUX", Some(Gelu), true, Bias::None),
            164 => forward("GELU_AUX_BIAS", Some(Gelu), true, Bias::Add),
            192 => backward("DGELU", Gelu, Bias::None),
            208 => backward("DGELU_BGRAD", Gelu, Bias::GradientOfOutput),
            256 => forward("BGRADA", None, false, Bias::GradientOfA),
            512 => forward("BGRADB", None, false, Bias::GradientOfB),
            _ => return None,
        })
    }
}

/// sqrt(2 / pi), and the coefficient of the cubic term, in the tanh approximation.
const SCALE: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

pub(super) fn relu(z: f32) -> f32 {
    // NaN stays NaN: new memory is filled with NaN so that its use shows.
    if z < 0.0 { 0.0 } else { z }
}

pub(super) fn gelu(z: f32) -> f32 {
    0.5 * z * (1.0 + (SCALE * (z + CUBIC * z * z * z)).tanh())
}

pub(super) fn gelu_derivative(z: f32) -> f32 {
    let tanh = (SCALE * (z + CUBIC * z * z * z)).tanh();
    0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * SCALE * (1.0 + 3.0 * CUBIC * z * z)
}
