//! Tests of arithmetic.

mod add;
mod axpy;
mod mul;
mod rsqrt;
mod scale;
mod sub;
