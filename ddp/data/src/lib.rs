//! Data to train on: what a dataset is, built-in data, users' files, the order of rows, and the
//! loader that fills batches.
//!
//! `prepare` turns a request into data in four steps, each of which knows only those before it:
//! `resolve` finds the files and where their labels are, `open` opens them (`files` reads every
//! format, `rows` and `labels` put several files together), `facts` reads all rows once with
//! `scan`, and the rows become a dataset (`file_rows`), as `learn` says. What is guessed on the way
//! stands in `guess`, what is logged in `warnings`. Tokens go a shorter way (`tokens`); `text`
//! makes files of them.

#![forbid(unsafe_code)]

mod array_names;
mod built_in;
mod dataset;
mod element;
pub mod error;
mod facts;
mod feature_plan;
mod file_rows;
pub mod files;
mod glyphs;
mod guess;
mod labels;
mod learn;
pub mod loader;
mod mix;
mod normalize;
mod open;
mod prepare;
mod ranks;
mod request;
pub mod resolve;
mod rows;
pub mod sampler;
mod scan;
pub mod setting;
pub mod spec;
mod synthetic;
mod task;
pub mod text;
mod tokens;
mod warnings;

pub use dataset::{Dataset, InMemory, RowSpec, read_rows, sampled_hash};
pub use error::{Error, Result};
pub use feature_plan::{AUTO, ColumnPlan, FeaturePlan, Missing, TableSettings};
pub use files::safetensors;
pub use loader::{Batch, InOrder, Loader, LoaderBuilder, Micro, Origin, Resident, SlotId, Source};
pub use normalize::{Normalization, Normalize};
pub use prepare::{TokenSummary, open, prepare, summarize_tokens};
pub use ranks::{Alone, Ranks};
pub use request::{Data, DataRequest, Trained};
pub use sampler::Sampler;
pub use spec::{DataSpec, FilesSpec, TokensSpec};
pub use task::{Classes, LabelName, TaskKind, TaskSpec, TensorSpec, TokenizerId};
