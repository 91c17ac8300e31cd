//! Gathers the next batch on a background thread, so that reading from a disk, or drawing, runs
//! during the step.
//!
//! One order at a time, for memory that nothing else touches: the loader gives it away with the
//! order and gets it back with the answer. The thread starts with the first order and ends with the
//! loader.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use ddp_kernels::Tensor;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::trace::{self, Label, Lane};

use super::memory::first_rows;
use crate::dataset::Dataset;
use crate::error::{Error, Result};

/// Rows to gather, and the memory for them.
#[derive(Debug)]
struct Order {
    rows: Vec<u64>,
    host: [Tensor; 2],
}

/// An order that is done or has failed.
#[derive(Debug)]
struct Answer {
    rows: Vec<u64>,
    result: Result<()>,
}

/// Rows are gathered.
pub(super) const GATHER: Label = Label::new(Lane::Data, "gather rows");
/// The step waits for rows.
const WAIT: Label = Label::new(Lane::Waiting, "wait for rows");

/// Gathers the next batch.
#[derive(Debug)]
pub(super) struct Prefetcher {
    dataset: Arc<dyn Dataset>,
    thread: Option<Thread>,
    /// The batch that is being gathered.
    ordered: Option<u64>,
    /// Memory for the row numbers of the next order.
    spare: Vec<u64>,
}

#[derive(Debug)]
struct Thread {
    /// Closed first, which ends the thread.
    orders: Option<SyncSender<Order>>,
    answers: Receiver<Answer>,
    handle: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// For batches of at most `rows_max` rows of this dataset.
    pub(super) fn new(dataset: Arc<dyn Dataset>, rows_max: usize) -> Prefetcher {
        Prefetcher {
            dataset,
            thread: None,
            ordered: None,
            spare: Vec::with_capacity(rows_max),
        }
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
        let host = first_rows(&host, rows.len())?;
        if self.thread.is_none() {
            self.thread = Some(Thread::start(self.dataset.clone())?);
        }
        let orders = self
            .thread
            .as_ref()
            .and_then(|thread| thread.orders.as_ref());
        let sent = orders.is_some_and(|orders| orders.send(Order { rows, host }).is_ok());
        if sent { Ok(()) } else { Err(gone()) }?;
        self.ordered = Some(batch);
        Ok(())
    }

    /// Waits for the batch that was ordered. If it is batch `batch`, puts its rows into `rows` and
    /// returns true; another one is dropped.
    pub(super) fn take(&mut self, batch: u64, rows: &mut Vec<u64>) -> Result<bool> {
        let Some(ordered) = self.ordered.take() else {
            return Ok(false);
        };
        let thread = self.thread.as_ref().expect("an order starts it");
        let Answer {
            rows: mut gathered,
            result,
        } = trace::record(WAIT, || thread.answers.recv()).map_err(|_| gone())?;
        if ordered == batch {
            result?;
            std::mem::swap(rows, &mut gathered);
        }
        self.spare = gathered;
        Ok(ordered == batch)
    }
}

impl Thread {
    fn start(dataset: Arc<dyn Dataset>) -> Result<Thread> {
        let (orders, to_do) = sync_channel::<Order>(1);
        let (done, answers) = sync_channel(1);
        let work = move || {
            for Order { rows, host } in to_do {
                let gather = || dataset.gather(&rows, &host[0], &host[1]);
                let result = trace::record(GATHER, gather);
                heartbeat::beat(Work::ReadsData);
                // Before the answer, after which the loader may write there.
                drop(host);
                if done.send(Answer { rows, result }).is_err() {
                    return;
                }
            }
        };
        let started = std::thread::Builder::new()
            .name("loader".into())
            .spawn(work);
        let handle = started.map_err(|error| {
            Error::Limit(format!(
                "cannot start the thread that gathers batches: {error}; help: raise the limits on \
                 threads (ulimit -u) and on virtual memory (ulimit -v)"
            ))
        })?;
        Ok(Thread {
            orders: Some(orders),
            answers,
            handle: Some(handle),
        })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(handle) = self.handle.take() {
            // A panic was reported where it happened.
            _ = handle.join();
        }
    }
}

fn gone() -> Error {
    Error::Internal("the thread that gathers batches has ended".into())
}
