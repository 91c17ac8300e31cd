//! Small programs to read and run. This library tests the programs in docs/.

/// The program of docs/own-program.md.
#[cfg(doctest)]
#[doc = include_str!("../docs/own-program.md")]
pub struct OwnProgram;

/// The first program of docs/placement.md.
#[cfg(doctest)]
#[doc = include_str!("../docs/placement.md")]
pub struct Placement;
