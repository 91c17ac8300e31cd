//! What preparing data needs from the ranks that do it together. The engine implements it over its
//! world; `Alone` is one process.

use crate::error::Result;

/// The ranks of a job. All of them make the same calls in the same order.
pub trait Ranks {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// This rank's number among those of its host.
    fn local_rank(&self) -> usize;

    /// The bytes of all ranks, in their order, or the error of the first rank that has one: the
    /// same on all ranks. Ranks wait here as long as one of them may take to convert or scan data.
    fn share(&self, outcome: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>>;

    /// An error on all ranks if one of `values`, each with its name, differs between them.
    fn must_match(&self, values: &[(String, String)], help: &str) -> Result<()>;
}

/// What to do about ranks with different data.
pub(crate) const SAME_FILES: &str = "compare the files on the hosts: all ranks need the same data";

/// An error on all ranks if one of these values, which they found in `files`, differs between them.
pub(crate) fn must_be_alike(
    ranks: &dyn Ranks,
    files: &str,
    values: &[(&str, String)],
) -> Result<()> {
    let values = values.iter();
    let values = values.map(|(what, value)| (format!("{what} of {files}"), value.clone()));
    ranks.must_match(&values.collect::<Vec<_>>(), SAME_FILES)
}

/// One process.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Ranks for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn local_rank(&self) -> usize {
        0
    }

    fn share(&self, outcome: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        outcome.map(|bytes| vec![bytes])
    }

    fn must_match(&self, _: &[(String, String)], _: &str) -> Result<()> {
        Ok(())
    }
}

/// This rank's `outcome` if all ranks have succeeded, else the error of the first rank that has
/// one.
pub(crate) fn agree<T>(ranks: &dyn Ranks, outcome: Result<T>) -> Result<T> {
    let (value, outcome) = match outcome {
        Ok(value) => (Some(value), Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    ranks.share(outcome)?;
    Ok(value.expect("an error is shared by all ranks"))
}

/// What `open` returns, on one rank of each host before the others, which then find the files that
/// it has converted.
pub(crate) fn in_turn<T>(ranks: &dyn Ranks, open: impl Fn() -> Result<T>) -> Result<T> {
    let first = match ranks.local_rank() {
        0 => open().map(Some),
        _ => Ok(None),
    };
    let first = agree(ranks, first)?;
    agree(ranks, first.map_or_else(open, Ok))
}

/// Those ranks that have the same files open: they share the work of reading them. Ranks with
/// other files read these on their own, so that the content can be compared.
pub(crate) struct SameFiles<'a> {
    pub(crate) all: &'a dyn Ranks,
    /// In their order.
    members: Vec<usize>,
}

impl SameFiles<'_> {
    /// The ranks whose files have the same `identity` as this rank's. All ranks call it together.
    pub(crate) fn of<'a>(all: &'a dyn Ranks, identity: &str) -> Result<SameFiles<'a>> {
        let identities = all.share(Ok(identity.as_bytes().to_vec()))?;
        let is_same = |rank: &usize| identities[*rank] == identity.as_bytes();
        let members = (0..all.size()).filter(is_same).collect();
        Ok(SameFiles { all, members })
    }
}

impl Ranks for SameFiles<'_> {
    fn rank(&self) -> usize {
        let mut members = self.members.iter();
        let own = members.position(|&rank| rank == self.all.rank());
        own.expect("a rank has its own files open")
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn local_rank(&self) -> usize {
        self.all.local_rank()
    }

    /// An error of any rank is one of all, whatever their files.
    fn share(&self, outcome: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let mut all = self.all.share(outcome)?;
        let own = |&rank: &usize| std::mem::take(&mut all[rank]);
        Ok(self.members.iter().map(own).collect())
    }

    fn must_match(&self, values: &[(String, String)], help: &str) -> Result<()> {
        self.all.must_match(values, help)
    }
}

#[cfg(test)]
pub(crate) mod tests;
