//! CUDA as this crate uses it: thin wrappers of our own over the driver, NVRTC and cuBLASLt, whose bindings are cudarc's.
//!
//! cudarc's safe layer is not used: it waits on events at every use of a buffer (which breaks captures), runs cuBLASLt's
//! heuristic on every product, and panics where a symbol is missing. What we need of the driver stands in `calls.rs`.
//!
//! * `gpu.rs`: one device of this process: context, default stream, memory pool, events kept for reuse.
//! * `queue.rs`: streams and events as the driver has them, `capture.rs`: graphs.
//! * `copies.rs`: all copies; `peers.rs`: which devices see each other's memory.
//! * `nvrtc.rs`: `.cu` files compiled at first use, and kept on disk; `launch.rs`: how operations run them.
//! * `blaslt.rs`: matrix products.

pub(crate) mod blaslt;
pub(crate) mod calls;
pub(crate) mod capture;
pub(crate) mod copies;
pub(crate) mod fault;
pub(crate) mod gpu;
pub(crate) mod launch;
pub(crate) mod library;
pub(crate) mod nvrtc;
pub(crate) mod peers;
pub(crate) mod queue;

pub(crate) use gpu::Gpu;
pub(crate) use launch::{Grid, Launcher, Source};
