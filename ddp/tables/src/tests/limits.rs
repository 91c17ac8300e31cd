//! Memory that does not grow with a table, and disks that are full. Each test runs in a separate
//! process: this program again, with that test alone.

use std::fs;
use std::io::{BufWriter, Write};
use std::process::{Command, Output};

use super::*;
use ddp_kernels::files::testing::Scratch;

const FOLDER: &str = "DDP_TEST_TABLE_FOLDER";

/// Runs the test `name` of this file again, after `limit` of the shell, with a folder; within,
/// gives that folder.
fn within(name: &str, limit: &str, folder: &Path) -> Output {
    let program = std::env::current_exe().expect("a test is a program");
    let test = format!("tests::limits::{name}");
    let mut shell = Command::new("bash");
    shell
        .args(["-c", &format!("{limit}\nexec \"$0\" \"$@\"")])
        .arg(program);
    shell
        .args(["--exact", &test, "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder);
    shell.output().expect("bash is there")
}

/// The folder, in the process that has the limit.
fn folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

#[track_caller]
fn assert_passed(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// A table of this many rows of eight numbers and a text.
fn write_table(path: &Path, rows: u32) {
    let mut out = BufWriter::new(fs::File::create(path).unwrap());
    writeln!(out, "a,b,c,d,e,f,g,h,kind").unwrap();
    for row in 0..rows {
        let x = f64::from(row) / 7.0;
        writeln!(
            out,
            "{row},{x:.6},{x:.3},-{x:.2},1e-3,0.5,12345.678,7,class {}",
            row % 10
        )
        .unwrap();
    }
    out.flush().unwrap();
}

/// The most memory that this process has had.
fn memory_bytes_max() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        << 10
}

#[test]
fn memory_does_not_grow_with_the_table() {
    let Some(folder) = folder() else {
        let scratch = Scratch::new();
        write_table(&scratch.path().join("table.csv"), 1_000_000);
        return assert_passed(&within(
            "memory_does_not_grow_with_the_table",
            "",
            scratch.path(),
        ));
    };
    let path = folder.join("table.csv");
    let bytes = fs::metadata(&path).unwrap().len();
    assert!(bytes > 50 << 20, "{bytes}");
    let request = TableRequest {
        label: Some("kind".into()),
        features: others(&path, Some("kind")).unwrap(),
        ..Default::default()
    };
    // The pages of this program's own code count too: a small table brings them in first.
    let small = folder.join("small.csv");
    write_table(&small, 1000);
    open(&small, &request).unwrap();
    // Resets the peak.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory_bytes_max();
    let contents = open(&path, &request).unwrap();
    assert_eq!(contents.arrays[0].rows(), 1_000_000);
    let grown = memory_bytes_max() - before;
    assert!(
        grown < 8 << 20,
        "a table of {bytes} bytes took {grown} of memory"
    );
}

/// Files may have this many blocks, of 512 bytes or 1024, as the shell likes. Ignored, the signal
/// becomes an error of the write.
const DISK: &str = "trap '' XFSZ\nulimit -f 1000";

#[track_caller]
fn assert_full<T>(converted: Result<T>, cache: &Path) {
    let Err(error) = converted else {
        panic!("there was room")
    };
    assert_eq!(error.exit_code(), 74, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("cannot write") && text.contains("(ulimit -f)"),
        "{text}"
    );
    assert_eq!(fs::read_dir(cache).unwrap().count(), 0, "{text}");
}

#[test]
fn a_disk_that_is_full_leaves_nothing() {
    let Some(folder) = folder() else {
        let scratch = Scratch::new();
        write_table(&scratch.path().join("features.csv"), 100_000);
        // Of labels there is more than of features.
        let labels: String = (0..150_000).map(|row| format!("{row}\n")).collect();
        fs::write(
            scratch.path().join("labels.csv"),
            "y\n".to_string() + &labels,
        )
        .unwrap();
        let array = [
            &[0, 0, 8, 1][..],
            &(2u32 << 20).to_be_bytes(),
            &vec![7; 2 << 20],
        ]
        .concat();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(&array).unwrap();
        fs::write(scratch.path().join("array.gz"), packed.finish().unwrap()).unwrap();
        return assert_passed(&within(
            "a_disk_that_is_full_leaves_nothing",
            DISK,
            scratch.path(),
        ));
    };
    let (cache, path) = (folder.join(".ddp-cache"), folder.join("features.csv"));
    let request = TableRequest {
        label: Some("kind".into()),
        features: others(&path, Some("kind")).unwrap(),
        ..Default::default()
    };
    assert_full(open(&path, &request), &cache);
    let request = TableRequest {
        label: Some("y".into()),
        features: Vec::new(),
        ..Default::default()
    };
    assert_full(open(&folder.join("labels.csv"), &request), &cache);
    assert_full(
        ddp_data::files::open(&folder.join("array.gz"), None),
        &cache,
    );
}
