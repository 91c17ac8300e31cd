//! Which rank gets which GPU. `tests/mpirun` tests that ranks of a job exchange what they see.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;

use ddp_kernels::device::discover;

use super::*;
use crate::error::{Error, Result};
use crate::tests::on_threads;
use crate::world::World;

/// A rank on `host` that sees the GPUs of these letters, `-` for one without a UUID.
fn sight(host: &str, letters: &str) -> VisibleGpus {
    let uuid = |letter: char| {
        if letter == '-' {
            String::new()
        } else {
            format!("GPU-{}-0000", letter.to_string().repeat(8))
        }
    };
    let why_none = letters
        .is_empty()
        .then(|| "no driver is installed. Install one.".to_string());
    VisibleGpus {
        host: host.into(),
        uuids: letters.chars().map(uuid).collect(),
        why_none,
    }
}

fn on_one_host(ranks: &[&str]) -> Vec<VisibleGpus> {
    ranks
        .iter()
        .map(|letters| sight("node7", letters))
        .collect()
}

fn gets(sights: Vec<VisibleGpus>, per_rank: usize) -> Vec<Vec<usize>> {
    let table = assign(sights, per_rank, false).unwrap();
    assert!(table.sharing.is_empty());
    table.ranks.into_iter().map(|line| line.gets).collect()
}

fn shortage(sights: Vec<VisibleGpus>, per_rank: usize) -> Shortage {
    assign(sights, per_rank, false).unwrap_err()
}

#[test]
fn where_all_see_the_same_the_nth_rank_has_the_nth_group() {
    assert_eq!(gets(on_one_host(&["abcd"; 4]), 1), [[0], [1], [2], [3]]);
    assert_eq!(gets(on_one_host(&["abcd"; 2]), 2), [[0, 1], [2, 3]]);
    assert_eq!(gets(on_one_host(&["abcd"; 3]), 1), [[0], [1], [2]]);
    assert_eq!(gets(on_one_host(&["abcd"]), 3), [[0, 1, 2]]);
}

#[test]
fn where_each_sees_its_own_each_has_the_first() {
    assert_eq!(gets(on_one_host(&["a", "b", "c"]), 1), [[0], [0], [0]]);
    assert_eq!(gets(on_one_host(&["abc", "def"]), 2), [[0, 1], [0, 1]]);
}

#[test]
fn where_they_see_some_of_the_same_the_unclaimed_come_first() {
    assert_eq!(gets(on_one_host(&["ab", "bc", "cd"]), 1), [[0], [0], [0]]);
    assert_eq!(gets(on_one_host(&["ab", "ab", "bc"]), 1), [[0], [1], [1]]);
    // Own orders: the first of one is the last of the other.
    assert_eq!(gets(on_one_host(&["ab", "ba"]), 1), [[0], [0]]);
}

#[test]
fn ranks_with_a_choice_leave_gpus_to_those_without() {
    assert_eq!(gets(on_one_host(&["ab", "a"]), 1), [[1], [0]]);
    // a goes from rank 0 to rank 3, which makes 0, 1 and 2 move up.
    assert_eq!(
        gets(on_one_host(&["ab", "bc", "cd", "a"]), 1),
        [[1], [1], [1], [0]]
    );
    assert_eq!(gets(on_one_host(&["abcd", "ab"]), 2), [[2, 3], [0, 1]]);
}

#[test]
fn hosts_have_gpus_of_their_own_and_containers_of_one_machine_have_not() {
    let two_hosts = |second: &'static str| {
        ["ab", "ab", second, second]
            .into_iter()
            .zip(["n1", "n1", "n2", "n2"])
    };
    let sights = |second| {
        two_hosts(second)
            .map(|(letters, host)| sight(host, letters))
            .collect::<Vec<_>>()
    };
    assert_eq!(gets(sights("cd"), 1), [[0], [1], [0], [1]]);
    // One machine under two names, seen by its UUIDs.
    let shortage = shortage(sights("ab"), 1);
    assert_eq!(
        (shortage.lacking.as_slice(), shortage.seen),
        (&[0, 1, 2, 3][..], 2)
    );
    assert_eq!(
        gets(vec![sight("pod-1", "ab"), sight("pod-2", "ab")], 1),
        [[0], [1]]
    );
}

#[test]
fn without_uuids_the_ranks_of_a_host_count_its_gpus() {
    let sights = [("n1", "--"), ("n1", "--"), ("n2", "-"), ("n3", "-a")]
        .map(|(host, letters)| sight(host, letters));
    assert_eq!(gets(sights.to_vec(), 1), [[0], [1], [0], [0]]);
    assert_eq!(shortage(on_one_host(&["--"; 3]), 1).lacking, [0, 1, 2]);
}

