//! Pairs of rows of two classes, for the area under the ROC curve (AUC): the share of all pairs of
//! a row of each class in which the row of the second class has the higher score. Ties count half.
//!
//! Pairs are counted in integers, so AUC is exact for these scores, and the same on any number of
//! ranks.

use ddp_comm::Group;

use crate::error::Result;

/// Scores that each rank sends at a time: 512 KiB.
const SCORES_A_TIME: usize = 1 << 16;

/// Twice the pairs that are in the right order, of this rank's rows of the second class and all
/// ranks' rows of the first. A tie counts once. All ranks call it together. `scores` are those of
/// this rank's rows, by class: the logit of the second class minus that of the first, which has the
/// order of the probabilities and more digits.
pub(super) fn right_pairs_twice(scores: &mut [Vec<f64>; 2], group: &Group) -> Result<i64> {
    let [first, second] = scores;
    second.sort_unstable_by(f64::total_cmp);
    let (mut rest, mut twice) = (&first[..], 0);
    loop {
        let (now, later) = rest.split_at(rest.len().min(SCORES_A_TIME));
        rest = later;
        let bytes: Vec<u8> = now.iter().flat_map(|score| score.to_le_bytes()).collect();
        let of_ranks = group.all_gather_bytes(&bytes)?;
        if of_ranks.iter().all(Vec::is_empty) {
            return Ok(twice);
        }
        for score in of_ranks.iter().flat_map(|of| of.chunks_exact(8)) {
            let score = f64::from_le_bytes(score.try_into().expect("8 bytes"));
            let lower = second.partition_point(|it| *it < score);
            let not_higher = second.partition_point(|it| *it <= score);
            twice += (2 * second.len() - lower - not_higher) as i64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ddp_comm::World;

    use crate::confusion::ClassCounts;

    /// AUC of these rows (class, score), of which each rank has every so many.
    fn auc(ranks: usize, rows: &[(usize, f32)]) -> Option<f64> {
        let worlds = World::threads(ranks, None, Duration::from_secs(60)).unwrap();
        let of_rank = |world: World| {
            let mut counts = ClassCounts::of(2);
            for (class, score) in rows.iter().skip(world.rank()).step_by(ranks) {
                counts.count(*class, &[0.0, *score]);
            }
            let group = world.group("counts").unwrap();
            counts.add_up(&group).unwrap();
            counts.auc()
        };
        let aucs: Vec<_> = std::thread::scope(|scope| {
            let of_rank = &of_rank;
            let start = |world| scope.spawn(move || of_rank(world));
            let threads: Vec<_> = worlds.into_iter().map(start).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert!(aucs.iter().all(|of_rank| *of_rank == aucs[0]), "{aucs:?}");
        aucs[0]
    }

    #[test]
    fn auc_is_the_part_of_pairs_in_the_right_order_and_ties_count_half() {
        let rows = |first: &[f32], second: &[f32]| -> Vec<(usize, f32)> {
            let of = |class| move |score: &f32| (class, *score);
            let first = first.iter().map(of(0));
            first.chain(second.iter().map(of(1))).collect()
        };
        for (first, second, by_hand) in [
            (&[1.0, 2.0][..], &[3.0, 4.0][..], Some(1.0)),
            (&[3.0, 4.0], &[1.0, 2.0], Some(0.0)),
            (&[1.0, 1.0], &[1.0], Some(0.5)),
            // The example of scikit-learn's roc_auc_score: scores 0.1, 0.4, 0.35, 0.8.
            (&[0.1, 0.4], &[0.35, 0.8], Some(0.75)),
            // Of six pairs three are right, and two are ties: -0 is 0.
            (
                &[-1.0, 0.0, 2.0],
                &[-0.0, 2.0],
                Some((1.0 + 0.5 + 2.0 + 0.5) / 6.0),
            ),
            (&[1.0], &[], None),
            (&[], &[1.0], None),
        ] {
            let rows = rows(first, second);
            for ranks in [1, 3] {
                assert_eq!(auc(ranks, &rows), by_hand, "{rows:?} on {ranks} ranks");
            }
        }
    }

    #[test]
    fn auc_of_random_scores_is_the_count_of_all_pairs_on_any_number_of_ranks() {
        let mut state = 4u64;
        let mut below = |values: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 33) % values
        };
        for values in [7, 1000] {
            let mut row = || {
                let class = usize::from(below(3) == 0);
                // The second class is a little higher.
                (class, (below(values) + class as u64) as f32 / 8.0)
            };
            let rows: Vec<_> = (0..700).map(|_| row()).collect();
            let of = |class| rows.iter().filter(move |row| row.0 == class);
            let (mut sum, mut pairs) = (0.0, 0.0);
            for (_, first) in of(0) {
                for (_, second) in of(1) {
                    pairs += 1.0;
                    sum += match second.total_cmp(first) {
                        std::cmp::Ordering::Less => 0.0,
                        std::cmp::Ordering::Equal => 0.5,
                        std::cmp::Ordering::Greater => 1.0,
                    };
                }
            }
            for ranks in [1, 2, 5] {
                assert_eq!(auc(ranks, &rows), Some(sum / pairs), "{ranks} ranks");
            }
        }
    }
}
