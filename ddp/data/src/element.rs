//! The types of numbers in files.

use std::fmt;

use ddp_kernels::setting::Choice;

ddp_kernels::choices! {
    /// The type of the numbers in a file, with its name in messages and in our own format.
    pub enum Element {
        /// Whole, 1 byte, from 0
        U8 = "u8",
        /// Whole, 1 byte
        I8 = "i8",
        /// Whole, 2 bytes, from 0
        U16 = "u16",
        /// Whole, 2 bytes
        I16 = "i16",
        /// Whole, 4 bytes, from 0
        U32 = "u32",
        /// Whole, 4 bytes
        I32 = "i32",
        /// Whole, 8 bytes, from 0
        U64 = "u64",
        /// Whole, 8 bytes
        I64 = "i64",
        /// A byte that is 0 or 1
        Bool = "bool",
        /// Floating-point, 2 bytes
        F16 = "f16",
        /// Floating-point, 2 bytes with the exponents of F32
        BF16 = "bf16",
        /// Floating-point, 4 bytes
        F32 = "f32",
        /// Floating-point, 8 bytes
        F64 = "f64",
    }
}

impl Element {
    /// The size of one number.
    pub fn bytes(self) -> usize {
        match self {
            Element::U8 | Element::I8 | Element::Bool => 1,
            Element::U16 | Element::I16 | Element::F16 | Element::BF16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        use Element::{BF16, F16, F32, F64};
        matches!(self, F16 | BF16 | F32 | F64)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Choice::name(self)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
