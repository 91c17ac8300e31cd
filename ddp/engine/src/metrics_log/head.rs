//! The head of a metrics log: the BLAKE3 of its whole lines, each with its newline. Whoever has
//! published it cannot change these lines any more.
//!
//! A resume removes lines. It then writes a line `cut`, which names the number of lines and the
//! head before it, and after that a line `removed` for each of them, with the line as it was. So
//! the log of any earlier moment can be put together again, and a head of that moment checked.

use std::io::{self, BufRead};

use serde::{Deserialize, Serialize};

/// The most cuts of a log that are undone, since each is checked from its first line on, and the
/// most bytes that are read for it.
const CUTS_MAX: usize = 1000;
const CHECKED_BYTES_MAX: usize = 32 << 30;

/// The lines of a log so far.
#[derive(Debug, Default)]
pub struct Head {
    hash: blake3::Hasher,
    /// Their number.
    pub lines: u64,
}

impl Head {
    /// Adds a line, which is without its newline.
    pub fn add(&mut self, line: &[u8]) {
        self.hash.update(line);
        self.hash.update(b"\n");
        self.lines += 1;
    }

    /// 64 hexadecimal digits.
    pub fn text(&self) -> String {
        self.hash.finalize().to_hex().to_string()
    }

    /// The line that says that this many of these lines were removed.
    pub(super) fn cut(&self, removed: usize) -> String {
        let cut = Cut {
            event: CUT.into(),
            lines: self.lines,
            head: self.text(),
            removed,
        };
        serde_json::to_string(&cut).expect("numbers and texts")
    }
}

const CUT: &str = "cut";

/// Follows the lines that a resume has kept.
#[derive(Debug, Serialize, Deserialize)]
struct Cut {
    event: String,
    /// The number of lines before the cut, and their head.
    lines: u64,
    head: String,
    /// How many of them follow, each as a line `removed`.
    removed: usize,
}

/// What a removed line begins with, before and after its number. It ends with a brace.
const REMOVED: [&str; 2] = ["{\"event\":\"removed\",\"line\":", ",\"was\":"];

/// The line that says what line `number`, from 1, was.
pub(super) fn removed_line(number: u64, line: &[u8]) -> Vec<u8> {
    let start = format!("{}{number}{}", REMOVED[0], REMOVED[1]);
    [start.as_bytes(), line, b"}"].concat()
}

/// The place, from 0, and the text of a removed line.
fn removed(line: &[u8]) -> Option<(usize, &[u8])> {
    let rest = line.strip_prefix(REMOVED[0].as_bytes())?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number: usize = str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
    let rest = rest[digits..].strip_prefix(REMOVED[1].as_bytes())?;
    Some((number.checked_sub(1)?, rest.strip_suffix(b"}")?))
}

/// The head of a log's first `most` lines, or of all lines if `most` is None or too large.
/// Half a line does not count.
pub fn head_of(mut log: impl BufRead, most: Option<u64>) -> io::Result<Head> {
    let (mut line, mut head) = (Vec::new(), Head::default());
    while most.is_none_or(|most| head.lines < most) {
        line.clear();
        log.read_until(b'\n', &mut line)?;
        match line.strip_suffix(b"\n") {
            Some(line) => head.add(line),
            None => break,
        }
    }
    Ok(head)
}

/// Where a head was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FoundHead {
    /// It is that of this many lines.
    pub lines: u64,
    /// Of the log as it was before this line, from 1, which says that lines were removed; None for
    /// the log as it is.
    pub before_line: Option<usize>,
    /// So many first lines of the log as it is are among them. The others were written later.
    pub still_there: usize,
}

/// Why a head is not looked for to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadError {
    /// Which line says of the lines before it what is not so.
    Forged(String),
    /// The log is too large, which says nothing of it.
    TooLarge(String),
}

/// Looks for a head among those that the log had at any time.
pub fn find_head(log: &[u8], wanted: Option<&str>) -> Result<Option<FoundHead>, HeadError> {
    find_within(log, wanted, CHECKED_BYTES_MAX)
}

