use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use ddp_kernels::files::testing::Scratch;

/// A source in a folder of its own, and how often something was made of it.
struct Bench {
    scratch: Scratch,
    made: AtomicU32,
}

impl Bench {
    fn new(content: &str) -> Bench {
        let bench = Bench {
            scratch: Scratch::new(),
            made: AtomicU32::new(0),
        };
        bench.write(content);
        bench
    }

    fn source(&self) -> PathBuf {
        self.scratch.path().join("table.csv")
    }

    fn write(&self, content: &str) {
        fs::write(self.source(), content).unwrap();
    }

    fn cache(&self) -> PathBuf {
        self.scratch.path().join(".ddp-cache")
    }

    /// Makes a copy of the source in capitals.
    fn capitals(&self, request: &str) -> PathBuf {
        converted(&self.source(), None, request, |to| self.make_capitals(to)).unwrap()
    }

    fn make_capitals(&self, to: &Path) -> Result<()> {
        self.made.fetch_add(1, Ordering::Relaxed);
        let text = fs::read_to_string(self.source()).unwrap();
        fs::write(to, text.to_uppercase()).map_err(writing(to))
    }

    fn times_made(&self) -> u32 {
        self.made.load(Ordering::Relaxed)
    }

    /// Sets the source's time of modification, as a copying tool would.
    fn set_modified(&self, when: SystemTime) {
        File::options()
            .write(true)
            .open(self.source())
            .unwrap()
            .set_modified(when)
            .unwrap();
    }

    /// The unfinished entries in the cache.
    fn left_over(&self) -> Vec<String> {
        let names = fs::read_dir(self.cache())
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.into_string().unwrap());
        names
            .filter(|name| name.starts_with(".unfinished"))
            .collect()
    }
}

/// Lets time pass until no other change of a file written before could go unnoticed.
fn settle() {
    // Sleep: the system sets the time of a change, and whole seconds count.
    std::thread::sleep(SETTLED + Duration::from_millis(1100));
}

/// What says of an entry that its file was written once and not again.
fn written(path: &Path) -> (u64, i64, i64) {
    let metadata = fs::metadata(path).unwrap();
    (metadata.ino(), metadata.ctime(), metadata.ctime_nsec())
}

#[test]
fn cache_entries_are_reused() {
    let bench = Bench::new("abc");
    let first = bench.capitals("capitals");
    assert_eq!(fs::read(&first).unwrap(), b"ABC");
    assert!(first.starts_with(bench.cache()), "{}", first.display());
    let mark = written(&first);
    assert_eq!(
        (bench.capitals("capitals"), written(&first)),
        (first.clone(), mark)
    );
    // A copy of the same content elsewhere is the same content; another request is another entry.
    fs::copy(bench.source(), bench.scratch.path().join("copy.csv")).unwrap();
    fs::rename(bench.scratch.path().join("copy.csv"), bench.source()).unwrap();
    assert_eq!(
        (bench.capitals("capitals"), bench.times_made()),
        (first.clone(), 1)
    );
    assert_ne!(bench.capitals("more capitals"), first);
    assert_eq!(bench.times_made(), 2);
    assert_eq!(bench.left_over(), [""; 0]);
}

#[test]
fn a_source_that_is_known_is_not_read_again() {
    let bench = Bench::new("abc");
    let hour = Duration::from_secs(3600);
    // However slow this machine is, the file has changed too recently.
    bench.set_modified(SystemTime::now() + hour);
    let first = bench.capitals("capitals");
    let seen = || {
        let names = fs::read_dir(bench.cache())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        names
            .filter(|path| {
                path.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with(".seen")
            })
            .collect::<Vec<_>>()
    };
    // As long as another change might not show, nothing is written down.
    assert_eq!(seen(), [""; 0].map(PathBuf::from));
    bench.set_modified(SystemTime::now() - hour);
    settle();
    assert_eq!(bench.capitals("capitals"), first);
    let [note] = &seen()[..] else {
        panic!("one source is known")
    };
    // The note is believed: with another checksum the entry of this content is not found.
    let xxh3 = format!("{:032x}", 7);
    let access = Access::of(&bench.source()).unwrap();
    let believed = Note::read(note, access).unwrap();
    let changed = Note { xxh3, ..believed };
    changed.write(note, access).unwrap();
    assert_ne!(bench.capitals("capitals"), first);
    assert_eq!(bench.times_made(), 2);
    // A damaged note counts as none.
    for damaged in ["", "{", "{\"identity\": 3}"] {
        fs::write(note, damaged).unwrap();
        assert_eq!(
            (bench.capitals("capitals"), bench.times_made()),
            (first.clone(), 2),
            "{damaged}"
        );
    }
}

