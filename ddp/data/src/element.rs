//! The types of numbers in files.

use std::fmt;

/// The type of the numbers in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    /// A byte that is 0 or 1.
    Bool,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    /// Every type, by its name in messages and in our own format.
    pub const ALL: [(Element, &'static str); 13] = [
        (Element::U8, "u8"),
        (Element::I8, "i8"),
        (Element::U16, "u16"),
        (Element::I16, "i16"),
        (Element::U32, "u32"),
        (Element::I32, "i32"),
        (Element::U64, "u64"),
        (Element::I64, "i64"),
        (Element::Bool, "bool"),
        (Element::F16, "f16"),
        (Element::BF16, "bf16"),
        (Element::F32, "f32"),
        (Element::F64, "f64"),
    ];

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
        matches!(
            self,
            Element::F16 | Element::BF16 | Element::F32 | Element::F64
        )
    }

    /// The name of this type.
    pub fn name(self) -> &'static str {
        Element::ALL
            .iter()
            .find(|(element, _)| *element == self)
            .map_or("", |(_, name)| name)
    }

    /// The type of this name.
    pub fn named(name: &str) -> Option<Element> {
        Element::ALL
            .iter()
            .find(|(_, own)| *own == name)
            .map(|(element, _)| *element)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
