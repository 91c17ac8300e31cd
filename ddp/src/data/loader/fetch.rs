//! The batch after the one that is being trained on, gathered by a thread of its own: so that reading from a disk, or drawing, runs
//! beside the step.
//!
//! One order at a time, always for memory that nobody else touches: the loader gives it away with the order and has it back with the
//! answer. The thread begins with the first order, and ends with the loader.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use ddp_kernels::Tensor;

use super::gather;
use crate::data::Dataset;
use crate::error::{Error, Result};

/// Rows to gather, and where to.
#[derive(Debug)]
struct Order {
    rows: Vec<u64>,
    host: [Tensor; 2],
}

/// An order that has been carried out, or has failed.
#[derive(Debug)]
struct Answer {
    rows: Vec<u64>,
    result: Result<()>,
}

/// What gathers ahead.
#[derive(Debug)]
pub(super) struct Fetcher {
    dataset: Arc<dyn Dataset>,
    thread: Option<Thread>,
    /// Which batch is under way.
    ordered: Option<u64>,
    /// Memory for the next order's rows.
    spare: Vec<u64>,
}

#[derive(Debug)]
struct Thread {
    /// Closed first of all: that ends the thread.
    orders: Option<SyncSender<Order>>,
    answers: Receiver<Answer>,
    handle: Option<JoinHandle<()>>,
}

impl Fetcher {
    /// For batches of at most `rows_max` rows of this dataset.
    pub(super) fn new(dataset: Arc<dyn Dataset>, rows_max: usize) -> Fetcher {
        Fetcher { dataset, thread: None, ordered: None, spare: Vec::with_capacity(rows_max) }
    }

    /// Gathers `mine`, the rows of batch number `batch`, into the front of `host`, beside whatever the caller does next.
    pub(super) fn order(&mut self, batch: u64, mine: impl Iterator<Item = u64>, host: [Tensor; 2]) -> Result<()> {
        assert!(self.ordered.is_none(), "one order at a time");
        let mut rows = std::mem::take(&mut self.spare);
        rows.clear();
        rows.extend(mine);
        let host = super::first_rows(&host, rows.len())?;
        if self.thread.is_none() {
            self.thread = Some(Thread::start(self.dataset.clone())?);
        }
        let orders = self.thread.as_ref().and_then(|thread| thread.orders.as_ref());
        let sent = orders.is_some_and(|orders| orders.send(Order { rows, host }).is_ok());
        if sent { Ok(()) } else { Err(gone()) }?;
        self.ordered = Some(batch);
        Ok(())
    }

    /// Waits for batch number `batch`, if it is the one that was ordered, and puts its rows into `rows`. Another one that was ordered is
    /// waited for too, since its memory is wanted, and forgotten. Whether it was that one.
    pub(super) fn take(&mut self, batch: u64, rows: &mut Vec<u64>) -> Result<bool> {
        let Some(ordered) = self.ordered.take() else { return Ok(false) };
        let thread = self.thread.as_ref().expect("it was ordered from one");
        let Answer { rows: mut gathered, result } = thread.answers.recv().map_err(|_| gone())?;
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
                let result = gather(&*dataset, &rows, &host);
                // Before the answer: whoever gets it may write there.
                drop(host);
                if done.send(Answer { rows, result }).is_err() {
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("loader".into()).spawn(work);
        let handle = started.map_err(|error| {
            Error::Data(format!(
                "cannot start the thread that gathers batches: {error}. Lift the limit (ulimit -u), or free memory."
            ))
        })?;
        Ok(Thread { orders: Some(orders), answers, handle: Some(handle) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(handle) = self.handle.take() {
            // Its panic has been said where it happened.
            _ = handle.join();
        }
    }
}

fn gone() -> Error {
    Error::Internal("the thread that gathers batches has ended".into())
}
