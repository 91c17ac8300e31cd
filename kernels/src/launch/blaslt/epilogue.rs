//! What cuBLASLt does to the sums of a matmul before it stores them.

/// What cuBLASLt does to the sums.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Epilogue {
    pub(crate) function: Function,
    /// One element per column, added first.
    pub(crate) bias: Option<u64>,
    /// `Gelu` also stores its input here; `GeluGradient` reads it.
    pub(crate) aux: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Function {
    #[default]
    Identity,
    Relu,
    /// The library's approximation of the tanh form, off by up to 2e-4.
    Gelu,
    /// Multiplies by the derivative of the tanh form at `aux`.
    GeluGradient,
}

// The library's numbers: CUBLASLT_EPILOGUE_RELU and so on are sums of these.
pub(super) const NOTHING: u32 = 1;
pub(super) const RELU: u32 = 2;
pub(super) const BIAS: u32 = 4;
pub(super) const GELU: u32 = 32;
pub(super) const GELU_GRADIENT: u32 = 64;
pub(super) const HAS_AUX: u32 = 128;

impl Epilogue {
    /// Whether the library accepts a bias or an aux matrix at this address.
    pub(crate) fn fits(address: u64) -> bool {
        address.is_multiple_of(16)
    }

    pub(super) fn number(&self) -> u32 {
        let function = match self.function {
            Function::Identity => 0,
            Function::Relu => RELU,
            Function::Gelu => GELU,
            Function::GeluGradient => GELU_GRADIENT,
        };
        let bias = if self.bias.is_some() { BIAS } else { 0 };
        let aux = if self.aux.is_some() { HAS_AUX } else { 0 };
        match function | bias | aux {
            0 => NOTHING,
            number => number,
        }
    }
}
