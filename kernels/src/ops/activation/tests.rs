//! Tests of activations.

mod each;
mod swiglu;
