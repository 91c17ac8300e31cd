//! Selects the part of an exhaustive check that runs, reports tests that are skipped, and writes
//! programs for tests.
//!
//! Checks with many independent cases (each wait removed in turn, each byte flipped, 1000 seeds)
//! run a slice of them. `DDP_TEST_SLICE` selects it: `launch/test` sets it to the number of the
//! commit, so that a commit always runs the same slice and the next commit the next one. Where the
//! history is missing, the hash of the commit selects at random. `DDP_TEST_SLICE=all` runs every
//! case, as `launch/test --long` does; `cases:30..31` runs case 30, to repeat a failure. Unset, a
//! fixed slice runs.
//!
//! ```
//! for seed in ddp_slice::of("seeds of my check", 1000, 5) {
//!     assert!(seed < 1000);
//! }
//! ```

use std::env;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Writes an executable file, in another process. If this process wrote it, a child that another
/// test starts at that moment would inherit the open file, and running it would fail with ETXTBSY.
pub fn write_executable(path: &Path, bytes: &[u8]) {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", r#"cat >"$0" && chmod 755 "$0""#])
        .arg(path);
    let mut shell = shell.stdin(Stdio::piped()).spawn().expect("sh is there");
    let mut input = shell.stdin.take().expect("it is a pipe");
    input.write_all(bytes).expect("the file can be written");
    drop(input);
    let status = shell.wait().expect("it is a child of this process");
    assert!(status.success(), "cannot write {}", path.display());
}

/// Records that the calling test, or a part of it, is skipped: in the file that `DDP_TEST_SKIPPED`
/// names, from which `launch/test` counts, else on standard error, past the harness, which hides
/// what passing tests print. Fails where `DDP_TEST_ENOUGH_GPUS` says that a test may not lack GPUs.
pub fn skip(why: &str) {
    let lacks_gpus = why.contains("CUDA device");
    let has_enough = env::var_os("DDP_TEST_ENOUGH_GPUS").is_some();
    assert!(!(lacks_gpus && has_enough), "{why}");
    let thread = std::thread::current();
    // A line each: reasons may be errors of several lines.
    let why = why.replace(['\n', '\t'], " ");
    let program: PathBuf = env::current_exe().unwrap_or_default();
    let program = program.file_stem().unwrap_or_default().to_string_lossy();
    let test = thread.name().unwrap_or("(a thread of a test)");
    let listed = env::var_os("DDP_TEST_SKIPPED")
        .and_then(|file| OpenOptions::new().append(true).create(true).open(file).ok());
    // A closed standard error must not make a test fail.
    let _ = match listed {
        Some(mut file) => file.write_all(format!("{program}\t{test}\t{why}\n").as_bytes()),
        None => writeln!(std::io::stderr(), "skipped: {test}: {why}"),
    };
}

/// Whether every case of every check runs.
pub fn is_all() -> bool {
    env::var("DDP_TEST_SLICE").is_ok_and(|slice| slice == "all")
}

/// The numbers, below `cases`, of the cases to run: about `wanted` of them, evenly spaced; all with
/// `DDP_TEST_SLICE=all`. `check` names the check, so that each one has its own slice.
pub fn of(check: &str, cases: usize, wanted: usize) -> Vec<usize> {
    select(
        env::var("DDP_TEST_SLICE").ok().as_deref(),
        check,
        cases,
        wanted,
    )
}

/// The cases to run, about `wanted` of them: see [`of`].
pub fn from<T>(check: &str, cases: impl IntoIterator<Item = T>, wanted: usize) -> Vec<T> {
    let cases: Vec<T> = cases.into_iter().collect();
    let chosen = of(check, cases.len(), wanted);
    let numbered = cases.into_iter().enumerate();
    let kept = numbered.filter(|(number, _)| chosen.binary_search(number).is_ok());
    kept.map(|(_, case)| case).collect()
}

