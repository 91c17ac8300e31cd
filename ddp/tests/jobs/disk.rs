//! Folders that cannot be written and disks that fill up: exit code 74, what was written stays
//! readable, and no incomplete file has the name of a complete one.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::support::job::{Ended, Folder, QUICK};
use crate::support::metrics_log::model_bytes;

#[test]
fn a_file_in_the_way_is_named() {
    let folder = Folder::new("file");
    std::fs::write(folder.path().join("out"), "a file").unwrap();
    for words in [QUICK.to_string(), QUICK.replace("OUT", "OUT/below")] {
        for ended in [folder.alone(&words).run(), folder.together(&words).run()] {
            let cause = ended.assert_fails(74);
            let named = format!("cannot make the folder {}", folder.out().display());
            assert!(
                cause.contains(&named) && cause.contains("another folder"),
                "{ended}"
            );
        }
    }
    assert_eq!(std::fs::read(folder.path().join("out")).unwrap(), b"a file");
}

#[test]
fn an_unwritable_folder_is_named() {
    // Not even root can make folders there.
    let ended = Folder::new("proc")
        .alone(&QUICK.replace("OUT", "/proc/ddp"))
        .run();
    assert!(
        ended
            .assert_fails(74)
            .contains("cannot make the folder /proc/ddp"),
        "{ended}"
    );
    let folder = Folder::new("read-only");
    std::fs::create_dir(folder.out()).unwrap();
    std::fs::set_permissions(folder.out(), Permissions::from_mode(0o555)).unwrap();
    let is_root = std::fs::metadata("/proc/self")
        .expect("this is Linux")
        .uid()
        == 0;
    // Root writes where it may not.
    let ended = if is_root {
        let another = "exec setpriv --clear-groups --reuid 100000 \"$@\"";
        folder.in_shell(another, QUICK).run()
    } else {
        folder.alone(QUICK).run()
    };
    assert!(
        ended
            .assert_fails(74)
            .contains(&folder.out().display().to_string()),
        "{ended}"
    );
}

/// A run of 64 steps, each logged, with a model of 200 kB.
const LONG: &str = "--data glyphs,rows=256,held-out=0 --hidden 64 --batch-size 4 --epochs 1 --log-every 1 --out OUT";

/// No file may have more than this many blocks, which are 512 bytes or 1024, as the shell likes.
fn limit(blocks: u32) -> String {
    format!("ulimit -f {blocks}")
}

/// The disk filled up during training: the metrics log has whole lines up to some step, and there
/// is no checkpoint.
#[track_caller]
fn assert_stopped_in_training(folder: &Folder, ended: &Ended) {
    let cause = ended.assert_fails(74);
    assert!(
        cause.contains("cannot write")
            && cause.contains("metrics.jsonl")
            && ["space left", "(ulimit -f)"]
                .iter()
                .any(|help| cause.contains(help)),
        "{ended}"
    );
    let steps = folder.metrics_log().of_steps("step");
    assert!((1..64).contains(&steps.len()), "{steps:?}");
    assert!(
        steps
            .iter()
            .zip(1..)
            .all(|(&step, number)| step == f64::from(number)),
        "{steps:?}"
    );
    assert!(!folder.out().join("checkpoints").exists());
}

/// The disk filled up while the model was saved: training is in the metrics log, and the model is
/// absent.
#[track_caller]
fn assert_stopped_in_saving(folder: &Folder, ended: &Ended) {
    let cause = ended.assert_fails(74);
    assert!(
        cause.contains("cannot write") && cause.contains("model.safetensors"),
        "{ended}"
    );
    let log = folder.metrics_log();
    assert_eq!(log.of_steps("step").len(), 64);
    let end = log.end().expect("the run came to an end");
    assert!(
        end["exit_code"] == 74
            && end["reason"]
                .as_str()
                .unwrap()
                .contains("model.safetensors"),
        "{end}"
    );
    assert_eq!(folder.checkpoints(), [""; 0]);
}

#[test]
fn a_disk_that_is_full_in_training_ends_the_run() {
    let folder = Folder::new("training");
    // 4 or 8 kB, for a metrics log of 13.
    let ended = folder.in_shell(&limit(8), LONG).run();
    assert_stopped_in_training(&folder, &ended);
}

#[test]
fn a_disk_that_is_full_in_saving_leaves_no_checkpoint() {
    let folder = Folder::new("saving");
    // 51 or 102 kB.
    let ended = folder.in_shell(&limit(100), LONG).run();
    assert_stopped_in_saving(&folder, &ended);
}

