//! Ranks that are processes.

use super::bench::*;
use crate::machine::testing::made;
use crate::nccl::comm_calls::*;
use crate::stream::calls::{cuStreamCreate, cuStreamSynchronize};

#[test]
fn all_ranks_have_the_sum_that_the_documentation_says_to_the_bit() {
    for ranks in 1..=4 {
        let test = name!(all_ranks_have_the_sum_that_the_documentation_says_to_the_bit);
        let ended = played(test, ranks, &[("SIMCUDA_SCHEDULE", "random")], |own| {
            let ranks = own.ranks;
            let comm = own.start();
            let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
            // The last is larger than the ring.
            for count in [1, 63, 1000, 3 << 20] {
                let from = upload(&values(own.rank, count));
                let to = upload(&vec![0.0; count]);
                done(all_reduce(from, to, count, comm, stream));
                assert_eq!(cuStreamSynchronize(stream), SUCCESS);
                let all: Vec<Vec<f32>> = (0..ranks).map(|rank| values(rank, count)).collect();
                let expected: Vec<f32> = (0..count)
                    .map(|at| ring_sum(ranks, at, 0, |rank| all[rank][at]))
                    .collect();
                assert!(download(to, count) == expected, "{count} elements");
            }
            done(ncclCommDestroy(comm));
        });
        let Some(ended) = ended else { return };
        all_clean(&ended);
    }
}
