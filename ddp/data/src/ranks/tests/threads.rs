//! Ranks as threads. Also part of the tests of `ddp-tables`.

use std::time::Duration;

use ddp_comm::{Field, World};

use super::{Alone, Error, Ranks, Result};

struct Threads<'a>(&'a World);

impl Ranks for Threads<'_> {
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
        let told = outcome.as_ref().map(Vec::as_slice);
        let told = told.map_err(|error| (error.exit_code(), error.to_string()));
        match self.0.share_outcome(told).unwrap() {
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
        let outcome = self.0.handshake(&fields);
        outcome.map_err(|error| Error::Remote {
            rank: 0,
            text: error.to_string(),
            exit_code: error.exit_code(),
        })
    }
}

/// What `body` returns on each of `size` ranks.
pub(crate) fn ranks<T: Send>(size: usize, body: impl Fn(&dyn Ranks) -> T + Sync) -> Vec<T> {
    if size == 1 {
        return vec![body(&Alone)];
    }
    let worlds = World::threads(size, None, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let spawn = |world| scope.spawn(move || body(&Threads(&world)));
        let ranks: Vec<_> = worlds.into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
