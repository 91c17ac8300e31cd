//! All small cases: 2 to 4 ranks, each behind or ahead, with old slices or new ones, of which any
//! are lost. A step's update is made by all of its ranks or by none, and no slice comes from
//! nowhere.

use super::*;

/// Where a rank is between two versions of what all have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has the old one, and is not ready for the next.
    Before,
    /// It has the old one, and is ready for the next.
    Ready,
    /// It has the next one.
    After,
}

use Phase::{After, Before, Ready};

/// Every choice of one of `of` for each of `ranks`.
fn choices<T: Copy>(of: &[T], ranks: usize) -> Vec<Vec<T>> {
    let longer = |all: Vec<Vec<T>>, _| {
        let with = |one: &Vec<T>| of.iter().map(|it| [&one[..], &[*it]].concat()).collect();
        all.iter().flat_map(|one| -> Vec<_> { with(one) }).collect()
    };
    (0..ranks).fold(vec![Vec::new()], longer)
}

/// What ranks can be in: none has the next version before all are ready for it.
fn phases(ranks: usize) -> impl Iterator<Item = Vec<Phase>> {
    let can_be = |all: &Vec<Phase>| !(all.contains(&After) && all.contains(&Before));
    choices(&[Before, Ready, After], ranks)
        .into_iter()
        .filter(can_be)
}

fn report(phase: Phase, old: Option<Version>, next: Version) -> RankReport {
    let steps = match (phase, old) {
        (Before | Ready, Some(old)) => old.steps,
        _ => next.steps,
    };
    RankReport {
        progress: Some(RankProgress {
            steps,
            ..RankProgress::default()
        }),
        has: if phase == After { Some(next) } else { old },
        ready: (phase == Ready).then_some(next),
    }
}

/// Checks the plan of the ranks that are left, `reports`. Those in `phases` had a run.
fn check(phases: &[Phase], reports: &[RankReport], [old, next]: [u64; 2], what: &str) {
    let plan = Regroup::of(reports);
    let what = format!("{what}: {phases:?}, {reports:?}: {plan:?}");
    // Each slice of the version that they continue with is somewhere, or they start again.
    let goes_on = phases.contains(&After) || !phases.contains(&Before);
    let offered = reports.iter().flat_map(|it| [it.has, it.ready]).flatten();
    let of = |number| {
        let all = offered
            .clone()
            .filter(move |it: &Version| it.slicing.number == number);
        all.map(|it| Some(it.slicing)).collect::<Vec<_>>()
    };
    if plan.has_lost_slices {
        // Nothing better was there: neither the next slices nor the old ones are whole.
        let was_whole = |number| !of(number).is_empty() && Slicing::are_whole(&of(number));
        let has_next = phases.contains(&After) || goes_on && was_whole(next);
        assert!(!was_whole(if has_next { next } else { old }), "{what}");
        assert!(plan.progress.iter().all(Option::is_none), "{what}");
        assert!(plan.acts.iter().all(|it| *it == Act::Forget), "{what}");
        assert!(plan.source().is_none(), "{what}");
        return;
    }
    assert!(Slicing::are_whole(&plan.slicings), "{what}");
    // All have the same then.
    let mut after: Vec<_> = plan.slicings.iter().flatten().map(|it| it.number).collect();
    after.dedup();
    assert!(after.len() <= 1, "{what}");
    // Of slices that all could have, those of which fewer ranks are lost.
    let all_have = |number| of(number).len() == reports.len() && Slicing::are_whole(&of(number));
    if !reports.is_empty()
        && old != next
        && !phases.contains(&After)
        && all_have(old)
        && all_have(next)
    {
        let ranks = |number| of(number)[0].map_or(0, |it| it.ranks);
        let fewest = ranks(old).min(ranks(next));
        assert_eq!(ranks(after[0]), fewest, "{what}");
    }
    let mut steps: Vec<_> = plan.progress.iter().flatten().collect();
    steps.dedup();
    assert!(steps.len() <= 1, "{what}");
    for (report, act) in reports.iter().zip(&plan.acts) {
        let had = report.has.is_some();
        match act {
            Act::Stay => assert!(had, "{what}"),
            Act::Advance => assert!(report.ready.is_some(), "{what}"),
            // No rank that had something loses it.
            Act::Forget => assert!(!had, "{what}"),
        }
    }
    assert_eq!(plan.source().is_some(), !after.is_empty(), "{what}");
}

/// Of those that are not lost.
fn left<T: Copy>(all: &[T], lost: &[bool]) -> Vec<T> {
    let left = all.iter().zip(lost).filter(|(_, lost)| !**lost);
    left.map(|(one, _)| *one).collect()
}

#[test]
fn an_update_is_made_by_all_ranks_that_are_left_or_by_none() {
    let mut cases = 0;
    for ranks in 2..5 {
        for (phases, lost) in phases(ranks).flat_map(|it| {
            choices(&[true, false], ranks)
                .into_iter()
                .map(move |lost| (it.clone(), lost))
        }) {
            for distance in 1..ranks {
                let version = |steps, rank| Version {
                    steps,
                    slicing: Slicing::new(3, [rank, ranks], distance),
                };
                let of = |(rank, phase): (usize, &Phase)| {
                    report(*phase, Some(version(6, rank)), version(7, rank))
                };
                let reports: Vec<_> = phases.iter().enumerate().map(of).collect();
                let (reports, phases) = (left(&reports, &lost), left(&phases, &lost));
                check(&phases, &reports, [3, 3], "an update");
                let plan = Regroup::of(&reports);
                // With owner or backup of each slice, nothing is lost.
                let has = |rank: usize| !lost[rank] || !lost[(rank + distance) % ranks];
                let is_whole = phases.is_empty() || (0..ranks).all(has);
                assert_eq!(plan.has_lost_slices, !is_whole);
                // One that has made it cannot undo it, and one that is not ready cannot make it.
                if is_whole && !phases.is_empty() {
                    let makes = phases.contains(&After) || !phases.contains(&Before);
                    let steps = plan.progress.iter().flatten().map(|it| it.steps);
                    assert!(
                        steps.eq(phases.iter().map(|_| 6 + u64::from(makes))),
                        "{plan:?}"
                    );
                }
                cases += 1;
            }
        }
    }
    assert!(cases > 1000, "{cases}");
}

