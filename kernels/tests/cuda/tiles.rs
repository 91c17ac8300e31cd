//! Sizes for tests of tiled kernels, from the constants in the kernels' own files, and addresses
//! that are not multiples of 16 bytes.

use std::cell::Cell;

use ddp_kernels::{Device, Tensor};

use crate::reductions::upload;

/// The number that `constexpr … NAME = …;` means in a kernel's file, or else in a header.
macro_rules! constant {
    ($file:literal, $name:ident) => {
        $crate::tiles::number_of(
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops/", $file)),
            stringify!($name),
        )
    };
}
pub(crate) use constant;

const HEADERS: [&str; 2] = [
    include_str!("../../src/ops/chunks.cuh"),
    include_str!("../../src/ops/common.cuh"),
];

/// As the macro, from the file's text: numbers, names, and products of these.
pub(crate) fn number_of(file: &str, name: &str) -> usize {
    let value_in = |text: &str| {
        let (_, rest) = text.split_once(&format!(" {name} = "))?;
        Some(rest[..rest.find([';', ','])?].to_string())
    };
    let value = value_in(file).or_else(|| HEADERS.into_iter().find_map(value_in));
    let value = value.unwrap_or_else(|| panic!("no kernel has a constant {name}"));
    let factor = |factor: &str| match factor.trim_end_matches("ull").parse() {
        Ok(number) => number,
        Err(_) => number_of(file, factor),
    };
    value.split(" * ").map(factor).product()
}

/// 1, a tile and its neighbours, and more than five tiles.
pub(crate) fn around(tile: usize) -> [usize; 5] {
    [1, tile - 1, tile, tile + 1, 5 * tile + 3]
}

/// Which operands begin one element after 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Odd {
    Nothing,
    /// Only the operand of this number.
    Only(usize),
    Everything,
}

impl Odd {
    /// None of this many operands, each alone, and all.
    pub(crate) fn each(operands: usize) -> impl Iterator<Item = Odd> {
        let alone = (0..operands).map(Odd::Only);
        [Odd::Nothing, Odd::Everything].into_iter().chain(alone)
    }

    pub(crate) fn is(self, operand: usize) -> bool {
        self == Odd::Everything || self == Odd::Only(operand)
    }
}

/// Copies tensors to a device; the order of the calls numbers them for `odd`.
pub(crate) fn placing(device: Device, odd: Odd) -> impl Fn(&Tensor) -> Tensor {
    let calls = Cell::new(0);
    move |tensor| {
        upload(
            tensor,
            device,
            usize::from(odd.is(calls.replace(calls.get() + 1))),
        )
    }
}
