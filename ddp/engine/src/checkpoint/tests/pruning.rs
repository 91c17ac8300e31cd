//! Which checkpoints are kept.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{Scratch, save, state};
use crate::checkpoint::find::{Skipped, best_or, newest_of};
use crate::checkpoint::folders::goes;
use crate::checkpoint::folders::steps;
use crate::checkpoint::{Best, Opened, State, folder, open};

proptest! {
    #[test]
    fn the_newest_stay_and_the_best(
        steps in proptest::collection::btree_set(0u64..50, 1..20),
        newest in 0usize..20,
        keep in 1u64..6,
        best in proptest::option::of(0u64..50),
    ) {
        let newest = *steps.iter().nth(newest % steps.len()).unwrap();
        let gone: BTreeSet<u64> = goes(&steps, newest, keep, best).into_iter().collect();
        prop_assert!(gone.is_subset(&steps));
        let left: Vec<u64> = steps.difference(&gone).copied().collect();
        prop_assert!(left.contains(&newest));
        prop_assert!(best.is_none_or(|best| !gone.contains(&best)));
        // Later ones are not this run's to judge.
        prop_assert!(gone.iter().all(|&step| step < newest));
        let up_to = |steps: &[u64]| -> Vec<u64> { steps.iter().rev().copied().filter(|&step| step <= newest).collect() };
        let (all, left) = (up_to(&steps.iter().copied().collect::<Vec<_>>()), up_to(&left));
        let kept = all.len().min(keep as usize);
        prop_assert_eq!(&left[..kept], &all[..kept]);
        prop_assert!(left[kept..].iter().all(|&step| Some(step) == best), "{:?}", left);
    }
}

#[test]
fn a_best_that_is_beaten_goes() {
    let steps = BTreeSet::from([1, 2, 3, 4]);
    assert_eq!(goes(&steps, 4, 1, Some(1)), [2, 3]);
    assert_eq!(goes(&steps, 4, 1, Some(3)), [1, 2]);
    assert_eq!(goes(&steps, 4, u64::MAX, None), [0; 0]);
    assert_eq!(
        goes(&steps, 4, 0, None),
        [1, 2, 3],
        "the newest stays whatever is asked"
    );
}

#[test]
fn checkpoints_that_vanish_are_relisted_then_skipped() {
    let scratch = Scratch::new();
    save(scratch.path(), &[1, 2]);
    let checkpoints = scratch.path().join("checkpoints");
    let listed = steps(&checkpoints).unwrap();
    std::fs::remove_dir_all(folder(scratch.path(), 2)).unwrap();
    assert!(newest_of(&checkpoints, &listed, false).unwrap().is_none());
    let (newest, passed_over) = newest_of(&checkpoints, &listed, true).unwrap().unwrap();
    assert_eq!((newest.unwrap().state.step, passed_over.len()), (1, 1));
    assert!(passed_over[0].1.contains("No such file"), "{passed_over:?}");
}

#[test]
fn a_missing_best_checkpoint_is_searched_for_again() {
    let scratch = Scratch::new();
    save(scratch.path(), &[2]);
    let opened = open(&folder(scratch.path(), 2)).unwrap();
    let best = Some(Best {
        step: 1,
        loss: 1.0,
        ..Best::default()
    });
    let newest = || Opened {
        state: State { best, ..state(2) },
        ..opened.clone()
    };
    let choose = |skipped: &Skipped, is_last| {
        let chosen = best_or(newest(), skipped, scratch.path(), is_last).unwrap();
        chosen.map(|chosen| (chosen.opened.state.step, chosen.why))
    };
    // It was never saved.
    let two = Some((2, "the newest".to_string()));
    assert_eq!(choose(&Vec::new(), false), two);
    save(scratch.path(), &[3]);
    assert_eq!(choose(&Vec::new(), false), None);
    assert_eq!(choose(&Vec::new(), true), two);
    // A newer one that is damaged will not become the best.
    let skipped = vec![(folder(scratch.path(), 3), "it is damaged".to_string())];
    assert_eq!(choose(&skipped, false), two);
}

#[test]
fn later_checkpoints_are_superseded_and_nothing_is_lost() {
    let scratch = Scratch::new();
    let folder = scratch.path().join("checkpoints");
    for _ in 0..2 {
        for name in ["step-00000003", "step-00000006", "step-00000009", "step-x"] {
            std::fs::create_dir_all(folder.join(name)).unwrap();
        }
        crate::checkpoint::put_aside_after(scratch.path(), 4).unwrap();
    }
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected = [
        "step-00000003",
        "step-x",
        "superseded-2-step-00000006",
        "superseded-2-step-00000009",
        "superseded-step-00000006",
        "superseded-step-00000009",
    ];
    assert_eq!(names, expected);
}