fn find_within(
    log: &[u8],
    wanted: Option<&str>,
    mut bytes_left: usize,
) -> Result<Option<FoundHead>, HeadError> {
    let lines = whole_lines(log).into_iter();
    let mut lines: Vec<Line<'_>> = lines.map(|text| (text, true)).collect();
    let (mut before_line, mut found) = (None, None);
    // All cuts are checked, also where nothing is wanted.
    for _ in 0..=CUTS_MAX {
        let bytes = lines.iter().map(|(text, _)| text.len() + 1).sum();
        bytes_left = bytes_left.checked_sub(bytes).ok_or_else(|| {
            let text = "to undo its cuts, more bytes must be read than expected";
            HeadError::TooLarge(text.into())
        })?;
        if let (Some(wanted), None) = (wanted, found) {
            let mut head = Head::default();
            let place = lines.iter().position(|(line, _)| {
                head.add(line);
                head.text() == wanted
            });
            found = place.map(|last| FoundHead {
                lines: head.lines,
                before_line,
                still_there: lines[..=last].iter().filter(|line| line.1).count(),
            });
        }
        match before_cut(&lines).map_err(HeadError::Forged)? {
            Some((line, before)) => (lines, before_line) = (before, Some(line)),
            None => return Ok(found),
        }
    }
    let text = format!("it was cut more than {CUTS_MAX} times");
    Err(HeadError::TooLarge(text))
}

/// The lines that end in a newline, without it.
fn whole_lines(log: &[u8]) -> Vec<&[u8]> {
    let lines = log.split_inclusive(|byte| *byte == b'\n');
    lines.filter_map(|line| line.strip_suffix(b"\n")).collect()
}

/// A line, and whether the log still has it in its place.
type Line<'a> = (&'a [u8], bool);

/// The lines of a log before a cut, and the number of its line.
type BeforeCut<'a> = (usize, Vec<Line<'a>>);

