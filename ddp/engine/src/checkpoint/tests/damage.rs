//! A checkpoint that was changed in any way is never used.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Scratch, run, save, state};
use crate::checkpoint::files::reason;
use crate::checkpoint::manifest::open_reading;
use crate::checkpoint::{MANIFEST_FILE, Saver, folder, load_opened, newest, open, restore};

/// A run with checkpoints of steps 1 and 2; the second is to be damaged.
fn two() -> (Scratch, PathBuf) {
    let scratch = Scratch::new();
    save(scratch.path(), &[1, 2]);
    let folder = folder(scratch.path(), 2);
    open(&folder).unwrap();
    (scratch, folder)
}

/// The newest checkpoint is skipped, with the reason, and the one before it is used.
#[track_caller]
fn is_skipped(out: &Path, folder: &Path, what: &str) {
    let error = open(folder).expect_err(what);
    assert!([65, 74].contains(&error.exit_code()), "{what}: {error}");
    assert!(
        error.to_string().contains(folder.to_str().unwrap()),
        "{what}: {error}"
    );
    let (found, passed_over) = newest(out).unwrap();
    assert_eq!(found.map(|opened| opened.state.step), Some(1), "{what}");
    assert_eq!(
        passed_over,
        [(
            folder.to_path_buf(),
            reason(folder, &error.to_string()).to_string()
        )],
        "{what}"
    );
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert_eq!(files.len(), 4);
    files
}

#[test]
fn every_flipped_byte_is_noticed() {
    let (scratch, folder) = two();
    for path in files(&folder) {
        let whole = fs::read(&path).unwrap();
        for index in 0..whole.len() {
            for flip in [0x01, 0x20, 0x80] {
                let mut bytes = whole.clone();
                bytes[index] ^= flip;
                fs::write(&path, bytes).unwrap();
                let what = format!("byte {index} of {} flipped by {flip:02x}", path.display());
                if flip == 1 {
                    is_skipped(scratch.path(), &folder, &what);
                } else {
                    assert!(open(&folder).is_err(), "{what}");
                }
            }
        }
        fs::write(&path, whole).unwrap();
    }
    open(&folder).unwrap();
}

#[test]
fn every_length_but_the_right_one_is_noticed() {
    let (scratch, folder) = two();
    for path in files(&folder) {
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            is_skipped(
                scratch.path(),
                &folder,
                &format!("{} cut to {length} bytes", path.display()),
            );
        }
        for more in [b'\0', b' ', b'\n'] {
            fs::write(&path, [&whole[..], &[more]].concat()).unwrap();
            is_skipped(
                scratch.path(),
                &folder,
                &format!("{} longer by a {more:?}", path.display()),
            );
        }
        fs::write(&path, whole).unwrap();
    }
    open(&folder).unwrap();
}

