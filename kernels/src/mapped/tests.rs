use std::io::Write;
use std::process::Command;
use std::sync::atomic::AtomicU32;

use super::*;

/// A folder for one test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ddp-mapped-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn counting(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index % 251) as u8 + 1).collect()
}

#[test]
fn what_is_read_is_what_the_file_holds() {
    let scratch = Scratch::new();
    let bytes = counting(10_000);
    let mapped = Mapped::open(&scratch.file("a", &bytes)).unwrap();
    assert_eq!((mapped.len(), mapped.is_empty()), (10_000, false));
    for (offset, length) in [
        (0, 10_000),
        (1, 1),
        (4095, 2),
        (9_999, 1),
        (10_000, 0),
        (17, 8_191),
    ] {
        let mut into = vec![0; length];
        mapped.read(offset as u64, &mut into).unwrap();
        assert_eq!(into, bytes[offset..offset + length]);
    }
    let mut numbers = [0.0_f32; 3];
    mapped.read_elements(5, &mut numbers).unwrap();
    let expected: Vec<f32> = bytes[5..17]
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_ne_bytes(*bytes))
        .collect();
    assert_eq!(
        numbers.map(f32::to_bits).to_vec(),
        expected.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    );
}

#[test]
fn bytes_beyond_the_end_are_an_error_that_names_them() {
    let scratch = Scratch::new();
    let mapped = Mapped::open(&scratch.file("a", &counting(100))).unwrap();
    for (offset, length) in [
        (100, 1),
        (0, 101),
        (u64::MAX, 1),
        (u64::MAX, 2),
        (1 << 40, 0),
    ] {
        let error = mapped.read(offset, &mut vec![0; length]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert!(
            error.to_string().contains(&format!("bytes {offset} to")),
            "{error}"
        );
    }
    let empty = Mapped::open(&scratch.file("b", b"")).unwrap();
    assert!(empty.is_empty() && empty.read(0, &mut []).is_ok() && empty.read(0, &mut [0]).is_err());
    assert_eq!(empty.change().unwrap(), None);
}

#[test]
fn a_file_cut_short_while_it_is_mapped_is_an_error_and_stays_one() {
    let scratch = Scratch::new();
    let path = scratch.file("a", &counting(64 << 10));
    let (mapped, other) = (
        Mapped::open(&path).unwrap(),
        Mapped::open(&scratch.file("b", &counting(64 << 10))).unwrap(),
    );
    let mut into = vec![0; 4096];
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(8192)
        .unwrap();
    mapped
        .read(0, &mut into)
        .expect("these pages are still there");
    let error = mapped.read(32 << 10, &mut into).unwrap_err();
    assert!(error.to_string().contains("cut short"), "{error}");
    // Also where bytes are: what a run has read of such a file is of no use.
    assert!(mapped.read(0, &mut into).is_err());
    other
        .read(60 << 10, &mut into)
        .expect("the other file is whole");
    assert_eq!(into, counting(64 << 10)[60 << 10..]);
    drop(mapped);
    // A new mapping has a mark of its own.
    let again = Mapped::open(&path).unwrap();
    again.read(0, &mut into).unwrap();
}

#[test]
fn many_threads_meet_the_cut_and_each_is_told() {
    let scratch = Scratch::new();
    let path = scratch.file("a", &counting(1 << 20));
    let mapped = Mapped::open(&path).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(0)
        .unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let mapped = &mapped;
            scope.spawn(move || {
                for page in 0..256 {
                    let mut into = [1; 100];
                    mapped
                        .read((page + 32 * thread) % 256 * 4096, &mut into)
                        .unwrap_err();
                }
            });
        }
    });
}

#[test]
fn only_those_of_many_files_that_were_cut_fail() {
    let scratch = Scratch::new();
    for round in 0..2 {
        let paths: Vec<_> = (0..200)
            .map(|file| scratch.file(&format!("{round}-{file}"), &counting(5000)))
            .collect();
        let files: Vec<_> = paths
            .iter()
            .map(|path| Mapped::open(path).unwrap())
            .collect();
        for path in paths.iter().step_by(3) {
            File::options()
                .write(true)
                .open(path)
                .unwrap()
                .set_len(0)
                .unwrap();
        }
        for (index, file) in files.iter().enumerate() {
            assert_eq!(
                file.read(0, &mut [0; 5000]).is_err(),
                index % 3 == 0,
                "{index}"
            );
        }
    }
}