/// Undoes the last cut among these lines, if there is one.
fn before_cut<'a>(lines: &[Line<'a>]) -> Result<Option<BeforeCut<'a>>, String> {
    let start = format!("{{\"event\":\"{CUT}\",");
    let is_cut = |line: &Line<'_>| line.0.starts_with(start.as_bytes());
    let Some(at) = lines.iter().rposition(is_cut) else {
        return Ok(None);
    };
    let wrong = |what: &str| format!("line {} says that lines were removed, but {what}", at + 1);
    let cut: Cut =
        serde_json::from_slice(lines[at].0).map_err(|error| wrong(&error.to_string()))?;
    let after = lines[at + 1..].iter().take(cut.removed);
    let all: Option<Vec<_>> = after.map(|line| removed(line.0)).collect();
    let all = all.filter(|all| all.len() == cut.removed);
    let all = all.ok_or_else(|| wrong("they do not follow it"))?;
    let (mut before, mut kept) = (Vec::new(), lines[..at].iter());
    // Else this could be the log of another run, with that of this one as what was removed.
    if all.first().is_none_or(|first| first.0 == 0) {
        return Err(wrong("the first line, with the settings, never is"));
    }
    for (place, line) in all {
        let count = place.checked_sub(before.len());
        let count = count.filter(|count| *count <= kept.len());
        let count = count.ok_or_else(|| wrong("not from places that the log had"))?;
        before.extend(kept.by_ref().take(count));
        before.push((line, false));
    }
    before.extend(kept);
    let mut head = Head::default();
    before.iter().for_each(|line| head.add(line.0));
    if head.lines != cut.lines || head.text() != cut.head {
        return Err(wrong("with them the log has another head than it names"));
    }
    Ok(Some((at + 1, before)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: [&str; 4] = [
        "{\"event\":\"start\"}",
        "{\"a\":1}",
        "{\"b\":2}",
        "{\"c\":3}",
    ];

    fn log(lines: &[&str]) -> Vec<u8> {
        lines
            .iter()
            .flat_map(|line| [line, "\n"].concat().into_bytes())
            .collect()
    }

    /// The log after a resume that keeps these lines of `lines`, and a later line.
    fn cut(lines: &[u8], kept: &[usize]) -> Vec<u8> {
        let all = whole_lines(lines);
        let removed = (0..all.len()).filter(|at| kept.binary_search(at).is_err());
        let removed: Vec<_> = removed
            .map(|at| removed_line(at as u64 + 1, all[at]))
            .collect();
        let head = head_of(lines, None).unwrap();
        let kept = kept.iter().map(|at| all[*at].to_vec());
        let cut = std::iter::once(head.cut(removed.len()).into_bytes());
        let after = std::iter::once(b"{\"after\":1}".to_vec());
        let all = kept.chain(cut).chain(removed).chain(after);
        all.flat_map(|line| [&line[..], b"\n"].concat()).collect()
    }

    #[test]
    fn a_head_of_any_moment_is_found_also_after_two_cuts() {
        let first = log(&LINES);
        let second = cut(&first, &[0, 2]);
        let third = cut(&second, &[0, 1, 2, 3, 4]);
        for (was, before_line) in [(&first, Some(3)), (&second, Some(6)), (&third, None)] {
            let count = whole_lines(was).len() as u64;
            for lines in 1..=count {
                let head = head_of(&was[..], Some(lines)).unwrap().text();
                assert_eq!(head, blake3::hash(&prefix(was, lines)).to_hex().as_str());
                let found = find_head(&third, Some(&head)).unwrap().unwrap();
                assert_eq!(found.lines, lines);
                // The first lines of several logs are the same.
                assert!(found.before_line >= before_line || found.before_line.is_none());
            }
            assert_eq!(head_of(&was[..], Some(count + 1)).unwrap().lines, count);
        }
        let other = head_of(&b"{}\n"[..], None).unwrap().text();
        assert_eq!(find_head(&third, Some(&other)), Ok(None));
        // Half a line does not count.
        let torn = [&first[..], b"{\"d\""].concat();
        assert_eq!(head_of(&torn[..], None).unwrap().lines, 4);
    }

    fn prefix(log: &[u8], lines: u64) -> Vec<u8> {
        log.split_inclusive(|byte| *byte == b'\n')
            .take(lines as usize)
            .flatten()
            .copied()
            .collect()
    }

    /// A cut that names a published head does not make it that of other lines.
    #[test]
    fn whatever_changes_in_or_before_a_cut_is_an_error() {
        let cut = cut(&log(&LINES), &[0, 2]);
        let wanted = head_of(&log(&LINES)[..], None).unwrap().text();
        assert!(find_head(&cut, Some(&wanted)).unwrap().is_some());
        let text = String::from_utf8(cut).unwrap();
        for (from, to) in [
            ("{\"b\":2}", "{\"b\":3}"),
            ("{\"a\":1}}", "{\"a\":2}}"),
            ("\"line\":2", "\"line\":3"),
            ("\"line\":2", "\"line\":0"),
            ("\"line\":2", "\"line\":18446744073709551615"),
            ("\"removed\":2", "\"removed\":1"),
            ("\"removed\":2", "\"removed\":18446744073709551615"),
            ("\"lines\":4", "\"lines\":5"),
            ("\"was\":", "\"is\":"),
            ("\"head\":\"", "\"head\":\"0"),
        ] {
            assert!(text.contains(from), "{from}");
            let changed = text.replacen(from, to, 1).into_bytes();
            let error = find_head(&changed, Some(&wanted)).expect_err(to);
            assert!(matches!(error, HeadError::Forged(_)), "{error:?}");
        }
    }

    #[test]
    fn a_log_of_another_run_that_names_all_lines_of_this_one_as_removed_is_forged() {
        let first = log(&LINES);
        let wanted = head_of(&first[..], None).unwrap().text();
        for kept in [&[][..], &[1, 2, 3], &[3]] {
            let error = find_head(&cut(&first, kept), Some(&wanted)).unwrap_err();
            let HeadError::Forged(why) = error else {
                panic!("{error:?}")
            };
            assert!(
                why.contains("the first line, with the settings, never is"),
                "{why}"
            );
        }
        // Which lines were written after the head.
        let found = |log: &[u8]| find_head(log, Some(&wanted)).unwrap().unwrap().still_there;
        assert_eq!([found(&first), found(&cut(&first, &[0, 2]))], [4, 2]);
    }

    #[test]
    fn as_many_cuts_as_are_undone_are_no_forgery_and_more_are_too_large() {
        let (mut whole, mut cuts) = (log(&LINES), 0);
        let mut cut_again = |times: usize| {
            while cuts < times {
                // The last line is removed each time.
                let last = whole_lines(&whole).len() - 1;
                whole = cut(&whole, &(0..last).collect::<Vec<_>>());
                cuts += 1;
            }
            whole.clone()
        };
        let few = cut_again(3);
        assert_eq!(find_within(&few, None, 3 * few.len()), Ok(None));
        let error = find_within(&few, None, 2 * few.len()).unwrap_err();
        assert!(matches!(error, HeadError::TooLarge(_)), "{error:?}");
        assert_eq!(find_head(&cut_again(CUTS_MAX), None), Ok(None));
        let error = find_head(&cut_again(CUTS_MAX + 1), None).unwrap_err();
        assert!(matches!(error, HeadError::TooLarge(_)), "{error:?}");
    }
}
