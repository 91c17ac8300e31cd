//! Small programs to read and run. This library tests the programs in README.md and docs/.

/// The program in README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;

/// The first program of docs/placement.md.
#[cfg(doctest)]
#[doc = include_str!("../docs/placement.md")]
pub struct Placement;