#[test]
fn a_disk_that_is_full_from_the_start_leaves_the_folder_free() {
    let folder = Folder::new("start");
    let ended = folder.in_shell(&limit(0), QUICK).run();
    assert!(
        ended
            .assert_fails(74)
            .contains(&folder.out().display().to_string()),
        "{ended}"
    );
    folder.alone(QUICK).run().assert_well();
}

/// A job on a real file system of this many kB, seen by it alone; none where that may not be made.
fn on_a_small_disk(folder: &Folder, size_kb: u32, words: &str) -> Option<Ended> {
    let root = std::fs::metadata("/proc/self")
        .expect("this is Linux")
        .uid()
        == 0;
    let namespace = if root { "unshare -m" } else { "unshare -rm" };
    std::fs::create_dir(folder.out()).unwrap();
    // Only this mount namespace sees the disk, so its files are copied out of it.
    let inside = format!(
        "mkdir disk && mount -t tmpfs -o size={size_kb}k none disk || exit 99
        \"$@\"
        code=$?
        cp -r disk/. out
        exit $code"
    );
    let before =
        format!("export inside='{inside}'\nset -- {namespace} sh -c \"$inside\" sh \"$@\"");
    let words = words.replace("OUT", "disk");
    let ended = folder.in_shell(&before, &words).run();
    let made = ended.exit_code() != Some(99) && !ended.stderr.contains("unshare");
    if !made {
        ddp_testing::skip(&format!(
            "no file system may be mounted here: {}",
            ended.stderr.trim()
        ));
    }
    made.then_some(ended)
}

#[test]
fn a_small_disk_fills_up_in_training() {
    // A page for the settings and two for the metrics log, which needs four.
    let folder = Folder::new("small");
    let Some(ended) = on_a_small_disk(&folder, 12, LONG) else {
        return;
    };
    assert_stopped_in_training(&folder, &ended);
}

#[test]
fn a_small_disk_fills_up_in_saving() {
    let folder = Folder::new("small");
    let Some(ended) = on_a_small_disk(&folder, 64, &format!("{LONG} --ranks 2")) else {
        return;
    };
    assert!(ended.stderr.contains("No space left on device"), "{ended}");
    assert_stopped_in_saving(&folder, &ended);
    let writer = "ddp-train: rank 0 on ";
    assert!(ended.causes()[0].starts_with(writer), "{ended}");
}

#[test]
fn a_small_disk_that_fills_up_starts_no_rank_again() {
    let folder = Folder::new("small-elastic");
    let words = format!("{LONG} --ranks 2 --min-ranks 1 --restarts 9");
    let Some(ended) = on_a_small_disk(&folder, 64, &words) else {
        return;
    };
    assert_stopped_in_saving(&folder, &ended);
    assert!(!ended.stderr.contains("starting it again"), "{ended}");
}

#[test]
fn a_run_resumes_from_checkpoints_that_filled_the_disk() {
    // 600 kB each: two have room.
    let words = format!("{LONG} --checkpoint-every 20 --keep 9 --threads 1");
    let (folder, undisturbed) = (Folder::new("small"), Folder::new("large"));
    let of_ranks = format!("{words} --ranks 2");
    let Some(ended) = on_a_small_disk(&folder, 1700, &of_ranks) else {
        return;
    };
    assert!(
        ended.assert_fails(74).contains("cannot write")
            && ended.stderr.contains("No space left on device"),
        "{ended}"
    );
    assert_eq!(
        folder.checkpoints(),
        ["step-00000020", "step-00000040"],
        "{ended}"
    );
    folder
        .together(&format!("{words} --resume auto"))
        .run()
        .assert_well();
    undisturbed.together(&words).run().assert_well();
    assert!(model_bytes(&folder.out(), 64) == model_bytes(&undisturbed.out(), 64));
    assert_eq!(
        folder.metrics_log().of_steps("loss"),
        undisturbed.metrics_log().of_steps("loss")
    );
}

#[test]
fn a_record_that_is_removed_while_it_is_written_is_missed() {
    let folder = Folder::new("removed");
    let job = folder.alone(QUICK);
    let running = job.env("DDP_TEST_FAULT", "0:forward:3:hold").start();
    running.wait_for_fault("0:forward:3");
    std::fs::remove_file(folder.out().join("metrics.jsonl")).unwrap();
    running.go_on(3);
    let ended = running.wait();
    let cause = ended.assert_fails(74);
    assert!(
        cause.contains("cannot find the metrics log ")
            && cause.contains("metrics.jsonl: No such file"),
        "{ended}"
    );
}
