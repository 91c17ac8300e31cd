//! Ranks as threads, and errors that all of them share.

use std::time::Duration;

use ddp_comm::{Field, World};

use super::*;
use crate::error::Error;

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

#[test]
fn all_ranks_end_with_the_error_of_the_first_that_has_one() {
    let errors = ranks(3, |world| match world.rank() {
        0 => agree(world, Ok(())),
        rank => agree(world, Err(Error::Data(format!("rank {rank} says so")))),
    });
    for error in errors {
        let error = error.unwrap_err();
        assert_eq!(
            (error.to_string().as_str(), error.exit_code()),
            ("rank 1 says so", 65)
        );
    }
    let texts = ranks(2, |world| {
        let missing = || {
            Error::Io(ddp_kernels::files::FileError {
                action: "open",
                path: "there".into(),
                source: std::io::ErrorKind::NotFound.into(),
                help: "make it".into(),
            })
        };
        let outcome = match world.rank() {
            1 => Err(missing()),
            _ => Ok(()),
        };
        let error = agree(world, outcome).unwrap_err();
        assert_eq!(error.exit_code(), 74);
        error.to_string()
    });
    assert_eq!(texts[0], texts[1]);
    assert!(ranks(2, |world| agree(world, Ok(world.rank())).unwrap()) == [0, 1]);
}
