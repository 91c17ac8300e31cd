//! Counts lines: code without blanks, comments and tests; and comments that are too long.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The widest a line with a comment may be, in characters.
const COMMENT_COLUMNS_MAX: usize = 100;

/// What one line of a source file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    /// The line without comments, and without what is inside its strings.
    pub(crate) code: String,
    /// What is inside its strings, each after a space.
    pub(crate) text: String,
    pub(crate) comment: bool,
    pub(crate) columns: usize,
}

/// Where the lexer is at the end of a line.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Code,
    /// In `/* … */`, so deep.
    Comment(usize),
    /// In a string that ends with `"` and this many `#`; `None` where `\` escapes.
    Text(Option<usize>),
}

/// Splits the text of a Rust or CUDA file into code and comments.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let mut state = State::Code;
    text.lines().map(|line| read(line, &mut state)).collect()
}

fn read(line: &str, state: &mut State) -> Line {
    let characters: Vec<char> = line.chars().collect();
    let mut found = Line {
        columns: characters.len(),
        ..Line::default()
    };
    let mut at = 0;
    while at < characters.len() {
        let rest = &characters[at..];
        match *state {
            State::Comment(depth) => {
                found.comment = true;
                (at, *state) = match rest {
                    ['*', '/', ..] if depth == 1 => (at + 2, State::Code),
                    ['*', '/', ..] => (at + 2, State::Comment(depth - 1)),
                    ['/', '*', ..] => (at + 2, State::Comment(depth + 1)),
                    _ => (at + 1, *state),
                };
            }
            State::Text(None) => {
                (at, *state) = match rest {
                    ['\\', ..] => (at + 2, *state),
                    ['"', ..] => (at + 1, State::Code),
                    _ => (at + 1, *state),
                };
                found.code.push('"');
                found.text.push(rest[0]);
            }
            State::Text(Some(marks)) => {
                let ends =
                    rest[0] == '"' && rest[1..].iter().take_while(|&&c| c == '#').count() >= marks;
                (at, *state) = if ends {
                    (at + 1 + marks, State::Code)
                } else {
                    (at + 1, *state)
                };
                found.code.push('"');
                found.text.push(rest[0]);
            }
            State::Code => at += read_code(rest, found.code.chars().last(), &mut found, state),
        }
    }
    found
}

/// Reads one piece of code at the start of `rest`; how many characters it has.
fn read_code(rest: &[char], before: Option<char>, found: &mut Line, state: &mut State) -> usize {
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    match rest {
        ['/', '/', ..] => {
            found.comment = true;
            return rest.len();
        }
        ['/', '*', ..] => {
            found.comment = true;
            *state = State::Comment(1);
            return 2;
        }
        ['r', tail @ ..] if !in_word || before == Some('b') => {
            let marks = tail.iter().take_while(|&&c| c == '#').count();
            if tail.get(marks) == Some(&'"') {
                *state = State::Text(Some(marks));
                found.code.push('"');
                found.text.push(' ');
                return marks + 2;
            }
        }
        ['"', ..] => {
            *state = State::Text(None);
            found.code.push('"');
            found.text.push(' ');
            return 1;
        }
        // A character such as '"'; a lifetime has no second quote there.
        ['\'', '\\', _, tail @ ..] => {
            let end = tail
                .iter()
                .position(|&c| c == '\'')
                .map_or(0, |end| end + 1);
            found.code.push('\'');
            return 3 + end;
        }
        ['\'', _, '\'', ..] => {
            found.code.push('\'');
            return 3;
        }
        _ => {}
    }
    found.code.push(rest[0]);
    1
}

/// How many lines have code, outside `#[cfg(test)]` modules at the top of a file.
pub(crate) fn code_lines(text: &str) -> usize {
    product_lines(text).len()
}

/// The lines that have code, outside `#[cfg(test)]` modules at the top of a file, with their
/// numbers.
pub(crate) fn product_lines(text: &str) -> Vec<(Line, usize)> {
    let (mut found, mut in_tests, mut after_cfg_test) = (Vec::new(), false, false);
    for (line, number) in lines(text).into_iter().zip(1..) {
        let code = line.code.trim();
        if in_tests {
            in_tests = !line.code.starts_with('}');
        } else if line.code.starts_with("#[cfg(test)]") {
            after_cfg_test = true;
        } else if !code.is_empty() {
            let is_module =
                line.code.starts_with("mod ") || line.code.starts_with("pub(crate) mod ");
            if after_cfg_test && is_module {
                in_tests = code.ends_with('{');
            } else {
                found.push((line, number));
            }
            after_cfg_test = false;
        }
    }
    found
}

/// The lines with comments that are too long, of one file's text.
pub(crate) fn long_comments(text: &str) -> Vec<usize> {
    let numbered = lines(text).into_iter().zip(1..);
    let long = numbered.filter(|(line, _)| line.comment && line.columns > COMMENT_COLUMNS_MAX);
    long.map(|(_, number)| number).collect()
}

/// All source files under `folder` with one of these endings, sorted; without what is built.
pub(crate) fn sources(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_path_buf()];
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    waiting.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|e| endings.iter().any(|ending| e == *ending))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Whether a file of a crate's `src/` is for tests alone.
pub(crate) fn is_test(path: &Path) -> bool {
    path.iter()
        .any(|part| part == "tests" || part == "tests.rs")
}

/// Code lines of each crate's product: everything under its `src/` but tests.
pub(crate) fn by_crate(folders: &[(String, PathBuf)]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for (name, folder) in folders {
        let mut count = 0;
        for path in sources(
            &folder.join("src"),
            &["rs", "cu", "cuh", "js", "css", "html"],
        ) {
            if !is_test(&path) {
                count += fs::read_to_string(&path).map_or(0, |text| code_lines(&text));
            }
        }
        counts.insert(name.clone(), count);
    }
    counts
}