#[test]
fn sharing_goes_round_and_says_who_shares() {
    let shared = |ranks: &[&str], per_rank| {
        let table = assign(on_one_host(ranks), per_rank, true).unwrap();
        (
            table
                .ranks
                .into_iter()
                .map(|line| line.gets)
                .collect::<Vec<_>>(),
            table.sharing,
        )
    };
    assert_eq!(shared(&["a"; 3], 1), (vec![vec![0]; 3], vec![0, 1, 2]));
    assert_eq!(
        shared(&["ab"; 3], 1),
        (vec![vec![0], vec![1], vec![0]], vec![0, 2])
    );
    assert_eq!(
        shared(&["abc"; 2], 2),
        (vec![vec![0, 1], vec![2, 0]], vec![0, 1])
    );
    assert_eq!(shared(&["a"; 2], 2), (vec![vec![0, 0]; 2], vec![0, 1]));
    // With enough GPUs no two ranks share one, and a host that needs no change keeps its own.
    assert_eq!(shared(&["ab"; 2], 1), (vec![vec![0], vec![1]], vec![]));
    assert_eq!(
        shared(&["a", "a", "bc", "bc"], 1),
        (vec![vec![0], vec![0], vec![0], vec![1]], vec![0, 1])
    );
    // Nothing cannot be shared.
    let blind = assign(on_one_host(&["a", "a", "", ""]), 1, true).unwrap_err();
    assert_eq!((blind.lacking.as_slice(), blind.seen), (&[2, 3][..], 0));
}

#[test]
fn a_shortage_lists_who_sees_what() {
    let error = shortage(on_one_host(&["ab"; 4]), 1);
    assert_eq!(
        error.to_string(),
        "ranks 0, 1, 2 and 3 need 4 GPUs and see 2 between them:\n  \
           rank 0 on node7  gets cuda:0  sees cuda:0 GPU-aaaaaaaa, cuda:1 GPU-bbbbbbbb\n  \
           rank 1 on node7  gets cuda:1  sees the same as rank 0\n  \
           rank 2 on node7  gets none    sees the same as rank 0\n  \
           rank 3 on node7  gets none    sees the same as rank 0"
    );
    assert_eq!(error.ranks_that_fit(), 2);
    let error = shortage(on_one_host(&["a"]), 2);
    assert!(
        error
            .to_string()
            .starts_with("rank 0 needs 2 GPUs and sees 1:\n"),
        "{error}"
    );
    let error = shortage(on_one_host(&["abcd", "x", "", "x"]), 1);
    assert!(
        error
            .to_string()
            .starts_with("rank 2 needs 1 GPU and sees none:\n"),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("sees none: no driver is installed."),
        "{error}"
    );
    let error = shortage(on_one_host(&["abcd", "x", "x"]), 1);
    assert!(
        error
            .to_string()
            .starts_with("ranks 1 and 2 need 2 GPUs and see 1 between them:\n"),
        "{error}"
    );
    let error = Error::from(error).to_string();
    assert!(
        error.starts_with("cannot give every rank its own GPUs: ranks 1 and 2"),
        "{error}"
    );
}

#[test]
fn a_long_table_shows_those_that_lack_something() {
    let mut sights: Vec<VisibleGpus> = (0..100)
        .map(|rank| sight(&format!("node{rank}"), ""))
        .collect();
    sights
        .iter_mut()
        .take(50)
        .enumerate()
        .for_each(|(rank, sight)| sight.uuids = vec![format!("GPU-{rank:032}")]);
    sights[51].uuids = vec!["GPU-x".into(); 1];
    let text = shortage(sights, 1).to_string();
    assert!(
        !text.contains("rank 49 ")
            && text.contains("rank 50 on node50")
            && !text.contains("rank 51 "),
        "{text}"
    );
    assert!(text.ends_with("and 33 more ranks"), "{text}");
    assert_eq!(text.lines().count(), 1 + 16 + 1);
    let wide = assign(vec![sight("n", "abcdefghijkl")], 1, false)
        .unwrap()
        .to_string();
    assert!(wide.ends_with("cuda:7 GPU-hhhhhhhh, … 12 in all"), "{wide}");
}

#[test]
fn uuids_that_begin_alike_are_shown_whole() {
    let uuids = ["GPU-73696d75-6c61-0000", "GPU-73696d75-6c61-0001"]
        .map(String::from)
        .to_vec();
    let table = assign(
        vec![VisibleGpus {
            host: "n".into(),
            uuids,
            why_none: None,
        }],
        1,
        false,
    )
    .unwrap();
    assert!(
        table.to_string().contains("cuda:1 GPU-73696d75-6c61-0001"),
        "{table}"
    );
}

#[test]
fn what_a_rank_sees_arrives_as_it_was_sent() {
    for sent in [sight("node7", "ab-"), sight("", "")] {
        assert_eq!(VisibleGpus::decode(&sent.encode()), sent);
    }
    assert_eq!(VisibleGpus::decode(b"{nonsense"), VisibleGpus::default());
    assert_eq!(VisibleGpus::decode(b"[1, 2]"), VisibleGpus::default());
}

