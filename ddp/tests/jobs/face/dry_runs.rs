//! `--dry-run`: what a run takes, said without one.

use super::*;

#[test]
fn a_dry_run_says_what_a_run_takes_and_leaves_nothing() {
    let folder = Folder::new("dry");
    let ended = folder.together(&format!("{QUICK} --dry-run")).run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    for part in [
        "256 rows to train on",
        "8 steps, 8 an epoch",
        "the model of a rank: parameters",
        "of host memory at the peak",
        "a checkpoint:",
        "nothing was trained",
    ] {
        assert!(ended.stdout.contains(part), "{part} in {ended}");
    }
    assert!(!folder.out().exists(), "{ended}");
    // What would be refused is refused.
    folder.together(QUICK).run().assert_well();
    let ended = folder.together(&format!("{QUICK} --dry-run")).run();
    assert!(
        ended.assert_fails(2).contains("holds a run already"),
        "{ended}"
    );
    let ended = folder
        .alone("--dry-run --data nowhere.csv --out elsewhere")
        .run();
    assert!(ended.assert_fails(74).contains("nowhere.csv"), "{ended}");
}

/// The sum of parameters, gradients and moments was a tenth of what runs took.
#[test]
fn a_dry_run_states_the_peak_memory_within_10_percent_and_no_time_on_the_cpu() {
    for dtype in ["f32", "bf16"] {
        let folder = Folder::new("dry-memory");
        let words = format!(
            "--data glyphs,rows=500,held-out=100 --hidden 1500,1500 --steps 4 --dtype {dtype} \
             --out OUT"
        );
        let ended = folder.alone(&format!("{words} --dry-run")).run();
        let (_, memory) = ended
            .stdout
            .split_once("memory of a rank: about ")
            .expect("it is stated");
        let (stated_mb, rest) = memory.split_once(" MB").expect("it is in MB");
        assert!(rest.starts_with(" of host memory at the peak"), "{ended}");
        assert!(!ended.stdout.contains("a step ("), "{ended}");
        let stated_mb: f64 = stated_mb.parse().unwrap();
        folder.alone(&words).run().assert_well();
        let measured_mb = number(folder.metrics_log().all("end")[0], "peak_mb");
        let ratio = measured_mb / stated_mb;
        assert!(
            (0.9..=1.1).contains(&ratio),
            "{dtype}: {measured_mb} MB of {stated_mb} MB"
        );
    }
}

#[test]
fn a_dry_run_of_a_resumed_run_states_the_remaining_steps() {
    let folder = Folder::new("dry-on");
    folder
        .alone(&format!("{EXTENSIBLE} --steps 8"))
        .run()
        .assert_well();
    let log = fs::read(folder.out().join("metrics.jsonl")).unwrap();
    let ended = folder
        .alone(&format!("{EXTENSIBLE} --steps 20 --resume auto --dry-run"))
        .run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    assert!(
        ended.stdout.contains("20 steps, of which 8 are done"),
        "{ended}"
    );
    assert_eq!(fs::read(folder.out().join("metrics.jsonl")).unwrap(), log);
}

#[test]
fn a_dry_run_refuses_a_folder_that_cannot_be_made_and_says_what_it_keeps() {
    let folder = Folder::new("dry-out");
    fs::write(folder.path().join("file"), "").unwrap();
    let words = QUICK.replace("--out OUT", "--dry-run");
    // Not even root can make folders in /proc.
    for out in ["file", "file/run", "/proc/run", "/proc/self/run/1"] {
        let ended = folder.alone(&format!("{words} --out {out}")).run();
        assert!(
            ended
                .assert_fails(74)
                .contains(&format!("cannot write in {out}:")),
            "{ended}"
        );
    }
    let ended = folder.alone(&format!("{words} --out a/b/c")).run();
    assert!(
        ended
            .stdout
            .ends_with("nothing was trained, and nothing written but caches of tables and kernels (--dry-run)\n"),
        "{ended}"
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{ended}");

    let rows: String = (0..64)
        .map(|row| format!("{row},{},{}\n", row % 7, row % 2))
        .collect();
    fs::write(folder.path().join("rows.csv"), format!("a,b,kind\n{rows}")).unwrap();
    let ended = folder
        .alone("--data rows.csv --hidden 4 --epochs 1 --dry-run --out OUT")
        .run();
    assert!(folder.path().join(".ddp-cache").exists() && !folder.out().exists());
    assert!(
        ended
            .stdout
            .contains("nothing written but caches of tables and kernels"),
        "{ended}"
    );
}
