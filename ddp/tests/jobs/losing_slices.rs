//! A job with ZeRO-1 that loses ranks: their slices come from their backups, or from the last
//! checkpoint.

use crate::losing::{RUN, assert_as, lost, lost_at_once, sorted, undisturbed_with, with};
use crate::support::job::{Ended, Folder, Running, all_at_once};

/// Of more ranks, and their optimizers: AdamW, SGD with momentum, and Muon.
const OPTIMIZERS: [&str; 3] = [
    "--same-bits 8",
    "--same-bits 8 --optimizer sgd --momentum 0.9",
    "--same-bits 8 --optimizer muon --hidden 32,32",
];

/// What is said when a slice was lost.
pub(crate) const FROM_CHECKPOINT: &str = "the run continues from its last checkpoint";

/// Runs with `--zero 1` and these faults, each with 5 ranks and every optimizer: a sixth of them.
/// `disturb` does more while they run.
fn lose_with_zero(
    faults: &[&str],
    disturb: impl Fn(&str, &Running) + Sync,
    check: impl Fn(&str, &Folder, &Ended) + Sync,
) {
    OPTIMIZERS
        .iter()
        .for_each(|words| _ = undisturbed_with(words));
    let jobs = faults
        .iter()
        .flat_map(|faults| OPTIMIZERS.map(|words| (*faults, words)));
    let jobs = ddp_testing::cases_of(faults[0], jobs, faults.len().div_ceil(2).max(2));
    all_at_once(jobs, |(faults, words)| {
        let folder = Folder::new("losing-zero");
        let run = format!("{RUN} --zero 1 --min-ranks 1");
        let job = folder.started(5, &with(&run, words));
        let running = job.env("DDP_TEST_FAULT", faults).start();
        disturb(faults, &running);
        let ended = running.wait();
        check(faults, &folder, &ended);
        assert_as(undisturbed_with(words), &folder, &ended);
    });
}

#[test]
fn slices_of_lost_ranks_are_kept_by_their_neighbours() {
    let faults = [
        "0:forward:14:kill",
        "2:reduction:14:kill",
        // The backup has no sums, and the others have theirs.
        "2:copy:14:kill",
        "0:copy:1:kill",
        "4:optimizer:14:kill",
        "3:agreed:14:kill",
        "0:agreed:14:kill",
        "0:log:14:kill",
        "1:snapshot:18:kill",
        "0:save:18:kill",
        // Two that are not neighbours, at once.
        "0:forward:9:kill,2:forward:9:kill",
        "1:agreed:9:kill,4:optimizer:9:kill",
        // One after the other: the backup of the first, too.
        "1:forward:9:kill,2:forward:10:kill,3:reduction:11:kill,4:agreed:12:kill",
        // Another one while slices are cut anew.
        "2:forward:9:kill,0:slices:2:kill",
        "2:agreed:9:kill,4:slices:2:kill,1:forward:9:kill",
        "2:copy:9:kill,0:slices:2:kill",
    ];
    lose_with_zero(
        &faults,
        |_, _| (),
        |faults, folder, ended| {
            let expected = faults.split(',').count();
            // Rank 1 may learn that rank 4 is lost before it gets there.
            let least = expected - usize::from(faults.starts_with("1:agreed"));
            let lost = lost(&folder.metrics_log()).len();
            assert!((least..=expected).contains(&lost), "{faults}: {ended}");
            assert!(
                !ended.to_string().contains(FROM_CHECKPOINT),
                "{faults}: {ended}"
            );
        },
    );
}

#[test]
fn ranks_that_leave_an_update_complete_it_or_the_others_undo_it() {
    // Owner and backup of a slice: before and after the point from which the others continue.
    let faults = [
        "2:optimizer:14:leave,3:optimizer:14:leave",
        "2:agreed:14:leave,3:agreed:14:leave",
        "0:agreed:1:leave,1:agreed:1:leave",
        "0:optimizer:14:leave,1:agreed:14:leave,4:agreed:15:leave",
        "0:slices:2:leave,1:slices:2:leave,4:agreed:14:leave",
        "4:agreed:9:kill,2:agreed:9:leave",
    ];
    lose_with_zero(
        &faults,
        |_, _| (),
        |faults, folder, ended| {
            let met = folder.metrics_log().all("ranks").len();
            let text = ended.to_string();
            assert!(
                met > 0 && !text.contains(FROM_CHECKPOINT),
                "{faults}: {ended}"
            );
        },
    );
}

#[test]
fn slices_that_were_lost_with_owner_and_backup_come_from_the_last_checkpoint() {
    // The others meet when both are gone: a rank that holds is waited for. The last ones are lost
    // before the first checkpoint.
    let faults = [
        "2:forward:14,3:forward:14",
        "4:optimizer:14,0:optimizer:14",
        "0:agreed:4,1:agreed:4",
    ];
    let faults = faults.map(|both| both.replace(',', ":hold,") + ":hold");
    let kill = |faults: &str, running: &Running| {
        let held = faults.split(',').map(|it| it.trim_end_matches(":hold"));
        held.clone().for_each(|at| running.wait_for_fault(at));
        held.for_each(|at| running.signal_rank(at[..1].parse().unwrap(), "KILL"));
    };
    let check = |faults: &str, folder: &Folder, ended: &Ended| {
        let both = faults.split(',').map(|it| it[..1].parse().unwrap());
        let both = sorted(both.collect());
        let lost: Vec<_> = lost_at_once(&folder.metrics_log());
        let lost: Vec<_> = lost.into_iter().map(sorted).collect();
        assert_eq!(lost, [both], "{faults}: {ended}");
        assert!(
            ended.to_string().contains(FROM_CHECKPOINT),
            "{faults}: {ended}"
        );
    };
    lose_with_zero(&faults.each_ref().map(String::as_str), kill, check);
}

#[test]
fn a_backup_can_be_lost_while_slices_are_divided_anew() {
    // If all others have their new slices by then, nothing is lost. In the second case they have:
    // each holds when it has them. Before that all hold in one step, so that none is behind.
    let left = [0, 2, 3, 4];
    let held = left.map(|rank| format!("{rank}:forward:4:hold,{rank}:slices:2:hold"));
    let held = format!("1:forward:4:hold,{}", held.join(","));
    let kill = |faults: &str, running: &Running| {
        if faults != held {
            return;
        }
        (0..5).for_each(|rank| running.wait_for_fault(&format!("{rank}:forward:4")));
        running.signal_rank(1, "KILL");
        running.go_on(4);
        left.iter()
            .for_each(|rank| running.wait_for_fault(&format!("{rank}:slices:2")));
        running.signal_rank(2, "KILL");
        running.go_on(2);
    };
    let check = |faults: &str, folder: &Folder, ended: &Ended| {
        // One event names both: it is written only when all have their new slices.
        let lost = lost_at_once(&folder.metrics_log());
        assert_eq!(lost, [[1, 2]], "{faults}: {ended}");
        let is_again = ended.to_string().contains(FROM_CHECKPOINT);
        assert!(faults != held || !is_again, "{faults}: {ended}");
    };
    lose_with_zero(&["1:forward:14:kill,2:slices:2:kill", &held], kill, check);
}
