//! Data to train on: what a dataset is, built-in data, users' files, the order of rows, and the
//! loader that fills batches.
//!
//! `prepare` turns a request into data in four steps, each of which knows only those before it:
//! `resolve` finds the files and where their labels are, `open` opens them (`files` reads every
//! format of arrays, `tables` lets another crate turn tables into arrays, `labels` reads the labels
//! of several files), `facts` reads all rows once with `scan`, and the rows become a dataset
//! (`file_rows`), as `learn` says. All guesses are in `guess`. Tokens take a shorter path
//! (`tokens`); `text` makes files of them.

#![forbid(unsafe_code)]

mod built_in;
pub mod chat;
mod dataset;
pub mod error;
mod facts;
mod features;
mod file_rows;
pub mod files;
mod glyphs;
mod guess;
mod labels;
mod learn;
pub mod loader;
mod open;
mod prepare;
mod ranks;
mod request;
pub mod resolve;
pub mod sampler;
mod scan;
pub mod spec;
pub mod tables;
mod task;
pub mod text;
mod tokens;
pub mod words;

pub use chat::{ChatWriter, Packing};
pub use dataset::{Dataset, IGNORED, InMemory, RowSpec, counted, read_rows, sampled_hash};
pub use error::{Error, Result, setting};
pub use features::{
    AUTO, COMMON, ColumnPlan, FeaturePlan, Missing, MoreFeatures, Normalization, Scaling,
    TableSettings,
};
pub use files::safetensors;
pub use guess::SMALL_ROWS_MAX;
pub use labels::{FileLabels, TableColumn};
pub use loader::{Batch, InOrder, Loader, LoaderBuilder, Micro, Origin, Resident, SlotId, Source};
pub use prepare::{open, prepare};
pub use ranks::{Alone, Ranks};
pub use request::{Data, DataRequest, LeftOpen, Trained};
pub use sampler::Sampler;
pub use spec::{DataSpec, FilesSpec, TokensSpec};
pub use task::{
    CLASSES_MAX, Classes, LabelName, LossOn, TOKENS_MAX, TaskKind, TaskSpec, TensorSpec,
    TokenizerId,
};
