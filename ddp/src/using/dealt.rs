//! Rows dealt to ranks batch by batch: batch k of all rows is rank k mod N's.

use std::sync::Arc;

use ddp_kernels::Tensor;

use crate::data::{Dataset, Result, RowSpec};

/// One rank's batches of a dataset, as a dataset: every batch is whole but for the last of all.
#[derive(Debug)]
pub(super) struct Dealt {
    all: Arc<dyn Dataset>,
    rank: u64,
    ranks: u64,
    /// Rows of a batch.
    batch: u64,
    /// Rows of this rank.
    rows: u64,
}

/// Row numbers that are looked up at a time: on the stack, so that nothing is allocated.
const AT_A_TIME: usize = 64;

impl Dealt {
    /// Those of rank `rank` of `ranks`, in batches of at most `batch` rows.
    pub(super) fn new(all: Arc<dyn Dataset>, rank: usize, ranks: usize, batch: usize) -> Dealt {
        let mut dealt = Dealt {
            all,
            rank: rank as u64,
            ranks: ranks as u64,
            batch: batch.max(1) as u64,
            rows: 0,
        };
        // All but the last batch are full.
        dealt.rows = match dealt.batches_of(dealt.rank) {
            0 => 0,
            mine => (mine - 1) * dealt.batch + dealt.rows_of(dealt.rank + (mine - 1) * dealt.ranks),
        };
        dealt
    }

    /// Rows of all ranks.
    pub(super) fn all_rows(&self) -> u64 {
        self.all.rows()
    }

    /// Rows of a batch, but for the last.
    pub(super) fn batch(&self) -> usize {
        // It was one.
        self.batch as usize
    }

    /// How often every rank has its turn.
    pub(super) fn rounds(&self) -> u64 {
        self.batches().div_ceil(self.ranks)
    }

    /// The rows of rank `rank`'s batch in round `round`: the first, and how many; none if it has no batch in that one.
    pub(super) fn turn(&self, round: u64, rank: usize) -> Option<(u64, usize)> {
        let number = round * self.ranks + rank as u64;
        (number < self.batches()).then(|| (number * self.batch, self.rows_of(number) as usize))
    }

    fn batches(&self) -> u64 {
        self.all.rows().div_ceil(self.batch)
    }

    fn batches_of(&self, rank: u64) -> u64 {
        self.batches().saturating_sub(rank).div_ceil(self.ranks)
    }

    /// Of batch `number` of all.
    fn rows_of(&self, number: u64) -> u64 {
        self.batch.min(self.all.rows() - number * self.batch)
    }

    /// The row of the whole that is this rank's row `row`.
    fn row(&self, row: u64) -> u64 {
        let (turn, within) = (row / self.batch, row % self.batch);
        (turn * self.ranks + self.rank) * self.batch + within
    }
}

impl Dataset for Dealt {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn spec(&self) -> &RowSpec {
        self.all.spec()
    }

    fn fingerprint(&self) -> Result<String> {
        self.all.fingerprint()
    }

    fn gather(&self, rows: &[u64], inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let mut numbers = [0; AT_A_TIME];
        for (index, part) in rows.chunks(AT_A_TIME).enumerate() {
            let numbers = &mut numbers[..part.len()];
            numbers
                .iter_mut()
                .zip(part)
                .for_each(|(number, &row)| *number = self.row(row));
            let first = index * AT_A_TIME;
            let range = first..first + part.len();
            let (inputs, targets) = (inputs.slice(range.clone())?, targets.slice(range)?);
            self.all.gather(numbers, &inputs, &targets)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::read_rows;
    use crate::data::synthetic::row_number;

    fn numbered(rows: u64) -> Arc<dyn Dataset> {
        crate::data::open(
            &format!("synthetic:row-number,rows={rows},held-out=0")
                .parse()
                .unwrap(),
        )
        .unwrap()
        .train
    }

    #[test]
    fn every_row_is_dealt_once_and_batches_are_the_same_for_any_number_of_ranks() {
        for (rows, batch) in [(1, 1), (1, 8), (103, 10), (100, 10), (257, 200), (64, 64)] {
            let all = numbered(rows);
            let mut whole = Vec::new();
            for ranks in [1, 2, 3, 7, 20] {
                let dealt: Vec<Dealt> = (0..ranks)
                    .map(|rank| Dealt::new(all.clone(), rank, ranks, batch))
                    .collect();
                assert_eq!(dealt.iter().map(Dealt::rows).sum::<u64>(), rows);
                let mut batches = Vec::new();
                for round in 0..dealt[0].rounds() {
                    for (rank, mine) in dealt.iter().enumerate() {
                        let Some((first, count)) = mine.turn(round, rank) else {
                            continue;
                        };
                        let numbers: Vec<u64> = (0..count as u64)
                            .map(|row| round * batch as u64 + row)
                            .collect();
                        let [x, y] = read_rows(mine, &numbers).unwrap();
                        let (x, y) = (x.to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap());
                        assert_eq!(x, y);
                        let got: Vec<u64> = x.chunks(4).map(row_number).collect();
                        assert_eq!(
                            got,
                            (first..first + count as u64).collect::<Vec<_>>(),
                            "{ranks} ranks"
                        );
                        batches.push(got);
                    }
                }
                assert_eq!(batches.concat(), (0..rows).collect::<Vec<_>>());
                if ranks == 1 {
                    whole = batches;
                } else {
                    assert_eq!(batches, whole, "{ranks} ranks");
                }
            }
        }
    }
}
