//! How ranks meet over MPI, and how those that do not come in time are named.
//!
//! A collective call of MPI cannot be cancelled. So before each one, every rank tells rank 0 that
//! it is there. Rank 0 lets all continue, or tells them who is missing, so that the others need not
//! report it.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use super::library::{MpiComm, MpiRequest};
use crate::error::{Error, RankList, Result, Seconds};
use crate::launcher::{is_first_of_host, launcher_folder, patience, stopped_note};
use crate::waited::wait_until;

const TAG_HERE: c_int = 101;
const TAG_ANSWER: c_int = 102;
/// Bytes of rank 0's answer: empty, or who is missing.
const ANSWER_BYTES: usize = 256;
/// How long the answer may take.
const ANSWER_MAX: Duration = Duration::from_millis(300);

impl MpiComm {
    /// The same ranks again. All ranks call this in the same order.
    pub(crate) fn duplicate(&self, timeout: Duration) -> Result<MpiComm> {
        const ACTION: &str = "make a group of ranks";
        roll_call(self, timeout, ACTION)?;
        let (new, request) = self.start_duplicate(ACTION)?;
        match finish(request, timeout, ACTION) {
            Ok(()) => Ok(*new),
            Err(error) => {
                std::mem::forget(new);
                Err(error)
            }
        }
    }

    /// The same ranks with other numbers: this one has `rank`.
    pub(crate) fn reordered(&self, rank: usize, timeout: Duration) -> Result<MpiComm> {
        const ACTION: &str = "order the ranks by host";
        roll_call(self, timeout, ACTION)?;
        self.split(rank, ACTION)
    }

    /// The `block` of every rank, all of one length.
    pub(crate) fn all_gather(&self, block: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>> {
        const ACTION: &str = "exchange addresses between ranks";
        roll_call(self, timeout, ACTION)?;
        let each = block.len();
        let mut everything = vec![0u8; each * self.size()];
        let request = self.start_all_gather(block, &mut everything, ACTION)?;
        if let Err(error) = finish(request, timeout, ACTION) {
            std::mem::forget(everything);
            return Err(error);
        }
        Ok(everything.chunks(each.max(1)).map(<[u8]>::to_vec).collect())
    }
}

/// Returns when all ranks have come here.
fn roll_call(comm: &MpiComm, timeout: Duration, action: &str) -> Result<()> {
    match comm.rank() {
        0 => call(comm, timeout, action),
        rank => answer(comm, rank, timeout, action),
    }
}

/// Rank 0's part.
fn call(comm: &MpiComm, timeout: Duration, action: &str) -> Result<()> {
    let (mut arriving, mut under_way) = (Vec::new(), Vec::new());
    for rank in 1..comm.size() {
        under_way.push(comm.send(Arc::from([0u8]), rank, TAG_HERE)?);
        arriving.push((rank, comm.receive(1, rank, TAG_HERE)?));
    }
    let mut here = Vec::new();
    wait_until(timeout, || {
        let mut absent = Vec::new();
        for (rank, mut request) in std::mem::take(&mut arriving) {
            if request.is_done()? {
                here.push(rank)
            } else {
                absent.push((rank, request))
            }
        }
        arriving = absent;
        Ok(arriving.is_empty())
    })?;
    let missing: Vec<usize> = arriving.iter().map(|(rank, _)| *rank).collect();
    let text = if missing.is_empty() {
        String::new()
    } else {
        // Ranks that wait in a call of MPI for a stopped one do not come either.
        let (ranks, limit, note) = (RankList(&missing), Seconds(timeout), stopped_note());
        format!("{ranks} did not come within {limit}{note}")
    };
    let mut bytes = text.as_bytes()[..text.floor_char_boundary(ANSWER_BYTES)].to_vec();
    bytes.resize(ANSWER_BYTES, 0);
    let bytes: Arc<[u8]> = bytes.into();
    for rank in here {
        under_way.push(comm.send(Arc::clone(&bytes), rank, TAG_ANSWER)?);
    }
    if missing.is_empty() {
        let mut requests = under_way.into_iter();
        return requests.try_for_each(|request| finish(request, timeout, action));
    }
    wait_until(ANSWER_MAX, || {
        under_way.retain_mut(|request| matches!(request.is_done(), Ok(false)));
        Ok(false)
    })?;
    Err(reported_once(Error::too_late(action, text)))
}

/// The part of the other ranks.
fn answer(comm: &MpiComm, rank: usize, timeout: Duration, action: &str) -> Result<()> {
    let mut here = comm.send(Arc::from([0u8]), 0, TAG_HERE)?;
    let mut hello = comm.receive(1, 0, TAG_HERE)?;
    let mut answer = comm.receive(ANSWER_BYTES, 0, TAG_ANSWER)?;
    // Rank 0 may come later than this rank, and then waits longer for the others.
    for request in [&mut hello, &mut answer, &mut here] {
        if !request.is_done_within(timeout.saturating_add(patience(rank)))? {
            let reason = format!("rank 0 did not come within {}", Seconds(timeout));
            return Err(reported_once(Error::too_late(action, reason)));
        }
    }
    let answer = answer.take_bytes();
    match String::from_utf8_lossy(&answer).trim_end_matches('\0') {
        "" => Ok(()),
        text => {
            // Rank 0 reports it first.
            std::thread::sleep(ANSWER_MAX);
            Err(Error::too_late(action, text.to_string()).reported_by_rank_0())
        }
    }
}

fn finish(mut request: MpiRequest, timeout: Duration, action: &str) -> Result<()> {
    if request.is_done_within(timeout)? {
        return Ok(());
    }
    let (within, note) = (Seconds(timeout), stopped_note());
    let reason = format!("not all ranks came within {within}{note}");
    Err(reported_once(Error::too_late(action, reason)))
}

/// An error that all ranks find by themselves, for the first of a host to report.
fn reported_once(error: Error) -> Error {
    if is_first_of_host(launcher_folder().as_deref()) {
        return error;
    }
    std::thread::sleep(ANSWER_MAX);
    error.reported_by_rank_0()
}
