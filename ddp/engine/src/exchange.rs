//! Values that ranks send each other as JSON.

use ddp_comm::{Group, World};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

fn written<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(unreadable)
}

fn read_all<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    all.collect::<Result<_, _>>().map_err(unreadable)
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Internal(format!("a message between ranks: {error}"))
}

/// Every rank's `mine` in rank order, on all ranks, which call it together.
pub fn gather<T: Serialize + DeserializeOwned>(world: &World, mine: &T) -> Result<Vec<T>> {
    read_all(&world.all_gather_bytes(&written(mine)?)?)
}

/// As above, for numbers that need not be finite.
pub fn gather_numbers(world: &World, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let bits: Vec<u64> = mine.iter().map(|number| number.to_bits()).collect();
    let numbers = |bits: Vec<u64>| bits.into_iter().map(f64::from_bits).collect();
    Ok(gather(world, &bits)?.into_iter().map(numbers).collect())
}

/// What rank `source` has, on all ranks, which call it together. Only that rank calls `own`.
pub(crate) fn broadcast<T: Serialize + DeserializeOwned>(
    world: &World,
    source: usize,
    own: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let mut bytes = if world.rank() == source {
        written(&own()?)?
    } else {
        Vec::new()
    };
    world.broadcast_bytes(&mut bytes, source)?;
    serde_json::from_slice(&bytes).map_err(unreadable)
}

/// As `gather` where a rank may have failed: the error of the first that did.
pub(crate) fn outcomes<T: Serialize + DeserializeOwned>(
    group: &Group,
    mine: Result<T>,
) -> Result<Vec<T>> {
    if group.size() == 1 {
        return mine.map(|mine| vec![mine]);
    }
    let outcome = match mine {
        Ok(mine) => Ok(written(&mine)?),
        Err(error) => Err((error.exit_code(), error.to_string())),
    };
    let outcome = outcome.as_ref().map(Vec::as_slice).map_err(Clone::clone);
    read_all(&group.share_outcome(outcome)??)
}
