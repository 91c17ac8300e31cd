//! Instructions against their definitions in the PTX ISA, and kernels with mistakes, which are
//! found.

mod arithmetic;
mod block;
mod global;
mod group;
mod machine;
mod mistakes;
mod refused;
mod warp;
