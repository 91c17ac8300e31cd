//! The whole seen from outside. The test programs lie beside this file; what is here makes the README's example one.

/// The README's first program, run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
