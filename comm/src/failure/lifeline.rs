//! News of a failure between hosts: a communicator on which a rank that fails tells every rank of
//! the other hosts why, and on which every rank's watch listens.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::Cause;
use crate::mpi::{Comm, MESSAGE_BYTES_MAX, Request};
use crate::shared::Board;
use crate::waited::wait_until;

const TAG: c_int = 1;

/// The connection to the ranks of other hosts.
#[derive(Debug)]
pub(crate) struct Lifeline {
    pub(crate) comm: Comm,
    pub(crate) others: Vec<usize>,
    /// This host reports if all hosts fail at the same time.
    pub(crate) is_on_first_host: bool,
}

impl Lifeline {
    /// Tells the other hosts why the job ends; gives up after `bound`.
    pub(crate) fn send(&self, cause: &Cause, bound: Duration) {
        let bytes: Arc<[u8]> = encode(cause).into();
        let send = |&rank: &usize| self.comm.send(Arc::clone(&bytes), rank, TAG).ok();
        let mut under_way: Vec<Request> = self.others.iter().filter_map(send).collect();
        // What is not sent by then is not reported.
        _ = wait_until(bound, || {
            under_way.retain_mut(|request| matches!(request.is_done(), Ok(false)));
            Ok(under_way.is_empty())
        });
    }

    /// Puts a cause from another host on the board. One thread a rank listens.
    pub(crate) fn listen(&self, board: &Board) {
        let Ok(Some((from, length))) = self.comm.arrived(TAG) else {
            return;
        };
        let received = self.comm.receive(length.min(MESSAGE_BYTES_MAX), from, TAG);
        if let Ok(mut request) = received
            && let Ok(true) = request.is_done_within(Duration::from_secs(1))
            && let Some(cause) = decode(&request.into_bytes())
        {
            board.fail(&cause);
        }
    }
}

fn encode(cause: &Cause) -> Vec<u8> {
    let value = json!([cause.rank, cause.host, cause.exit_code, cause.text]);
    value.to_string().into_bytes()
}

fn decode(bytes: &[u8]) -> Option<Cause> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    Some(Cause {
        rank: usize::try_from(value[0].as_u64()?).ok()?,
        host: value[1].as_str()?.to_string(),
        exit_code: u8::try_from(value[2].as_u64()?).ok()?,
        text: value[3].as_str()?.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_survives_encoding() {
        let cause = Cause {
            rank: 3,
            host: "nöde".into(),
            exit_code: 77,
            text: "a \"b\"\nc".into(),
        };
        assert_eq!(decode(&encode(&cause)), Some(cause));
        assert_eq!(decode(b"[1, 2"), None);
        assert_eq!(decode(b"[1, \"x\", 300, \"y\"]"), None);
    }
}
