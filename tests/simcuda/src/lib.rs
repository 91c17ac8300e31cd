//! A CUDA machine on the host: the driver, NVRTC, cuBLASLt and NCCL as one library. It runs
//! unmodified GPU programs in any order that CUDA allows and finds their races. README.md lists
//! what is modelled, from which documentation, and what is not.
//!
//! One module per concept; every entry point goes through [`machine`].

// Names and contracts of the entry points are NVIDIA's:
// <https://docs.nvidia.com/cuda/cuda-driver-api>. They are not repeated here.
#![allow(non_snake_case, clippy::missing_safety_doc)]

pub mod config;
pub mod context;
pub mod copy;
pub mod cublaslt;
pub mod device;
pub mod error;
pub mod event;
pub mod faults;
pub mod graph;
pub mod handle;
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
