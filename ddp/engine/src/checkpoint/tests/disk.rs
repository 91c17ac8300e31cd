//! Disks that fill up and processes that are killed, at every change that saving makes on the disk:
//! earlier checkpoints stay intact, and no incomplete one is found.

use std::fs;
use std::path::Path;

use super::{Scratch, run, save, state};
use crate::checkpoint::{Saver, folders, newest, open};
use crate::error::Result;
use ddp_kernels::files::testing::Failing;

/// More than any save here makes.
const CALLS_MAX: usize = 100;

fn names(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Saves step 4 to a disk that fails, in a run that has steps 1, 2 and 3 and keeps two. Returns the
/// error, and the changes that were tried.
fn save_badly(out: &Path, fails_at: usize, is_last: bool) -> (Result<()>, Vec<String>) {
    let (world, mut step) = run(1);
    let mut saver = Saver::new(&world, out, 2).unwrap();
    let failing = Failing::at(fails_at, is_last, out);
    let saved = saver
        .save(&mut step, state(4))
        .and_then(|()| saver.finish())
        .map(drop);
    (saved, failing.calls())
}

/// All checkpoints that are seen are whole, and there are these at least.
fn all_are_whole(out: &Path, least: &[u64], what: &str) {
    let steps = folders::steps(&out.join("checkpoints")).unwrap();
    assert!(
        least.iter().all(|step| steps.contains(step)),
        "{what}: {steps:?} left"
    );
    for step in steps {
        open(&crate::checkpoint::folder(out, step))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

#[test]
fn a_full_disk_leaves_the_old_file_and_no_partial_one() {
    for fails_at in 0..CALLS_MAX {
        let scratch = Scratch::new();
        save(scratch.path(), &[1, 2, 3]);
        let (saved, calls) = save_badly(scratch.path(), fails_at, false);
        let Some(failed) = calls.get(fails_at) else {
            saved.unwrap();
            assert_eq!(
                names(scratch.path()),
                ["step-00000003", "step-00000004"],
                "every change went well"
            );
            assert!(fails_at > 15, "{fails_at} changes: {calls:?}");
            return;
        };
        if calls.iter().any(|call| call.contains(".removing-")) {
            // The new one is safe by then, and old ones may stay.
            saved.unwrap();
            all_are_whole(scratch.path(), &[3, 4], failed);
            continue;
        }
        all_are_whole(scratch.path(), &[1, 2, 3], failed);
        let error = saved.unwrap_err();
        assert_eq!(error.exit_code(), 74, "{failed}: {error}");
        let path = failed.split_once(' ').unwrap().1;
        assert!(error.to_string().contains(path), "{failed}: {error}");
        let left = names(scratch.path());
        // That the name of the new one is there may not be known to the disk yet.
        let known = [
            "step-00000001",
            "step-00000002",
            "step-00000003",
            "step-00000004",
        ];
        assert!(
            left.iter().all(|name| known.contains(&name.as_str())),
            "{failed}: {left:?}"
        );
        save(scratch.path(), &[5]);
        assert_eq!(newest(scratch.path()).unwrap().0.unwrap().state.step, 5);
    }
    panic!("a save makes more than {CALLS_MAX} changes");
}

#[test]
fn a_kill_leaves_old_files_intact_and_the_next_run_cleans_up() {
    for fails_at in 0..CALLS_MAX {
        let scratch = Scratch::new();
        save(scratch.path(), &[1, 2, 3]);
        let (_, calls) = save_badly(scratch.path(), fails_at, true);
        let Some(killed) = calls.get(fails_at) else {
            return;
        };
        all_are_whole(scratch.path(), &[3], killed);
        let found = newest(scratch.path()).unwrap();
        assert!(
            found.0.unwrap().state.step >= 3 && found.1.is_empty(),
            "{killed}"
        );
        let (world, _step) = run(1);
        Saver::new(&world, scratch.path(), 2).unwrap();
        let left = names(scratch.path());
        assert!(
            left.iter().all(|name| folders::step_of(name).is_some()),
            "{killed}: {left:?}"
        );
        all_are_whole(scratch.path(), &[3], killed);
    }
    panic!("a save makes more than {CALLS_MAX} changes");
}

#[test]
fn a_process_killed_while_it_replaces_a_step_loses_none() {
    for fails_at in 0..CALLS_MAX {
        let scratch = Scratch::new();
        save(scratch.path(), &[4]);
        let (world, mut step) = run(9);
        let calls = {
            let mut saver = Saver::new(&world, scratch.path(), 1).unwrap();
            let failing = Failing::at(fails_at, true, scratch.path());
            let _ = saver
                .save(&mut step, state(4))
                .and_then(|()| saver.finish());
            failing.calls()
        };
        let Some(killed) = calls.get(fails_at) else {
            return;
        };
        Saver::new(&world, scratch.path(), 1).unwrap();
        all_are_whole(scratch.path(), &[4], killed);
        assert_eq!(names(scratch.path()), ["step-00000004"], "{killed}");
    }
    panic!("a save makes more than {CALLS_MAX} changes");
}

#[test]
fn a_checkpoint_is_given_up_when_a_rank_is_lost() {
    let scratch = Scratch::new();
    save(scratch.path(), &[1]);
    let worlds = ddp_comm::World::threads(2, None, std::time::Duration::from_secs(60)).unwrap();
    let run = |world: ddp_comm::World| {
        let (_, mut step) = run(2);
        let mut saver = Saver::new(&world, scratch.path(), 2).unwrap();
        world.barrier().unwrap();
        world.end_generation(None);
        saver.save(&mut step, state(2)).unwrap();
        assert!(saver.finish().unwrap_err().is_rank_lost());
    };
    std::thread::scope(|scope| {
        let all = worlds.into_iter();
        all.for_each(|world| _ = scope.spawn(|| run(world)));
    });
    assert_eq!(names(scratch.path()), ["step-00000001"]);
}

#[test]
fn a_saver_works_again_after_a_full_disk() {
    let scratch = Scratch::new();
    let (world, mut step) = run(1);
    let mut saver = Saver::new(&world, scratch.path(), 2).unwrap();
    {
        let _failing = Failing::at(3, false, scratch.path());
        saver.save(&mut step, state(1)).unwrap();
        // The error of the one before.
        assert_eq!(saver.save(&mut step, state(2)).unwrap_err().exit_code(), 74);
    }
    saver.check().unwrap();
    assert_eq!(saver.written(), []);
    saver.save(&mut step, state(3)).unwrap();
    assert_eq!(
        saver.finish().unwrap(),
        Some(crate::checkpoint::folder(scratch.path(), 3))
    );
}
