//! CUDA: thin wrappers over the driver, NVRTC and cuBLASLt, whose bindings are cudarc's.
//!
//! cudarc's safe layer is not used: it waits on events at every use of a buffer, which breaks
//! captures, runs cuBLASLt's heuristic on every matmul, and panics where a symbol is missing.
//!
//! Bottom up, each file uses only those above it in this list:
//! * `library.rs`: loading NVIDIA's libraries.
//! * `calls.rs`: the driver's functions; `fault.rs`: their errors.
//! * `devices.rs`: which devices this process can use; `parse.rs`: their names; `gpu.rs`: one of
//!   them.
//! * `queue.rs`: streams, events, and where a thread's work goes during a capture.
//! * `nodes.rs`: what a graph consists of.
//! * `copies.rs`: all copies; `peers.rs`: which devices can access each other's memory.
//! * `nvrtc.rs`: compiling `.cu` files at first use; `cache.rs`: what is kept of that on disk.

pub(crate) mod cache;
pub(crate) mod calls;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod fault;
pub(crate) mod gpu;
pub(crate) mod library;
pub(crate) mod nodes;
pub(crate) mod nvrtc;
mod parse;
pub(crate) mod peers;
pub(crate) mod queue;

pub(crate) use gpu::Gpu;
