//! The ranks of a world, for preparing data.

use ddp_comm::{Field, World};
use ddp_data::{Error, Ranks, Result};

/// The ranks of a world.
pub struct WorldRanks<'a>(pub &'a World);

impl Ranks for WorldRanks<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn local_rank(&self) -> usize {
        self.0.local_rank()
    }

    fn share(&self, outcome: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let mine = outcome.as_ref().map(Vec::as_slice);
        let mine = mine.map_err(|error| (error.exit_code(), error.to_string()));
        match self.0.share_outcome(mine).map_err(wrapped)? {
            Ok(all) => Ok(all),
            Err(remote) => Err(match outcome {
                Err(own) if remote.rank == self.rank() => own,
                _ => Error::Remote {
                    rank: remote.rank,
                    text: remote.text,
                    exit_code: remote.exit_code,
                },
            }),
        }
    }

    fn must_match(&self, values: &[(String, String)], help: &str) -> Result<()> {
        let field = |(name, value): &(String, String)| Field::must_match(name, value, help);
        let fields: Vec<Field> = values.iter().map(field).collect();
        self.0.handshake(&fields).map_err(wrapped)
    }
}

fn wrapped(error: ddp_comm::Error) -> Error {
    Error::Outside {
        exit_code: error.exit_code(),
        source: Box::new(error),
    }
}