#[test]
fn ranks_take_new_slices_or_keep_those_they_had() {
    // `before` ranks lost some, others joined, and all that are there divided buckets anew.
    // Then any of them are lost.
    let mut cases = 0;
    for before in 1..5 {
        for first_lost in choices(&[true, false], before) {
            let old: Vec<_> = (0..before)
                .map(|rank| Slicing::new(1, [rank, before], 1))
                .collect();
            let old = left(&old, &first_lost);
            let whole: Vec<_> = old.iter().copied().map(Some).collect();
            if old.is_empty() || !Slicing::are_whole(&whole) {
                continue;
            }
            for ranks in old.len().max(2)..5 {
                let old = |rank: usize| {
                    old.get(rank).map(|slicing| Version {
                        steps: 6,
                        slicing: *slicing,
                    })
                };
                let new = |rank| Version {
                    steps: 6,
                    slicing: Slicing::new(2, [rank, ranks], 1),
                };
                for phases in phases(ranks) {
                    for lost in choices(&[true, false], ranks) {
                        let of = |(rank, phase): (usize, &Phase)| match (old(rank), phase) {
                            // A new rank has a run only when it has everything.
                            (None, Before) => RankReport::default(),
                            (old, phase) => report(*phase, old, new(rank)),
                        };
                        let reports: Vec<_> = phases.iter().enumerate().map(of).collect();
                        let reports = left(&reports, &lost);
                        check(&left(&phases, &lost), &reports, [1, 2], "slices");
                        cases += 1;
                    }
                }
            }
        }
    }
    assert!(cases > 1000, "{cases}");
}

/// Of the new slices, one more loss would lose one; of the old ones every slice still has a copy.
#[test]
fn ranks_keep_slices_of_which_none_are_lost_instead_of_others_without_a_copy() {
    let version = |number, rank, ranks| Version {
        steps: 6,
        slicing: Slicing::new(number, [rank, ranks], 1),
    };
    // Three ranks have divided all among them, and then with a fourth one that is lost again.
    let of = |rank| report(Ready, Some(version(2, rank, 3)), version(3, rank, 4));
    let mut reports: Vec<_> = (0..3).map(of).collect();
    let plan = Regroup::of(&reports);
    assert_eq!(plan.acts, [Act::Stay; 3]);
    assert!(plan.slicings.iter().flatten().all(|it| it.number == 2));
    // Of those before, one is lost, too: the later ones have more to give.
    for (rank, it) in reports.iter_mut().enumerate() {
        it.has = Some(version(2, rank, 4));
    }
    let plan = Regroup::of(&reports);
    assert_eq!(plan.acts, [Act::Advance; 3]);
    // An update that all have prepared may have been made by the one that is lost.
    for (rank, it) in reports.iter_mut().enumerate() {
        it.has = Some(Version {
            steps: 5,
            ..version(3, rank, 4)
        });
    }
    assert_eq!(Regroup::of(&reports).acts, [Act::Advance; 3]);
}

#[test]
fn without_slices_all_get_the_state_of_the_first_rank_that_is_furthest() {
    let at = |steps, logged| {
        Some(RankProgress {
            steps,
            logged,
            ..RankProgress::default()
        })
    };
    let cases = choices(&[None, at(6, 5), at(6, 6), at(7, 5)], 4);
    for progress in (2..5).flat_map(|ranks| cases.iter().map(move |it| &it[..ranks])) {
        let of = |progress: &Option<RankProgress>| RankReport {
            progress: *progress,
            ..RankReport::default()
        };
        let plan = Regroup::of(&progress.iter().map(of).collect::<Vec<_>>());
        assert_eq!(plan.progress, progress);
        assert!(!plan.has_lost_slices && !plan.has_slices());
        let acts = plan.acts.iter().zip(progress);
        for (act, progress) in acts {
            assert_eq!(*act == Act::Stay, progress.is_some());
        }
        let furthest = progress.iter().flatten().max();
        assert_eq!(
            plan.source().map(|it| progress[it]),
            furthest.map(|it| Some(*it))
        );
        let before = &progress[..plan.source().unwrap_or(0)];
        assert!(before.iter().all(|it| it.as_ref() != furthest));
    }
}

#[test]
fn each_slice_has_one_owner_and_one_backup_elsewhere() {
    for ranks in 3..9 {
        for distance in 1..ranks {
            let all: Vec<_> = (0..ranks)
                .map(|rank| Some(Slicing::new(1, [rank, ranks], distance)))
                .collect();
            for lost in 0..ranks {
                let backup = (lost + distance) % ranks;
                assert_eq!(all[backup].unwrap().backs_up, Some(lost));
                let mut left = all.clone();
                left[lost] = None;
                assert!(Slicing::are_whole(&left));
                left[backup] = None;
                assert!(!Slicing::are_whole(&left));
            }
        }
    }
    assert!(Slicing::are_whole(&[None, None]), "no rank has a run");
    let alone = Slicing::new(1, [0, 1], 1);
    assert!(alone.backs_up.is_none() && Slicing::are_whole(&[Some(alone), None]));
}
