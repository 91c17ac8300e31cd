//! Gathers the next batch on a background thread, so that reading from a disk, or drawing, runs
//! during the step.
//!
//! One order at a time, for memory that nothing else touches: the loader gives it away with the
//! order and gets it back with the answer. The thread ends with the loader.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use ddp_kernels::Tensor;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::trace::{self, Label, Lane};

use super::memory::first_rows;
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Rows to gather into this memory; after it, whether that succeeded.
#[derive(Debug)]
struct Order {
    rows: Vec<u64>,
    /// None once the rows are there: the loader may write to it again.
    host: Option<[Tensor; 2]>,
    result: Result<()>,
}

/// Rows are gathered.
pub(super) const GATHER: Label = Label::new(Lane::Data, "gather rows");
/// The step waits for rows.
const WAIT: Label = Label::new(Lane::Waiting, "wait for rows");

/// Gathers the next batch.
#[derive(Debug)]
pub(super) struct Prefetcher {
    /// Closed first, which ends the thread.
    orders: Option<SyncSender<Order>>,
    answers: Receiver<Order>,
    thread: Option<JoinHandle<()>>,
    /// The batch that is being gathered.
    ordered: Option<u64>,
    /// Memory for the row numbers of the next order.
    spare: Vec<u64>,
}

impl Prefetcher {
    /// For batches of at most `rows_max` rows of this dataset.
    pub(super) fn new(dataset: Arc<dyn Dataset>, rows_max: usize) -> Result<Prefetcher> {
        let (orders, to_do) = sync_channel::<Order>(1);
        let (done, answers) = sync_channel(1);
        let gather = move || {
            for mut order in to_do {
                if let Some([inputs, targets]) = order.host.take() {
                    let gather = || dataset.gather(&order.rows, &inputs, &targets);
                    order.result = trace::record(GATHER, gather);
                    heartbeat::beat(Work::ReadsData);
                }
                if done.send(order).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("loader".into()).spawn(gather);
        let thread = thread.map_err(|error| {
            Error::Limit(format!(
                "cannot start the thread that gathers batches: {error}; help: raise the limits on \
                 threads (ulimit -u) and on virtual memory (ulimit -v)"
            ))
        })?;
        Ok(Prefetcher {
            orders: Some(orders),
            answers,
            thread: Some(thread),
            ordered: None,
            spare: Vec::with_capacity(rows_max),
        })
    }

    /// Starts to gather `mine`, the rows of batch `batch`, into the first rows of `host`.
    pub(super) fn start(
        &mut self,
        batch: u64,
        mine: impl Iterator<Item = u64>,
        host: [Tensor; 2],
    ) -> Result<()> {
        assert!(self.ordered.is_none(), "one order at a time");
        let mut rows = std::mem::take(&mut self.spare);
        rows.clear();
        rows.extend(mine);
        let order = Order {
            host: Some(first_rows(&host, rows.len())?),
            rows,
            result: Ok(()),
        };
        let orders = self.orders.as_ref().expect("open until it is dropped");
        orders.send(order).map_err(|_| gone())?;
        self.ordered = Some(batch);
        Ok(())
    }

    /// Waits for the batch that was ordered. If it is batch `batch`, puts its rows into `rows` and
    /// returns true; another one is dropped.
    pub(super) fn take(&mut self, batch: u64, rows: &mut Vec<u64>) -> Result<bool> {
        let Some(ordered) = self.ordered.take() else {
            return Ok(false);
        };
        let mut order = trace::record(WAIT, || self.answers.recv()).map_err(|_| gone())?;
        if ordered == batch {
            order.result?;
            std::mem::swap(rows, &mut order.rows);
        }
        self.spare = order.rows;
        Ok(ordered == batch)
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            _ = thread.join();
        }
    }
}

fn gone() -> Error {
    Error::Internal("the thread that gathers batches has ended".into())
}
