//! Tests of activations.

mod gelu;
mod relu;
mod relu_squared;
mod swiglu;