#[test]
fn changed_content_with_the_same_name_size_and_time_is_reconverted() {
    let bench = Bench::new("abc");
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    bench.set_modified(hour_ago);
    let first = bench.capitals("capitals");
    // In place, so that it is the same inode too.
    File::options()
        .write(true)
        .open(bench.source())
        .unwrap()
        .write_all_at(b"xyz", 0)
        .unwrap();
    bench.set_modified(hour_ago);
    let second = bench.capitals("capitals");
    assert_eq!(
        (fs::read(&first).unwrap(), fs::read(&second).unwrap()),
        (b"ABC".to_vec(), b"XYZ".to_vec())
    );
    assert_eq!(bench.times_made(), 2);
}

#[test]
fn a_damaged_entry_is_made_again() {
    let bench = Bench::new("abcdef");
    let path = bench.capitals("capitals");
    let entry = path.parent().unwrap().join(ENTRY);
    type Damage = fn(&Path, &Path);
    let flip: Damage = |path, _| {
        let mut bytes = fs::read(path).unwrap();
        bytes[3] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let damages: [Damage; 5] = [
        flip,
        |path, _| {
            File::options()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(4)
                .unwrap()
        },
        |path, _| fs::remove_file(path).unwrap(),
        |_, entry| fs::remove_file(entry).unwrap(),
        |_, entry| fs::write(entry, "{\"xxh3\": 6").unwrap(),
    ];
    for (number, damage) in (2..).zip(damages) {
        damage(&path, &entry);
        assert_eq!(
            (bench.capitals("capitals"), bench.times_made()),
            (path.clone(), number)
        );
        assert_eq!(fs::read(&path).unwrap(), b"ABCDEF");
        assert_eq!(bench.left_over(), [""; 0]);
    }
    // Long after it was checked too.
    settle();
    bench.capitals("capitals");
    let access = Access::of(&bench.source()).unwrap();
    let said = Note::read(&entry, access).unwrap();
    assert!(said.describes(&identity_of(&path).unwrap()));
    assert_eq!(bench.times_made(), 6);
    flip(&path, &entry);
    bench.capitals("capitals");
    assert_eq!(
        (bench.times_made(), fs::read(&path).unwrap()),
        (7, b"ABCDEF".to_vec())
    );
}

#[test]
fn several_at_once_get_the_same_whole_entry() {
    let bench = Bench::new("abc");
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    converted(&bench.source(), None, "capitals", |to| {
                        // Sleep: the others come meanwhile, or later.
                        std::thread::sleep(Duration::from_millis(100));
                        bench.make_capitals(to)
                    })
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap().unwrap())
            .collect()
    });
    assert!(all.iter().all(|path| *path == all[0]));
    assert_eq!(fs::read(&all[0]).unwrap(), b"ABC");
    assert_eq!(bench.left_over(), [""; 0]);
}

#[test]
fn the_second_of_two_uses_the_entry_of_the_first() {
    let bench = Bench::new("abc");
    let mut inner = None;
    let outer = converted(&bench.source(), None, "capitals", |to| {
        fs::write(to, "half").unwrap();
        inner = Some(bench.capitals("capitals"));
        assert_eq!(fs::read(to).unwrap(), b"half", "each has its own folder");
        bench.make_capitals(to)
    });
    let outer = outer.unwrap();
    assert_eq!((inner, bench.times_made()), (Some(outer.clone()), 2));
    assert_eq!(fs::read(outer).unwrap(), b"ABC");
    assert_eq!(bench.left_over(), [""; 0]);
}

