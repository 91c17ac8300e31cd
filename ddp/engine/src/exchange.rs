//! What ranks tell each other as JSON.

use ddp_comm::{Group, World};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

fn unreadable(error: serde_json::Error) -> Error {
    Error::Internal(format!("a message between ranks: {error}"))
}

/// Every rank's `mine` in rank order, on all ranks, which call it together.
pub fn gather<T: Serialize + DeserializeOwned>(world: &World, mine: &T) -> Result<Vec<T>> {
    let mine = serde_json::to_vec(mine).map_err(unreadable)?;
    let all = world.all_gather_bytes(&mine)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    all.collect::<serde_json::Result<_>>().map_err(unreadable)
}

/// As above, for numbers that need not be finite.
pub fn gather_numbers(world: &World, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bits: Vec<u64> = mine.iter().map(|number| number.to_bits()).collect();
    let numbers = |bits: Vec<u64>| bits.into_iter().map(f64::from_bits).collect();
    Ok(gather(world, &bits)?.into_iter().map(numbers).collect())
}

/// The same where a rank may have failed: the error of the first that did.
pub(crate) fn outcomes<T: Serialize + DeserializeOwned>(
    group: &Group,
    mine: Result<T>,
) -> Result<Vec<T>> {
    if group.size() == 1 {
        return mine.map(|mine| vec![mine]);
    }
    let outcome = match mine {
        Ok(mine) => Ok(serde_json::to_vec(&mine).map_err(unreadable)?),
        Err(error) => Err((error.exit_code(), error.to_string())),
    };
    let outcome = outcome.as_ref().map(Vec::as_slice).map_err(Clone::clone);
    match group.share_outcome(outcome)? {
        Ok(all) => {
            let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
            all.collect::<serde_json::Result<_>>().map_err(unreadable)
        }
        Err(remote) => Err(Error::Remote {
            rank: remote.rank,
            text: remote.text,
            exit_code: remote.exit_code,
        }),
    }
}
