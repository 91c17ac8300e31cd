//! Small programs to read and run. This library holds what they share, and tests the one in README.

/// The program in README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
