//! Tests of arithmetic.

mod axpy;
mod scale;
