use super::*;
use proptest::prelude::*;

/// What a sum adds, in words: shards by number, each addition in brackets.
fn in_words(level: u32, index: usize, shards: usize) -> Option<String> {
    let first = index << level;
    if first >= shards {
        return None;
    }
    if level == 0 {
        return Some(index.to_string());
    }
    let half = |index| in_words(level - 1, index, shards);
    let left = half(2 * index)?;
    match half(2 * index + 1) {
        Some(right) => Some(format!("({left}+{right})")),
        None => Some(left),
    }
}

fn whole(shards: usize) -> String {
    let level = shards.next_power_of_two().trailing_zeros();
    in_words(level, 0, shards).unwrap()
}

/// Adds as the parts say.
fn added(parts: impl Iterator<Item = (String, usize)>) -> Vec<String> {
    let mut left: Vec<String> = Vec::new();
    for (mut sum, additions) in parts {
        for _ in 0..additions {
            let before = left.pop().unwrap();
            sum = format!("({before}+{sum})");
        }
        left.push(sum);
    }
    left
}

/// The partial sums that a rank gives, made as it makes them.
fn given(tree: &SumTree, rank: usize) -> Vec<String> {
    let shards = tree.shards_of(rank).map(|shard| shard.to_string());
    added(shards.zip(tree.additions(rank)))
}

#[test]
fn five_shards_on_two_ranks_in_words() {
    assert_eq!(whole(5), "(((0+1)+(2+3))+4)");
    let tree = SumTree::new(5, 2);
    assert_eq!(given(&tree, 0), ["(0+1)"]);
    assert_eq!(given(&tree, 1), ["(2+3)", "4"]);
    assert_eq!((tree.kept_by(0), tree.kept_by(1)), (1, 1));
}

#[test]
fn a_rank_whose_range_is_a_subtree_gives_one_partial_sum() {
    for (shards, ranks) in [(2, 2), (8, 2), (8, 8), (64, 4), (12, 3)] {
        let tree = SumTree::new(shards, ranks);
        let given: Vec<_> = (0..ranks).map(|rank| tree.given_by(rank)).collect();
        assert_eq!(given, vec![1; ranks], "{shards} shards");
    }
    assert_eq!(SumTree::new(8, 8).kept_by(3), 0);
}

proptest! {
    #[test]
    fn every_number_of_ranks_makes_the_same_additions(shards in 1usize..200, ranks in 1usize..40) {
        let ranks = ranks.min(shards);
        let tree = SumTree::new(shards, ranks);
        let of = |rank: usize| given(&tree, rank);
        let parts = tree.order().iter();
        let sums = parts.map(|part| (of(part.rank)[part.row].clone(), part.additions));
        prop_assert_eq!(added(sums), vec![whole(shards)]);
    }

    #[test]
    fn ranges_cover_all_shards_and_differ_by_one(shards in 1usize..2000, ranks in 1usize..300) {
        let ranks = ranks.min(shards);
        let tree = SumTree::new(shards, ranks);
        let mut end = 0;
        for rank in 0..ranks {
            let range = tree.shards_of(rank);
            prop_assert_eq!(range.start, end);
            prop_assert!((shards / ranks..=shards.div_ceil(ranks)).contains(&range.len()));
            end = range.end;
        }
        prop_assert_eq!(end, shards);
    }

    #[test]
    fn partial_sums_are_few(shards in 1usize..2000, ranks in 1usize..50) {
        let ranks = ranks.min(shards);
        let tree = SumTree::new(shards, ranks);
        let log = shards.next_power_of_two().trailing_zeros() as usize;
        for rank in 0..ranks {
            prop_assert!(tree.given_by(rank) <= (2 * log).max(1));
            prop_assert!(tree.kept_by(rank) <= 2 * log);
            // The last one is in the gradients themselves.
            prop_assert!(tree.given_by(rank) <= tree.kept_by(rank) + 1);
        }
        // A sum of so few that are left at a time: see `sums::DEPTH`.
        let mut left = 0usize;
        for part in tree.order() {
            left = left + 1 - part.additions;
            prop_assert!(left <= log + 1);
        }
    }

    #[test]
    fn hosts_make_sums_that_others_complete(shards in 1usize..60, cuts in prop::collection::vec(1usize..5, 1..5)) {
        let ranks: usize = cuts.iter().sum();
        prop_assume!(ranks <= shards);
        let tree = SumTree::new(shards, ranks);
        let (mut first, mut made, mut hosts) = (0, Vec::new(), Vec::new());
        for count in cuts {
            hosts.push((first..first + count).collect::<Vec<usize>>());
            made.push(Vec::new());
            for parts in tree.sums_of(first..first + count) {
                let sums = parts.iter().map(|part| {
                    (given(&tree, first + part.rank)[part.row].clone(), part.additions)
                });
                let sums = added(sums);
                prop_assert_eq!(sums.len(), 1);
                prop_assert!(whole(shards).contains(&sums[0]));
                made.last_mut().unwrap().push(sums[0].clone());
            }
            first += count;
        }
        let order = tree.order_of(&hosts).into_iter();
        let sums = order.map(|part| (made[part.rank][part.row].clone(), part.additions));
        prop_assert_eq!(added(sums), vec![whole(shards)]);
    }
}