/// The outcome of each rank of a world of threads, given how many GPUs it asks for and whether it
/// would share.
fn outcomes(asked: &[(usize, bool)]) -> Vec<Result<Result<GpuTable, Shortage>>> {
    let worlds = World::threads(asked.len(), None, Duration::from_secs(60)).unwrap();
    let ranks = worlds.into_iter().zip(asked).collect();
    on_threads(ranks, |(world, &(per_rank, share))| {
        world.assign_gpus(per_rank, share)
    })
}

#[test]
fn all_ranks_get_the_same_table() {
    let told: Vec<Result<GpuTable, Shortage>> = outcomes(&[(1, false); 3])
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(told.iter().all(|other| *other == told[0]), "{told:?}");
    let table = told[0].as_ref().unwrap_or_else(|shortage| &shortage.table);
    let own = discover()
        .gpus
        .iter()
        .map(|gpu| gpu.uuid.clone())
        .collect::<Vec<_>>();
    assert!(
        table.ranks.len() == 3 && table.ranks.iter().all(|line| line.visible.uuids == own),
        "{table}"
    );
}

#[test]
fn ranks_with_different_requests_are_reported() {
    for (odd, name) in [
        ((2, false), "the number of GPUs a rank"),
        ((1, true), "whether ranks may share GPUs"),
    ] {
        for told in outcomes(&[(1, false), (1, false), odd]) {
            let error = told.unwrap_err();
            assert!(
                error.to_string().contains(name) && error.exit_code() == 78,
                "{error}"
            );
        }
    }
}

/// Ranks that see any of six GPUs, in any order, and how many each needs.
fn any_ranks() -> impl Strategy<Value = (Vec<Vec<usize>>, usize)> {
    let sees = prop::collection::btree_set(0usize..6, 0..=6)
        .prop_map(|set| set.into_iter().collect::<Vec<_>>());
    (prop::collection::vec(sees.prop_shuffle(), 1..5), 1usize..4)
}

fn sights_of(sees: &[Vec<usize>]) -> Vec<VisibleGpus> {
    let letters = |gpus: &Vec<usize>| {
        gpus.iter()
            .map(|&gpu| ['a', 'b', 'c', 'd', 'e', 'f'][gpu])
            .collect::<String>()
    };
    sees.iter()
        .enumerate()
        .map(|(rank, gpus)| sight(&format!("node{}", rank / 2), &letters(gpus)))
        .collect()
}

/// Whether every set of ranks sees as many GPUs as it needs: by Hall's theorem, an assignment
/// exists if and only if it does.
fn is_possible(sees: &[Vec<usize>], per_rank: usize) -> bool {
    (1u32..1 << sees.len()).all(|set| {
        let ranks: Vec<&Vec<usize>> = sees
            .iter()
            .enumerate()
            .filter(|(rank, _)| set >> rank & 1 == 1)
            .map(|(_, gpus)| gpus)
            .collect();
        ranks
            .iter()
            .flat_map(|gpus| gpus.iter())
            .collect::<BTreeSet<_>>()
            .len()
            >= ranks.len() * per_rank
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_rank_gets_its_own_gpus_if_possible((sees, per_rank) in any_ranks()) {
        match assign(sights_of(&sees), per_rank, false) {
            Ok(table) => {
                prop_assert!(table.ranks.iter().all(|line| line.gets.len() == per_rank));
                let names = table.ranks.iter().flat_map(|line| line.gets.iter().map(|&gpu| &line.visible.uuids[gpu]));
                prop_assert_eq!(names.collect::<BTreeSet<_>>().len(), sees.len() * per_rank);
            }
            Err(shortage) => {
                prop_assert!(!is_possible(&sees, per_rank), "{}", shortage);
                // Those that are named do lack what they are said to lack.
                let seen: BTreeSet<_> = shortage.lacking.iter().flat_map(|&rank| &sees[rank]).collect();
                prop_assert_eq!(seen.len(), shortage.seen);
                prop_assert!(shortage.seen < shortage.lacking.len() * per_rank);
            }
        }
    }

    #[test]
    fn sharing_ranks_get_enough_of_their_visible_gpus((sees, per_rank) in any_ranks()) {
        let shared = assign(sights_of(&sees), per_rank, true);
        prop_assert_eq!(shared.is_err(), sees.iter().any(Vec::is_empty));
        let Ok(table) = shared else { return Ok(()) };
        for (line, sees) in table.ranks.iter().zip(&sees) {
            prop_assert!(line.gets.len() == per_rank && line.gets.iter().all(|&gpu| gpu < sees.len()));
        }
        let users = |wanted: usize| {
            let uses = |rank: &usize| table.ranks[*rank].gets.iter().any(|&gpu| sees[*rank][gpu] == wanted);
            (0..sees.len()).filter(uses).collect::<Vec<_>>()
        };
        let sharing: BTreeSet<usize> = (0..6).map(users).filter(|users| users.len() > 1).flatten().collect();
        prop_assert_eq!(sharing.into_iter().collect::<Vec<_>>(), table.sharing.clone());
        if is_possible(&sees, per_rank) {
            prop_assert_eq!(assign(sights_of(&sees), per_rank, false), Ok(table));
        }
    }
}
