//! How ranks exchange values over MPI, and how those that do not come in time are named.
//!
//! A collective call of MPI cannot be cancelled, and does not say who is missing. So every rank
//! sends its value to rank 0, which sends all values to all, or tells them who is missing, so that
//! the others need not report it.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::library::{MpiJob, MpiRequest};
use crate::error::{Error, RankList, Result, Seconds};
use crate::launcher::{is_first_of_host, launcher_folder, patience, stopped_note};
use crate::waited::wait_until;

const ACTION: &str = "exchange addresses between ranks";
const TAG_HERE: c_int = 101;
const TAG_VALUE: c_int = 102;
const TAG_ANSWER: c_int = 103;
/// The most bytes of a value.
const VALUE_BYTES_MAX: usize = 8192;
/// How long the answer that a rank is missing may take.
const ANSWER_MAX: Duration = Duration::from_millis(300);

impl MpiJob {
    /// The `value` of every rank. One that is too long becomes null.
    pub(crate) fn exchange(&self, value: &Value, timeout: Duration) -> Result<Vec<Value>> {
        let is_long = value.to_string().len() > VALUE_BYTES_MAX;
        let mine = if is_long { &Value::Null } else { value };
        match self.rank() {
            0 => collect(self, mine.clone(), timeout),
            rank => tell(self, rank, mine, timeout),
        }
    }
}

/// Rank 0's part.
fn collect(job: &MpiJob, mine: Value, timeout: Duration) -> Result<Vec<Value>> {
    let (mut arriving, mut leaving) = (Vec::new(), Vec::new());
    for rank in 1..job.size() {
        leaving.push(job.send(Arc::from([1]), rank, TAG_HERE)?);
        arriving.push(job.receive(VALUE_BYTES_MAX, rank, TAG_VALUE)?);
    }
    let mut values = vec![None; job.size()];
    values[0] = Some(mine);
    wait_until(timeout, || {
        for (value, request) in values[1..].iter_mut().zip(&mut arriving) {
            if value.is_none() && request.is_done()? {
                *value = Some(serde_json::from_str(&request.text()).unwrap_or_default());
            }
        }
        Ok(values.iter().all(Option::is_some))
    })?;
    let missing = (0..values.len()).filter(|&rank| values[rank].is_none());
    let missing: Vec<usize> = missing.collect();
    // Ranks that wait in a call of MPI for a stopped one do not come either.
    let late = || format!("did not come within {}{}", Seconds(timeout), stopped_note());
    let (answer, limit) = match missing.is_empty() {
        true => (json!(values).to_string(), timeout),
        false => (format!("{} {}", RankList(&missing), late()), ANSWER_MAX),
    };
    let bytes: Arc<[u8]> = answer.as_bytes().into();
    for rank in (1..values.len()).filter(|rank| !missing.contains(rank)) {
        leaving.push(job.send(Arc::clone(&bytes), rank, TAG_ANSWER)?);
    }
    let are_sent = wait_until(limit, || {
        let mut all = leaving.iter_mut().map(MpiRequest::is_done);
        all.try_fold(true, |so_far, it| Ok(so_far && it?))
    })?;
    if !missing.is_empty() {
        return Err(reported_once(Error::too_late(ACTION, answer)));
    }
    if !are_sent {
        let reason = format!("some ranks {}", late());
        return Err(reported_once(Error::too_late(ACTION, reason)));
    }
    Ok(values.into_iter().flatten().collect())
}

/// The part of the other ranks.
fn tell(job: &MpiJob, rank: usize, mine: &Value, timeout: Duration) -> Result<Vec<Value>> {
    let mut told = job.send(mine.to_string().into_bytes().into(), 0, TAG_VALUE)?;
    let mut here = job.receive(1, 0, TAG_HERE)?;
    let most = job.size() * (VALUE_BYTES_MAX + 1) + 1;
    let mut answer = job.receive(most, 0, TAG_ANSWER)?;
    // Rank 0 may come later than this rank, and then waits longer for the others.
    let limit = timeout.saturating_add(patience(rank));
    for request in [&mut here, &mut answer, &mut told] {
        if !wait_until(limit, || request.is_done())? {
            let reason = format!("rank 0 did not come within {}", Seconds(timeout));
            return Err(reported_once(Error::too_late(ACTION, reason)));
        }
    }
    let answer = answer.text();
    let values = serde_json::from_str(&answer).ok();
    let values = values.filter(|all: &Vec<Value>| all.len() == job.size());
    values.ok_or_else(|| {
        // Rank 0 reports it first.
        std::thread::sleep(ANSWER_MAX);
        Error::too_late(ACTION, answer).reported_by_rank_0()
    })
}

/// An error that all ranks find by themselves, for the first of a host to report.
fn reported_once(error: Error) -> Error {
    if is_first_of_host(launcher_folder().as_deref()) {
        return error;
    }
    std::thread::sleep(ANSWER_MAX);
    error.reported_by_rank_0()
}
