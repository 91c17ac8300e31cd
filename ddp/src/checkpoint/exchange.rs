//! What the ranks that write a checkpoint tell each other: what each has written, or the error that all of them end with.

use std::io;
use std::path::PathBuf;

use ddp_comm::Group;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// An error on its way to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
enum Told {
    Io { action: String, path: PathBuf, source: String, way_out: String },
    Data(String),
    Internal(String),
}

/// What can fail in writing, as errors call it.
const ACTIONS: [&str; 9] = [
    "make the folder",
    "make a folder beside",
    "make",
    "write",
    "make durable",
    "put in its place",
    "remove",
    "read",
    "see",
];

impl Told {
    fn new(error: Error, rank: usize) -> Told {
        // Paths are the same on all ranks, disks need not be.
        let where_ = if rank == 0 { String::new() } else { format!(" (on rank {rank})") };
        match error {
            Error::Io { action, path, source, way_out } => {
                Told::Io { action: action.into(), path, source: format!("{source}{where_}"), way_out }
            }
            Error::Data(text) => Told::Data(text),
            other => Told::Internal(format!("saving failed{where_}: {other}")),
        }
    }

    fn error(self) -> Error {
        match self {
            Told::Io { action, path, source, way_out } => {
                let action = ACTIONS.into_iter().find(|known| *known == action).unwrap_or("save");
                Error::Io { action, path, source: io::Error::other(source), way_out }
            }
            Told::Data(text) => Error::Data(text),
            Told::Internal(text) => Error::Internal(text),
        }
    }
}

/// What each rank brings, in the order of ranks, on all of them; or, if any has failed, the error of the first of these.
pub(super) fn all<T: Serialize + DeserializeOwned>(group: &Group, mine: Result<T>) -> Result<Vec<T>> {
    if group.size() == 1 {
        return mine.map(|mine| vec![mine]);
    }
    let mine = mine.map_err(|error| Told::new(error, group.rank()));
    let bytes = serde_json::to_vec(&mine).map_err(|error| Error::Internal(format!("telling the others: {error}")))?;
    let told = gather(group, &bytes)?;
    let read = |bytes: Vec<u8>| -> Result<Result<T, Told>> {
        serde_json::from_slice(&bytes).map_err(|error| Error::Internal(format!("what another rank told: {error}")))
    };
    let told = told.into_iter().map(read).collect::<Result<Vec<_>>>()?;
    told.into_iter().map(|one| one.map_err(Told::error)).collect()
}

/// The bytes that each rank brings, in the order of ranks.
fn gather(group: &Group, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
    let (size, rank, stream) = (group.size(), group.rank(), Stream::default_of(Device::Cpu)?);
    let mut lengths = vec![0i64; size];
    lengths[rank] = mine.len() as i64;
    let lengths = Tensor::from_slice(&lengths, &[size], Device::Cpu)?.named("lengths");
    group.all_gather(&lengths, &stream)?;
    let lengths: Vec<usize> = lengths.to_vec::<i64>()?.into_iter().map(|length| length as usize).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let all = Tensor::zeros(&[size, longest], DType::U8, Device::Cpu)?.named("what each rank has saved");
    all.with_slice_mut(|all: &mut [u8]| all[rank * longest..][..mine.len()].copy_from_slice(mine))?;
    group.all_gather(&all, &stream)?;
    let all = all.to_vec::<u8>()?;
    Ok(all.chunks(longest).zip(lengths).map(|(slice, length)| slice[..length].to_vec()).collect())
}
