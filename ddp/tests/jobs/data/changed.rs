//! Files that change during a run.

use super::*;

/// A run that continues until it is ended: some milliseconds a step.
fn endless(folder: &Folder, is_on_ranks: bool) -> Running {
    let rows = 20_000;
    let x: Vec<u8> = (0..rows * 64)
        .flat_map(|n| ((n * 7919 % 1000) as f32 / 1000.0).to_le_bytes())
        .collect();
    let y: Vec<u8> = (0..rows as i64)
        .flat_map(|n| (n % 3).to_le_bytes())
        .collect();
    write(folder, "x.npy", npy("<f4", &[rows, 64], &x));
    write(folder, "y.npy", npy("<i8", &[rows], &y));
    let words = "--data x.npy --labels y.npy --hidden 64 --batch-size 64 --steps 100000000 --log-every 1 --out OUT";
    let job = if is_on_ranks {
        folder.together(words)
    } else {
        folder.alone(words)
    };
    let running = job.start();
    running.wait_for_step_2();
    running
}

#[test]
fn a_file_that_changes_underneath_ends_the_run() {
    for is_on_ranks in [false, true] {
        let folder = Folder::new("changed");
        let running = endless(&folder, is_on_ranks);
        let mut file = OpenOptions::new()
            .write(true)
            .open(folder.path().join("x.npy"))
            .unwrap();
        file.write_all(b"\x93NUMPY").unwrap();
        drop(file);
        let ended = running.wait();
        let cause = ended.assert_fails(65);
        assert!(
            cause.contains("x.npy was written to while it is in use"),
            "{ended}"
        );
    }
}

/// Files are looked at once a second: what was read in between was saved.
#[test]
fn no_checkpoint_is_made_of_rows_that_changed_before_it() {
    let folder = Folder::new("changed-saved");
    let x = |value: f32| npy("<f4", &[64, 4], &value.to_le_bytes().repeat(256));
    let y: Vec<u8> = (0..64i64).flat_map(|n| (n % 3).to_le_bytes()).collect();
    write(&folder, "x.npy", x(0.5));
    write(&folder, "y.npy", npy("<i8", &[64], &y));
    let words = "--data x.npy --labels y.npy --hidden 4 --batch-size 16 --steps 12 --checkpoint-every 4 --threads 1 --out OUT";
    let job = folder.alone(words);
    let running = job.env("DDP_TEST_FAULT", "0:forward:6:hold").start();
    running.wait_for_fault("0:forward:6");
    // A thread writes it.
    running.wait_for_file("out/checkpoints/step-00000004");
    // In place, as numpy.memmap does.
    let file = OpenOptions::new()
        .write(true)
        .open(folder.path().join("x.npy"));
    file.unwrap().write_all(&x(0.25)).unwrap();
    running.go_on(6);
    let ended = running.wait();
    let cause = ended.assert_fails(65);
    let told = "x.npy was written to while it is in use";
    assert!(cause.contains(told), "{ended}");
    assert_eq!(folder.checkpoints(), ["step-00000004"], "{ended}");
}

#[test]
fn numbers_that_become_nan_in_a_file_are_blamed_on_the_file() {
    all_at_once([false, true, false, true], |is_on_ranks| {
        let folder = Folder::new("nan");
        let running = endless(&folder, is_on_ranks);
        let path = folder.path().join("x.npy");
        let bytes = fs::metadata(&path).unwrap().len();
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let nans = f32::NAN.to_le_bytes().repeat(bytes as usize / 4 - 64);
        std::os::unix::fs::FileExt::write_all_at(&file, &nans, 256).unwrap();
        let ended = running.wait();
        let cause = ended.assert_fails(65);
        assert!(
            cause.contains("they may have changed since") || cause.contains("was written to"),
            "{ended}"
        );
    });
}

#[test]
fn a_file_truncated_during_a_run_ends_it() {
    for is_on_ranks in [false, true] {
        let folder = Folder::new("cut");
        let running = endless(&folder, is_on_ranks);
        OpenOptions::new()
            .write(true)
            .open(folder.path().join("x.npy"))
            .unwrap()
            .set_len(100_000)
            .unwrap();
        let ended = running.wait();
        let cause = ended.assert_fails(65);
        assert!(cause.contains("x.npy"), "{ended}");
    }
}
