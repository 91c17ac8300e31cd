//! One error for all ranks: a file is opened by each rank by itself, and what is wrong with it may show on some alone. They all end
//! with the same error, that of the first rank that has one.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ddp_comm::World;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How long ranks wait for one that converts or scans data: as long as that takes. One that ends is noticed at once all the same.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);

/// What a rank has found out: its own `outcome` where all went well, else the same error on all.
pub(crate) fn all<T>(world: &World, outcome: Result<T>) -> Result<T> {
    if world.size() == 1 {
        return outcome;
    }
    let told = outcome.as_ref().err().map(|error| Told::of(error).encode()).unwrap_or_default();
    world.barrier_within(PATIENCE)?;
    let all = world.all_gather_bytes(&told)?;
    let Some((rank, told)) = all.iter().enumerate().find(|(_, told)| !told.is_empty()) else { return outcome };
    match outcome {
        Err(error) if rank == world.rank() => Err(error),
        _ => Err(Told::decode(told).into_error(world)),
    }
}

/// What `open` gives, on each rank: on one rank of each host before the others, who then find made what it had to make.
pub(crate) fn in_turn<T>(world: &World, open: impl Fn() -> Result<T>) -> Result<T> {
    let first = match world.local_rank() {
        0 => open().map(Some),
        _ => Ok(None),
    };
    let first = all(world, first)?;
    all(world, first.map_or_else(open, Ok))
}

/// An error on its way to other ranks.
#[derive(Serialize, Deserialize)]
enum Told {
    Usage(String),
    Data(String),
    Io {
        action: String,
        path: PathBuf,
        source: String,
        way_out: String,
    },
    /// One that says itself why all have to end.
    Other,
}

impl Told {
    fn of(error: &Error) -> Told {
        match error {
            Error::Usage(text) => Told::Usage(text.clone()),
            Error::Data(text) => Told::Data(text.clone()),
            Error::Io { action, path, source, way_out } => Told::Io {
                action: action.to_string(),
                path: path.clone(),
                source: source.to_string(),
                way_out: way_out.clone(),
            },
            _ => Told::Other,
        }
    }

    fn encode(&self) -> Vec<u8> {
        // A path that is not UTF-8 cannot be told: then its rank says it.
        serde_json::to_vec(self).unwrap_or_else(|_| b"?".to_vec())
    }

    fn decode(bytes: &[u8]) -> Told {
        serde_json::from_slice(bytes).unwrap_or(Told::Other)
    }

    fn into_error(self, world: &World) -> Error {
        match self {
            Told::Usage(text) => Error::Usage(text),
            Told::Data(text) => Error::Data(text),
            // Once in a process, which is about to end.
            Told::Io { action, path, source, way_out } => {
                Error::Io { action: action.leak(), path, source: io::Error::other(source), way_out }
            }
            Told::Other => match world.barrier() {
                Err(error) => error.into(),
                Ok(()) => Error::Internal("a rank that failed went on".into()),
            },
        }
    }
}

#[cfg(test)]
pub(super) mod testing {
    //! Ranks as threads.

    use super::*;

    /// What `body` gives on each of `size` ranks.
    pub(in crate::data) fn ranks<T: Send>(size: usize, body: impl Fn(&World) -> T + Sync) -> Vec<T> {
        if size == 1 {
            return vec![body(&World::single().unwrap())];
        }
        let worlds = World::threads(size, None, Duration::from_secs(60)).unwrap();
        std::thread::scope(|scope| {
            let body = &body;
            let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || body(&world))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::testing::ranks;
    use super::*;

    #[test]
    fn all_ranks_end_with_the_error_of_the_first_that_has_one() {
        let errors = ranks(3, |world| match world.rank() {
            0 => all(world, Ok(())),
            rank => all(world, Err(Error::Data(format!("rank {rank} says so")))),
        });
        for error in errors {
            let error = error.unwrap_err();
            assert_eq!((error.to_string().as_str(), error.exit_code()), ("rank 1 says so", 65));
        }
        let texts = ranks(2, |world| {
            let missing = || Error::Io {
                action: "open",
                path: "there".into(),
                source: io::Error::from(io::ErrorKind::NotFound),
                way_out: "Make it.".into(),
            };
            let error = all(world, if world.rank() == 1 { Err(missing()) } else { Ok(()) }).unwrap_err();
            assert_eq!(error.exit_code(), 74);
            error.to_string()
        });
        assert_eq!(texts[0], texts[1]);
        assert!(ranks(2, |world| all(world, Ok(world.rank())).unwrap()) == [0, 1]);
    }
}
