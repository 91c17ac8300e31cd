//! The cache's files, and what happens to damaged ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

/// A folder of a test's own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("ddp-kernel-cache-{}-{count}", std::process::id()));
        make_folder(&folder).unwrap();
        Folder(folder)
    }

    fn entry(&self, key: u128) -> CacheEntry {
        CacheEntry::new(Some(self.0.clone()), "relu-sm_90", key)
    }

    fn files(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700));
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn image() -> Vec<u8> {
    (0..=255).cycle().take(5000).collect()
}

#[test]
fn what_was_written_is_read_and_leaves_one_file() {
    let folder = Folder::new();
    assert_eq!(folder.entry(7).read(), None);
    folder.entry(7).write(&image());
    assert_eq!(folder.entry(7).read(), Some(image()));
    assert_eq!(folder.entry(8).read(), None);
    let [file] = &folder.files()[..] else {
        panic!("{:?}", folder.files())
    };
    assert!(
        file.ends_with("relu-sm_90-00000000000000000000000000000007.kernels"),
        "{file:?}"
    );
}

#[test]
fn a_truncated_or_changed_cache_file_is_replaced() {
    let folder = Folder::new();
    let entry = folder.entry(3);
    entry.write(&image());
    let path = entry.path.clone().unwrap();
    let whole = fs::read(&path).unwrap();
    for length in [0, 1, 7, 8, 23, 24, 31, 32, 47, 48, 49, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(entry.read(), None, "{length} bytes");
    }
    for position in (0..HEADER_BYTES).chain([48, 49, 2000, whole.len() - 1]) {
        let mut changed = whole.clone();
        changed[position] ^= 0x10;
        fs::write(&path, &changed).unwrap();
        assert_eq!(entry.read(), None, "byte {position}");
    }
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    assert_eq!(entry.read(), None);
    entry.write(&image());
    assert_eq!(entry.read(), Some(image()));
}

#[test]
fn a_cache_file_with_another_key_is_ignored() {
    let folder = Folder::new();
    folder.entry(1).write(&image());
    fs::rename(folder.entry(1).path.unwrap(), folder.entry(2).path.unwrap()).unwrap();
    assert_eq!(folder.entry(2).read(), None);
}

#[test]
fn a_folder_or_pipe_with_the_files_name_is_harmless() {
    let folder = Folder::new();
    let entry = folder.entry(1);
    fs::create_dir(entry.path.as_deref().unwrap()).unwrap();
    assert_eq!(entry.read(), None);
    entry.write(&image());
    assert_eq!(
        folder.files().len(),
        1,
        "the temporary file is removed: {:?}",
        folder.files()
    );
}

#[test]
fn an_uncreatable_cache_folder_is_not_an_error() {
    let folder = Folder::new();
    let file = folder.0.join("file");
    fs::write(&file, b"").unwrap();
    let entry = CacheEntry::new(Some(file.join("below")), "relu", 1);
    entry.write(&image());
    assert_eq!(entry.read(), None);
    CacheEntry::new(None, "relu", 1).write(&image());
}

#[test]
fn a_new_folder_is_for_its_owner_alone() {
    let folder = Folder::new();
    let below = folder.0.join("a/b");
    CacheEntry::new(Some(below.clone()), "relu", 1).write(&image());
    assert_eq!(
        fs::metadata(below).unwrap().permissions().mode() & 0o777,
        0o700
    );
}

#[test]
fn readers_beside_eight_writers_see_a_whole_image_or_none() {
    let folder = Folder::new();
    let start = Barrier::new(9);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                (0..20).for_each(|_| folder.entry(5).write(&image()));
            });
        }
        start.wait();
        while folder.entry(5).read().is_none() {
            std::thread::yield_now();
        }
        for _ in 0..200 {
            assert_eq!(folder.entry(5).read(), Some(image()));
        }
    });
    assert_eq!(folder.files().len(), 1);
}

#[test]
fn the_environment_names_the_folder_or_turns_it_off() {
    let with = |variables: &[(&str, &str)]| {
        folder(|name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| value.into())
        })
    };
    assert_eq!(
        with(&[("DDP_KERNEL_CACHE", "/k"), ("HOME", "/h")]),
        Some("/k".into())
    );
    assert_eq!(with(&[("DDP_KERNEL_CACHE", "off"), ("HOME", "/h")]), None);
    assert_eq!(
        with(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]),
        Some("/x/ddp-train/kernels".into())
    );
    assert_eq!(
        with(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]),
        Some("/h/.cache/ddp-train/kernels".into())
    );
    assert_eq!(
        with(&[("DDP_KERNEL_CACHE", ""), ("HOME", "/h")]),
        Some("/h/.cache/ddp-train/kernels".into())
    );
    assert_eq!(with(&[]), None);
}

#[test]
fn the_parts_of_a_key_cannot_run_into_each_other() {
    let key = |parts: &[&str]| {
        parts
            .iter()
            .fold(Key::new(), |key, part| key.part(part.as_bytes()))
            .finish()
    };
    let mut keys = [
        key(&["ab", "c"]),
        key(&["a", "bc"]),
        key(&["abc"]),
        key(&["abc", ""]),
        key(&[]),
    ];
    keys.sort_unstable();
    assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
}

#[test]
fn what_others_may_write_to_is_not_run() {
    let set_mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let folder = Folder::new();
    let entry = folder.entry(1);
    entry.write(&image());
    let file = entry.path.clone().unwrap();
    for path in [&folder.0, &file] {
        for mode in [0o775, 0o757, 0o1777] {
            set_mode(path, mode);
            assert_eq!(entry.read(), None, "{} {mode:o}", path.display());
        }
        set_mode(path, 0o755);
        assert_eq!(entry.read(), Some(image()));
    }
    // Nothing is written there either.
    set_mode(&folder.0, 0o775);
    folder.entry(2).write(&image());
    assert!(folder.entry(2).turn().is_none());
    assert_eq!(folder.files().len(), 1);
    set_mode(&folder.0, 0o755);
    if std::os::unix::fs::chown(&file, Some(65_534), None).is_err() {
        return ddp_testing::skip("only root can give files to another user");
    }
    assert_eq!(entry.read(), None, "another user's file");
}

#[test]
fn a_lock_neither_follows_links_nor_empties_files() {
    let folder = Folder::new();
    let entry = folder.entry(1);
    let (lock, other) = (
        entry.path.clone().unwrap().with_extension("lock"),
        folder.0.join("notes.txt"),
    );
    fs::write(&other, "kept").unwrap();
    std::os::unix::fs::symlink(&other, &lock).unwrap();
    assert!(entry.turn().is_none());
    assert_eq!(fs::read(&other).unwrap(), b"kept");
    fs::remove_file(&lock).unwrap();
    fs::hard_link(&other, &lock).unwrap();
    assert!(entry.turn().is_some());
    assert_eq!(fs::read(&other).unwrap(), b"kept");
}
