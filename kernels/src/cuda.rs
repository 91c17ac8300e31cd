//! CUDA: thin wrappers over the driver, NVRTC and cuBLASLt, whose bindings are cudarc's.
//!
//! cudarc's safe layer is not used: it waits on events at every use of a buffer, which breaks
//! captures, runs cuBLASLt's heuristic on every matmul, and panics where a symbol is missing.
//!
//! Bottom up, each file uses only those above it in this list:
//! * `calls.rs`: loading NVIDIA's libraries; the driver's functions and their errors.
//! * `devices.rs`: which devices this process can use, and their names; `gpu.rs`: one of them.
//! * `queue.rs`: streams, events, and where a thread's work goes during a capture.
//! * `nodes.rs`: what a graph consists of.
//! * `copies.rs`: all copies, and which devices can access each other's memory.
//! * `nvrtc.rs`: compiling `.cu` files at first use; `cache.rs`: what is kept of that on disk.

pub(crate) mod cache;
pub(crate) mod calls;
pub(crate) mod copies;
pub(crate) mod devices;
pub(crate) mod gpu;
pub(crate) mod nodes;
pub(crate) mod nvrtc;
pub(crate) mod queue;

pub(crate) use gpu::Gpu;
