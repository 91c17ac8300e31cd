//! Settings from a file and the environment, what is said in place of training, curves for TensorBoard, and the look at this machine.

use std::fs;

use serde_json::Value;

use crate::job::{Folder, QUICK};

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

#[test]
fn settings_come_from_a_file_the_environment_and_flags_in_this_order() {
    let folder = Folder::new("layers");
    fs::write(folder.path().join("run.toml"), "batch-size = 16\nseed = 3\nlr = 0.5\n").unwrap();
    let words = format!("--config run.toml {QUICK} --lr 0.25");
    let job = folder.alone(&words).env("DDP_SEED", "4").env("DDP_LR", "0.125");
    job.run().assert_well();
    let start = folder.record().all("start")[0].clone();
    // Of QUICK's flags the batch size is one.
    assert_eq!((&start["config"]["batch-size"], &start["config"]["seed"]), (&32.into(), &4.into()));
    assert_eq!(start["config"]["lr"], 0.25);
}

#[test]
fn a_dry_run_says_what_a_run_takes_and_leaves_nothing() {
    let folder = Folder::new("dry");
    let ended = folder.together(&format!("{QUICK} --dry-run")).run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    for part in [
        "256 rows to train on",
        "8 steps, 8 an epoch",
        "memory of a rank: values",
        "a checkpoint:",
        "ms a step",
        "nothing was trained",
    ] {
        assert!(ended.stdout.contains(part), "{part} in {ended}");
    }
    assert!(!folder.out().exists(), "{ended}");
    // What would be refused is refused.
    folder.together(QUICK).run().assert_well();
    let ended = folder.together(&format!("{QUICK} --dry-run")).run();
    assert!(ended.assert_fails(2).contains("holds a run already"), "{ended}");
    let ended = folder.alone("--dry-run --data nowhere.csv --out elsewhere").run();
    assert!(ended.assert_fails(74).contains("nowhere.csv"), "{ended}");
}

#[test]
fn a_dry_run_of_a_run_that_goes_on_says_what_is_left() {
    let folder = Folder::new("dry-on");
    let words = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --schedule constant --out OUT";
    folder.alone(&format!("{words} --steps 8")).run().assert_well();
    let record = fs::read(folder.out().join("metrics.jsonl")).unwrap();
    let ended = folder.alone(&format!("{words} --steps 20 --resume auto --dry-run")).run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    assert!(ended.stdout.contains("20 steps, of which 8 are done") && ended.stdout.contains("for 12 steps"), "{ended}");
    assert_eq!(fs::read(folder.out().join("metrics.jsonl")).unwrap(), record);
}

#[test]
fn curves_for_tensorboard_are_written_and_taken_up_again() {
    let folder = Folder::new("curves");
    let words = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --schedule constant --log-every 1 --tensorboard --out OUT";
    folder.together(&format!("{words} --steps 8")).run().assert_well();
    folder.together(&format!("{words} --steps 12 --resume auto")).run().assert_well();
    let mut files: Vec<_> =
        fs::read_dir(folder.out().join("tensorboard")).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let bytes: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let points = |bytes: &[u8], tag: &[u8]| bytes.windows(tag.len()).filter(|part| *part == tag).count();
    let counts = |tag: &[u8]| bytes.iter().map(|bytes| points(bytes, tag)).collect::<Vec<_>>();
    assert_eq!((counts(b"train/loss"), counts(b"eval/accuracy")), (vec![8, 4], vec![1, 1]));
}

#[test]
fn a_healthy_machine_is_said_to_be_healthy_by_one_process_and_by_ranks() {
    let folder = Folder::new("doctor");
    for job in [folder.alone("doctor --json"), folder.together("doctor --json")] {
        let ended = job.run();
        assert_eq!(ended.exit_code(), Some(0), "{ended}");
        let lines = json_lines(&ended.stdout);
        let topics: Vec<&str> = lines.iter().filter_map(|line| line["topic"].as_str()).collect();
        for topic in ["processor", "memory", "disk", "threads", "GPU", "GPU of rank"] {
            assert!(topics.contains(&topic), "{topic} in {ended}");
        }
        assert_eq!(
            topics.contains(&"all-reduce"),
            lines.iter().any(|line| line["of"].as_str().is_some_and(|of| of.starts_with("rank 1")))
        );
        assert_eq!(lines.last().unwrap()["healthy"], true);
    }
    let quick = folder.alone("doctor --quick").run();
    assert!(
        quick.exit_code() == Some(0) && quick.stdout.contains("healthy:") && !quick.stdout.contains("MB/s"),
        "{quick}"
    );
}

#[test]
fn a_disk_that_takes_nothing_is_named_and_ends_with_69() {
    let folder = Folder::new("doctor-disk");
    // No file may grow at all.
    let ended = folder.in_shell("ulimit -f 0; trap '' XFSZ", "doctor --out .").run();
    assert_eq!(ended.exit_code(), Some(69), "{ended}");
    let bad = ended.stdout.lines().find(|line| line.contains("BAD")).unwrap_or_else(|| panic!("{ended}"));
    assert!(bad.contains("cannot write 64 MiB") && ended.causes()[0].contains("1 bad"), "{ended}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "what was tried is gone");
}
