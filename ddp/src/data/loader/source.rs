//! Where a loader's rows come from, and on which devices its batches lie.

use std::sync::Arc;

use ddp_kernels::Device;

use super::resident::Tables;
use crate::config::Resident;
use crate::data::Dataset;
use crate::error::Result;

/// The rows of a dataset, on their way to one device or two. Clones share what is kept there.
#[derive(Clone, Debug)]
pub struct Source {
    pub(super) dataset: Arc<dyn Dataset>,
    /// Where the features of batches lie, and where their targets.
    pub(super) devices: [Device; 2],
    pub(super) tables: Option<Tables>,
}

impl Source {
    /// Rows that are gathered in host memory, batch by batch, and on GPUs copied ahead of their step: features to the first of `devices`,
    /// targets to the second. Both are the same device, or both are GPUs.
    pub fn new(dataset: Arc<dyn Dataset>, devices: [Device; 2]) -> Source {
        let [first, last] = devices;
        assert!(first == last || (first.is_accelerator() && last.is_accelerator()), "batches on {first} and {last}");
        Source { dataset, devices, tables: None }
    }

    /// As `new`, but the data are kept on the GPUs as a whole and batches gathered there if `choice` says so: `On` always, and too little
    /// memory is an error that comes before anything is taken; `Auto` where the data take at most a quarter of what is free, so make what
    /// the training needs before. In host memory there is nothing to keep: batches are gathered from where the data are. Every bit of every batch
    /// is the same both ways.
    #[track_caller]
    pub fn kept_on_device(dataset: Arc<dyn Dataset>, devices: [Device; 2], choice: Resident) -> Result<Source> {
        let mut source = Source::new(dataset, devices);
        source.tables = Tables::new(&*source.dataset, devices, choice)?;
        Ok(source)
    }

    /// How many bytes of the devices' memory the data take, if they are kept there.
    pub fn bytes_on_device(&self) -> Option<usize> {
        self.tables.as_ref().map(Tables::bytes)
    }
}
