//! What tests of several crates share: which cases of a property run, which tests are skipped,
//! damaged files, and programs.
//!
//! A property of many cases (each wait removed in turn, each byte flipped, 1000 seeds) runs a few
//! of them, always the same. `launch/search` tries the others: `DDP_CASES` has a seed that draws
//! as many, `N..M` selects those from N to before M, `all` runs every case.
//!
//! ```
//! for seed in ddp_testing::cases("seeds of my check", 1000, 5) {
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

/// Whether every case of every property runs.
pub fn all_cases() -> bool {
    env::var("DDP_CASES").is_ok_and(|cases| cases == "all")
}

/// The numbers, below `count`, of the cases to run: about `wanted` of them, evenly spaced, unless
/// `DDP_CASES` says otherwise. `check` names the property, so that each one has its own.
pub fn cases(check: &str, count: usize, wanted: usize) -> Vec<usize> {
    select(drawn().as_deref(), check, count, wanted, 0)
}

fn drawn() -> Option<String> {
    env::var("DDP_CASES").ok()
}

/// The cases to run, about `wanted` of them: see [`cases`]. If two kinds alternate, both occur
/// among several.
pub fn cases_of<T>(check: &str, all: impl IntoIterator<Item = T>, wanted: usize) -> Vec<T> {
    let all: Vec<T> = all.into_iter().collect();
    let chosen = select(drawn().as_deref(), check, all.len(), wanted, 1);
    let numbered = all.into_iter().enumerate();
    let kept = numbered.filter(|(number, _)| chosen.binary_search(number).is_ok());
    kept.map(|(_, case)| case).collect()
}

/// One of each `apart` cases in a row; if `apart` is even, each time the one that is `further` on.
fn select(
    drawn: Option<&str>,
    check: &str,
    count: usize,
    wanted: usize,
    further: usize,
) -> Vec<usize> {
    if let Some((first, end)) = drawn.and_then(|drawn| drawn.split_once("..")) {
        let [first, end] = [first, end].map(|number| number.parse().expect("a number of a case"));
        return (first..count.min(end)).collect();
    }
    if drawn == Some("all") || wanted >= count {
        return (0..count).collect();
    }
    assert!(wanted > 0, "{check}: at least one case is wanted");
    let apart = count.div_ceil(wanted);
    let first = (hash(&[drawn.unwrap_or(""), "/", check]) % apart as u64) as usize;
    let further = if apart.is_multiple_of(2) { further } else { 0 };
    let starts = (0..count).step_by(apart).enumerate();
    let chosen = starts.map(|(turn, start)| start + (first + turn * further) % apart);
    chosen.filter(|case| *case < count).collect()
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

    fn select(drawn: Option<&str>, check: &str, count: usize, wanted: usize) -> Vec<usize> {
        super::select(drawn, check, count, wanted, 0)
    }

    #[test]
    fn without_a_seed_the_same_cases_run_each_time() {
        // Pinned: on every machine, and until the function changes.
        assert_eq!(select(None, "seeds", 9, 2), [2, 7]);
        assert_eq!(select(None, "seeds", 3, 5), [0, 1, 2]);
        assert!(select(None, "seeds", 0, 5).is_empty());
    }

    #[test]
    fn seeds_together_run_every_case() {
        let drawn = |seed: u64| select(Some(&seed.to_string()), "seeds", 103, 5);
        let seen: BTreeSet<usize> = (0..400).flat_map(drawn).collect();
        assert_eq!(seen.len(), 103);
    }

    #[test]
    fn properties_have_different_cases_of_one_seed() {
        let drawn = |check: u64| select(Some("7"), &check.to_string(), 1000, 5);
        let chosen: BTreeSet<Vec<usize>> = (0..20).map(drawn).collect();
        assert!(chosen.len() > 15, "{}", chosen.len());
    }

    #[test]
    fn all_cases_or_a_range_run() {
        assert_eq!(select(Some("all"), "seeds", 7, 2), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(select(Some("3..5"), "seeds", 7, 2), [3, 4]);
        assert_eq!(select(Some("5..99"), "seeds", 7, 2), [5, 6]);
    }

    #[test]
    fn of_two_alternating_kinds_both_occur() {
        for (count, wanted) in (1..25).flat_map(|pairs| (2..10).map(move |it| (2 * pairs, it))) {
            for check in ["this", "that", "another", "one", "more"] {
                let chosen = super::select(None, check, count, wanted, 1);
                let is_mixed = chosen.iter().any(|it| it % 2 != chosen[0] % 2);
                assert!(is_mixed || chosen.len() == 1, "{chosen:?} of {count}");
            }
        }
    }

    #[test]
    fn there_is_a_case_and_never_more_than_wanted() {
        for count in 1..50 {
            for wanted in 1..10 {
                let chosen = select(Some("74"), "sizes", count, wanted);
                assert!(!chosen.is_empty() && chosen.len() <= wanted.min(count));
            }
        }
    }
}
