//! What the ranks that write a checkpoint tell each other: what each has written, or the error with
//! which all of them end.

use ddp_comm::Group;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, Result};

/// What each rank brings, in the order of ranks, on all of them. If any failed, the error of the
/// first that did.
pub(super) fn all<T: Serialize + DeserializeOwned>(
    group: &Group,
    mine: Result<T>,
) -> Result<Vec<T>> {
    if group.size() == 1 {
        return mine.map(|mine| vec![mine]);
    }
    // Paths are the same on all ranks, but disks may differ.
    let rank = group.rank();
    let on_rank = |error: &Error| match rank {
        0 => error.to_string(),
        _ => format!("{error} (on rank {rank})"),
    };
    let mine = mine.map_err(|error| (error.exit_code(), on_rank(&error)));
    let unreadable = |error| Error::Internal(format!("a message between ranks: {error}"));
    let bytes = serde_json::to_vec(&mine).map_err(unreadable)?;
    let read = |bytes: Vec<u8>| -> Result<T> {
        let outcome: Result<T, (u8, String)> =
            serde_json::from_slice(&bytes).map_err(unreadable)?;
        outcome.map_err(|(exit_code, text)| Error::Remote { text, exit_code })
    };
    gather(group, &bytes)?.into_iter().map(read).collect()
}

/// The bytes that each rank brings, in the order of ranks.
fn gather(group: &Group, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let (size, rank, stream) = (group.size(), group.rank(), Stream::default_of(Device::Cpu)?);
    let mut lengths = vec![0i64; size];
    lengths[rank] = mine.len() as i64;
    let lengths = Tensor::from_slice(&lengths, &[size], Device::Cpu)?.named("lengths");
    group.all_gather(&lengths, &stream)?;
    let lengths = lengths.to_vec::<i64>()?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    let all =
        Tensor::zeros(&[size, longest], DType::U8, Device::Cpu)?.named("what each rank has saved");
    all.with_slice_mut(|all: &mut [u8]| all[rank * longest..][..mine.len()].copy_from_slice(mine))?;
    group.all_gather(&all, &stream)?;
    let all = all.to_vec::<u8>()?;
    let slices = all.chunks(longest).zip(lengths);
    Ok(slices
        .map(|(slice, length)| slice[..length as usize].to_vec())
        .collect())
}
