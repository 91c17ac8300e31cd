//! `ddp-train bench`: how fast training steps, matmuls and collectives are here, as lines of JSON.
//!
//! Benchmarks call what training calls: the engine's step, the matmul of linear layers, the groups
//! of the reducer. Rows are random and stay in memory, so reading data is not measured. A GPU is
//! timed from the host: many calls are queued, and a round ends when the device has finished them.

mod addmm;
mod allreduce;
mod explain;
mod measure;
mod models;
mod timed;
mod training;

pub use self::addmm::{MatmulShape, SIDE_MAX, addmm};
pub use self::allreduce::{AllreduceOptions, BenchOperation, allreduce};
pub use self::measure::BenchOptions;
pub use self::models::{gpt, mlp};
pub use self::training::{Subject, steps};