#[test]
fn a_source_that_changes_meanwhile_is_an_error() {
    let bench = Bench::new("abc");
    let error = converted(&bench.source(), None, "capitals", |to| {
        bench.make_capitals(to)?;
        bench.write("something else");
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(
        error.exit_code() == 65 && error.to_string().contains("changed while it was read"),
        "{error}"
    );
    assert_eq!(fs::read_dir(bench.cache()).unwrap().count(), 0);
}

#[test]
fn a_failure_leaves_nothing() {
    let bench = Bench::new("abc");
    let error = converted(&bench.source(), None, "capitals", |to| {
        fs::write(to, "half").unwrap();
        fs::write(to.with_extension("more"), "half").unwrap();
        Err(Error::Data("torn".into()))
    });
    assert_eq!(error.unwrap_err().to_string(), "torn");
    assert_eq!(fs::read_dir(bench.cache()).unwrap().count(), 0);
}

#[test]
fn files_left_by_killed_processes_are_removed() {
    let bench = Bench::new("abc");
    let own = std::process::id();
    // The last two are of no process: one of another host holds the lock of the second.
    let names = [
        format!("{own}-8"),
        format!("{own}-9"),
        "4194305-0".into(),
        "4194305-1".into(),
    ];
    let half_made = names.map(|name| bench.cache().join(format!(".unfinished-{name}")));
    for path in &half_made {
        fs::create_dir_all(path).unwrap();
        fs::write(path.join("data.bin"), "half").unwrap();
    }
    let held = File::open(&half_made[3]).unwrap();
    held.try_lock().unwrap();
    bench.capitals("capitals");
    let are_there = half_made.each_ref().map(|path| path.exists());
    assert_eq!(
        are_there,
        [true, true, false, true],
        "it stayed for six hours"
    );
    let long_ago = SystemTime::now() - 2 * ABANDONED;
    for path in [
        half_made[0].join("data.bin"),
        half_made[0].clone(),
        half_made[1].join("data.bin"),
    ] {
        File::open(path).unwrap().set_modified(long_ago).unwrap();
    }
    bench.capitals("something else");
    // Of the second one only the file is old.
    assert_eq!(
        half_made.map(|path| path.exists()),
        [false, true, false, true]
    );
}

#[test]
fn the_folder_is_the_one_asked_for_or_beside_or_the_users() {
    let variable = |home: &'static str, cache: &'static str| {
        move |name: &str| match name {
            "HOME" => Some(OsString::from(home)),
            "XDG_CACHE_HOME" => Some(OsString::from(cache)),
            _ => None,
        }
    };
    let found =
        |path: &str, asked, home, cache| folders(Path::new(path), asked, variable(home, cache));
    let user = Path::new("/home/me/.cache/ddp-train/copies");
    assert_eq!(
        found("a/b.csv", Some(Path::new("c")), "/home/me", ""),
        [Path::new("c"), user]
    );
    assert_eq!(
        found("a/b.csv", None, "/home/me", ""),
        [Path::new("a/.ddp-cache"), user]
    );
    assert_eq!(
        found("b.csv", None, "", "/tmp/x"),
        [
            Path::new(".ddp-cache"),
            Path::new("/tmp/x/ddp-train/copies")
        ]
    );
    // The standard says that a relative one is to be ignored.
    assert_eq!(found("b.csv", None, "", "x"), [Path::new(".ddp-cache")]);
}

#[test]
fn an_unwritable_folder_falls_back_to_the_next() {
    let bench = Bench::new("abc");
    fs::write(bench.cache(), "a file in the way").unwrap();
    let user = bench.scratch.path().join("user");
    let wanted = WantedCopy {
        source: &bench.source(),
        request: "capitals",
    };
    for times in [1, 1] {
        let path = find_or_make(&[bench.cache(), user.clone()], &wanted, |to| {
            bench.make_capitals(to)
        })
        .unwrap();
        assert!(path.starts_with(&user));
        assert_eq!(bench.times_made(), times);
    }
    let error = find_or_make(&[bench.cache()], &wanted, |_| Ok(())).unwrap_err();
    assert_eq!(error.exit_code(), 74);
    let text = error.to_string();
    assert!(
        text.contains(".ddp-cache") && text.contains("`cache-dir`"),
        "{text}"
    );
}

#[test]
fn an_entry_in_a_folder_that_cannot_be_written_is_used() {
    let bench = Bench::new("abc");
    let made = bench.capitals("capitals");
    let elsewhere = bench.scratch.path().join("elsewhere");
    let wanted = WantedCopy {
        source: &bench.source(),
        request: "capitals",
    };
    let found = find_or_make(&[elsewhere.clone(), bench.cache()], &wanted, |_| {
        panic!("it is there")
    })
    .unwrap();
    assert_eq!(found, made);
    assert!(!elsewhere.exists());
}

#[test]
fn what_is_no_file_is_named() {
    let bench = Bench::new("abc");
    for (path, code, part) in [
        ("missing.csv", 74, "No such file"),
        (".", 65, "not an ordinary file"),
    ] {
        let path = bench.scratch.path().join(path);
        let error = converted(&path, None, "capitals", |_| Ok(())).unwrap_err();
        assert_eq!(error.exit_code(), code);
        assert!(
            error.to_string().contains(part)
                && error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
    }
}

#[test]
fn long_names_are_cut_between_letters() {
    let source = PathBuf::from("é".repeat(100) + ".csv");
    let wanted = WantedCopy {
        source: &source,
        request: "",
    };
    let entry = wanted.entry(Path::new(""), &"0".repeat(32));
    let name = entry.to_str().unwrap();
    assert!(
        name.len() < 160
            && name.starts_with('é')
            && name.ends_with("é-00000000000000000000000000000000"),
        "{name}"
    );
}

#[test]
fn a_large_file_is_compared_with_its_checksums_once_until_it_changes() {
    let scratch = Scratch::new();
    let path = scratch.path().join("large.npz");
    let file = File::create(&path).unwrap();
    file.set_len(NOTED_BYTES_MIN).unwrap();
    settle();
    let folder = scratch.path().join("cache");
    let count = std::cell::Cell::new(0);
    let check = |outcome: Result<()>| {
        let checked = checked(&path, Some(&folder), || {
            count.set(count.get() + 1);
            outcome
        });
        (checked.is_ok(), count.get())
    };
    let bad = || Err(refuse(&path, "it is damaged"));
    assert_eq!(check(bad()), (false, 1));
    assert_eq!(check(Ok(())), (true, 2), "what failed is compared again");
    assert_eq!(check(bad()), (true, 2), "what passed is not");
    file.set_len(NOTED_BYTES_MIN + 1).unwrap();
    assert_eq!(check(bad()), (false, 3));
    file.set_len(1000).unwrap();
    assert_eq!(
        (check(Ok(())), check(Ok(()))),
        ((true, 4), (true, 5)),
        "small ones are, always"
    );
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// An entry whose copy says something else, and whose note agrees with it; and a second folder.
fn planted() -> (Bench, PathBuf, PathBuf) {
    let bench = Bench::new("abc");
    let copy = bench.capitals("capitals");
    fs::write(&copy, "XYZ").unwrap();
    let access = Access::of(&bench.source()).unwrap();
    let note = Note::of(&copy).unwrap();
    note.write(&copy.with_file_name(ENTRY), access).unwrap();
    assert_eq!(fs::read(bench.capitals("capitals")).unwrap(), b"XYZ");
    let user = bench.scratch.path().join("home/user");
    (bench, copy, user)
}

impl Bench {
    fn capitals_in(&self, folders: &[PathBuf]) -> Vec<u8> {
        let wanted = WantedCopy {
            source: &self.source(),
            request: "capitals",
        };
        let made = find_or_make(folders, &wanted, |to| self.make_capitals(to));
        fs::read(made.unwrap()).unwrap()
    }
}

#[test]
fn a_planted_cache_of_another_user_is_not_used() {
    let another = |path: &Path| std::os::unix::fs::chown(path, Some(65_534), None);
    let (bench, _, user) = planted();
    if another(&bench.cache()).is_err() {
        return ddp_testing::skip("only root can give files to another user");
    }
    let folders = [bench.cache(), user.clone()];
    assert_eq!(bench.capitals_in(&folders), b"ABC", "another user's folder");
    assert!(user.exists());
    // Parts of it, in a folder of this user.
    for depth in 0..3 {
        let (bench, copy, _) = planted();
        let entry = copy.parent().unwrap();
        let parts = [entry.into(), copy.clone(), entry.join(ENTRY)];
        another(&parts[depth]).unwrap();
        assert_eq!(bench.capitals_in(&[bench.cache()]), b"ABC", "{depth}");
    }
    // A link of another user to a folder of this one.
    let (bench, _, user) = planted();
    fs::rename(bench.cache(), bench.scratch.path().join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", bench.cache()).unwrap();
    std::os::unix::fs::lchown(bench.cache(), Some(65_534), None).unwrap();
    assert_eq!(bench.capitals_in(&[bench.cache(), user]), b"ABC");
    // The owner of the data could change the data, too.
    let (bench, copy, _) = planted();
    let entry = copy.parent().unwrap();
    let parts = [
        &*bench.cache(),
        &*bench.source(),
        entry,
        &*copy,
        &*entry.join(ENTRY),
    ];
    parts.iter().for_each(|path| another(path).unwrap());
    assert_eq!(bench.capitals_in(&[bench.cache()]), b"XYZ");
}

#[test]
fn a_planted_note_about_a_source_is_not_believed() {
    let bench = Bench::new("abc");
    bench.set_modified(SystemTime::now() - Duration::from_secs(3600));
    settle();
    let (source, access) = (bench.source(), Access::of(&bench.source()).unwrap());
    let wanted = WantedCopy {
        source: &source,
        request: "capitals",
    };
    bench.capitals("capitals");
    let seen = bench.cache().join(wanted.seen_name());
    let finds = || {
        let identity = identity_of(&source).unwrap();
        Note::find(&[bench.cache()], &wanted.seen_name(), &identity, access).is_some()
    };
    assert!(finds());
    for path in [&seen, &bench.cache()] {
        let mode = mode_of(path);
        set_mode(path, 0o777);
        assert!(!finds(), "{}", path.display());
        set_mode(path, mode);
    }
    assert!(finds());
}

#[test]
fn a_folder_that_others_may_write_to_is_not_used_and_the_next_one_is() {
    for mode in [0o775, 0o757, 0o1777] {
        let (bench, _, user) = planted();
        set_mode(&bench.cache(), mode);
        let folders = [bench.cache(), user.clone()];
        assert_eq!(bench.capitals_in(&folders), b"ABC", "{mode:o}");
        assert_eq!(mode_of(&user), 0o700);
        let error = find_or_make(
            &[bench.cache()],
            &WantedCopy {
                source: &bench.source(),
                request: "capitals",
            },
            |_| Ok(()),
        );
        let text = error.unwrap_err().to_string();
        assert!(text.contains("chmod go-w"), "{text}");
    }
    let (bench, copy, _) = planted();
    set_mode(copy.parent().unwrap(), 0o775);
    assert_eq!(bench.capitals_in(&[bench.cache()]), b"ABC", "an entry");
}

/// Who may rename what is in the data's folder could put a link to this user's files there.
#[test]
fn no_copy_is_made_where_another_user_could_swap_it() {
    let (bench, home) = (Bench::new("abc"), Scratch::new());
    let folders = [bench.cache(), home.path().join("copies")];
    for (mode, owner, used) in [
        (0o777, None, 1),
        (0o775, None, 1),
        (0o755, Some(65_534), 1),
        (0o1777, None, 0),
        (0o755, None, 0),
    ] {
        let above = bench.scratch.path();
        set_mode(above, mode);
        if std::os::unix::fs::chown(above, owner.or(Some(0)), None).is_err() && owner.is_some() {
            ddp_testing::skip("only root can give files to another user");
            continue;
        }
        bench.write(&format!("{mode} {owner:?}"));
        bench.capitals_in(&folders);
        let is_there = folders.each_ref().map(|folder| folder.is_dir());
        assert_eq!(is_there, [used == 0, true], "{mode:o} {owner:?}");
    }
}

#[test]
fn a_copy_may_be_read_by_all_if_the_source_may() {
    for (source, folder, file) in [
        (0o600, 0o700, 0o600),
        (0o400, 0o700, 0o600),
        (0o640, 0o700, 0o600),
        (0o666, 0o755, 0o644),
    ] {
        let bench = Bench::new("abc");
        set_mode(&bench.source(), source);
        let copy = bench.capitals("capitals");
        let entry = copy.parent().unwrap();
        let modes = [&copy, &entry.join(ENTRY)].map(|path| mode_of(path));
        assert_eq!(modes, [file; 2], "{source:o}");
        assert_eq!([entry, &bench.cache()].map(mode_of), [folder; 2]);
    }
    // What was made is found again, whatever this process leaves out of the modes of its files.
    let bench = Bench::new("abc");
    set_mode(&bench.source(), 0o664);
    bench.capitals("capitals");
    bench.capitals("capitals");
    assert_eq!(bench.times_made(), 1);
}
