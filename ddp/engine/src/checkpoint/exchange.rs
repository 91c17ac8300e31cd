//! What the ranks that write a checkpoint exchange: what each has written, or the first error.

use ddp_comm::Group;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// Every rank's `mine` in rank order, on all ranks; or the error of the first rank that failed.
pub(super) fn all<T: Serialize + DeserializeOwned>(
    group: &Group,
    mine: Result<T>,
) -> Result<Vec<T>> {
    let unreadable = |error| Error::Internal(format!("a message between ranks: {error}"));
    if group.size() == 1 {
        return mine.map(|mine| vec![mine]);
    }
    let outcome = match mine {
        Ok(mine) => Ok(serde_json::to_vec(&mine).map_err(unreadable)?),
        Err(error) => Err((error.exit_code(), error.to_string())),
    };
    let outcome = outcome.as_ref().map(Vec::as_slice).map_err(Clone::clone);
    match group.share_outcome(outcome)? {
        Ok(all) => all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(unreadable))
            .collect(),
        Err(remote) => Err(Error::Remote {
            rank: remote.rank,
            text: remote.text,
            exit_code: remote.exit_code,
        }),
    }
}