#[test]
fn what_another_rank_reads_is_compared_by_name_and_length_alone() {
    let (_scratch, folder) = two();
    let path = folder.join("optimizer.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut bytes = whole.clone();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_eq!(open_reading(&folder, |_| false).unwrap().state.step, 2);
    open_reading(&folder, |place| place < 3).unwrap_err();
    fs::write(&path, &whole[1..]).unwrap();
    open_reading(&folder, |_| false).unwrap_err();
    fs::remove_file(&path).unwrap();
    open_reading(&folder, |_| false).unwrap_err();
}

#[test]
fn a_checked_model_loads_after_its_folder_is_removed() {
    let (_scratch, folder) = two();
    let (_world, step) = run(1);
    let (_world, other) = run(2);
    let opened = open(&folder).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    load_opened(&opened, &[&other.stages()[0].model().params]).unwrap();
    assert_eq!(
        other.stages()[0].model().params.values_hash().unwrap(),
        step.stages()[0].model().params.values_hash().unwrap()
    );
}

#[test]
fn a_missing_extra_or_wrong_kind_of_file_is_noticed() {
    let (scratch, folder) = two();
    for path in files(&folder) {
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        is_skipped(scratch.path(), &folder, "a file is missing");
        fs::create_dir(&path).unwrap();
        is_skipped(scratch.path(), &folder, "a folder in its place");
        fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        is_skipped(scratch.path(), &folder, "a device in its place");
        fs::remove_file(&path).unwrap();
        fs::write(&path, whole).unwrap();
    }
    fs::write(folder.join("another"), "").unwrap();
    is_skipped(scratch.path(), &folder, "a file too many");
    fs::remove_file(folder.join("another")).unwrap();
    // What a file manager leaves is not the checkpoint's.
    fs::create_dir(folder.join(".ipynb_checkpoints")).unwrap();
    fs::write(folder.join(".DS_Store"), "").unwrap();
    open(&folder).unwrap();
}

#[test]
fn an_intact_checkpoint_is_not_skipped() {
    let (scratch, folder) = two();
    // Of a newer program: by its manifest, and by a state that its manifest fits.
    let (manifest, state) = (folder.join(MANIFEST_FILE), folder.join("state.json"));
    let whole = [&manifest, &state].map(|path| fs::read_to_string(path).unwrap());
    let is_refused = |exit_code: u8, part: &str| {
        let error = newest(scratch.path()).unwrap_err();
        assert_eq!(error.exit_code(), exit_code, "{error}");
        let text = error.to_string();
        assert!(
            text.contains(part)
                && text.contains("name an older checkpoint")
                && text.contains("step-00000002"),
            "{text}"
        );
    };
    fs::write(
        &manifest,
        whole[0].replace("\"format\": 1,", "\"format\": 2,\n  \"colour\": \"blue\","),
    )
    .unwrap();
    is_refused(
        65,
        "; a test wrote it; help: it is intact, but of another version",
    );
    let newer = whole[1].replace("\"format\": 1,", "\"format\": 2,");
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    fs::write(&manifest, whole[0].replace(&hash(&whole[1]), &hash(&newer))).unwrap();
    fs::write(&state, newer).unwrap();
    is_refused(65, "is of format 2");
    fs::write(&manifest, &whole[0]).unwrap();
    // One that is temporarily unreadable.
    fs::remove_file(&state).unwrap();
    std::os::unix::fs::symlink("state.json", &state).unwrap();
    is_refused(74, "state.json");
    fs::remove_file(&state).unwrap();
    fs::write(&state, &whole[1]).unwrap();
    assert_eq!(newest(scratch.path()).unwrap().0.unwrap().state.step, 2);
}

#[test]
fn files_of_another_checkpoint_are_noticed_also_where_the_manifest_fits_them() {
    let (scratch, folder) = two();
    let before = crate::checkpoint::folder(scratch.path(), 1);
    let is_wrong = |name: &str| {
        let whole = fs::read(folder.join(name)).unwrap();
        fs::copy(before.join(name), folder.join(name)).unwrap();
        is_skipped(scratch.path(), &folder, name);
        fs::write(folder.join(name), whole).unwrap();
    };
    is_wrong("state.json");
    is_wrong(MANIFEST_FILE);
    // A whole one under another's name can be used where it is named, and is not the newest.
    fs::remove_dir_all(&folder).unwrap();
    fs::rename(&before, &folder).unwrap();
    assert_eq!(open(&folder).unwrap().state.step, 1);
    let (found, passed_over) = newest(scratch.path()).unwrap();
    assert!(found.is_none());
    assert!(
        passed_over[0]
            .1
            .contains("holds step 1, and its name says 2"),
        "{passed_over:?}"
    );
}

#[test]
fn other_files_among_checkpoints_are_ignored() {
    let scratch = Scratch::new();
    let (found, passed_over) = newest(scratch.path()).unwrap();
    assert!(found.is_none() && passed_over.is_empty());
    let checkpoints = scratch.path().join("checkpoints");
    let others = [
        "step-1",
        "step-x",
        "superseded-step-00000009",
        "step-00000009.old",
        ".unfinished-x",
        ".removing-step-9",
    ];
    for name in others {
        fs::create_dir_all(checkpoints.join(name)).unwrap();
    }
    save(scratch.path(), &[1, 2]);
    let (found, passed_over) = newest(scratch.path()).unwrap();
    assert_eq!((found.unwrap().state.step, passed_over), (2, vec![]));
    assert!(others.iter().all(|name| checkpoints.join(name).is_dir()));
    assert_eq!(
        open(&scratch.path().join("nowhere"))
            .unwrap_err()
            .exit_code(),
        74
    );
}

#[test]
fn a_forged_optimizer_file_is_refused_before_any_change() {
    let scratch = Scratch::new();
    save(scratch.path(), &[1]);
    let folder = folder(scratch.path(), 1);
    let opened = open(&folder).unwrap();
    let path = folder.join("optimizer.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    let json = String::from_utf8(whole[8..header].to_vec()).unwrap();
    let metadata = r#"{"format":"pt"}"#;
    assert!(
        json.contains(metadata) && json.contains("\"0.bias.exp_avg\""),
        "{json}"
    );
    let piece = |start: &str, length: u64, parameter: &str| {
        let piece = format!(
            r#"[{{\"tensor\":\"0.bias.exp_avg\",\"parameter\":\"{parameter}\",\"moment\":\"exp_avg\",\"start\":{start},\"length\":{length}}}]"#
        );
        json.replace(metadata, &format!(r#"{{"pieces":"{piece}"}}"#))
    };
    for (json, part) in [
        (
            piece("1", 2, "0.bias"),
            "starts at element 1: expected 0 of 2",
        ),
        (
            piece("18446744073709551615", 2, "0.bias"),
            "expected 0 of 2",
        ),
        (piece("-1", 2, "0.bias"), "pieces cannot be read"),
        (piece("0", 3, "0.bias"), "and its piece 3 elements"),
        (
            piece("0", 2, "2.bias"),
            "2.bias.exp_avg has a piece that starts at element 0: expected 2 of 3",
        ),
        (
            json.replace(metadata, r#"{"pieces":"["}"#),
            "pieces cannot be read",
        ),
        (
            json.replace("0.bias.exp_avg\"", "0.bias.exp_bvg\""),
            "it lacks 0.bias.exp_avg; it has 0.bias.exp_bvg",
        ),
        (
            json.replace("0.bias.exp_avg\"", "bias\""),
            "bias is not a parameter's moment",
        ),
    ] {
        let bytes = [
            &(json.len() as u64).to_le_bytes()[..],
            json.as_bytes(),
            &whole[header..],
        ]
        .concat();
        fs::write(&path, bytes).unwrap();
        let (_world, mut step) = run(2);
        let before = step.stages()[0].model().params.values_hash().unwrap();
        let error = restore(&opened, &mut step).unwrap_err();
        assert_eq!(error.exit_code(), 65);
        assert!(
            error.to_string().contains(part),
            "{json}\n{error}\nlacks {part}"
        );
        assert_eq!(
            step.stages()[0].model().params.values_hash().unwrap(),
            before
        );
    }
    fs::write(&path, whole).unwrap();
    let (_world, mut step) = run(2);
    restore(&opened, &mut step).unwrap();
}

#[test]
fn saving_a_step_again_replaces_only_a_damaged_checkpoint() {
    let (scratch, folder) = two();
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let there = inode(&folder);
    save(scratch.path(), &[2]);
    assert_eq!(inode(&folder), there, "the same model and moments");
    fs::write(folder.join("model.safetensors"), "x").unwrap();
    save(scratch.path(), &[2]);
    assert_eq!(open(&folder).unwrap().state.step, 2);
    let (world, mut other) = run(5);
    let mut saver = Saver::new(&world, scratch.path(), 9).unwrap();
    saver.save(&mut other, state(2)).unwrap();
    saver.finish().unwrap();
    let (_world, mut step) = run(6);
    restore(&open(&folder).unwrap(), &mut step).unwrap();
    assert_eq!(
        step.stages()[0].model().params.values_hash().unwrap(),
        other.stages()[0].model().params.values_hash().unwrap()
    );
    assert_eq!(
        crate::checkpoint::folders::steps(&scratch.path().join("checkpoints"))
            .unwrap()
            .len(),
        2
    );
}
