//! Data to train on: what a dataset is, built-in data, users' files, the order of rows, and the
//! loader that fills batches.
//!
//! Files: `choose` finds them and the arrays in them, `files` reads one, `opened` puts several
//! together (`stack`, `labels`), `scan` reads all rows before training, `rounding` warns of what
//! f32 loses, `plan` says how cells become features, `fill` fits what stands for missing numbers,
//! `file_rows` reads rows, `tokens` windows of tokens; `prepare` does all of it. `text` makes files
//! of tokens from texts.

#![forbid(unsafe_code)]

pub mod choose;
mod dataset;
pub mod disk;
pub mod error;
mod file_rows;
pub mod files;
mod fill;
pub mod glyphs;
mod in_memory;
mod labels;
pub mod loader;
mod mix;
mod normalize;
mod opened;
mod plan;
mod prepare;
mod ranks;
mod request;
mod rounding;
pub mod safetensors;
pub mod sampler;
mod scan;
pub mod spec;
mod split;
mod stack;
pub mod synthetic;
mod task;
mod tensor_spec;
pub mod text;
mod tokens;

pub use dataset::{Dataset, RowSpec, read_rows, sampled_hash};
pub use error::{Error, Result};
pub use in_memory::InMemory;
pub use loader::{Batch, InOrder, Loader, LoaderBuilder, Micro, Origin, Resident, SlotId, Source};
pub use normalize::{Normalization, Normalize};
pub use plan::{AUTO, ColumnPlan, FeaturePlan, Missing, TableSettings};
pub use prepare::{TokenSummary, open, prepare, summarize_tokens};
pub use ranks::{Alone, Ranks};
pub use request::{Data, DataRequest, Trained};
pub use sampler::Sampler;
pub use spec::{DataSpec, FilesSpec, TokensSpec};
pub use task::{Classes, LabelName, TaskKind, TaskSpec, TokenizerId};
pub use tensor_spec::TensorSpec;
