//! A CUDA machine on the host: the driver, NVRTC, cuBLASLt and NCCL as one library that runs unmodified GPU programs in every order
//! that CUDA allows and finds their races. README.md says what is modelled, from which documentation, and what is not.
//!
//! One room a concept; [`machine`] is where every entry point comes in.

// Names and contracts of the entry points are NVIDIA's: <https://docs.nvidia.com/cuda/cuda-driver-api>. Repeating them here a
// hundred times would say less than that page does.
#![allow(non_snake_case, clippy::missing_safety_doc)]

pub mod context;
pub mod copy;
pub mod cublaslt;
pub mod device;
pub mod error;
pub mod event;
pub mod faults;
pub mod graph;
pub mod kernel;
pub mod machine;
pub mod memory;
pub mod nccl;
pub mod nvrtc;
pub mod race;
pub mod report;
pub mod scheduler;
pub mod stream;
pub mod timeline;
pub mod work;
