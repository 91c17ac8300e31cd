//! Tests whose verdict could depend on the load of the machine: sleeps, and short time limits.

use std::path::{Path, PathBuf};

use crate::lines::{is_test, lines, product_lines};

/// A sleep for which the line before gives a reason begins like this.
const REASON: &str = "// Sleep: ";
/// A limit on how long something took is the end of patience, and no measure.
const PATIENCE_S: f64 = 60.0;

/// What a test file has that depends on time, each with its line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    /// Sleeps without a reason.
    pub(crate) sleeps: Vec<usize>,
    /// Limits on an elapsed time that are shorter than patience.
    pub(crate) limits: Vec<usize>,
}

/// Those in a file's text, of which the product's lines do not count.
pub(crate) fn of(path: &Path, text: &str) -> Waits {
    // The simulator is a program below tests/.
    let in_src = path.iter().skip_while(|part| *part != "src");
    let in_src: PathBuf = in_src.collect();
    let is_all_tests = if in_src.as_os_str().is_empty() {
        is_test(path)
    } else {
        is_test(&in_src)
    };
    let product: Vec<usize> = if is_all_tests {
        Vec::new()
    } else {
        product_lines(text).into_iter().map(|it| it.1).collect()
    };
    let raw: Vec<&str> = text.lines().collect();
    let mut found = Waits::default();
    // The code without spaces, so that it does not matter where a statement is broken.
    let (mut code, mut numbers) = (String::new(), Vec::new());
    for (line, number) in lines(text).into_iter().zip(1..) {
        if product.binary_search(&number).is_ok() {
            continue;
        }
        let has_reason = |before: &&str| before.trim_start().starts_with(REASON);
        let before = raw[..number - 1].iter().rev();
        let mut comments = before.take_while(|before| before.trim_start().starts_with("// "));
        if line.code.contains("thread::sleep(") && !comments.any(has_reason) {
            found.sleeps.push(number);
        }
        for piece in line.code.split_whitespace() {
            if code.ends_with(is_of_word) && piece.starts_with(is_of_word) {
                code.push(' ');
                numbers.push(number);
            }
            code += piece;
            numbers.extend(std::iter::repeat_n(number, piece.len()));
        }
    }
    for (at, elapsed) in code.match_indices("elapsed()") {
        let after = code[at + elapsed.len()..].strip_prefix('<');
        let after = after.map(|limit| limit.trim_start_matches('='));
        let limits = [after, limit_before(&code[..at])].into_iter().flatten();
        let mut limits = limits.filter_map(|limit| limit_s(limit).or(constant_s(limit, &code)));
        if limits.any(|limit| limit < PATIENCE_S) {
            found.limits.push(numbers[at]);
        }
    }
    found
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The limit in code that ends like `LIMIT>=began.`.
fn limit_before(code: &str) -> Option<&str> {
    let is_of_value = |c: char| is_of_word(c) || ".:()".contains(c);
    let code = code.trim_end_matches(is_of_value);
    let code = code.strip_suffix('=').unwrap_or(code).strip_suffix('>')?;
    let begin = code.trim_end_matches(is_of_value).len();
    Some(code[begin..].trim_start_matches('('))
}

/// The seconds of a limit that is a constant of this file, of which `code` is the whole.
fn constant_s(limit: &str, code: &str) -> Option<f64> {
    let (name, rest) = limit.split_at(limit.find(|c: char| !is_of_word(c)).unwrap_or(limit.len()));
    // Part of a sum, of a product or of another name.
    if rest.starts_with(['+', '*', '.', ':', '(']) {
        return None;
    }
    let (_, rest) = code.split_once(&format!("const {name}:"))?;
    limit_s(rest.split_once('=')?.1)
}

/// The seconds of a limit such as `Duration::from_secs(5)`.
fn limit_s(code: &str) -> Option<f64> {
    let code = code.trim_start_matches("std::time::");
    let (unit, rest) = code.strip_prefix("Duration::from_")?.split_once('(')?;
    let number: f64 = rest.split(')').next()?.replace('_', "").parse().ok()?;
    match unit {
        "secs" | "secs_f64" | "secs_f32" => Some(number),
        "millis" => Some(number / 1e3),
        "micros" => Some(number / 1e6),
        _ => None,
    }
}
