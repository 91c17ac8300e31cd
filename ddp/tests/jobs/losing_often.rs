//! A job that continues without lost ranks, and whose ranks are killed and stopped at random times:
//! whatever happens, its model is that of an undisturbed run.

use std::sync::OnceLock;
use std::time::Duration;

use crate::losing::{
    Left, RUN, assert_undisturbed, left, lost, rows, slow_steps, taken, undisturbed,
};
use crate::losing_slices::FROM_CHECKPOINT;
use crate::support::job::{Folder, Running, all_at_once};
use crate::support::processes::at_random;
use crate::support::random::mixed;

/// What trains while ranks are lost and come, each with all that lies between two steps.
const STORMS: [&str; 6] = [
    "--data glyphs,rows=1024,held-out=64 --hidden 32 --batch-size 64 --micro-batch 8 --dropout 0.1",
    "--data glyphs,rows=1024,held-out=64 --hidden 32,24 --batch-size 64 --optimizer muon",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --dropout 0.1 --sample to",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --micro-batch 2 --optimizer sgd --momentum 0.9 --lr 0.05",
    "--data glyphs,rows=1024,held-out=64 --hidden 32 --batch-size 64 --zero 1",
    "--data book.txt --val-split 0.1 --model gpt,layers=1,heads=2,width=16,context=16 \
     --batch-size 8 --optimizer muon --zero 1",
];

fn storm(which: usize) -> String {
    let storm = STORMS[which];
    format!(
        "{storm} --steps 40 --log-every 1 --eval-every 7 --checkpoint-every 9 --grad-clip 1 \
         --threads 1 --out OUT"
    )
}

fn with_book(name: &str) -> Folder {
    let folder = Folder::new(name);
    let text = "To be is to do, to do is to be, do be do be do. ".repeat(40);
    std::fs::write(folder.path().join("book.txt"), text).unwrap();
    folder
}

/// What the storm's run leaves if nothing disturbs it.
fn calm(which: usize) -> &'static Left {
    static LEFT: [OnceLock<Left>; STORMS.len()] = [const { OnceLock::new() }; STORMS.len()];
    LEFT[which].get_or_init(|| {
        let folder = with_book("losing-calm");
        let words = format!("{} --same-bits 8", storm(which));
        folder.started(2, &words).run().assert_well();
        left(&folder, 40)
    })
}

/// Ranks hold here until they were disturbed often enough.
const LAST: u64 = 38;

/// Slow steps before that.
fn slow_until_last() -> String {
    format!("0:forward:{LAST}:hold,{}", slow_steps())
}

/// Kills and stops random ranks at random times, also while they start, meet and join. How often a
/// rank was there to be hit.
fn disturb(running: &mut Running, seed: u64) -> u64 {
    // No more: a rank that ends ten times in a row is given up.
    const TIMES: u64 = 8;
    let mut hits = 0;
    for times in 0..TIMES {
        let drawn = mixed(seed, times);
        at_random(seed, times, Duration::from_millis(300));
        let ranks = running.ranks();
        let at_once = [1, 1, 1, 2, ranks.len().saturating_sub(1)][drawn as usize / 300 % 5];
        // One that stops while all start is waited for by all, for a minute.
        let stops = !seed.is_multiple_of(3) && (drawn / 1500).is_multiple_of(4);
        let signal = if stops { "STOP" } else { "KILL" };
        for at in 0..at_once.min(ranks.len()) {
            // The same one again and again, or any.
            let which = match seed % 5 {
                0 => at,
                _ => (drawn / 6000) as usize + at,
            };
            running.signal_rank(ranks[which % ranks.len()].0, signal);
            hits += 1;
        }
    }
    running.go_on(LAST);
    hits
}

#[test]
fn ranks_that_are_lost_at_any_moment_come_back_and_change_no_bit() {
    let seeds = ddp_testing::cases("ranks that are lost at any moment", 126, 2);
    for pair in seeds.chunks(2) {
        all_at_once(pair, |&seed| {
            let (which, ranks) = (seed % STORMS.len(), 2 + seed / STORMS.len() % 7);
            let is_exact = seed % 9 != 8;
            let folder = with_book("losing-storm");
            let bits = if is_exact { " --same-bits 8" } else { "" };
            let words = format!("--min-ranks 1 --restarts 1000 --timeout-s 10{bits}");
            let job = folder.started(ranks, &format!("{} {words}", storm(which)));
            let job = job.env("DDP_TEST_ROWS", &rows(&folder));
            let mut running = job.env("DDP_TEST_FAULT", &slow_until_last()).start();
            match seed % 3 {
                0 => _ = running.wait_for_process(0, None),
                _ => running.wait_for(r#""event":"step","step":1,"#),
            }
            let hits = disturb(&mut running, seed as u64);
            let ended = running.wait();
            assert!(hits > 0, "seed {seed}: {ended}");
            assert_eq!(ended.exit_code(), Some(0), "seed {seed}: {ended}");
            let (left, expected) = (left(&folder, 40), calm(which));
            assert_eq!(left.steps, expected.steps, "seed {seed}: {ended}");
            assert_eq!(left.evaluated, expected.evaluated, "seed {seed}: {ended}");
            if is_exact {
                assert!(left.losses == expected.losses, "seed {seed}: {ended}");
                assert!(left.model == expected.model, "seed {seed}: {ended}");
            }
            // Without --same-bits sums have another order.
            let pairs = left.losses.iter().zip(&expected.losses);
            let apart = pairs.map(|(loss, calm)| (loss / calm - 1.0).abs());
            assert!(apart.fold(0.0, f64::max) < 1e-3, "seed {seed}: {ended}");
            // Unless all ranks were lost at once, none goes back further than to its last step.
            let text = ended.to_string();
            let again = [FROM_CHECKPOINT, "resuming after step", "it starts over"];
            let times_back: usize = again.iter().map(|it| text.matches(it).count()).sum();
            let lost = lost(&folder.metrics_log());
            for (rank, steps) in (0..ranks).map(|rank| (rank, taken(&folder, rank))) {
                // A process that only itself had completed a step may be lost with it.
                let again = steps.windows(2).filter(|it| it[0] == it[1]).count();
                let losses = lost.iter().filter(|it| **it == rank as u64).count();
                let back = steps.windows(2).filter(|it| it[0] > it[1]).count();
                let is_well = back <= times_back && again <= losses + times_back;
                assert!(is_well, "seed {seed}: {steps:?}: {ended}");
            }
        });
    }
}

#[test]
fn ranks_of_several_hosts_that_are_killed_again_and_again_change_no_bit() {
    undisturbed();
    all_at_once(
        [(0, "far:2,off:1"), (1, "localhost:2,far:2")],
        |(seed, hosts)| {
            let folder = Folder::new("losing-hosts-again");
            let words = format!("{RUN} --min-ranks 1 --restarts 1000 --timeout-s 10");
            let job = folder.started_on(&format!("--hosts {hosts}"), "", &words);
            let mut running = job.env("DDP_TEST_FAULT", &slow_until_last()).start();
            running.wait_for(r#""event":"step","step":1,"#);
            let hits = disturb(&mut running, seed);
            let ended = running.wait();
            assert!(hits > 0, "{ended}");
            assert_undisturbed(&folder, &ended);
        },
    );
}