fn select(slice: Option<&str>, check: &str, cases: usize, wanted: usize) -> Vec<usize> {
    if let Some(range) = slice.and_then(|slice| slice.strip_prefix("cases:")) {
        let (first, end) = range.split_once("..").expect("as in cases:3..5");
        let [first, end] = [first, end].map(|number| number.parse().expect("a number of a case"));
        return (first..cases.min(end)).collect();
    }
    if slice == Some("all") || wanted >= cases {
        return (0..cases).collect();
    }
    assert!(wanted > 0, "{check}: a slice has at least one case");
    // Every `parts`-th case: that many different slices cover all cases.
    let parts = cases.div_ceil(wanted);
    let first = match slice.unwrap_or("").parse::<u64>() {
        Ok(commit) => (commit % parts as u64 + hash(&[check]) % parts as u64) % parts as u64,
        Err(_) => hash(&[slice.unwrap_or(""), "/", check]) % parts as u64,
    };
    (first as usize..cases).step_by(parts).collect()
}

/// A damaged copy of a file: some of its bytes changed, left out, repeated, or replaced by what
/// readers stumble over. The same for the same seed.
pub fn mutated(example: &[u8], seed: usize) -> Vec<u8> {
    const PARTS: [&[u8]; 16] = [
        b"null",
        b"-1",
        b"1e999",
        b"18446744073709551616",
        b"0.5",
        b"\"\"",
        b"[]",
        b"{}",
        b"[[[[[[[[",
        b"{\"a\":",
        b"\"\\ud800\"",
        b"\0",
        b"\xff\xfe",
        b"\n",
        b"NaN",
        b"\x1b[2J",
    ];
    let mut bytes = example.to_vec();
    let mut drawn = hash(&["mutated", &seed.to_string()]);
    let mut below = |most: usize| {
        drawn = hash(&[&drawn.to_string()]);
        (drawn % most.max(1) as u64) as usize
    };
    for _ in 0..=below(4) {
        let at = below(bytes.len() + 1);
        let end = (at + below(24)).min(bytes.len());
        let part = bytes[at..end].to_vec();
        match below(5) {
            0 => drop(bytes.splice(at..end, [])),
            1 => drop(bytes.splice(at..at, part)),
            2 => bytes.truncate(at),
            3 if at < bytes.len() => bytes[at] = below(256) as u8,
            _ => drop(bytes.splice(at..end, PARTS[below(PARTS.len())].repeat(1 + below(3)))),
        }
    }
    bytes
}

/// FNV-1a, followed by a mixing step because its low bits are weak.
fn hash(texts: &[&str]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in texts.iter().flat_map(|text| text.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::select;

    #[test]
    fn a_commit_always_selects_the_same_slice() {
        // Pinned: on every machine, and until the function changes.
        let expected = [135, 335, 535, 735, 935];
        assert_eq!(select(Some("74e49c6"), "seeds", 1000, 5), expected);
    }

    #[test]
    fn commits_together_run_every_case() {
        let mut seen = BTreeSet::new();
        for commit in 0..400 {
            seen.extend(select(Some(&format!("{commit:07x}")), "seeds", 103, 5));
        }
        assert_eq!(seen.len(), 103);
    }

    #[test]
    fn commits_in_a_row_run_every_case_once() {
        let commits = 1207..1207 + 21;
        let mut cases: Vec<usize> = commits
            .flat_map(|commit| select(Some(&commit.to_string()), "seeds", 103, 5))
            .collect();
        cases.sort_unstable();
        assert_eq!(cases, Vec::from_iter(0..103));
    }

    #[test]
    fn checks_have_different_slices_of_one_commit() {
        let slices: BTreeSet<Vec<usize>> = (0..20)
            .map(|check| select(Some("74e49c6"), &check.to_string(), 1000, 5))
            .collect();
        assert!(slices.len() > 15, "{}", slices.len());
    }

    #[test]
    fn all_runs_everything_and_unset_a_fixed_slice() {
        assert_eq!(select(Some("all"), "seeds", 7, 2), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(select(None, "seeds", 3, 5), [0, 1, 2]);
        assert_eq!(select(None, "seeds", 9, 2), [2, 7]);
        assert!(select(None, "seeds", 0, 5).is_empty());
    }

    #[test]
    fn a_slice_is_never_empty_and_never_more_than_wanted() {
        for cases in 1..50 {
            for wanted in 1..10 {
                let chosen = select(Some("74e49c6"), "sizes", cases, wanted);
                assert!(!chosen.is_empty() && chosen.len() <= wanted.min(cases));
            }
        }
    }
}