#[test]
fn each_kind_of_change_is_told() {
    let scratch = Scratch::new();
    let path = scratch.file("a", &counting(5000));
    // Times of some file systems advance in steps: it was written long ago.
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    let mut file = File::options().write(true).open(&path).unwrap();
    file.set_modified(long_ago).unwrap();
    let mapped = Mapped::open(&path).unwrap();
    assert_eq!(mapped.change().unwrap(), None);
    fs::hard_link(&path, scratch.0.join("backup")).unwrap();
    assert_eq!(
        mapped.change().unwrap(),
        None,
        "another name is not a change"
    );
    file.write_all(b"x").unwrap();
    assert_eq!(mapped.change().unwrap().unwrap(), "was written to");
    file.set_len(6000).unwrap();
    assert_eq!(
        mapped.change().unwrap().unwrap(),
        "had 5000 bytes and has 6000 now"
    );
    fs::rename(scratch.file("b", b"other"), &path).unwrap();
    assert_eq!(
        mapped.change().unwrap().unwrap(),
        "was replaced by another file"
    );
    fs::remove_file(&path).unwrap();
    assert_eq!(mapped.change().unwrap().unwrap(), "was removed");
    let mut into = [0; 2];
    mapped.read(0, &mut into).unwrap();
    assert_eq!(
        into,
        [b'x', 2],
        "the mapping still has the bytes of the file that is gone"
    );
}

#[test]
fn what_is_not_an_ordinary_file_is_refused_at_once() {
    let scratch = Scratch::new();
    let fifo = scratch.0.join("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    for (path, what) in [
        (fifo.as_path(), "a pipe"),
        (&scratch.0, "a directory"),
        (Path::new("/dev/null"), "a device"),
    ] {
        let error = Mapped::open(path).unwrap_err().to_string();
        assert!(
            error.contains(what) && error.contains("expected an ordinary file"),
            "{error}"
        );
    }
    assert_eq!(
        Mapped::open(&scratch.0.join("none")).unwrap_err().kind(),
        ErrorKind::NotFound
    );
}

#[test]
fn a_file_system_says_what_is_free() {
    assert!(free_bytes(&std::env::temp_dir()).unwrap() > 0);
    assert_eq!(free_bytes(Path::new("/proc")).unwrap(), 0);
    assert!(free_bytes(Path::new("/nonexistent/folder")).is_err());
}

/// Runs the ignored test `name` in a separate process, which a signal must end.
fn signal_of_child(name: &str) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    let test = format!("mapped::tests::{name}");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &test, "--ignored"])
        .output()
        .unwrap();
    child.status.signal()
}

#[test]
fn a_bus_error_elsewhere_ends_the_process_as_before() {
    assert_eq!(
        signal_of_child("child_touches_a_mapping_of_its_own"),
        Some(libc::SIGBUS)
    );
    assert_eq!(
        signal_of_child("child_is_sent_the_signal"),
        Some(libc::SIGBUS)
    );
}

#[test]
#[ignore = "ends its process: run by a_bus_error_elsewhere_ends_the_process_as_before"]
fn child_touches_a_mapping_of_its_own() {
    let scratch = Scratch::new();
    let path = scratch.file("a", &counting(64 << 10));
    let _watched = Mapped::open(&path).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // SAFETY: a new mapping of a file, and a read of its first byte, which is the point: it is not
    // there any more.
    unsafe {
        let start = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(start, libc::MAP_FAILED);
        file.set_len(0).unwrap();
        let _ = fs::remove_dir_all(&scratch.0);
        std::hint::black_box(start.cast::<u8>().read_volatile());
    }
}

#[test]
#[ignore = "ends its process: run by a_bus_error_elsewhere_ends_the_process_as_before"]
fn child_is_sent_the_signal() {
    let scratch = Scratch::new();
    let _watched = Mapped::open(&scratch.file("a", &counting(100))).unwrap();
    let _ = fs::remove_dir_all(&scratch.0);
    // SAFETY: sends this process a signal, which ends it: that is the point. The first goes to
    // Rust's own handler, which looks for an overflow of the stack and, since there is none, only
    // puts the default back.
    unsafe {
        libc::raise(libc::SIGBUS);
        libc::raise(libc::SIGBUS);
    }
}
