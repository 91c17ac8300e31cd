//! Tests of arithmetic.

mod add;
mod axpy;
mod mul;
mod scale;
mod sub;
