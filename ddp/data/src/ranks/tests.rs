//! Errors that all ranks share.

mod threads;

pub(crate) use self::threads::ranks;
use super::*;
use crate::error::Error;

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
