//! Rows divided among ranks batch by batch: batch k belongs to rank k mod N.

use std::sync::Arc;

use ddp_kernels::Tensor;

use crate::data::{Dataset, Result, RowSpec};

/// One rank's batches of a dataset, as a dataset. Only the last batch of all may be short.
#[derive(Debug)]
pub(super) struct RoundRobinRows {
    all: Arc<dyn Dataset>,
    rank: u64,
    ranks: u64,
    /// Rows of a batch.
    batch: u64,
    /// Rows of this rank.
    rows: u64,
}

/// Row numbers that are looked up at a time, on the stack.
const AT_A_TIME: usize = 64;

impl RoundRobinRows {
    /// The rows of rank `rank` of `ranks`, in batches of at most `batch` rows.
    pub(super) fn new(
        all: Arc<dyn Dataset>,
        rank: usize,
        ranks: usize,
        batch: usize,
    ) -> RoundRobinRows {
        let mut mine = RoundRobinRows {
            all,
            rank: rank as u64,
            ranks: ranks as u64,
            batch: batch.max(1) as u64,
            rows: 0,
        };
        // All but the last batch are full.
        let batches = mine.batches().saturating_sub(mine.rank);
        mine.rows = match batches.div_ceil(mine.ranks) {
            0 => 0,
            count => (count - 1) * mine.batch + mine.rows_of(mine.rank + (count - 1) * mine.ranks),
        };
        mine
    }

    /// Rows of all ranks.
    pub(super) fn all_rows(&self) -> u64 {
        self.all.rows()
    }

    /// Rows of every batch but the last.
    pub(super) fn batch(&self) -> usize {
        self.batch as usize
    }

    /// Rounds in which each rank has a batch, or in the last one some ranks.
    pub(super) fn rounds(&self) -> u64 {
        self.batches().div_ceil(self.ranks)
    }

    /// The first row of rank `rank`'s batch in round `round`; None if it has no batch in that
    /// round.
    pub(super) fn first_row(&self, round: u64, rank: usize) -> Option<u64> {
        let number = round * self.ranks + rank as u64;
        (number < self.batches()).then(|| number * self.batch)
    }

    fn batches(&self) -> u64 {
        self.all.rows().div_ceil(self.batch)
    }

    /// Rows of batch `number` of all.
    fn rows_of(&self, number: u64) -> u64 {
        self.batch.min(self.all.rows() - number * self.batch)
    }

    /// The number in the whole dataset of this rank's row `row`.
    fn row(&self, row: u64) -> u64 {
        let (turn, within) = (row / self.batch, row % self.batch);
        (turn * self.ranks + self.rank) * self.batch + within
    }
}

impl Dataset for RoundRobinRows {
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
    use ddp_kernels::Device;

    use crate::data::{InMemory, TaskSpec, read_rows};

    fn numbered(rows: u64) -> Arc<dyn Dataset> {
        let numbers: Vec<f32> = (0..rows).map(|row| row as f32).collect();
        let numbers = Tensor::from_slice(&numbers, &[rows as usize, 1], Device::Cpu).unwrap();
        let task = TaskSpec::Regression { outputs: 1 };
        Arc::new(InMemory::new(numbers.clone(), numbers, task).unwrap())
    }

    #[test]
    fn every_row_belongs_to_one_rank_and_batches_are_the_same_for_any_number_of_ranks() {
        for (rows, batch) in [(1, 1), (1, 8), (103, 10), (100, 10), (257, 200), (64, 64)] {
            let all = numbered(rows);
            let mut whole = Vec::new();
            for ranks in [1, 2, 3, 7, 20] {
                let dealt: Vec<RoundRobinRows> = (0..ranks)
                    .map(|rank| RoundRobinRows::new(all.clone(), rank, ranks, batch))
                    .collect();
                assert_eq!(dealt.iter().map(RoundRobinRows::rows).sum::<u64>(), rows);
                let mut batches = Vec::new();
                for round in 0..dealt[0].rounds() {
                    for (rank, mine) in dealt.iter().enumerate() {
                        let Some(first) = mine.first_row(round, rank) else {
                            continue;
                        };
                        let count = (rows - first).min(batch as u64);
                        let numbers: Vec<u64> =
                            (0..count).map(|row| round * batch as u64 + row).collect();
                        let [x, y] = read_rows(mine, &numbers).unwrap();
                        let (x, y) = (x.to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap());
                        assert_eq!(x, y);
                        let got: Vec<u64> = x.iter().map(|&number| number as u64).collect();
                        assert_eq!(
                            got,
                            (first..first + count).collect::<Vec<_>>(),
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
