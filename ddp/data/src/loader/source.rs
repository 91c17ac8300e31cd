//! Where a loader's rows come from, and on which devices its batches are.

use std::sync::Arc;

use ddp_kernels::Device;

use super::resident::{Resident, Tables};
use crate::dataset::Dataset;
use crate::error::Result;

/// The rows of a dataset for one device or two. Clones share the data kept there.
#[derive(Clone, Debug)]
pub struct Source {
    pub(super) dataset: Arc<dyn Dataset>,
    /// Where the inputs of batches are, and where their targets.
    pub(super) devices: [Device; 2],
    pub(super) tables: Option<Tables>,
}

impl Source {
    /// Rows that are gathered in host memory, and for GPUs copied ahead of their step: inputs to
    /// the first of `devices`, targets to the second. Both are the same device, or both are GPUs.
    pub fn new(dataset: Arc<dyn Dataset>, devices: [Device; 2]) -> Source {
        let [first, last] = devices;
        assert!(
            first == last || (first.is_accelerator() && last.is_accelerator()),
            "batches on {first} and {last}"
        );
        Source {
            dataset,
            devices,
            tables: None,
        }
    }

    /// Like `new`, but with the data kept on the GPUs: `On` always, and too little memory is an
    /// error before anything is allocated; `Auto` if the data take at most a quarter of the free
    /// memory, so allocate what training needs before. On the CPU this does nothing. Batches have
    /// the same bits either way.
    #[track_caller]
    pub fn kept_on_device(
        dataset: Arc<dyn Dataset>,
        devices: [Device; 2],
        choice: Resident,
    ) -> Result<Source> {
        let mut source = Source::new(dataset, devices);
        source.tables = Tables::new(&*source.dataset, devices, choice)?;
        Ok(source)
    }

    /// The bytes of device memory that the data take, if they are kept there.
    pub fn bytes_on_device(&self) -> Option<usize> {
        self.tables.as_ref().map(Tables::bytes)
    }
}
