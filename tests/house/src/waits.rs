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
        let packed = line.code.split_whitespace().collect::<String>();
        numbers.extend(std::iter::repeat_n(number, packed.len()));
        code += &packed;
    }
    for (at, _) in code.match_indices("elapsed()<") {
        if limit_s(&code[at + "elapsed()<".len()..]).is_some_and(|limit| limit < PATIENCE_S) {
            found.limits.push(numbers[at]);
        }
    }
    found
}

/// The seconds of a limit such as `=Duration::from_secs(5)`.
fn limit_s(code: &str) -> Option<f64> {
    let code = code
        .trim_start_matches('=')
        .trim_start_matches("std::time::");
    let (unit, rest) = code.strip_prefix("Duration::from_")?.split_once('(')?;
    let number: f64 = rest.split(')').next()?.replace('_', "").parse().ok()?;
    match unit {
        "secs" | "secs_f64" | "secs_f32" => Some(number),
        "millis" => Some(number / 1e3),
        "micros" => Some(number / 1e6),
        _ => None,
    }
}
